"""The completions segment: parts of a layer-step that others have finished, told without a message.

    done     int64 [2, num_experts, 4]   word, epoch, started_ns, ended_ns of one part
             lane 0 is written by the dma_worker: the expert lies whole in a slot
             lane 1 is written by cpu_workers: the expert's result rows are in their places
    "wake"   an eventfd beside it; 1 is added after every word

    word     step * 2^32 + layer * 2^22 + slot + 1; slot + 1 is 0 in lane 1

The gpu_worker waits for the parts of its layer-step here: it looks at the words for a moment, then
sleeps on the eventfd. The messages (`Copied`, `Executed`) follow for the directory and the log. The
orchestrator reads the words as well, before it believes that something was not done, and writes
them for workers that know only messages.

**No word is taken for another.** Steps are numbered once for all time, so a word names one part of
one layer-step whoever was alive then. A lane's word of one expert has one writer at a time: an
expert is in one place at a time, it gets another writer only after the death of the one before, and
no step starts before the last one's cpu_workers have answered.

**Order of memory.** The word is stored last. Where a processor may swap stores or loads, the writer
has the kernel run a barrier on the gpu_worker's processor between bytes and word.
"""

from __future__ import annotations

import os
import struct
import time
from typing import TYPE_CHECKING, NamedTuple

from protocol.lifeline import SegmentGrant
from protocol.membarrier import MemoryBarrier, is_strongly_ordered
from protocol.step_segment import segment_of

if TYPE_CHECKING:
    import mmap
    from collections.abc import Collection

    from protocol.worker_life import WorkerLink

COMPLETIONS = "completions"
#: Its descriptor is an eventfd (non-blocking), no memory: a grant of 0 bytes.
WAKE = "wake"
WAKE_GRANT = SegmentGrant(WAKE, 0)

LINK_LANE, CPU_LANE = 0, 1
_RECORD_WORDS = 4
_STEP_SHIFT, _LAYER_SHIFT = 32, 22
MAX_LAYERS = 1 << (_STEP_SHIFT - _LAYER_SHIFT)
MAX_SLOTS = (1 << _LAYER_SHIFT) - 1
_SLOT_MASK = (1 << _LAYER_SHIFT) - 1
_ONE = struct.pack("=Q", 1)


def completions_grant(num_experts: int) -> SegmentGrant:
    """Layout for layers of at most `num_experts` experts."""
    return segment_of(COMPLETIONS, ("done", "int64", [2, num_experts, _RECORD_WORDS]))


def new_wake_fd() -> int:
    """The eventfd that goes with the segment."""
    return os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)


class Completion(NamedTuple):
    """One finished part. `slot` is -1 where rows were computed in place."""

    slot: int
    epoch: int
    started_ns: int
    ended_ns: int


class Completions:
    """The segment as every process sees it. Experts are numbers within their layer."""

    def __init__(
        self,
        memory: mmap.mmap | bytearray,
        grant: SegmentGrant,
        wake_fd: int = -1,
        barrier: MemoryBarrier | None = None,
    ) -> None:
        field = grant.fields["done"]
        num_lanes, self.num_experts, num_words = field.shape
        num_bytes = 8 * num_lanes * self.num_experts * num_words
        self._words = memoryview(memory)[field.offset_bytes : field.offset_bytes + num_bytes].cast(
            "q"
        )
        self._lane_words = self.num_experts * num_words
        self.wake_fd = wake_fd
        self._barrier = barrier or (None if is_strongly_ordered() else MemoryBarrier())

    @classmethod
    def of(cls, link: WorkerLink) -> Completions | None:
        """A worker's; None where the orchestrator grants nothing for it."""
        try:
            wake_fd, _ = link.segment(WAKE)
            memory, grant = link.map_segment(COMPLETIONS, is_writable=True)
        except KeyError:
            return None
        return cls(memory, grant, wake_fd)

    # ---- writing ----

    def write(
        self, step: int, layer: int, expert: int, completion: Completion, *, is_waking: bool = True
    ) -> None:
        """Tell that one part is finished; its bytes must have been stored before."""
        lane = CPU_LANE if completion.slot < 0 else LINK_LANE
        place = lane * self._lane_words + expert * _RECORD_WORDS
        words = self._words
        words[place + 1] = completion.epoch
        words[place + 2] = completion.started_ns
        words[place + 3] = completion.ended_ns
        if self._barrier is not None:
            self._barrier.run()
        words[place] = _tag(step, layer) | (completion.slot + 1)
        if is_waking:
            self.wake()

    def wake(self) -> None:
        """End the gpu_worker's sleep."""
        if self.wake_fd >= 0:
            try:
                os.write(self.wake_fd, _ONE)
            except BlockingIOError:  # the counter is full: it is awake for sure
                return

    # ---- reading ----

    def landed(self, step: int, layer: int, experts: Collection[int]) -> list[tuple[int, int]]:
        """(expert, slot) of those of `experts` that are finished; slot -1: the rows are there."""
        tag, words, lane_words = _tag(step, layer), self._words, self._lane_words
        found = []
        for expert in experts:
            place = expert * _RECORD_WORDS
            if words[lane_words + place] == tag:
                found.append((expert, -1))
            elif words[place] & ~_SLOT_MASK == tag and words[place] & _SLOT_MASK:
                found.append((expert, (words[place] & _SLOT_MASK) - 1))
        return found

    def spin(
        self, step: int, layer: int, experts: Collection[int], spin_us: int
    ) -> list[tuple[int, int]]:
        """`landed`, looked at again and again for at most `spin_us` until there is something."""
        until_ns = time.monotonic_ns() + 1000 * spin_us
        while not (found := self.landed(step, layer, experts)):
            if time.monotonic_ns() >= until_ns:
                return []
        return found

    def read(self, step: int, layer: int, expert: int, slot: int = -1) -> Completion | None:
        """The record of one part: of its copy into `slot`, or of its computation; None if it is
        not finished."""
        lane = CPU_LANE if slot < 0 else LINK_LANE
        place = lane * self._lane_words + expert * _RECORD_WORDS
        word, epoch, started_ns, ended_ns = self._words[place : place + _RECORD_WORDS].tolist()
        if word != _tag(step, layer) | (slot + 1):
            return None
        return Completion(slot, epoch, started_ns, ended_ns)

    def forget_wakes(self) -> None:
        """What was woken for will be seen in the words from here on."""
        try:
            os.read(self.wake_fd, 8)
        except BlockingIOError:
            return


def _tag(step: int, layer: int) -> int:
    return step << _STEP_SHIFT | layer << _LAYER_SHIFT
