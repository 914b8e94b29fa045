"""Moving whole experts into slots: the interface, and the copier for slots in host memory.

`EmulatedCopier` stands in for a device: its slots lie in shared memory and a fill is a memcpy. With
a link rate given it also takes as long as that link would:

    start = max(now, link is free)      end = start + bytes / rate

A copy submitted while another is on the link begins where that one ends, as on a real link. The
bytes are moved at once and the copy is reported when its end has come, by sleeping, never by
spinning. It ends late by what the last short sleep overshoots (a few tens of us); the next one
begins at the model's end, not at the late one, so that errors do not add up while the link is busy.
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Protocol

import numpy as np

from expert_kernels.cuda_copy import DoneCopy

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    from expert_store.layout import StoreLayout

#: Sleep at most this long before looking for new commands again.
_LONG_SLEEP_NS = 500_000
#: A sleep may overshoot by this; the last stretch is slept in short pieces.
_MARGIN_NS = 100_000
_SHORT_SLEEP_NS = 20_000


class Copier(Protocol):
    """Copies into the slots of one arena, in the order of submission."""

    @property
    def num_in_flight(self) -> int: ...

    def submit(
        self,
        copy: int,
        layer: int,
        expert: int,
        slot: int,
        piece: tuple[int, int] | None = None,
    ) -> None:
        """Begin to copy the block of (layer, expert), which exists, into `slot`, which exists; or
        only a piece of it: (offset in the block, length) in bytes."""

    def poll(self) -> list[DoneCopy]:
        """Copies that have ended since the last call."""

    def wait(self) -> None:
        """Sleep a little while copies are in flight."""

    def close(self) -> None:
        """Give up the arena at once; what is in flight is never reported."""


class LinkModel:
    """When a transfer over one link begins and ends. A rate of 0.0 means no limit."""

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self.free_ns = 0

    def transfer(self, now_ns: int, num_bytes: int) -> tuple[int, int]:
        """(start, end) in ns of `num_bytes` asked for at `now_ns`; the link is busy until then."""
        if self.bytes_per_s <= 0:
            return now_ns, now_ns
        start_ns = max(now_ns, self.free_ns)
        self.free_ns = start_ns + round(num_bytes / self.bytes_per_s * 1e9)
        return start_ns, self.free_ns

    def delay(self, end_ns: int) -> None:
        """The last transfer could not end before `end_ns`."""
        self.free_ns = max(self.free_ns, end_ns)


class EmulatedCopier:
    """Fills slots in host memory.

    `store` is the whole segment and `slots` the arena, uint8 [segment bytes] and
    [num_slots, slot_bytes].
    """

    def __init__(
        self,
        layout: StoreLayout,
        store: npt.NDArray[np.uint8],
        slots: npt.NDArray[np.uint8],
        link: LinkModel,
        *,
        clock_ns: Callable[[], int] = time.monotonic_ns,
        sleep_s: Callable[[float], None] = time.sleep,
    ) -> None:
        self._layout = layout
        self._store = store
        self._slots = slots
        self._link = link
        self._clock_ns = clock_ns
        self._sleep_s = sleep_s
        self._in_flight: deque[DoneCopy] = deque()

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    def submit(
        self,
        copy: int,
        layer: int,
        expert: int,
        slot: int,
        piece: tuple[int, int] | None = None,
    ) -> None:
        first, num_bytes = piece or (0, self._layout.block_bytes)
        start_ns, end_ns = self._link.transfer(self._clock_ns(), num_bytes)
        offset = self._layout.block_offset(layer, expert) + first
        np.copyto(
            self._slots[slot, first : first + num_bytes], self._store[offset : offset + num_bytes]
        )
        copied_ns = self._clock_ns()
        self._link.delay(copied_ns)
        self._in_flight.append(DoneCopy(copy, start_ns, max(end_ns, copied_ns), num_bytes))

    def poll(self) -> list[DoneCopy]:
        done: list[DoneCopy] = []
        while self._in_flight and self._in_flight[0].ended_ns <= self._clock_ns():
            done.append(self._in_flight.popleft())
        return done

    def wait(self) -> None:
        if not self._in_flight:
            return
        left_ns = self._in_flight[0].ended_ns - self._clock_ns()
        if left_ns > _MARGIN_NS:
            self._sleep_s(min(left_ns - _MARGIN_NS, _LONG_SLEEP_NS) / 1e9)
        elif left_ns > 0:
            self._sleep_s(min(left_ns, _SHORT_SLEEP_NS) / 1e9)

    def close(self) -> None:
        self._in_flight.clear()
