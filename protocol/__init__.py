"""What the processes of Headrace say to each other, and how a worker lives."""
