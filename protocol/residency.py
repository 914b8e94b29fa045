"""The residency segment: which experts lie in slots, and what was computed without asking.

    words    int64 [4, 8]     epoch, fence, head, tail: the first word of a cache line each
    table    int32 [num_layers, num_experts]   slot of an expert, or -1    (by orchestrator)
    reports  int64 [num_reports, num_words]    ring of what was computed   (by gpu_worker)

    word    written by      what
    epoch   orchestrator    the gpu_worker that the table is for; another one must not use it
    fence   gpu_worker      odd from the look at the table to the last use of what was seen
    head    gpu_worker      reports written since it joined
    tail    orchestrator    reports taken since then

gpu_worker asks the table for the experts that the router chose. If all are there it computes, puts
one report into the ring and goes on; else it sends `Routed`, computes those that are there all the
same, and waits. What it runs from slots in such a layer it reports as well, with 0 rows for each
expert: those slots are no longer read. `Routed`, `Ran` and
`StepDone` carry `num_reports`, the head at the time of sending: the orchestrator takes the reports
up to there first, so that both streams are heard in the order in which they were said.

Everything here is a plain aligned load or store: the side that may be slow pays for the order of
memory (see `protocol.membarrier`), and docs/architecture.md says why nothing is read too late.
"""

from __future__ import annotations

import ctypes
import struct
from typing import TYPE_CHECKING, NamedTuple

from protocol.errors import ProtocolError
from protocol.step_segment import segment_of

if TYPE_CHECKING:
    import mmap
    from collections.abc import Sequence

    from protocol.lifeline import SegmentGrant

    Buffer = bytearray | memoryview | mmap.mmap

RESIDENCY = "residency"
NO_SLOT = -1

#: Enough for a step of any model: its layers are fewer, and its end takes all reports.
NUM_REPORTS = 256
_WORDS_PER_LINE = 8
_EPOCH, _FENCE, _HEAD, _TAIL = (line * _WORDS_PER_LINE for line in range(4))
#: epoch, step, layer, number of experts, routed, started, ended, joined; experts and rows follow.
_HEADER_WORDS = 8


def residency_grant(
    num_layers: int, num_experts: int, max_chosen: int, num_reports: int = NUM_REPORTS
) -> SegmentGrant:
    """Layout for `num_layers` layers of at most `num_experts` experts, of which one layer-step
    chooses at most `max_chosen`."""
    return segment_of(
        RESIDENCY,
        ("words", "int64", [4, _WORDS_PER_LINE]),
        ("table", "int32", [num_layers, num_experts]),
        ("reports", "int64", [num_reports, _HEADER_WORDS + max_chosen]),
    )


class Report(NamedTuple):
    """One layer that the gpu_worker passed without asking. Times in ns; `joined_ns` is of the
    layer before. Or, with 0 in all of `num_rows`: experts of a layer that it asked for have run."""

    epoch: int
    step: int
    layer: int
    experts: list[int]
    num_rows: list[int]
    routed_ns: int
    started_ns: int
    ended_ns: int
    joined_ns: int


class _Memory:
    """The segment's fields as flat arrays."""

    def __init__(self, memory: Buffer, grant: SegmentGrant) -> None:
        view = memoryview(memory)
        self._num_layers, self._num_experts = grant.fields["table"].shape
        self._num_slots_of_ring, num_words = grant.fields["reports"].shape
        self._report_bytes = 8 * num_words
        self._max_chosen = num_words - _HEADER_WORDS
        start = grant.fields["words"].offset_bytes
        self._words = view[start : start + 8 * 4 * _WORDS_PER_LINE].cast("q")
        start = grant.fields["table"].offset_bytes
        num_bytes = 4 * self._num_layers * self._num_experts
        self._table = view[start : start + num_bytes].cast("i")
        start = grant.fields["reports"].offset_bytes
        self._ring = view[start : start + self._num_slots_of_ring * self._report_bytes]

    @property
    def epoch(self) -> int:
        return self._words[_EPOCH]

    @property
    def fence(self) -> int:
        return self._words[_FENCE]

    @property
    def head(self) -> int:
        return self._words[_HEAD]

    def published(self) -> dict[tuple[int, int], int]:
        """The whole table: the slot of each (layer, expert) that has one. For checks."""
        return {
            divmod(index, self._num_experts): slot
            for index, slot in enumerate(self._table)
            if slot != NO_SLOT
        }


