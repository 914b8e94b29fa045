"""A cpu_worker and a dma_worker told what to do and timed, through whoever talks to them.

`Driver` knows no socket: it is given a way to send commands and hears the answers. Where a
gpu_worker would write the activation segment, the driver does; so there must be none at work.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
import time
from typing import TYPE_CHECKING

import msgspec

from protocol.errors import UserError
from protocol.messages import (
    Copied,
    Copy,
    CopyId,
    Execute,
    Executed,
    ExpertId,
    LayerId,
    SlotId,
    StepId,
)

if TYPE_CHECKING:
    import mmap
    from collections.abc import Callable

    from expert_store.layout import StoreLayout
    from protocol.lifeline import SegmentGrant
    from protocol.messages import Epoch, Role

#: Copies on their way while the link is to be busy.
LINK_DEPTH = 3
_ANSWER_TIMEOUT_S = 30.0
#: Steps of a driver count down from here: a word that a worker writes for one of them is never
#: taken for a word of a step that serves.
_LAST_STEP = (1 << 31) - 1


class Sample(msgspec.Struct, frozen=True):
    """One command: experts, when it was sent, worked at and answered; ns."""

    num_experts: int
    num_rows: int
    sent_ns: int
    started_ns: int
    ended_ns: int

    @property
    def work_s(self) -> float:
        return (self.ended_ns - self.started_ns) * 1e-9

    @property
    def way_s(self) -> float:
        """From the command to the first byte."""
        return max(self.started_ns - self.sent_ns, 0) * 1e-9


class Driver:
    """`layout`: experts of the store, all layers of which are used in turn; `epochs` must name both
    workers before anything is asked. One row of hidden values must be in the segment."""

    def __init__(
        self,
        layout: StoreLayout,
        num_slots: int,
        command: Callable[[Copy | Execute], object],
    ) -> None:
        self._layout = layout
        self._num_slots = num_slots
        self._command = command
        self.epochs: dict[Role, Epoch] = {}
        #: Done when a worker is lost.
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._answers: dict[object, asyncio.Future[Copied | Executed]] = {}
        self._steps = itertools.count(_LAST_STEP, -1)
        self._copies = itertools.count(1)
        self._layers = itertools.cycle(range(layout.num_layers))
        self._next_expert = 0

    def use_activations(self, memory: mmap.mmap, grant: SegmentGrant) -> None:
        """Where rows and choices are written. The rows get ordinary numbers."""
        self._header = _view(memory, grant, "header", 8).cast("q")
        self._choices = _view(memory, grant, "choices", 4).cast("i")
        hidden = _view(memory, grant, "hidden", 2 if self._layout.dtype != "float32" else 4)
        hidden[:] = bytes([0x3C]) * len(hidden)

    def answer(self, event: Copied | Executed) -> None:
        """A worker has done something; what nobody waits for is dropped."""
        name = event.copy if isinstance(event, Copied) else (event.step, *event.experts)
        waiting = self._answers.pop(name, None)
        if waiting is not None and not waiting.done():
            waiting.set_result(event)

    def unanswered_rows(self) -> list[asyncio.Future[Copied | Executed]]:
        """What the cpu_worker is still at."""
        return [answer for name, answer in self._answers.items() if isinstance(name, tuple)]

    async def run_cpu(
        self, seconds: float, *, sizes: tuple[int, ...], num_rows: int = 1, num_experts: int = 0
    ) -> list[Sample]:
        """The CPU at work for so long: batches of `sizes` in turn, over the first `num_experts` of
        the store (0: all)."""
        end_s = time.monotonic() + seconds
        samples: list[Sample] = []
        turns = itertools.cycle(sizes)
        while not samples or time.monotonic() < end_s:
            samples.append(await self._execute(next(turns), num_rows, num_experts))
        return samples

    async def run_link(
        self, seconds: float, *, sizes: tuple[int, ...] = (1, 2, 3, 4)
    ) -> list[Sample]:
        """The link at work: as many copies at once as `sizes` say in turn, each time to the end."""
        end_s = time.monotonic() + seconds
        samples: list[Sample] = []
        turns = itertools.cycle(sizes)
        while not samples or time.monotonic() < end_s:
            count = next(turns)
            sent_ns = time.monotonic_ns()
            done = await asyncio.gather(*(self._copy() for _ in range(count)))
            first = min(copied.started_ns for copied in done)
            last = max(copied.ended_ns for copied in done)
            samples.append(Sample(count, 1, sent_ns, first, last))
        return samples

    async def run_both(
        self, seconds: float, *, sizes: tuple[int, ...] = (4, 8)
    ) -> tuple[list[Sample], list[Sample]]:
        """(link, CPU) at work at once, all the time. What began before the other, or ended after
        it, is left out."""
        end_s = time.monotonic() + seconds

        async def keep_copying() -> list[Sample]:
            copies: list[Sample] = []
            while not copies or time.monotonic() < end_s:
                sent_ns = time.monotonic_ns()
                copied = await self._copy()
                copies.append(Sample(1, 1, sent_ns, copied.started_ns, copied.ended_ns))
            return copies

        *copying, batches = await asyncio.gather(
            *(keep_copying() for _ in range(LINK_DEPTH)), self.run_cpu(seconds, sizes=sizes)
        )
        copies = [sample for line in copying for sample in line]
        begin_ns = max(
            min(sample.started_ns for sample in copies), min(s.started_ns for s in batches)
        )
        finish_ns = min(max(sample.ended_ns for sample in copies), max(s.ended_ns for s in batches))

        def inside(samples: list[Sample]) -> list[Sample]:
            kept = [s for s in samples if s.started_ns >= begin_ns and s.ended_ns <= finish_ns]
            return kept or samples

        return inside(copies), inside(batches)

    # ---- commands ----

    def _experts(self, layer: int, count: int, num_experts: int) -> list[ExpertId]:
        """The next ones in turn: neighbours in the store never follow each other in time."""
        limit = min(num_experts or self._layout.num_experts[layer], self._layout.num_experts[layer])
        count = min(count, limit)
        stride = max(limit * 5 // 8, 1) | 1
        experts: list[ExpertId] = []
        while len(experts) < count:
            self._next_expert = (self._next_expert + stride) % limit
            if self._next_expert in experts:  # stride and limit have a factor in common
                self._next_expert = (self._next_expert + 1) % limit
            experts.append(ExpertId(self._next_expert))
        return experts

    async def _execute(self, count: int, num_rows: int, num_experts: int) -> Sample:
        step = StepId(next(self._steps))
        layer = LayerId(next(self._layers))
        chosen = self._experts(layer, self._layout.top_k, num_experts)
        for row in range(num_rows):
            first = row * self._layout.top_k
            self._choices[first : first + len(chosen)] = memoryview(_int32(chosen)).cast("i")
        self._header[:3] = memoryview(_int64([step, layer, num_rows])).cast("q")
        experts = chosen[:count]
        sent_ns = time.monotonic_ns()
        executed = await self._ask(
            (step, *experts), Execute(self.epochs["cpu_worker"], step, layer, experts)
        )
        return Sample(len(experts), num_rows, sent_ns, executed.started_ns, executed.ended_ns)

    async def _copy(self) -> Copied | Executed:
        copy = CopyId(next(self._copies))
        layer = LayerId(next(self._layers))
        (expert,) = self._experts(layer, 1, 0)
        slot = SlotId(copy % self._num_slots)
        command = Copy(self.epochs["dma_worker"], copy, layer, expert, slot)
        return await self._ask(copy, command)

    async def _ask(self, name: object, command: Copy | Execute) -> Copied | Executed:
        answer = asyncio.get_running_loop().create_future()
        self._answers[name] = answer
        self._command(command)
        waits = {answer, self.lost}
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED, timeout=_ANSWER_TIMEOUT_S)
        if not answer.done():
            raise UserError("A worker ended or hung while it was measured; see above, try again.")
        result: Copied | Executed = answer.result()
        return result


def _view(memory: mmap.mmap, grant: SegmentGrant, name: str, item_bytes: int) -> memoryview:
    field = grant.fields[name]
    num_bytes = item_bytes
    for extent in field.shape:
        num_bytes *= extent
    return memoryview(memory)[field.offset_bytes : field.offset_bytes + num_bytes]


def _int32(numbers: list[ExpertId]) -> bytes:
    return b"".join(int(number).to_bytes(4, sys.byteorder) for number in numbers)


def _int64(numbers: list[int]) -> bytes:
    return b"".join(int(number).to_bytes(8, sys.byteorder) for number in numbers)
