"""The dma_worker at work: `Copy` in, `Copied` out, into the arena that is attached just now.

    AttachArena   the slots are here; copies asked for before are void
    Copy          store block -> slot, reported when the expert lies whole in it
    DetachArena   their owner is gone: let go of its memory at once

What a command names is checked before a byte is written: a slot, layer or expert that does not
exist, or a copy while no arena is attached, is dropped and counted. Which expert goes where is
decided elsewhere.
"""

from __future__ import annotations

import ctypes
import logging
from typing import TYPE_CHECKING

import numpy as np

from dma_worker.copier import EmulatedCopier, LinkModel
from dma_worker.copy_queue import CopyQueue
from dma_worker.cuda_copier import CudaCopier, CudaDevice
from dma_worker.probe import NUM_SCRATCH_SLOTS, measure_rate
from expert_kernels.cuda_runtime import CudaError, CudaRuntime
from expert_store.segment import StoreView
from protocol.completions import Completion, Completions
from protocol.errors import ProtocolError
from protocol.messages import Arena, AttachArena, Copied, Copy, CopyId, DetachArena
from protocol.step_segment import ARENA, WEIGHTS

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    from dma_worker.copier import Copier
    from expert_kernels.cuda_copy import DoneCopy
    from protocol.messages import WorkerCommand
    from protocol.worker_life import WorkerLink

log = logging.getLogger("headrace")

_PR_SET_TIMERSLACK = 29


