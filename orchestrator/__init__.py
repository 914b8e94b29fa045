"""The orchestrator process: decides what runs where, and speaks to everyone; never touches a weight."""
