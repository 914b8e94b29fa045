"""The orchestrator process: decides what runs where, and talks to everyone; touches no weight."""
