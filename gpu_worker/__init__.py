"""The device's owner: dense weights, KV cache, router, expert slots, sampler."""