class DmaWorker:
    """Holds the store's mapping and, while one is attached, the arena's.

    Raises:
        StoreFormatError: the weights are no expert store of this version.
        UserError: CUDA is asked for and cannot be used.
    """

    def __init__(self, link: WorkerLink, load_cuda: Callable[[], CudaRuntime]) -> None:
        self._link = link
        self._setup = link.setup
        is_cuda = link.setup.device != "cpu"
        weights_fd, _ = link.segment(WEIGHTS)
        self._store = StoreView(weights_fd, writable=is_cuda)
        self.layout = self._store.layout
        self._bytes = np.frombuffer(self._store.memory, dtype=np.uint8)
        self._device: CudaDevice | None = None
        if is_cuda:
            self._device = CudaDevice(
                load_cuda,
                link.setup.device,
                self.layout,
                self._bytes.ctypes.data,
                weights_fd,
                lambda done, total: link.progress(done, total, "pinning expert weights"),
            )
        self._num_slots = 0
        self._completions = Completions.of(link)
        #: Copies under way that a step waits for.
        self._awaited: dict[int, Copy] = {}
        self.copier: CopyQueue | None = None
        self.num_dropped = 0

    def measure_rate(self) -> float:
        """Bytes/s at which experts travel, into memory that nobody uses; 0.0 when the device has
        no room for that any more."""
        copier: Copier
        if self._device is not None:
            try:
                copier = CudaCopier.with_scratch(self._device, NUM_SCRATCH_SLOTS)
            except CudaError as error:
                log.warning("the link is not measured: %s", error)
                return 0.0
        else:
            scratch = np.zeros((NUM_SCRATCH_SLOTS, self.layout.block_bytes), dtype=np.uint8)
            copier = self._emulated(scratch)
        try:
            return measure_rate(copier, self.layout)
        finally:
            copier.close()

    def obey(self, command: WorkerCommand) -> None:
        """Carry out one command, or begin to; drop it when it cannot be.

        Raises:
            ProtocolError: an arena that does not fit the segment or the experts.
            UserError: an arena that cannot be reached from this process.
        """
        match command:
            case Copy():
                reason = self._find_fault(command)
                if reason is not None:
                    self._drop(reason)
                elif self.copier is not None:
                    if command.step and self._completions is not None:
                        self._awaited[command.copy] = command
                    self.copier.submit(
                        command.copy,
                        command.layer,
                        command.expert,
                        command.slot,
                        is_awaited=command.is_awaited,
                    )
            case AttachArena(epoch=self._link.epoch):
                self.detach()
                self._attach(command.arena)
            case DetachArena(epoch=self._link.epoch):
                self.detach()
            case _:
                self._drop(f"{type(command).__name__} is not for this dma_worker")

    def send_finished(self) -> bool:
        """Report the copies that have ended; True when there were any."""
        done = self.copier.poll() if self.copier is not None else []
        for copy in done:
            self._tell(copy)
            self._link.send(
                Copied(
                    self._link.epoch,
                    CopyId(copy.tag),
                    copy.started_ns,
                    copy.ended_ns,
                    copy.num_bytes,
                )
            )
        return bool(done)

    def _tell(self, done: DoneCopy) -> None:
        """Tell a gpu_worker that waits, before the message to the orchestrator."""
        copy = self._awaited.pop(done.tag, None)
        if copy is not None and self._completions is not None:
            completion = Completion(copy.slot, self._link.epoch, done.started_ns, done.ended_ns)
            self._completions.write(copy.step, copy.layer, copy.expert, completion)

    def detach(self) -> None:
        """Let go of the arena; copies in flight are void."""
        self._awaited.clear()
        if self.copier is not None:
            self.copier.close()
            self.copier = None

    def close(self) -> None:
        """Give back everything that outlives a mapping."""
        self.detach()
        if self._device is not None:
            self._device.close()
        if self.num_dropped:
            log.info("dropped %d commands in all", self.num_dropped)

    def _attach(self, arena: Arena) -> None:
        if arena.kind == "in_process":
            log.info("the gpu_worker fills its slots itself; nothing to copy here")
            return
        if arena.num_slots < 1 or arena.slot_bytes < self.layout.block_bytes:
            raise ProtocolError(
                f"an arena of {arena.num_slots} slots of {arena.slot_bytes} bytes cannot hold "
                f"experts of {self.layout.block_bytes}"
            )
        copier: Copier
        if arena.kind == "shared":
            copier = self._emulated(self._shared_slots(arena))
        elif self._device is None:
            raise ProtocolError("the slots lie on a CUDA device, but the pipeline runs on the CPU")
        elif arena.kind == "scratch":
            copier = CudaCopier.with_scratch(self._device, arena.num_slots)
        else:
            copier = CudaCopier.open_arena(self._device, arena)
        self.copier = CopyQueue(copier, self.layout)
        self._num_slots = arena.num_slots
        log.info(
            "attached %d slots of %d bytes (%s)", arena.num_slots, arena.slot_bytes, arena.kind
        )

    def _shared_slots(self, arena: Arena) -> npt.NDArray[np.uint8]:
        try:
            memory, grant = self._link.map_segment(ARENA, is_writable=True)
        except KeyError:
            raise ProtocolError(
                "the slots are said to be shared, but no arena was granted"
            ) from None
        num_bytes = arena.num_slots * arena.slot_bytes
        if not 0 <= arena.base_offset_bytes <= grant.num_bytes - num_bytes:
            raise ProtocolError(
                f"{arena.num_slots} slots of {arena.slot_bytes} bytes at byte "
                f"{arena.base_offset_bytes} are not inside the arena of {grant.num_bytes} bytes"
            )
        flat = np.frombuffer(memory, np.uint8, num_bytes, arena.base_offset_bytes)
        return flat.reshape(arena.num_slots, arena.slot_bytes)

    def _emulated(self, slots: npt.NDArray[np.uint8]) -> EmulatedCopier:
        link = LinkModel(self._setup.emulate_link_bytes_per_s)
        return EmulatedCopier(self.layout, self._bytes, slots, link)

    def _find_fault(self, command: Copy) -> str | None:
        if command.epoch != self._link.epoch:
            return f"a copy for epoch {command.epoch}, this is {self._link.epoch}"
        if self.copier is None:
            return "a copy while no arena is attached"
        if not 0 <= command.slot < self._num_slots:
            return f"slot {command.slot} of {self._num_slots}"
        try:
            self.layout.block_index(command.layer, command.expert)
        except IndexError as error:
            return str(error)
        return None

    def _drop(self, reason: str) -> None:
        self.num_dropped += 1
        level = logging.WARNING if self.num_dropped == 1 else logging.DEBUG
        log.log(level, "dropped a command: %s (%d so far)", reason, self.num_dropped)


def serve(link: WorkerLink, load_cuda: Callable[[], CudaRuntime] = CudaRuntime.load) -> None:
    """Set up, say `Ready`, then copy until the orchestrator is gone."""
    _sharpen_sleep()
    worker = DmaWorker(link, load_cuda)
    try:
        rate = 0.0
        if not link.setup.is_rate_stated:
            link.progress(0, 1, "measuring the link")
            rate = worker.measure_rate()
            log.info("copies experts at %.2f GB/s", rate / 1e9)
        link.ready(rate)
        while True:
            is_busy = worker.copier is not None and worker.copier.num_in_flight > 0
            command = link.receive(0.0 if is_busy else None)
            if command is not None:
                worker.obey(command)
            if not worker.send_finished() and command is None and worker.copier is not None:
                worker.copier.wait()
    finally:
        worker.close()


def _sharpen_sleep() -> None:
    """Ask the kernel not to delay this thread's wake-ups by its usual 50 us. Not every system has
    the call; without it emulated copies end a little later."""
    try:
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)
    except (OSError, AttributeError):
        log.debug("prctl is not known here; sleeps overshoot by 50 us")
