"""Where resident experts lie, behind one interface: slot number -> the expert's tensors.

A slot has the size of one block of the expert store and holds the same bytes, so whoever fills it
makes one copy, and the same function reads a slot and a block. Who fills the slots depends on where
they are:

    SharedSlots        segment "arena"; this process maps it read-only, the dma_worker writes it
    CudaSlots          device memory of its own (gpu_worker.cuda_slots)
"""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING, Protocol

import torch

from expert_kernels.step_rows import as_tensor
from protocol.errors import UserError
from protocol.messages import Arena
from protocol.step_segment import ARENA

if TYPE_CHECKING:
    from expert_kernels.reference import ExpertFunction
    from protocol.worker_life import WorkerLink


class ExpertSlots(Protocol):
    """All slots of the device. `arena` is what the orchestrator is told about them."""

    arena: Arena

    def tensors(self, slot: int) -> dict[str, torch.Tensor]:
        """The tensors of whichever expert lies in `slot`, as ExpertFunction takes them. Made once
        per slot: all blocks are laid out alike, so they outlive the experts."""

    def close(self) -> None:
        """Give the memory back; nothing may read a slot any more."""


class SlotViews:
    """Tensors of slots over one flat piece of memory, uint8 [num_slots, slot_bytes]."""

    def __init__(self, memory: torch.Tensor, function: ExpertFunction) -> None:
        self.memory = memory
        self._function = function
        self._tensors: list[dict[str, torch.Tensor] | None] = [None] * memory.shape[0]

    def tensors(self, slot: int) -> dict[str, torch.Tensor]:
        tensors = self._tensors[slot]
        if tensors is None:
            tensors = self._tensors[slot] = self._function.tensors_of(self.memory[slot])
        return tensors


class SharedSlots:
    """Slots in the shared segment "arena": slot i begins at byte i * slot_bytes.

    Raises:
        UserError: the orchestrator granted no arena, or one that is too small.
    """

    def __init__(self, link: WorkerLink, function: ExpertFunction) -> None:
        num_slots, slot_bytes = link.setup.num_slots, function.layout.block_bytes
        try:
            fd, grant = link.segment(ARENA)
        except KeyError:
            raise UserError(
                "The orchestrator keeps no expert slots in host memory; start this worker with the "
                "device that the orchestrator was started with."
            ) from None
        if grant.num_bytes < num_slots * slot_bytes:
            raise UserError(
                f"The arena has {grant.num_bytes} bytes, {num_slots} slots of {slot_bytes} need "
                f"{num_slots * slot_bytes}; run all processes from the same release."
            )
        memory = mmap.mmap(fd, num_slots * slot_bytes, mmap.MAP_SHARED, mmap.PROT_READ)
        self.arena = Arena("shared", num_slots, slot_bytes)
        self.views = SlotViews(as_tensor(memory, torch.uint8, 0, (num_slots, slot_bytes)), function)
        self.tensors = self.views.tensors

    def close(self) -> None:
        """The mapping goes with its last view, at the end of the process."""
