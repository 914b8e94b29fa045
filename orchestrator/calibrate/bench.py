"""A real cpu_worker and a real dma_worker, told what to do and timed; nobody decides anything.

The orchestrator's own doors are used (run directory, channel, life lines, hub), so that kernels,
copies, threads, NUMA binding and messages are those of serving. Where a gpu_worker would write the
activation segment, this does.
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
import sys
from typing import TYPE_CHECKING, Literal, Self

from orchestrator.calibrate.driver import Driver
from orchestrator.core.events import WorkerJoined, WorkerLost
from orchestrator.hub import Hub
from orchestrator.lifelines import Lifelines
from orchestrator.mailroom import Mailroom
from protocol.channel import RouterChannel
from protocol.codec import to_orchestrator
from protocol.errors import UserError
from protocol.lifeline import SegmentGrant
from protocol.messages import Arena, AttachArena, Copied, Executed, WorkerSetup
from protocol.run_dir import LockedRunDir
from protocol.step_segment import ARENA, WEIGHTS, activation_grant

if TYPE_CHECKING:
    from pathlib import Path

    from expert_store.layout import StoreLayout
    from orchestrator.core.events import CoreEvent
    from protocol.messages import ClientRequest, Role, WorkerEvent

MAX_ROWS = 8
NUM_SLOTS = 16
_READY_TIMEOUT_S = 120.0
_ROLES: tuple[Role, ...] = ("cpu_worker", "dma_worker")


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
        self._processes: list[asyncio.subprocess.Process] = []
        self.num_threads = 0
        self.isa = ""

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        self.driver = Driver(self._layout, NUM_SLOTS, lambda command: self._hub.command(command))
        self._joined = asyncio.Event()
        try:
            run_dir = LockedRunDir(self._path)
            self._stack.callback(run_dir.close)
            self._channel = RouterChannel(run_dir, to_orchestrator(), self._on_message)
            self._stack.callback(self._channel.close)
            mailroom = Mailroom(loop, self._channel.count_drop)
            self._stack.callback(mailroom.close)
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
            lifelines.open(*self._make_segments(), mailroom)
            await self._start_workers()
        except BaseException:
            await self._end()
            raise
        return self

    async def __aexit__(self, *details: object) -> None:
        await self._end()

    # ---- events ----

    def _on_message(self, identity: bytes, message: WorkerEvent | ClientRequest) -> None:
        if self._hub.is_worker(identity) or type(message).__name__ == "Hello":
            self._hub.handle(identity, message)  # type: ignore[arg-type]

    def _deliver(self, event: CoreEvent) -> None:
        match event:
            case WorkerJoined():
                self.driver.epochs[event.role] = event.epoch
                if len(self.driver.epochs) == len(_ROLES):
                    self._joined.set()
            case WorkerLost():
                if not self.driver.lost.done():
                    self.driver.lost.set_result(None)
            case Executed() | Copied():
                self.driver.answer(event)
            case _:
                pass

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
        self.driver.use_activations(memory, activations)
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
        self._hub.command(AttachArena(self.driver.epochs["dma_worker"], arena))

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
