"""`headrace calibrate`: what link and CPU of this machine do, alone and beside each other.

store     made-up experts of one format, as many as a cache cannot hold
bench     a real cpu_worker and a real dma_worker on them, told what to do and timed
fits      numbers out of samples: T = a + bytes / B, with its error
course    what is measured, in which order
profile   the result as a file, and whether it is for this machine
"""
