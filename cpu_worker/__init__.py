"""The process that runs expert misses in place, from host memory, beside a busy link."""
