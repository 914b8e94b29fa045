"""How fast experts travel into slots: B_P, bytes/s, link pacing included.

The very copier that will fill slots copies experts from all over the store into a scratch buffer of
its own kind; nobody's slots are touched.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from expert_kernels import probe

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dma_worker.copier import Copier
    from expert_store.layout import StoreLayout

#: Copies in flight at once, and slots of the scratch buffer: enough to keep a link busy.
NUM_SCRATCH_SLOTS = 4


def measure_rate(
    copier: Copier, layout: StoreLayout, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Rate of `copier`, whose arena is a scratch buffer of NUM_SCRATCH_SLOTS slots."""

    def copy_all(keys: Sequence[tuple[int, int]]) -> None:
        for slot, (layer, expert) in enumerate(keys):
            copier.submit(slot, layer, expert, slot)
        while copier.num_in_flight:
            if not copier.poll():
                copier.wait()

    batch = min(NUM_SCRATCH_SLOTS, layout.total_experts)
    return probe.measure_rate(copy_all, layout, batch=batch, clock=clock)
