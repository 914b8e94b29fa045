"""Expert slots in device memory, and who may fill them.

The arena is one `cudaMalloc` of its own: torch's allocator may use expandable segments, whose
memory has no IPC handle. Its 64-byte handle goes to the orchestrator, which passes it to the
dma_worker; that process then copies experts in while this one computes.

CUDA IPC does not exist everywhere (WSL2, MIG, some containers). There the arena is declared
"in_process", and `InProcessCopier` takes the copies: a thread with a stream of its own, so that a
copy from memory that could not be pinned, which blocks its caller, never blocks the model.

Order between a copy and a kernel that reads the slot: the copy has been seen complete by a CPU
before the orchestrator hears `Copied`, hence before it says `Run`; what is launched after that
sees it.
Order the other way round: `Ran` is sent after the stream has passed the last read.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections import deque
from typing import TYPE_CHECKING

import msgspec
import torch

from expert_kernels.cuda_copy import PinnedStore
from expert_kernels.cuda_runtime import CudaError, CudaRuntime, CudaUnavailable
from expert_store.segment import StoreView
from gpu_worker.rows import CudaStream, DeviceRows
from gpu_worker.slots import SlotViews
from protocol.errors import ProtocolError, UserError
from protocol.messages import Arena, CopyId
from protocol.sizes import size
from protocol.step_segment import WEIGHTS

if TYPE_CHECKING:
    import mmap

    from expert_kernels.reference import ExpertFunction
    from expert_kernels.step_rows import ActivationViews
    from expert_store.layout import StoreLayout
    from protocol.messages import Copy
    from protocol.worker_life import WorkerLink

log = logging.getLogger("headrace.gpu_worker")

#: The driver hands out memory in pieces of this size; a whole number of them shares none of its
#: pieces with other allocations, so the handle exports the arena and nothing else.
_ALLOCATION_UNIT_BYTES = 2 << 20


class DeviceBytes:
    """Raw device memory as the CUDA array interface (version 3) describes it: uint8 [rows, cols].

    `torch.as_tensor` makes a tensor of it without a copy and keeps this object alive.
    """

    def __init__(self, pointer: int, num_rows: int, num_columns: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_rows, num_columns),
            "typestr": "|u1",
            "data": (pointer, False),
            "strides": None,
            "version": 3,
        }


class CudaSlots:
    """Slots in an allocation of our own on CUDA device `device_index`.

    Raises:
        UserError: the device has not that much free memory.
    """

    def __init__(
        self, runtime: CudaRuntime, num_slots: int, function: ExpertFunction, device_index: int
    ) -> None:
        slot_bytes = function.layout.block_bytes
        num_bytes = num_slots * slot_bytes
        self._runtime = runtime
        runtime.set_device(device_index)
        unit = _ALLOCATION_UNIT_BYTES
        try:
            self.base = runtime.malloc(-(-num_bytes // unit) * unit)
        except CudaError as error:
            raise UserError(
                f"The device has no room for {num_slots} expert slots of {slot_bytes} bytes "
                f"({size(num_bytes)}) beside the dense weights: {error}; use fewer --slots."
            ) from None
        uuid = runtime.device_uuid(device_index)
        try:
            handle = runtime.ipc_get_handle(self.base)
        except CudaError as error:
            log.info("no CUDA IPC here (%s): this process fills its slots itself", error)
            self.arena = Arena("in_process", num_slots, slot_bytes, gpu_uuid=uuid)
        else:
            self.arena = Arena("cuda_ipc", num_slots, slot_bytes, handle, 0, uuid)
        self._function = function
        self._views: SlotViews | None = None
        self._device_index = device_index

    def tensors(self, slot: int) -> dict[str, torch.Tensor]:
        if self._views is None:
            memory = torch.as_tensor(
                DeviceBytes(self.base, self.arena.num_slots, self.arena.slot_bytes),
                device=torch.device("cuda", self._device_index),
            )
            self._views = SlotViews(memory, self._function)
        return self._views.tensors(slot)

    def close(self) -> None:
        """Free the arena. An importer that still maps it reads on undefined: the orchestrator has
        the dma_worker detach first, and the end of this process frees it all the same."""
        self._views = None
        with contextlib.suppress(CudaError):
            self._runtime.free(self.base)


class FinishedCopy(msgspec.Struct, frozen=True):
    """A copy that lies whole in its slot."""

    copy: CopyId
    started_ns: int
    ended_ns: int
    num_bytes: int


class InProcessCopier:
    """Fills slots from a thread of this process, one copy at a time: those that are awaited
    first, in the order asked for.

    `source` is the address of the store's first byte in this process. `finished` is polled by the
    thread that owns the connection to the orchestrator: sockets belong to one thread.
    """

    def __init__(
        self,
        runtime: CudaRuntime,
        device_index: int,
        layout: StoreLayout,
        source: int,
        target: int,
        num_slots: int,
    ) -> None:
        self._runtime = runtime
        self._device_index = device_index
        self._layout = layout
        self._source = source
        self._target = target
        self._num_slots = num_slots
        #: First what is awaited, in the order asked for; None ends the thread.
        self._asked: queue.PriorityQueue[tuple[int, int, tuple[CopyId, int, int] | None]] = (
            queue.PriorityQueue()
        )
        self._num_asked = 0
        self._done: deque[FinishedCopy] = deque()
        self._fault: Exception | None = None
        #: Copies asked for and not yet returned by `finished`.
        self.num_pending = 0
        self._thread = threading.Thread(target=self._copy_all, name="copier", daemon=True)
        self._thread.start()

    def submit(self, command: Copy) -> None:
        """Ask for one copy.

        Raises:
            ProtocolError: there is no such expert or slot.
        """
        if not 0 <= command.slot < self._num_slots:
            raise ProtocolError(f"Copy names slot {command.slot} of {self._num_slots}")
        try:
            offset_bytes = self._layout.block_offset(command.layer, command.expert)
        except IndexError as error:
            raise ProtocolError(f"Copy names {error}") from None
        self.num_pending += 1
        target_bytes = command.slot * self._layout.block_bytes
        self._ask(0 if command.is_awaited else 1, (command.copy, offset_bytes, target_bytes))

    def finished(self) -> list[FinishedCopy]:
        """Copies completed since the last call, oldest first.

        Raises:
            CudaError: a copy failed; the device cannot be trusted any more.
        """
        found: list[FinishedCopy] = []
        while self._done:
            found.append(self._done.popleft())
        self.num_pending -= len(found)
        if self._fault is not None and not found:
            raise self._fault
        return found

    def close(self) -> None:
        """Let the copy under way end, forget the rest."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._asked.get_nowait()
        self._ask(2, None)
        self._thread.join(timeout=5.0)

    def _ask(self, rank: int, copy: tuple[CopyId, int, int] | None) -> None:
        self._num_asked += 1
        self._asked.put((rank, self._num_asked, copy))

    def _copy_all(self) -> None:
        try:
            self._runtime.set_device(self._device_index)
            stream = self._runtime.stream_create()
            num_bytes = self._layout.block_bytes
            while (asked := self._asked.get()[2]) is not None:
                copy, source_offset, target_offset = asked
                started_ns = time.monotonic_ns()
                self._runtime.copy_to_device(
                    self._target + target_offset, self._source + source_offset, num_bytes, stream
                )
                self._runtime.stream_synchronize(stream)
                self._done.append(FinishedCopy(copy, started_ns, time.monotonic_ns(), num_bytes))
            self._runtime.stream_destroy(stream)
        except Exception as error:  # told to the owner by `finished`
            self._fault = error


