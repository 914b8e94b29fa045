"""What an expert computes, and where its rows lie: the contract between gpu_worker and cpu_worker.

Whoever computes an expert, the bits of its result rows are the same, so that moving an expert from
one process to another never changes a token. reference.py says what that rests on.
"""
