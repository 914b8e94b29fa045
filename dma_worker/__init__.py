"""The process that copies experts from host memory into slots, and nothing else."""
