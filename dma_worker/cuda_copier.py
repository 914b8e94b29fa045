"""Filling slots in a gpu_worker's device memory, from this process, through CUDA IPC.

The gpu_worker exports the allocation that holds its slots as a 64-byte handle; this process opens
it once per arena and copies into it. Rules that CUDA leaves to us:

- the import is closed as soon as the arena is given up, else the memory of a gpu_worker that has
  ended stays occupied and the next one does not fit;
- what is in flight ends first: a copy into a closed import has undefined results;
- pinning belongs to the process, not to an arena, and is kept from one arena to the next.

Copies into a gpu_worker that died in the meantime fail or vanish; either way the device context of
this process may be unusable then, and a `CudaError` ends the process: a fresh one costs a second.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from expert_kernels.cuda_copy import CopyStream, DoneCopy, PinnedStore
from expert_kernels.cuda_runtime import CudaError, CudaUnavailable, plain_uuid
from protocol.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable

    from expert_kernels.cuda_runtime import CudaRuntime
    from expert_store.layout import StoreLayout
    from protocol.messages import Arena

#: How long to sleep between looks at an event: a copy of 1 MB takes 20-80 us.
_POLL_S = 20e-6


class CudaDevice:
    """One CUDA device as this process uses it: current device, pinned store.

    `address` is where the segment `fd` is mapped here, writable.

    Raises:
        UserError: there is no such device, or no CUDA at all.
    """

    def __init__(
        self,
        load: Callable[[], CudaRuntime],
        name: str,
        layout: StoreLayout,
        address: int,
        fd: int,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> None:
        try:
            self.runtime = load()
            num_devices = self.runtime.num_devices()
        except (CudaUnavailable, CudaError) as error:
            raise UserError(
                f"The pipeline runs with --device {name}, but CUDA cannot be used here: {error}; "
                "run on a machine with an NVIDIA GPU and driver, or with --device cpu."
            ) from None
        index = _device_index(name)
        if index >= num_devices:
            raise UserError(
                f"There is no device {name}: this process sees {num_devices} CUDA devices; "
                "choose another --device or check CUDA_VISIBLE_DEVICES."
            )
        self.layout = layout
        self.address = address
        self._index = index
        self.runtime.set_device(index)
        self._pinned = PinnedStore(self.runtime, address, layout, fd, on_progress=on_progress)

    def use(self, gpu_uuid: str) -> None:
        """Go to the device that the arena lies on ("" when its owner does not know).

        Raises:
            UserError: this process does not see that device.
        """
        if not gpu_uuid or plain_uuid(gpu_uuid) == self.runtime.device_uuid(self._index):
            return
        index = self.runtime.find_device(gpu_uuid)
        if index is None:
            raise UserError(
                f"The gpu_worker's slots lie on GPU {gpu_uuid}, which this process does not see; "
                "start both with the same CUDA_VISIBLE_DEVICES."
            )
        self._index = index
        self.runtime.set_device(index)

    def close(self) -> None:
        self._pinned.close()


class CudaCopier:
    """Fills slots at a device address. `on_close` gives the memory back."""

    def __init__(
        self, device: CudaDevice, slots_address: int, slot_bytes: int, on_close: Callable[[], None]
    ) -> None:
        self._device = device
        self._slots_address = slots_address
        self._slot_bytes = slot_bytes
        self._on_close = on_close
        self._stream = CopyStream(device.runtime)

    @classmethod
    def open_arena(cls, device: CudaDevice, arena: Arena) -> CudaCopier:
        """Import the slots of another process.

        Raises:
            UserError: they cannot be opened from here.
        """
        device.use(arena.gpu_uuid)
        runtime = device.runtime
        try:
            base = runtime.ipc_open_handle(arena.handle)
        except (CudaError, ValueError) as error:
            raise UserError(
                f"The gpu_worker's slots cannot be opened from another process: {error}; CUDA IPC "
                "does not exist on WSL2, on MIG slices and between containers without a common "
                "process namespace. Start the gpu_worker so that it copies by itself."
            ) from None
        try:
            return cls(
                device,
                base + arena.base_offset_bytes,
                arena.slot_bytes,
                lambda: runtime.ipc_close_handle(base),
            )
        except BaseException:
            runtime.ipc_close_handle(base)
            raise

    @classmethod
    def with_scratch(cls, device: CudaDevice, num_slots: int) -> CudaCopier:
        """A copier into memory of its own, for measuring.

        Raises:
            CudaError: the device has no room for it.
        """
        runtime, slot_bytes = device.runtime, device.layout.block_bytes
        address = runtime.malloc(num_slots * slot_bytes)
        try:
            return cls(device, address, slot_bytes, lambda: runtime.free(address))
        except BaseException:
            runtime.free(address)
            raise

    @property
    def num_in_flight(self) -> int:
        return self._stream.num_in_flight

    def submit(
        self,
        copy: int,
        layer: int,
        expert: int,
        slot: int,
        piece: tuple[int, int] | None = None,
    ) -> None:
        layout = self._device.layout
        first, num_bytes = piece or (0, layout.block_bytes)
        self._stream.submit(
            copy,
            self._slots_address + slot * self._slot_bytes + first,
            self._device.address + layout.block_offset(layer, expert) + first,
            num_bytes,
        )

    def poll(self) -> list[DoneCopy]:
        return self._stream.poll()

    def wait(self) -> None:
        if self._stream.num_in_flight:
            time.sleep(_POLL_S)

    def close(self) -> None:
        try:
            self._stream.close()
        finally:
            self._on_close()


def _device_index(name: str) -> int:
    """0 for "cuda", 1 for "cuda:1".

    Raises:
        UserError: it is no CUDA device name.
    """
    kind, _, index = name.partition(":")
    if kind != "cuda" or not (index or "0").isdigit():
        raise UserError(f"{name!r} is no device; give cpu, cuda or cuda:N.")
    return int(index or "0")
