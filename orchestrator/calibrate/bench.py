"""A real cpu_worker and a real dma_worker, told what to do and timed; nobody decides anything.

The orchestrator's own doors are used (run directory, channel, life lines, hub), so that kernels,
copies, threads, NUMA binding and messages are those of serving. Where a gpu_worker would write the
activation segment, this does.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import mmap
import os
import sys
import time
from typing import TYPE_CHECKING, Literal, Self

import msgspec

from orchestrator.core.events import WorkerJoined, WorkerLost
from orchestrator.hub import Hub
from orchestrator.lifelines import Lifelines
from protocol.channel import RouterChannel
from protocol.codec import to_orchestrator
from protocol.errors import UserError
from protocol.lifeline import SegmentGrant
from protocol.messages import (
    Arena,
    AttachArena,
    Copied,
    Copy,
    CopyId,
    Execute,
    Executed,
    ExpertId,
    LayerId,
    SlotId,
    StepId,
    WorkerSetup,
)
from protocol.run_dir import LockedRunDir
from protocol.step_segment import ARENA, WEIGHTS, activation_grant

if TYPE_CHECKING:
    from pathlib import Path

    from expert_store.layout import StoreLayout
    from orchestrator.core.events import CoreEvent
    from protocol.messages import ClientRequest, Epoch, Role, WorkerEvent

MAX_ROWS = 8
NUM_SLOTS = 16
#: Copies on their way while the link is to be busy.
LINK_DEPTH = 3
_READY_TIMEOUT_S = 120.0
_ANSWER_TIMEOUT_S = 30.0
_LAYER = LayerId(0)
_ROLES: tuple[Role, ...] = ("cpu_worker", "dma_worker")


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


class Bench:
    """Async context manager: inside, both workers are ready. `weights_fd` holds the store.

    Raises:
        UserError: a worker cannot run here.
    """

    def __init__(
        self,
        layout: StoreLayout,
        weights_fd: int,
        run_dir: Path,
        *,
        device: str,
        emulate_link_bytes_per_s: float,
    ) -> None:
        self._layout = layout
        self._weights_fd = weights_fd
        self._path = run_dir
        self._setup = WorkerSetup(
            model_dir="",
            dtype=layout.dtype,
            device=device,
            num_slots=NUM_SLOTS,
            max_rows=MAX_ROWS,
            max_sequence_tokens=1,
            emulate_link_bytes_per_s=emulate_link_bytes_per_s,
            is_rate_stated=True,
        )
        self._stack = contextlib.ExitStack()
        self._epochs: dict[Role, Epoch] = {}
        self._answers: dict[object, asyncio.Future[Copied | Executed]] = {}
        self._lost: asyncio.Future[None]
        self._processes: list[asyncio.subprocess.Process] = []
        self._steps = itertools.count(1)
        self._copies = itertools.count(1)
        self._next_expert = 0
        self.num_threads = 0
        self.isa = ""

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        self._lost = loop.create_future()
        self._joined = asyncio.Event()
        try:
            run_dir = LockedRunDir(self._path)
            self._stack.callback(run_dir.close)
            self._channel = RouterChannel(run_dir, to_orchestrator(), self._on_message)
            self._stack.callback(self._channel.close)
            lifelines = Lifelines(run_dir, loop, lambda token: self._hub.line_ended(token))
            self._stack.callback(lifelines.close)
            self._hub = Hub(
                lifelines,
                self._channel.send,
                self._channel.count_drop,
                self._deliver,
                lambda role: self._setup,
                lambda worker, change: None,
            )
            self._channel.start(loop)
            lifelines.open(*self._make_segments())
            await self._start_workers()
        except BaseException:
            await self._end()
            raise
        return self

    async def __aexit__(self, *details: object) -> None:
        await self._end()

    # ---- the course asks ----

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

    def _experts(self, count: int, num_experts: int) -> list[ExpertId]:
        """The next ones in turn: neighbours in the store never follow each other in time."""
        limit = min(num_experts or self._layout.num_experts[0], self._layout.num_experts[0])
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
        chosen = self._experts(self._layout.top_k, num_experts)
        for row in range(num_rows):
            first = row * self._layout.top_k
            self._choices[first : first + len(chosen)] = memoryview(_int32(chosen)).cast("i")
        self._header[:3] = memoryview(_int64([step, _LAYER, num_rows])).cast("q")
        experts = chosen[:count]
        sent_ns = time.monotonic_ns()
        executed = await self._ask(
            (step, *experts), Execute(self._epochs["cpu_worker"], step, _LAYER, experts)
        )
        return Sample(count, num_rows, sent_ns, executed.started_ns, executed.ended_ns)

    async def _copy(self) -> Copied | Executed:
        copy = CopyId(next(self._copies))
        (expert,) = self._experts(1, 0)
        slot = SlotId(copy % NUM_SLOTS)
        command = Copy(self._epochs["dma_worker"], copy, _LAYER, expert, slot)
        return await self._ask(copy, command)

    async def _ask(self, name: object, command: Copy | Execute) -> Copied | Executed:
        answer = asyncio.get_running_loop().create_future()
        self._answers[name] = answer
        self._hub.command(command)
        waits = {answer, self._lost}
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED, timeout=_ANSWER_TIMEOUT_S)
        if not answer.done():
            raise UserError("A worker ended or hung while it was measured; see above, try again.")
        result: Copied | Executed = answer.result()
        return result

    # ---- events ----

    def _on_message(self, identity: bytes, message: WorkerEvent | ClientRequest) -> None:
        if self._hub.is_worker(identity) or type(message).__name__ == "Hello":
            self._hub.handle(identity, message)  # type: ignore[arg-type]

    def _deliver(self, event: CoreEvent) -> None:
        match event:
            case WorkerJoined():
                self._epochs[event.role] = event.epoch
                if len(self._epochs) == len(_ROLES):
                    self._joined.set()
            case WorkerLost():
                if not self._lost.done():
                    self._lost.set_result(None)
            case Executed():
                self._answer((event.step, *event.experts), event)
            case Copied():
                self._answer(event.copy, event)
            case _:
                pass

    def _answer(self, name: object, event: Copied | Executed) -> None:
        waiting = self._answers.pop(name, None)
        if waiting is not None and not waiting.done():
            waiting.set_result(event)

    # ---- set-up and end ----

    def _make_segments(self) -> tuple[list[SegmentGrant], list[int]]:
        layout = self._layout
        activations = activation_grant(
            MAX_ROWS, layout.top_k, layout.form.hidden_size, layout.dtype
        )
        arena = SegmentGrant(ARENA, NUM_SLOTS * layout.block_bytes)
        fds = [self._weights_fd]
        for segment in (activations, arena):
            fd = os.memfd_create(f"headrace-{segment.name}", os.MFD_CLOEXEC)
            self._stack.callback(os.close, fd)
            os.ftruncate(fd, segment.num_bytes)
            fds.append(fd)
        memory = mmap.mmap(fds[1], activations.num_bytes)
        self._header = _view(memory, activations, "header", 8).cast("q")
        self._choices = _view(memory, activations, "choices", 4).cast("i")
        hidden = _view(memory, activations, "hidden", 2 if layout.dtype != "float32" else 4)
        hidden[:] = bytes([0x3C]) * len(hidden)
        return [SegmentGrant(WEIGHTS, layout.total_bytes), activations, arena], fds

    async def _start_workers(self) -> None:
        for role in _ROLES:
            self._processes.append(
                await asyncio.create_subprocess_exec(
                    sys.executable, "-P", "-m", role,
                    "--run-dir", str(self._path), "--log-level", "warning",
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=asyncio.subprocess.DEVNULL,
                    start_new_session=True,
                )
            )  # fmt: skip
        ends = [asyncio.ensure_future(process.wait()) for process in self._processes]
        joined = asyncio.ensure_future(self._joined.wait())
        await asyncio.wait(
            [joined, *ends], return_when=asyncio.FIRST_COMPLETED, timeout=_READY_TIMEOUT_S
        )
        is_joined = joined.done()
        for wait in (joined, *ends):
            wait.cancel()
        if not is_joined:
            words = [self._hub.last_words(process.pid) for process in self._processes]
            why = next((word for word in words if word), "a worker did not get ready; see above")
            raise UserError(f"The calibration cannot run: {why.rstrip('.')}.")
        for status in self._hub.statuses({}):
            if status.role == "cpu_worker":
                self.num_threads = status.capabilities.num_threads
                self.isa = status.capabilities.isa
        kind: Literal["shared", "scratch"] = "shared" if self._setup.device == "cpu" else "scratch"
        arena = Arena(kind, NUM_SLOTS, self._layout.block_bytes)
        self._hub.command(AttachArena(self._epochs["dma_worker"], arena))

    async def _end(self) -> None:
        if self._processes:
            self._hub.say_goodbye("the calibration is over")
        for process in self._processes:
            try:
                await asyncio.wait_for(process.wait(), 3.0)
            except TimeoutError:
                process.kill()
                await process.wait()
        self._stack.close()


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
