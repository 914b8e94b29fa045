"""The decisions and nothing else: where experts lie, who leaves, what is filled, what the CPU runs.

Pure code. No clock, no chance, no socket, no thread: everything it knows arrives as an argument, so
that a test with a virtual clock drives the very code that serves.
"""
