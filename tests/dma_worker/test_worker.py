"""A real dma_worker process against a small orchestrator."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest

from expert_store.segment import StoreView
from protocol.messages import (
    Arena,
    AttachArena,
    Copied,
    Copy,
    CopyId,
    DetachArena,
    Epoch,
    ExpertId,
    Failed,
    LayerId,
    Ready,
    Shutdown,
    SlotId,
)
from tests.protocol.fake_orchestrator import FakeOrchestrator, Worker

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.process

NUM_SLOTS = 4


def arena_of(orchestrator: FakeOrchestrator, **changes: Any) -> Arena:
    values: dict[str, Any] = {
        "kind": "shared",
        "num_slots": NUM_SLOTS,
        "slot_bytes": orchestrator.layout.block_bytes,
    }
    return Arena(**{**values, **changes})


def copy_of(worker: Worker, copy: int, layer: int, expert: int, slot: int) -> Copy:
    return Copy(worker.epoch, CopyId(copy), LayerId(layer), ExpertId(expert), SlotId(slot))


def slot_bytes(orchestrator: FakeOrchestrator, slot: int) -> bytes:
    size = orchestrator.layout.block_bytes
    return orchestrator.arena_map[slot * size : (slot + 1) * size]


def block_bytes(orchestrator: FakeOrchestrator, layer: int, expert: int) -> bytes:
    with StoreView(orchestrator.weights_fd) as store:
        return bytes(store.block(layer, expert))


def test_copies_arrive_whole_and_only_where_told(tmp_path: Path, tiny_env: dict[str, str]) -> None:
    rate = 20e6
    with FakeOrchestrator(
        tmp_path / "run", num_slots=NUM_SLOTS, emulate_link_bytes_per_s=rate, environ=tiny_env
    ) as orchestrator:
        flags = ("--run-dir", str(tmp_path / "run"))
        worker = orchestrator.spawn("-P", "-m", "dma_worker", *flags)
        assert orchestrator.welcome(worker).role == "dma_worker"
        ready = orchestrator.expect(worker, Ready)
        assert 0 < ready.bytes_per_s <= rate * 1.001
        untouched = slot_bytes(orchestrator, 0)
        assert untouched == bytes(len(untouched))  # the probe wrote into no slot

        orchestrator.send(worker, copy_of(worker, 1, 0, 0, 0))  # no arena yet: void
        orchestrator.send(worker, AttachArena(worker.epoch, arena_of(orchestrator)))
        wanted = [(2, 0, 5, 3), (3, 1, 2, 1), (4, 0, 1, 2)]
        for copy, layer, expert, slot in wanted:
            orchestrator.send(worker, copy_of(worker, copy, layer, expert, slot))
        before_ns = 0
        for copy, layer, expert, slot in wanted:
            copied = orchestrator.expect(worker, Copied)
            assert (copied.epoch, copied.copy) == (worker.epoch, copy)
            assert copied.num_bytes == orchestrator.layout.block_bytes
            took_ns = copied.ended_ns - copied.started_ns
            assert took_ns >= copied.num_bytes / rate * 1e9 - 1
            assert before_ns <= copied.started_ns
            assert copied.ended_ns <= time.monotonic_ns()
            before_ns = copied.ended_ns
            assert slot_bytes(orchestrator, slot) == block_bytes(orchestrator, layer, expert)
        assert slot_bytes(orchestrator, 0) == untouched

        for layer, expert, slot in ((0, 6, 0), (2, 0, 0), (0, -1, 0), (0, 0, 4), (0, 0, -1)):
            orchestrator.send(worker, copy_of(worker, 9, layer, expert, slot))
        for frames in ([b""], [b"\xc1"], [os.urandom(300)], [b"a", b"b"]):
            orchestrator.send_raw(worker, *frames)
        stale = Copy(Epoch(99), CopyId(9), LayerId(0), ExpertId(0), SlotId(0))
        orchestrator.send(worker, stale)
        orchestrator.send(worker, DetachArena(worker.epoch))
        orchestrator.send(worker, copy_of(worker, 9, 0, 0, 0))
        orchestrator.send(worker, AttachArena(worker.epoch, arena_of(orchestrator)))
        orchestrator.send(worker, copy_of(worker, 10, 0, 3, 1))
        assert orchestrator.expect(worker, Copied).copy == 10
        assert slot_bytes(orchestrator, 0) == untouched
        assert slot_bytes(orchestrator, 1) == block_bytes(orchestrator, 0, 3)

        orchestrator.send(worker, Shutdown(worker.epoch, "test over"))
        assert worker.wait() == 0
        assert not any(isinstance(message, Copied) for message in worker.messages)
        assert "dropped 8 commands in all" in worker.stderr


def test_detached_copies_are_void_at_once(tmp_path: Path, tiny_env: dict[str, str]) -> None:
    with FakeOrchestrator(
        tmp_path / "run",
        num_slots=NUM_SLOTS,
        emulate_link_bytes_per_s=1e4,  # one copy takes seconds
        is_rate_stated=True,
        environ=tiny_env,
    ) as orchestrator:
        worker = orchestrator.start_worker("dma_worker")
        orchestrator.send(worker, AttachArena(worker.epoch, arena_of(orchestrator)))
        orchestrator.send(worker, copy_of(worker, 1, 0, 0, 0))
        orchestrator.send(worker, DetachArena(worker.epoch))
        orchestrator.send(worker, AttachArena(worker.epoch, arena_of(orchestrator)))
        worker.process.send_signal(signal.SIGTERM)
        assert worker.wait(5) == 0
        assert not any(isinstance(message, Copied) for message in worker.messages)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"slot_bytes": 64}, "cannot hold experts"),
        ({"num_slots": NUM_SLOTS + 1}, "are not inside the arena"),
        ({"base_offset_bytes": 4096}, "are not inside the arena"),
        ({"kind": "cuda_ipc", "handle": bytes(64)}, "the pipeline runs on the CPU"),
    ],
)
def test_an_arena_that_cannot_be_is_a_fault(
    changes: dict[str, Any], sentence: str, tmp_path: Path, tiny_env: dict[str, str]
) -> None:
    with FakeOrchestrator(
        tmp_path / "run", num_slots=NUM_SLOTS, is_rate_stated=True, environ=tiny_env
    ) as orchestrator:
        worker = orchestrator.start_worker("dma_worker")
        orchestrator.send(worker, AttachArena(worker.epoch, arena_of(orchestrator, **changes)))
        assert worker.wait() == 1
        orchestrator.wait_until(lambda: bool(worker.messages), 5)
        failed = worker.messages[-1]
        assert isinstance(failed, Failed)
        assert sentence in failed.sentence


def test_cuda_without_a_driver_is_told(tmp_path: Path, tiny_env: dict[str, str]) -> None:
    import msgspec

    from expert_kernels.cuda_runtime import CudaRuntime, CudaUnavailable

    try:
        CudaRuntime.load()
    except CudaUnavailable:
        pass
    else:
        pytest.skip("this machine has CUDA")
    with FakeOrchestrator(tmp_path / "run", environ=tiny_env) as orchestrator:
        orchestrator.setup = msgspec.structs.replace(orchestrator.setup, device="cuda")
        worker = orchestrator.spawn("-P", "-m", "dma_worker", "--run-dir", str(tmp_path / "run"))
        orchestrator.welcome(worker)
        assert worker.wait() == 2
        assert "--device cuda, but CUDA cannot be used here: no NVIDIA driver" in worker.stderr
        assert "Traceback" not in worker.stderr


def test_it_never_loads_torch(tiny_env: dict[str, str]) -> None:
    code = (
        "import sys; import dma_worker.__main__\n"
        "print([name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        env=tiny_env,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert result.stdout.strip() == "[]"
