"""The CUDA path against a fake runtime library that records calls and fails when told to."""

from __future__ import annotations

import ctypes
import fcntl
import logging
import os
from typing import TYPE_CHECKING, Any

import pytest

from dma_worker.cuda_copier import CudaCopier, CudaDevice
from expert_kernels.cuda_copy import CopyStream, PinnedStore, chunks_of
from expert_kernels.cuda_runtime import (
    CudaError,
    CudaRuntime,
    CudaUnavailable,
    IpcHandle,
    plain_uuid,
)
from protocol.errors import UserError
from protocol.messages import Arena
from tests.protocol.fake_orchestrator import make_store, small_layout

if TYPE_CHECKING:
    from collections.abc import Iterator

LAYOUT = small_layout()
ADDRESS = 0x7000_0000_0000
HANDLE = bytes(range(64))
UUIDS = (b"\x01" * 16, b"\xab\xcd" * 8)


class FakeLibrary:
    """libcudart and libcuda as this project uses them. `failing` maps a call to its code; `lag` is
    how often an event is asked before it is done."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.failing: dict[str, int] = {}
        self.sticky = 0
        self.lag = 0
        self.open: set[str] = set()
        self._next = 0x1000
        self._asked: dict[int, int] = {}

    def names(self) -> list[str]:
        return [call[0] for call in self.calls]

    def _result(self, name: str, *arguments: Any) -> int:
        self.calls.append((name, *arguments))
        code = self.failing.get(name, 0)
        self.sticky = code or self.sticky
        return code

    def _make(self, name: str, kind: str, out: Any, *arguments: Any) -> int:
        code = self._result(name, *arguments)
        if code == 0:
            self._next += 0x1000
            out._obj.value = self._next
            self.open.add(f"{kind} {self._next}")
        return code

    def _end(self, name: str, kind: str, value: int) -> int:
        self.open.discard(f"{kind} {value}")
        return self._result(name, value)

    def cudaGetLastError(self) -> int:
        code, self.sticky = self.sticky, 0
        return code

    def cudaGetErrorString(self, code: int) -> bytes:
        return f"error text {code}".encode()

    def cudaGetDeviceCount(self, out: Any) -> int:
        out._obj.value = 2
        return self._result("cudaGetDeviceCount")

    def cudaSetDevice(self, device: int) -> int:
        return self._result("cudaSetDevice", device)

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        code = self._result("cudaHostRegister", address, num_bytes, flags)
        if code == 0:
            self.open.add(f"pin {address}")
        return code

    def cudaHostUnregister(self, address: int) -> int:
        return self._end("cudaHostUnregister", "pin", address)

    def cudaMalloc(self, out: Any, num_bytes: int) -> int:
        return self._make("cudaMalloc", "memory", out, num_bytes)

    def cudaFree(self, pointer: int) -> int:
        return self._end("cudaFree", "memory", pointer)

    def cudaIpcGetMemHandle(self, out: Any, pointer: int) -> int:
        ctypes.memmove(ctypes.byref(out._obj), HANDLE, 64)
        return self._result("cudaIpcGetMemHandle", pointer)

    def cudaIpcOpenMemHandle(self, out: Any, handle: IpcHandle, flags: int) -> int:
        return self._make("cudaIpcOpenMemHandle", "import", out, bytes(handle), flags)

    def cudaIpcCloseMemHandle(self, pointer: int) -> int:
        return self._end("cudaIpcCloseMemHandle", "import", pointer)

    def cudaStreamCreateWithFlags(self, out: Any, flags: int) -> int:
        return self._make("cudaStreamCreateWithFlags", "stream", out, flags)

    def cudaStreamSynchronize(self, stream: int) -> int:
        return self._result("cudaStreamSynchronize", stream)

    def cudaStreamDestroy(self, stream: int) -> int:
        return self._end("cudaStreamDestroy", "stream", stream)

    def cudaMemcpyAsync(self, *arguments: int) -> int:
        return self._result("cudaMemcpyAsync", *arguments)

    def cudaEventCreateWithFlags(self, out: Any, flags: int) -> int:
        return self._make("cudaEventCreateWithFlags", "event", out, flags)

    def cudaEventRecord(self, event: int, stream: int) -> int:
        self._asked[event] = 0
        return self._result("cudaEventRecord", event, stream)

    def cudaEventQuery(self, event: int) -> int:
        code = self._result("cudaEventQuery", event)
        self._asked[event] += 1
        if code == 0 and self._asked[event] <= self.lag:
            self.sticky = 600
            return 600
        return code

    def cudaEventDestroy(self, event: int) -> int:
        return self._end("cudaEventDestroy", "event", event)

    def cuInit(self, flags: int) -> int:
        return 0

    def cuDeviceGet(self, out: Any, ordinal: int) -> int:
        out._obj.value = ordinal
        return 0

    def cuDeviceGetUuid_v2(self, buffer: Any, device: ctypes.c_int) -> int:
        ctypes.memmove(buffer, UUIDS[device.value], 16)
        return 0


@pytest.fixture
def library() -> FakeLibrary:
    return FakeLibrary()


@pytest.fixture
def runtime(library: FakeLibrary) -> CudaRuntime:
    return CudaRuntime(library, library)


@pytest.fixture
def fd() -> Iterator[int]:
    fd = make_store(LAYOUT)
    yield fd
    os.close(fd)


@pytest.fixture
def device(runtime: CudaRuntime, fd: int) -> CudaDevice:
    return CudaDevice(lambda: runtime, "cuda", LAYOUT, ADDRESS, fd)


def arena(**changes: Any) -> Arena:
    values: dict[str, Any] = {
        "kind": "cuda_ipc",
        "num_slots": 3,
        "slot_bytes": LAYOUT.block_bytes + 512,
        "handle": HANDLE,
        "base_offset_bytes": 256,
    }
    return Arena(**{**values, **changes})


def test_every_failing_code_is_an_error_and_leaves_nothing_sticky(
    library: FakeLibrary, runtime: CudaRuntime
) -> None:
    calls: dict[str, Any] = {
        "cudaGetDeviceCount": runtime.num_devices,
        "cudaSetDevice": lambda: runtime.set_device(0),
        "cudaHostRegister": lambda: runtime.host_register(1, 2),
        "cudaHostUnregister": lambda: runtime.host_unregister(1),
        "cudaMalloc": lambda: runtime.malloc(1),
        "cudaFree": lambda: runtime.free(1),
        "cudaIpcGetMemHandle": lambda: runtime.ipc_get_handle(1),
        "cudaIpcOpenMemHandle": lambda: runtime.ipc_open_handle(HANDLE),
        "cudaIpcCloseMemHandle": lambda: runtime.ipc_close_handle(1),
        "cudaStreamCreateWithFlags": runtime.stream_create,
        "cudaStreamSynchronize": lambda: runtime.stream_synchronize(1),
        "cudaStreamDestroy": lambda: runtime.stream_destroy(1),
        "cudaMemcpyAsync": lambda: runtime.copy_to_device(1, 2, 3, 4),
        "cudaEventCreateWithFlags": runtime.event_create,
        "cudaEventRecord": lambda: runtime.event_record(1, 2),
        "cudaEventQuery": lambda: runtime.is_event_done(1),
        "cudaEventDestroy": lambda: runtime.event_destroy(1),
    }
    library._asked[1] = 0
    for name, call in calls.items():
        library.failing = {name: 700}
        with pytest.raises(CudaError, match=rf"{name} failed: error text 700 \(error 700\)"):
            call()
        assert library.sticky == 0, name
    library.failing = {}
    for call in calls.values():
        call()


def test_handles_and_uuids_keep_their_bytes(library: FakeLibrary, runtime: CudaRuntime) -> None:
    assert runtime.ipc_get_handle(5) == HANDLE
    runtime.ipc_open_handle(HANDLE)
    assert library.calls[-1] == ("cudaIpcOpenMemHandle", HANDLE, 1)
    with pytest.raises(ValueError, match="64 bytes, not 63"):
        runtime.ipc_open_handle(HANDLE[:-1])
    assert runtime.device_uuid(1) == "abcd" * 8
    assert runtime.find_device("GPU-ABCDABCD-ABCD-abcd-abcd-abcdabcdabcd") == 1
    assert runtime.find_device("00" * 16) is None
    assert plain_uuid("GPU-01-02") == "0102"


def test_chunks_cover_all_blocks_and_end_between_experts() -> None:
    for max_bytes in (1, LAYOUT.block_bytes, 3 * LAYOUT.block_bytes + 5, 2**40):
        chunks = chunks_of(LAYOUT, max_bytes)
        position = LAYOUT.blocks_offset_bytes
        for offset, length in chunks:
            assert offset == position
            assert length % LAYOUT.block_bytes == 0
            assert length <= max(max_bytes, LAYOUT.block_bytes)
            position += length
        assert position == LAYOUT.total_bytes


def test_pins_chunk_by_chunk_and_unpins(
    library: FakeLibrary, runtime: CudaRuntime, fd: int
) -> None:
    chunk = 4 * LAYOUT.block_bytes
    seen: list[tuple[int, int]] = []
    pinned = PinnedStore(
        runtime, ADDRESS, LAYOUT, fd, max_chunk_bytes=chunk,
        on_progress=lambda done, total: seen.append((done, total)),
    )  # fmt: skip
    registered = [call[1:] for call in library.calls]
    assert registered == [(ADDRESS + o, n, 1) for o, n in chunks_of(LAYOUT, chunk)]
    assert pinned.pinned_bytes == LAYOUT.total_experts * LAYOUT.block_bytes
    assert pinned.reason == ""
    assert seen[-1] == (pinned.pinned_bytes, pinned.pinned_bytes)
    pinned.close()
    assert not library.open


def test_pinning_that_fails_is_one_line_and_no_end(
    library: FakeLibrary,
    runtime: CudaRuntime,
    fd: int,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    library.failing = {"cudaHostRegister": 304}
    # A program's own set-up of the logger, run by another test, would keep records from caplog.
    monkeypatch.setattr(logging.getLogger("headrace"), "propagate", True)
    pinned = PinnedStore(runtime, ADDRESS, LAYOUT, fd)
    assert pinned.pinned_bytes == 0
    assert "error 304" in pinned.reason
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert library.sticky == 0
    pinned.close()
    assert "cudaHostUnregister" not in library.names()


def test_pinning_holds_a_lock_that_the_shared_descriptor_does_not_share(
    library: FakeLibrary, runtime: CudaRuntime, fd: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    other_fd = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)  # as another process would lock it
    held: list[bool] = []

    def register(*_: int) -> int:
        try:
            fcntl.flock(other_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            held.append(True)
        return 0

    monkeypatch.setattr(library, "cudaHostRegister", register)
    PinnedStore(runtime, ADDRESS, LAYOUT, fd)
    assert held == [True]
    fcntl.flock(other_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # given back
    monkeypatch.setattr("expert_kernels.cuda_copy._LOCK_TIMEOUT_S", 0.1)
    assert "too long" in PinnedStore(runtime, ADDRESS, LAYOUT, fd).reason
    os.close(other_fd)


def test_copy_goes_from_block_to_slot_and_is_done_when_its_event_is(
    library: FakeLibrary, device: CudaDevice
) -> None:
    library.lag = 2
    copier = CudaCopier.open_arena(device, arena())
    (base,) = (int(entry.split()[1]) for entry in library.open if entry.startswith("import"))
    copier.submit(41, 1, 3, 2)
    copier.submit(42, 0, 5, 0)
    copies = [call for call in library.calls if call[0] == "cudaMemcpyAsync"]
    (stream,) = (int(entry.split()[1]) for entry in library.open if entry.startswith("stream"))
    slot_bytes = LAYOUT.block_bytes + 512
    assert [call[1:] for call in copies] == [
        (base + 256 + slot * slot_bytes, ADDRESS + LAYOUT.block_offset(layer, expert),
         LAYOUT.block_bytes, 1, stream)
        for layer, expert, slot in ((1, 3, 2), (0, 5, 0))
    ]  # fmt: skip
    assert copier.poll() == []
    assert copier.poll() == []
    assert library.sticky == 0  # "not ready" is no error to be found later
    (first,) = copier.poll()
    assert (first.tag, first.num_bytes) == (41, LAYOUT.block_bytes)
    copier.poll()
    (second,) = copier.poll()
    assert second.tag == 42
    assert second.started_ns == first.ended_ns
    copier.submit(43, 0, 0, 1)
    assert library.names().count("cudaEventCreateWithFlags") == 2  # events are used again
    copier.close()
    assert not [entry for entry in library.open if not entry.startswith("pin")]
    names = library.names()
    assert names.index("cudaStreamSynchronize") < names.index("cudaIpcCloseMemHandle")
    device.close()
    assert not library.open


def test_import_is_closed_even_when_the_device_is_lost(
    library: FakeLibrary, device: CudaDevice
) -> None:
    copier = CudaCopier.open_arena(device, arena())
    library.failing = {"cudaStreamSynchronize": 719}
    with pytest.raises(CudaError):
        copier.close()
    assert not [entry for entry in library.open if entry.startswith("import")]


@pytest.mark.parametrize("failing", ["cudaIpcOpenMemHandle", "cudaStreamCreateWithFlags"])
def test_an_arena_that_cannot_be_opened_leaves_no_import(
    failing: str, library: FakeLibrary, device: CudaDevice
) -> None:
    library.failing = {failing: 201}
    with pytest.raises((UserError, CudaError), match="error 201"):
        CudaCopier.open_arena(device, arena())
    assert not [entry for entry in library.open if entry.startswith("import")]


def test_a_failed_copy_is_an_error(library: FakeLibrary, runtime: CudaRuntime) -> None:
    stream = CopyStream(runtime)
    library.failing = {"cudaMemcpyAsync": 1}
    with pytest.raises(CudaError, match="cudaMemcpyAsync"):
        stream.submit(1, 2, 3, 4)
    assert stream.num_in_flight == 0
    library.failing = {}
    stream.submit(1, 2, 3, 4)
    library.failing = {"cudaEventQuery": 719}
    with pytest.raises(CudaError, match="719"):
        stream.poll()


def test_the_arena_decides_the_device(library: FakeLibrary, device: CudaDevice) -> None:
    CudaCopier.open_arena(device, arena(gpu_uuid="GPU-" + UUIDS[1].hex()))
    assert [call for call in library.calls if call[0] == "cudaSetDevice"] == [
        ("cudaSetDevice", 0),
        ("cudaSetDevice", 1),
    ]
    with pytest.raises(UserError, match="CUDA_VISIBLE_DEVICES"):
        CudaCopier.open_arena(device, arena(gpu_uuid="GPU-" + "9" * 32))


@pytest.mark.parametrize(
    ("name", "sentence"),
    [("cuda:2", "sees 2 CUDA devices"), ("cuda:x", "is no device"), ("xpu", "is no device")],
)
def test_devices_that_do_not_exist(name: str, sentence: str, runtime: CudaRuntime, fd: int) -> None:
    with pytest.raises(UserError, match=sentence):
        CudaDevice(lambda: runtime, name, LAYOUT, ADDRESS, fd)


def test_no_driver_is_told_in_one_sentence(fd: int) -> None:
    def load() -> CudaRuntime:
        raise CudaUnavailable("no NVIDIA driver here")

    with pytest.raises(UserError, match=r"no NVIDIA driver here; .*--device cpu"):
        CudaDevice(load, "cuda", LAYOUT, ADDRESS, fd)


@pytest.mark.gpu
def test_on_a_device_bytes_arrive_whole(fd: int) -> None:
    import mmap

    import numpy as np
    import torch

    memory = mmap.mmap(fd, LAYOUT.total_bytes)
    store = np.frombuffer(memory, dtype=np.uint8)
    device = CudaDevice(CudaRuntime.load, "cuda", LAYOUT, store.ctypes.data, fd)
    slots = torch.zeros(3, LAYOUT.block_bytes, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    copier = CudaCopier(device, slots.data_ptr(), LAYOUT.block_bytes, lambda: None)
    copier.submit(1, 1, 3, 2)
    while not copier.poll():
        copier.wait()
    start = LAYOUT.block_offset(1, 3)
    expected = torch.from_numpy(store[start : start + LAYOUT.block_bytes].copy())
    assert torch.equal(slots[2].cpu(), expected)
    assert not slots[:2].any()
    copier.close()
    device.close()
