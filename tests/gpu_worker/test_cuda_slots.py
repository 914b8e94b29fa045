"""Slots in device memory and the in-process copier, with a runtime that lives in host memory.

What is shown: which bytes go where, in which order copies are reported, and what happens where
CUDA IPC or memory is missing. CUDA itself is tested in tests/gpu.
"""

from __future__ import annotations

import ctypes
import threading
import time
from typing import Any

import pytest
import torch

from expert_kernels.cuda_runtime import CudaError
from expert_kernels.reference import ExpertFunction
from expert_store.layout import ExpertForm, StoreLayout, make_layout
from gpu_worker.cuda_slots import CudaSlots, FinishedCopy, InProcessCopier
from gpu_worker.slots import SlotViews
from gpu_worker.worker import GpuWorker
from protocol.errors import ProtocolError, UserError
from protocol.messages import Copied, Copy, DropSequence, WorkerSetup

NUM_SLOTS = 3


class HostRuntime:
    """The calls of CudaRuntime over host memory. `fail` names the call that fails."""

    def __init__(self, fail: str = "", hold: threading.Event | None = None) -> None:
        self._fail = fail
        self._hold = hold
        self.allocated: dict[int, Any] = {}
        self.calls: list[tuple[Any, ...]] = []

    def _call(self, name: str, *arguments: Any) -> None:
        self.calls.append((name, *arguments))
        if name == self._fail:
            raise CudaError(name, 2, "out of memory")

    def set_device(self, device: int) -> None:
        self._call("set_device", device)

    def device_uuid(self, device: int) -> str:
        return "ab" * 16

    def malloc(self, num_bytes: int) -> int:
        self._call("malloc", num_bytes)
        buffer = (ctypes.c_uint8 * num_bytes)()
        self.allocated[ctypes.addressof(buffer)] = buffer
        return ctypes.addressof(buffer)

    def free(self, pointer: int) -> None:
        del self.allocated[pointer]

    def ipc_get_handle(self, pointer: int) -> bytes:
        self._call("ipc_get_handle", pointer)
        return b"h" * 64

    def stream_create(self) -> int:
        self._call("stream_create")
        return 1

    def stream_destroy(self, stream: int) -> None:
        self._call("stream_destroy", stream)

    def stream_synchronize(self, stream: int) -> None:
        if self._hold is not None:
            self._hold.wait(10)

    def copy_to_device(self, target: int, source: int, num_bytes: int, stream: int) -> None:
        self._call("copy_to_device", target, source, num_bytes)
        ctypes.memmove(target, source, num_bytes)


@pytest.fixture
def layout() -> StoreLayout:
    form = ExpertForm(
        hidden_size=32, intermediate_size=48, has_gate=True, has_bias=False,
        is_transposed=False, is_interleaved=False, activation="silu", gate="act_mul",
    )  # fmt: skip
    return make_layout(
        model_name="slots", checkpoint_fingerprint="none", form=form, dtype="float32",
        model_layer_ids=(0, 1), num_experts=(2, 3), top_k=2,
    )  # fmt: skip


def _slots(layout: StoreLayout, runtime: HostRuntime) -> CudaSlots:
    return CudaSlots(runtime, NUM_SLOTS, ExpertFunction(layout), 0)


def test_the_arena_is_an_allocation_of_its_own_with_a_handle(layout: StoreLayout) -> None:
    runtime = HostRuntime()
    slots = _slots(layout, runtime)
    assert ("malloc", 2 << 20) in runtime.calls
    arena = slots.arena
    assert (arena.kind, arena.num_slots, arena.slot_bytes) == (
        "cuda_ipc", NUM_SLOTS, layout.block_bytes,
    )  # fmt: skip
    assert arena.handle == b"h" * 64
    assert arena.gpu_uuid == "ab" * 16
    slots.close()
    assert not runtime.allocated


def test_without_ipc_the_arena_says_so(layout: StoreLayout) -> None:
    arena = _slots(layout, HostRuntime(fail="ipc_get_handle")).arena
    assert (arena.kind, arena.handle) == ("in_process", b"")


def test_without_room_the_sentence_has_the_numbers(layout: StoreLayout) -> None:
    with pytest.raises(UserError, match=rf"3 expert slots of {layout.block_bytes} bytes.*--slots"):
        _slots(layout, HostRuntime(fail="malloc"))


class Store:
    """Host memory shaped like a store, each block filled with its own number."""

    def __init__(self, layout: StoreLayout) -> None:
        self.memory = torch.zeros(layout.total_bytes, dtype=torch.uint8)
        self.address = self.memory.data_ptr()
        blocks = self.memory[layout.blocks_offset_bytes :].view(-1, layout.block_bytes)
        for number, block in enumerate(blocks):
            block.fill_(number + 1)


def _collect(copier: InProcessCopier, num_copies: int) -> list[FinishedCopy]:
    found: list[FinishedCopy] = []
    deadline_s = time.monotonic() + 10
    while len(found) < num_copies:
        assert time.monotonic() < deadline_s
        found += copier.finished()
    return found