def set_up_cuda(
    link: WorkerLink,
    function: ExpertFunction,
    views: ActivationViews,
    memory: mmap.mmap,
    device: torch.device,
) -> tuple[CudaSlots, DeviceRows, InProcessCopier | None]:
    """Slots, rows and, where IPC is missing, a copier on a CUDA device. `memory` is the activation
    segment that `views` look at.

    Raises:
        UserError: no room for the slots, or no CUDA runtime library.
    """
    index = device.index or 0
    try:
        runtime = CudaRuntime.load()
    except CudaUnavailable as error:
        raise UserError(f"CUDA cannot be used: {error}.") from None
    runtime.set_device(index)
    activations = torch.frombuffer(memory, dtype=torch.uint8)
    try:
        runtime.host_register(activations.data_ptr(), activations.numel())
    except CudaError as error:
        log.warning("rows cross to the device unpinned, a little slower: %s", error)
    slots = CudaSlots(runtime, link.setup.num_slots, function, index)
    rows = DeviceRows(views, function, slots, device, CudaStream(device))
    if slots.arena.kind != "in_process":
        return slots, rows, None
    fd, _ = link.segment(WEIGHTS)
    store = StoreView(fd, writable=True)  # pinning may need write access; nothing is written
    layout = store.layout
    source = torch.frombuffer(store.memory, dtype=torch.uint8).data_ptr()
    link.progress(1, 2, "pinning the expert store")
    PinnedStore(runtime, source, layout, fd)  # until the process ends
    copier = InProcessCopier(runtime, index, layout, source, slots.base, link.setup.num_slots)
    return slots, rows, copier