def _address_of(view: memoryview) -> int:
    """Where a writable view begins."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


class ResidencyReader(_Memory):
    """The gpu_worker's side. Calls come as `look`, then, if that gave slots for all, `report` after
    the last use of them; if for some, `leave` after the last use of these, told by `ran`."""

    def __init__(self, memory: Buffer, grant: SegmentGrant) -> None:
        super().__init__(memory, grant)
        self._packs: dict[int, struct.Struct] = {}
        #: Layers that were asked for because the ring was full.
        self.num_full = 0

    @property
    def num_reports(self) -> int:
        """Reports written since the table is for this gpu_worker: what events carry."""
        return self._words[_HEAD]

    def layout(self) -> dict[str, int]:
        """Addresses and sizes, by the names that expert_kernels/native/resident_layer.h gives
        them: for native code that looks and reports in this object's stead."""
        return {
            "words": _address_of(self._words),
            "table": _address_of(self._table),
            "reports": _address_of(self._ring),
            "num_layers": self._num_layers,
            "num_experts": self._num_experts,
            "num_reports": self._num_slots_of_ring,
            "report_words": self._report_bytes // 8,
        }

    def look(self, layer: int, experts: Sequence[int]) -> list[int] | None:
        """The slots of `experts`, NO_SLOT for those that have none; None if no report could be
        made. Enters the fence; it stays entered, until `report` or `leave`, only if there is any
        slot."""
        words, table = self._words, self._table
        if words[_HEAD] - words[_TAIL] >= self._num_slots_of_ring:
            self.num_full += 1
            return None
        if len(experts) > self._max_chosen:
            return None
        words[_FENCE] += 1
        base = layer * self._num_experts
        slots = [table[base + expert] for expert in experts]
        if slots.count(NO_SLOT) == len(slots) > 0:
            words[_FENCE] += 1
        return slots

    def leave(self) -> None:
        """What `look` gave is used no more; said is that by `ran`, or nothing was used."""
        self._words[_FENCE] += 1

    def report(
        self,
        epoch: int,
        step: int,
        layer: int,
        experts: Sequence[int],
        num_rows: Sequence[int],
        times_ns: tuple[int, int, int, int],
    ) -> None:
        """What `look` gave is used no more; say what was computed. `times_ns` as in Report."""
        self._write(epoch, step, layer, experts, num_rows, times_ns)
        self._words[_FENCE] += 1

    def ran(
        self,
        epoch: int,
        step: int,
        layer: int,
        experts: Sequence[int],
        started_ns: int,
        ended_ns: int,
    ) -> bool:
        """Say that slots given by a `Run` are no longer read. False if there is no room for it."""
        if self._words[_HEAD] - self._words[_TAIL] >= self._num_slots_of_ring:
            return False
        if len(experts) > self._max_chosen:
            return False
        times_ns = (0, started_ns, ended_ns, 0)
        self._write(epoch, step, layer, experts, [0] * len(experts), times_ns)
        return True

    def _write(
        self,
        epoch: int,
        step: int,
        layer: int,
        experts: Sequence[int],
        num_rows: Sequence[int],
        times_ns: tuple[int, int, int, int],
    ) -> None:
        num = len(experts)
        pack = self._packs.get(num)
        if pack is None:
            pack = self._packs[num] = struct.Struct(f"<8q{2 * num}i")
        number = self._words[_HEAD]
        pack.pack_into(
            self._ring,
            number % self._num_slots_of_ring * self._report_bytes,
            epoch, step, layer, num, *times_ns, *experts, *num_rows,
        )  # fmt: skip
        self._words[_HEAD] = number + 1


class ResidencyWriter(_Memory):
    """The orchestrator's side: the table out, the reports in."""

    #: The greatest number of a report that a message has named.
    _named = 0

    def reset(self, epoch: int) -> None:
        """No expert has a slot, nothing was reported, and the table is for `epoch` (0: nobody).
        No gpu_worker may be alive that used it so far."""
        self._words[_EPOCH] = 0
        for index in range(len(self._table)):
            self._table[index] = NO_SLOT
        for word in (_FENCE, _HEAD, _TAIL):
            self._words[word] = 0
        self._named = 0
        self._words[_EPOCH] = epoch

    def publish(self, layer: int, expert: int, slot: int) -> None:
        self._table[layer * self._num_experts + expert] = slot

    def unpublish(self, layer: int, expert: int) -> None:
        self._table[layer * self._num_experts + expert] = NO_SLOT

    def take(self, num_reports: int) -> list[Report]:
        """The reports up to number `num_reports` that were not taken yet, in order.

        Raises:
            ProtocolError: they do not exist, or are none; nothing was taken.
        """
        tail, head = self._words[_TAIL], self._words[_HEAD]
        if self._named <= num_reports <= tail:  # nothing new, or taken before it was named
            self._named = num_reports
            return []
        if not tail <= num_reports <= head <= tail + self._num_slots_of_ring:
            raise ProtocolError(
                f"names report {num_reports} of {head}, of which {tail} are taken, in a ring of "
                f"{self._num_slots_of_ring}"
            )
        reports = [self._read(number) for number in range(tail, num_reports)]
        self._named = self._words[_TAIL] = num_reports
        return reports

    def take_layers(self) -> list[Report]:
        """The reports of whole layers that are there and were not taken yet, in order, up to one of
        another kind. Before a message names them: what was written before a report is seen with it
        only on processors that keep the order of writes.

        Raises:
            ProtocolError: they are no reports; nothing was taken.
        """
        tail, head = self._words[_TAIL], self._words[_HEAD]
        if not 0 <= head - tail <= self._num_slots_of_ring:
            raise ProtocolError(f"has written {head} reports, of which {tail} were taken")
        reports = []
        for number in range(tail, head):
            report = self._read(number)
            if not any(report.num_rows):
                break
            reports.append(report)
        self._words[_TAIL] = tail + len(reports)
        return reports

    def _read(self, number: int) -> Report:
        start = number % self._num_slots_of_ring * self._report_bytes
        epoch, step, layer, num, *times_ns = struct.unpack_from("<8q", self._ring, start)
        is_sound = 0 <= layer < self._num_layers and 0 < num <= self._max_chosen
        numbers: tuple[int, ...] = ()
        if is_sound:
            numbers = struct.unpack_from(f"<{2 * num}i", self._ring, start + 8 * _HEADER_WORDS)
            is_sound = 0 <= min(numbers[:num]) <= max(numbers[:num]) < self._num_experts
        if not is_sound or epoch != self.epoch:
            raise ProtocolError(f"left a report {number} that is none")
        return Report(epoch, step, layer, list(numbers[:num]), list(numbers[num:]), *times_ns)