def test_copies_land_whole_in_their_slots_in_order(layout: StoreLayout) -> None:
    store, arena = Store(layout), torch.zeros(NUM_SLOTS, layout.block_bytes, dtype=torch.uint8)
    copier = InProcessCopier(HostRuntime(), 0, layout, store.address, arena.data_ptr(), NUM_SLOTS)
    copier.submit(Copy(1, 10, 1, 2, 0))
    copier.submit(Copy(1, 11, 0, 1, 2))
    assert copier.num_pending == 2
    done = _collect(copier, 2)
    assert [copy.copy for copy in done] == [10, 11]
    assert all(copy.num_bytes == layout.block_bytes for copy in done)
    assert done[0].started_ns < done[0].ended_ns <= done[1].started_ns
    assert [slot.unique().tolist() for slot in arena] == [[5], [0], [2]]
    assert copier.num_pending == 0
    copier.close()


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        (Copy(1, 1, 0, 0, 3), "slot 3 of 3"),
        (Copy(1, 1, 0, 0, -1), "slot -1 of 3"),
        (Copy(1, 1, 0, 2, 0), "expert 2 of 2 in MoE layer 0"),
        (Copy(1, 1, 2, 0, 0), "MoE layer 2 of 2"),
    ],
)
def test_copies_of_nothing_are_refused(layout: StoreLayout, command: Copy, sentence: str) -> None:
    copier = InProcessCopier(HostRuntime(), 0, layout, 0, 0, NUM_SLOTS)
    with pytest.raises(ProtocolError, match=sentence):
        copier.submit(command)
    assert copier.num_pending == 0
    copier.close()


def test_a_failed_copy_is_raised_after_those_that_landed(layout: StoreLayout) -> None:
    store, arena = Store(layout), torch.zeros(NUM_SLOTS, layout.block_bytes, dtype=torch.uint8)
    copier = InProcessCopier(
        HostRuntime(fail="copy_to_device"), 0, layout, store.address, arena.data_ptr(), NUM_SLOTS
    )
    copier.submit(Copy(1, 10, 0, 0, 0))
    with pytest.raises(CudaError, match="copy_to_device failed"):
        _collect(copier, 1)
    copier.close()


class ScriptedLink:
    """Gives `commands` one by one, None when a command was not ready in time; notes events."""

    epoch = 1
    setup = WorkerSetup("", "float32", "cuda", NUM_SLOTS, 4, 10)

    def __init__(self, commands: list[Any]) -> None:
        self.commands = commands
        self.events: list[Any] = []
        self.num_polls = 0

    def receive(self, timeout_s: float | None = None, wake_fd: int = -1) -> Any:
        if self.commands:
            return self.commands.pop(0)
        self.num_polls += 1
        if timeout_s is None:
            raise EOFError
        return None

    def send(self, event: Any) -> None:
        self.events.append(event)


class NoModel:
    """A model that nobody runs."""

    def new_cache(self) -> None:
        return None

    def connect(self, exchange: Any) -> None:
        """Nothing to connect."""


def test_the_worker_reports_copies_while_it_waits_for_commands(layout: StoreLayout) -> None:
    """Commands are read while a copy is under way, and `Copied` goes out without one."""
    hold = threading.Event()
    store, arena = Store(layout), torch.zeros(NUM_SLOTS, layout.block_bytes, dtype=torch.uint8)
    runtime = HostRuntime(hold=hold)
    copier = InProcessCopier(runtime, 0, layout, store.address, arena.data_ptr(), NUM_SLOTS)
    link = ScriptedLink([Copy(1, 3, 1, 1, 1), Copy(9, 4, 1, 1, 1), DropSequence(1, 0)])
    worker = GpuWorker(link, NoModel(), None, _slots(layout, HostRuntime()), layout, copier)
    threading.Timer(0.05, hold.set).start()
    with pytest.raises(EOFError):  # raised by a wait without end: nothing is pending any more
        worker.serve()
    assert [type(event) for event in link.events] == [Copied]
    assert (link.events[0].copy, link.events[0].num_bytes) == (3, layout.block_bytes)
    assert link.num_polls > 1
    assert worker.num_dropped == 1
    assert arena[1].unique().tolist() == [4]
    copier.close()


def test_tensors_of_a_slot_follow_what_is_copied_into_it(layout: StoreLayout) -> None:
    memory = torch.zeros(NUM_SLOTS, layout.block_bytes, dtype=torch.uint8)
    views = SlotViews(memory, ExpertFunction(layout))
    tensors = views.tensors(2)
    assert views.tensors(2) is tensors
    memory[2].view(torch.float32).fill_(7.0)
    assert {float(tensor.unique()) for tensor in tensors.values()} == {7.0}
    assert float(views.tensors(1)["down"].sum()) == 0.0
