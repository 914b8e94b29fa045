"""How fast this process computes experts of the store: B_H for a cpu_worker, bytes/s.

The real function runs over experts spread through the whole store, so that the weights come from
memory and not from a cache. Short slices, and the median of their rates: on a busy machine a slice
that was interrupted says nothing about the kernel.
"""

from __future__ import annotations

import math
import statistics
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from expert_store.layout import StoreLayout

PROBE_S = 0.15
_NUM_SLICES = 7


def spread_experts(layout: StoreLayout) -> list[tuple[int, int]]:
    """All (layer, expert) in an order whose neighbours lie far apart in the store."""
    keys = [
        (layer, expert)
        for layer in range(layout.num_layers)
        for expert in range(layout.num_experts[layer])
    ]
    stride = max(1, int(len(keys) * 0.618))
    while math.gcd(stride, len(keys)) != 1:
        stride += 1
    return [keys[index * stride % len(keys)] for index in range(len(keys))]


def measure_rate(
    compute: Callable[[Sequence[tuple[int, int]]], None],
    layout: StoreLayout,
    *,
    batch: int,
    keys: Sequence[tuple[int, int]] = (),
    budget_s: float = PROBE_S,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Bytes of blocks per second that `compute` gets through, `batch` experts per call: all of the
    store, or `keys` in this order.

    One untimed call comes first (page faults, one-time set-up of kernels). Takes about `budget_s`,
    or the time of a few calls where one alone is longer than a slice.
    """
    order = keys or spread_experts(layout)
    position = 0

    def next_batch() -> list[tuple[int, int]]:
        nonlocal position
        keys = [order[(position + offset) % len(order)] for offset in range(batch)]
        position = (position + batch) % len(order)
        return keys

    compute(next_batch()[:1])
    rates: list[float] = []
    end_s = clock() + budget_s
    while not rates or (len(rates) < _NUM_SLICES and clock() < end_s):
        num_bytes, started_s = 0, clock()
        while (elapsed_s := clock() - started_s) < budget_s / _NUM_SLICES or not num_bytes:
            compute(next_batch())
            num_bytes += batch * layout.block_bytes
        rates.append(num_bytes / elapsed_s)
    return statistics.median(rates)
