"""The opening, against workers that answer from within the loop."""

from __future__ import annotations

import asyncio
import os
import time
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from expert_store.layout import make_layout
from orchestrator import opening as opening_module
from orchestrator.calibrate.store import gated_form
from orchestrator.core.events import RatesMeasured, WorkerJoined, WorkerLost
from orchestrator.opening import LEAST_STORE_BYTES, Opening, wants_opening
from orchestrator.settings import PipelineSettings
from protocol.lifeline import SegmentGrant
from protocol.messages import (
    Arena,
    AttachArena,
    Copied,
    Copy,
    DetachArena,
    Epoch,
    Execute,
    Executed,
)
from protocol.step_segment import ARENA, activation_grant

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from expert_store.layout import StoreLayout

LAYOUT = make_layout(
    model_name="made up",
    checkpoint_fingerprint="0" * 32,
    form=gated_form(64, 64),
    dtype="float32",
    model_layer_ids=(0, 1),
    num_experts=(8, 6),
    top_k=2,
    weights=None,
)
GPU, LINK, CPU = Epoch(1), Epoch(2), Epoch(3)
#: An expert takes so long, ns.
LINK_NS, CPU_NS = 400_000, 200_000


def settings(tmp_path: Path, **more: Any) -> PipelineSettings:
    return PipelineSettings(model_dir=tmp_path, run_dir=tmp_path, is_supervising=True, **more)


class Workers:
    """Answer every command after the time it takes; `is_silent`: not at all."""

    def __init__(self) -> None:
        self.sent: list[object] = []
        self.heard: list[object] = []
        self.is_silent = False
        self.link_free_ns = 0
        self.opening: Opening

    def command(self, command: Any) -> None:
        self.sent.append(command)
        if self.is_silent or isinstance(command, (AttachArena, DetachArena)):
            return
        now_ns = time.monotonic_ns()
        if isinstance(command, Copy):
            start_ns = max(now_ns, self.link_free_ns)
            self.link_free_ns = end_ns = start_ns + LINK_NS
            size = LAYOUT.expert_bytes
            answer: Copied | Executed = Copied(LINK, command.copy, start_ns, end_ns, size)
        else:
            assert isinstance(command, Execute)
            start_ns, end_ns = now_ns, now_ns + CPU_NS * len(command.experts)
            answer = Executed(
                CPU, command.step, command.layer, command.experts, start_ns, end_ns, 1
            )
        delay_s = (end_ns - now_ns) * 1e-9
        asyncio.get_running_loop().call_later(delay_s, self.opening.takes, answer)


@pytest.fixture
def segments() -> Iterator[tuple[list[SegmentGrant], list[int]]]:
    activations = activation_grant(4, LAYOUT.top_k, LAYOUT.form.hidden_size, LAYOUT.dtype)
    arena = SegmentGrant(ARENA, 3 * LAYOUT.block_bytes)
    fds = [os.memfd_create(name, os.MFD_CLOEXEC) for name in ("activations", "arena")]
    os.ftruncate(fds[0], activations.num_bytes)
    yield [activations, arena], fds
    for fd in fds:
        os.close(fd)


def open_with(workers: Workers, segments: tuple[list[SegmentGrant], list[int]]) -> Opening:
    opening = Opening(LAYOUT, 3, *segments, workers.command, workers.heard.append)
    workers.opening = opening
    return opening


JOINED = [
    WorkerJoined(CPU, "cpu_worker", 1e9),
    WorkerJoined(LINK, "dma_worker", 1e9),
    WorkerJoined(GPU, "gpu_worker", 0.0, Arena("shared", 3, LAYOUT.block_bytes)),
]


async def over(workers: Workers) -> None:
    for _ in range(500):
        if workers.heard:
            return
        await asyncio.sleep(0.01)
    raise AssertionError("the opening does not end")


def test_both_branches_are_measured_before_the_core_hears_of_anybody(
    segments: tuple[list[SegmentGrant], list[int]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(opening_module, "_ALONE_S", 0.03)
    monkeypatch.setattr(opening_module, "_BOTH_S", 0.03)

    async def scenario() -> Workers:
        workers = Workers()
        opening = open_with(workers, segments)
        for joined in JOINED:
            assert opening.takes(joined)
        await over(workers)
        assert not opening.takes(JOINED[0])  # from now on everything is the core's
        return workers

    workers = asyncio.run(scenario())
    measured, *joined = workers.heard
    assert joined == JOINED
    assert isinstance(measured, RatesMeasured)
    costs = measured.costs
    assert costs.expert_bytes == LAYOUT.expert_bytes
    assert costs.link_bytes_per_s == pytest.approx(LAYOUT.expert_bytes / LINK_NS * 1e9, rel=0.01)
    assert costs.cpu_bytes_per_s == pytest.approx(LAYOUT.expert_bytes / CPU_NS * 1e9, rel=0.01)
    assert 0 < costs.link_beside_cpu_bytes_per_s <= costs.link_bytes_per_s
    assert 0 < costs.cpu_beside_link_bytes_per_s <= costs.cpu_bytes_per_s
    assert isinstance(workers.sent[0], AttachArena)
    assert isinstance(workers.sent[-1], DetachArena)
    commands = [command for command in workers.sent if isinstance(command, (Copy, Execute))]
    assert {command.layer for command in commands} == {0, 1}
    assert all(command.slot < 3 for command in commands if isinstance(command, Copy))
    assert len([record for record in caplog.records if "GB/s" in record.message]) == 1


@pytest.mark.parametrize("lost", [CPU, LINK])
def test_a_worker_that_is_lost_ends_it_and_the_core_hears_all_in_order(
    lost: Epoch, segments: tuple[list[SegmentGrant], list[int]]
) -> None:
    async def scenario() -> Workers:
        workers = Workers()
        opening = open_with(workers, segments)
        workers.is_silent = True
        for joined in JOINED:
            opening.takes(joined)
        await asyncio.sleep(0.02)
        assert workers.heard == []
        assert opening.takes(WorkerLost(lost))
        if lost == LINK:  # the cpu_worker is still at it: no step may start
            await asyncio.sleep(0.02)
            assert workers.heard == []
            asked = next(command for command in workers.sent if isinstance(command, Execute))
            opening.takes(Executed(CPU, asked.step, asked.layer, asked.experts, 1, 2, 1))
        await over(workers)
        return workers

    assert asyncio.run(scenario()).heard == [*JOINED, WorkerLost(lost)]


def test_it_is_for_machines_that_nobody_has_measured(tmp_path: Path) -> None:
    def wants(is_calibrated: bool = False, **more: Any) -> bool:
        return wants_opening(settings(tmp_path, **more), LAYOUT, is_calibrated=is_calibrated)

    assert not wants()  # a cache holds these experts
    assert wants(probe="on")
    assert not wants(is_calibrated=True, probe="on")
    assert not wants(host_gbps=5.0, probe="on")
    assert not wants(fill="all", probe="on")
    assert not wants(planner="cpu-only", probe="on")
    assert not wants(num_cpu_workers=2, probe="on")
    by_hand = msgspec.structs.replace(settings(tmp_path, probe="on"), is_supervising=False)
    assert not wants_opening(by_hand, LAYOUT, is_calibrated=False)
    large: StoreLayout = make_layout(
        model_name="made up", checkpoint_fingerprint="0" * 32, form=gated_form(2048, 2048),
        dtype="float32", model_layer_ids=(0,), num_experts=(8,), top_k=2, weights=None,
    )  # fmt: skip
    assert large.total_bytes >= LEAST_STORE_BYTES
    assert wants_opening(settings(tmp_path), large, is_calibrated=False)
    assert not wants_opening(settings(tmp_path, probe="off"), large, is_calibrated=False)
