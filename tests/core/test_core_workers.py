"""Workers that come and go in the middle of a layer-step, and news that comes too late."""

from __future__ import annotations

import msgspec
import pytest

from orchestrator.core.events import (
    CoreConfig,
    Planned,
    Stalled,
    Submit,
    Withdraw,
    WorkerJoined,
    WorkerLost,
)
from protocol.messages import (
    Arena,
    AttachArena,
    Copied,
    Copy,
    CopyId,
    DetachArena,
    Epoch,
    Execute,
    Executed,
    ExpertId,
    LayerId,
    Ran,
    RequestId,
    Routed,
    Run,
    Sampled,
    SamplingParams,
    SequenceId,
    SlotId,
    StartStep,
    StepDone,
    StepId,
    StepPart,
)
from tests.core.step_core import StepCore

GPU, DMA, CPU, CPU2, NEXT, STRANGER = (Epoch(number) for number in (1, 2, 3, 4, 5, 77))
ARENA = Arena(kind="cuda_ipc", num_slots=4, slot_bytes=100, handle=b"old")
NEXT_ARENA = Arena(kind="cuda_ipc", num_slots=4, slot_bytes=100, handle=b"new")
CONFIG = CoreConfig(
    num_layers=2,
    top_k=2,
    expert_bytes=100,
    num_slots=4,
    max_rows=8,
    max_sequence_tokens=64,
    fill_mode="1",
)
STEP, LAYER = StepId(1), LayerId(0)


def in_a_layer_step(*, num_cpus: int = 1, dma: bool = True, fill_mode: str = "1") -> StepCore:
    """Experts 3, 8 and 9 of layer 0 are missing; the first is on its way if a link is there."""
    core = StepCore(msgspec.structs.replace(CONFIG, fill_mode=fill_mode))
    core.handle(WorkerJoined(GPU, "gpu_worker", 0.0, ARENA))
    if dma:
        core.handle(WorkerJoined(DMA, "dma_worker", 10.0))
    for epoch in (CPU, CPU2)[:num_cpus]:
        core.handle(WorkerJoined(epoch, "cpu_worker", 30.0))
    core.handle(Submit(RequestId("a"), [1, 2], 5, frozenset()))
    core.handle(routed())
    core.check()
    return core


def routed(epoch: Epoch = GPU, step: StepId = STEP) -> Routed:
    return Routed(epoch, step, LAYER, experts(3, 8, 9), [1, 1, 1], 0)


def experts(*numbers: int) -> list[ExpertId]:
    return [ExpertId(number) for number in numbers]


def executed(epoch: Epoch, *done: int, step: StepId = STEP) -> Executed:
    return Executed(epoch, step, LAYER, experts(*done), 0, 1, 100)


def copied(epoch: Epoch = DMA, copy: int = 1) -> Copied:
    return Copied(epoch, CopyId(copy), 0, 1, 100)


def test_what_a_lost_dma_worker_was_bringing_runs_on_the_cpu() -> None:
    core = in_a_layer_step()
    assert core.handle(WorkerLost(DMA)) == [Execute(CPU, STEP, LAYER, experts(3))]
    core.check()
    assert core.snapshot().num_filling == 0
    assert core.handle(copied()) == []  # said before it died, heard after
    core.handle(executed(CPU, 3))
    assert core.handle(executed(CPU, 8, 9)) == [Run(GPU, STEP, LAYER, [], [], join=True)]


def test_what_a_lost_cpu_worker_had_not_finished_goes_to_the_other() -> None:
    core = in_a_layer_step(num_cpus=2, fill_mode="none")
    core.handle(executed(CPU, 3))
    assert core.handle(WorkerLost(CPU)) == [Execute(CPU2, STEP, LAYER, experts(9))]
    assert core.handle(executed(CPU, 9)) == []
    assert core.handle(executed(CPU2, 8)) == []
    assert core.handle(executed(CPU2, 9)) == [Run(GPU, STEP, LAYER, [], [], join=True)]


def test_what_the_last_cpu_worker_had_not_finished_is_filled() -> None:
    core = in_a_layer_step()
    assert core.handle(WorkerLost(CPU)) == [
        Copy(DMA, CopyId(2), LAYER, ExpertId(8), SlotId(1)),
        Copy(DMA, CopyId(3), LAYER, ExpertId(9), SlotId(2)),
    ]
    core.check()


def test_when_both_branches_are_lost_the_first_to_come_back_takes_all() -> None:
    core = in_a_layer_step(num_cpus=0, fill_mode="all")
    (stalled,) = core.handle(WorkerLost(DMA))
    assert isinstance(stalled, Stalled)
    core.check()
    assert core.handle(WorkerLost(DMA)) == []
    commands = core.handle(WorkerJoined(NEXT, "dma_worker", 10.0))
    assert commands[0] == AttachArena(NEXT, ARENA)
    assert [command.expert for command in commands if isinstance(command, Copy)] == [3, 8, 9]
    assert all(isinstance(command, Copy) for command in commands[1:])
    core.check()


def test_a_lost_gpu_worker_takes_its_slots_and_its_step_along() -> None:
    core = in_a_layer_step()
    first, *rest = core.handle(WorkerLost(GPU))
    assert first == DetachArena(DMA)
    assert [type(command) for command in rest] == [Stalled]
    core.check()
    assert (core.snapshot().num_filling, core.snapshot().step) == (0, None)
    assert core.handle(copied()) == []

    # The cpu_worker still writes rows of the void step: no other starts before it has answered.
    assert core.handle(WorkerJoined(NEXT, "gpu_worker", 0.0, NEXT_ARENA)) == [
        AttachArena(DMA, NEXT_ARENA)
    ]
    core.check()
    assert core.handle(executed(CPU, 8)) == []
    assert core.handle(executed(CPU, 9)) == [
        StartStep(NEXT, StepId(2), [StepPart(SequenceId(1), 0, [1, 2], SamplingParams(), 2)])
    ]
    core.check()


def test_a_cpu_worker_that_dies_need_not_be_waited_for() -> None:
    core = in_a_layer_step()
    core.handle(WorkerLost(GPU))
    core.handle(WorkerJoined(NEXT, "gpu_worker", 0.0, NEXT_ARENA))
    (start,) = core.handle(WorkerLost(CPU))
    assert isinstance(start, StartStep)


def test_a_joining_dma_worker_gets_the_arena_before_any_copy() -> None:
    core = in_a_layer_step(dma=False, num_cpus=0)
    commands = core.handle(WorkerJoined(DMA, "dma_worker", 10.0))
    assert commands[0] == AttachArena(DMA, ARENA)
    assert all(isinstance(command, Copy) for command in commands[1:])


@pytest.mark.parametrize(
    "event",
    [
        routed(),
        routed(STRANGER),
        routed(step=StepId(9)),
        copied(STRANGER),
        copied(copy=9),
        executed(STRANGER, 8, 9),
        executed(CPU, 3),
        executed(CPU, 8, step=StepId(9)),
        Ran(STRANGER, STEP, LAYER, experts(3), 0, 1),
        Ran(GPU, STEP, LAYER, experts(3), 0, 1),
        StepDone(GPU, STEP, [Sampled(5)], 0, 0),
        StepDone(STRANGER, STEP, [Sampled(5)], 0, 0),
        WorkerLost(STRANGER),
        WorkerJoined(CPU, "cpu_worker", 30.0),
        Submit(RequestId("a"), [1, 2], 5, frozenset()),
        Withdraw(RequestId("nobody")),
    ],
    ids=lambda event: type(event).__name__,
)
def test_late_and_repeated_news_change_nothing(event: object) -> None:
    core = in_a_layer_step()
    before = core.snapshot()
    assert core.handle(event) == []  # type: ignore[arg-type]
    after = core.snapshot()
    assert after.num_ignored_events == before.num_ignored_events + 1
    assert msgspec.structs.replace(after, num_ignored_events=0) == msgspec.structs.replace(
        before, num_ignored_events=0
    )
    core.check()


def test_a_worker_that_left_does_not_join_again() -> None:
    core = StepCore(CONFIG)
    core.handle(WorkerLost(CPU))  # it died before it was ready
    assert core.handle(WorkerJoined(CPU, "cpu_worker", 30.0)) == []
    assert core.snapshot().cpu_epochs == []


def test_rates_are_the_stated_ones_else_those_of_who_is_here() -> None:
    core = in_a_layer_step(num_cpus=2)
    assert (core.snapshot().host_bytes_per_s, core.snapshot().link_bytes_per_s) == (60.0, 10.0)
    core.handle(WorkerLost(CPU))
    assert core.snapshot().host_bytes_per_s == 30.0
    stated = msgspec.structs.replace(CONFIG, host_bytes_per_s=7.0, link_bytes_per_s=0.0)
    core = StepCore(stated)
    core.handle(WorkerJoined(CPU, "cpu_worker", 30.0))
    core.handle(WorkerJoined(DMA, "dma_worker", 30.0))
    assert (core.snapshot().host_bytes_per_s, core.snapshot().link_bytes_per_s) == (7.0, 0.0)


@pytest.mark.parametrize(("cpu_bytes_per_s", "num_fills"), [(20.0, 2), (40.0, 1), (10.0, 4)])
def test_the_split_follows_the_rates_of_the_moment(cpu_bytes_per_s: float, num_fills: int) -> None:
    config = msgspec.structs.replace(CONFIG, fill_mode="auto", report_plans=True)
    core = StepCore(config)
    core.handle(WorkerJoined(GPU, "gpu_worker", 0.0, ARENA))
    core.handle(WorkerJoined(DMA, "dma_worker", 10.0))
    core.handle(WorkerJoined(CPU, "cpu_worker", cpu_bytes_per_s))
    core.handle(Submit(RequestId("a"), [1], 5, frozenset()))
    planned = core.handle(Routed(GPU, STEP, LAYER, experts(1, 2, 3, 4), [1] * 4, 0))[0]
    assert isinstance(planned, Planned)
    assert (len(planned.fills), len(planned.cpu)) == (num_fills, 4 - num_fills)


def test_a_cpu_worker_without_a_rate_gets_its_part() -> None:
    core = StepCore(msgspec.structs.replace(CONFIG, fill_mode="none"))
    core.handle(WorkerJoined(GPU, "gpu_worker", 0.0, ARENA))
    core.handle(WorkerJoined(CPU, "cpu_worker", 0.0))
    core.handle(WorkerJoined(CPU2, "cpu_worker", 30.0))
    core.handle(Submit(RequestId("a"), [1], 5, frozenset()))
    assert core.handle(Routed(GPU, STEP, LAYER, experts(1, 2), [1, 1], 0)) == [
        Execute(CPU, STEP, LAYER, experts(1)),
        Execute(CPU2, STEP, LAYER, experts(2)),
    ]


def test_the_least_recently_demanded_expert_leaves_and_the_known_one_is_filled() -> None:
    config = msgspec.structs.replace(CONFIG, num_layers=1, num_slots=2)
    core = StepCore(config)
    core.handle(WorkerJoined(GPU, "gpu_worker", 0.0, ARENA))
    core.handle(WorkerJoined(DMA, "dma_worker", 10.0))
    core.handle(WorkerJoined(CPU, "cpu_worker", 30.0))
    core.handle(Submit(RequestId("a"), [1], 9, frozenset()))

    def step(number: int, *chosen: int) -> list[Copy]:
        """One whole step; its fills."""
        this = StepId(number)
        commands = core.handle(Routed(GPU, this, LAYER, experts(*chosen), [1] * len(chosen), 0))
        fills = [command for command in commands if isinstance(command, Copy)]
        for command in commands:
            if isinstance(command, Execute):
                core.handle(executed(CPU, *command.experts, step=this))
        for fill in fills:
            core.handle(copied(copy=fill.copy))
        core.handle(Ran(GPU, this, LAYER, experts(*chosen), 0, 1))
        core.handle(StepDone(GPU, this, [Sampled(5)], 0, 0))
        core.check()
        return fills

    assert [(fill.expert, fill.slot) for fill in step(1, 1)] == [(1, 0)]
    assert [(fill.expert, fill.slot) for fill in step(2, 2)] == [(2, 1)]
    assert step(3, 1) == []  # a hit: now 2 is the one that leaves
    # Of 6 and 7 the router prefers 6; neither was ever asked for, so 6 is filled, in the slot of 2.
    assert [(fill.expert, fill.slot) for fill in step(4, 6, 7)] == [(6, 1)]
    # 7 ran on the CPU and is remembered: it is filled before 8, whatever the router prefers.
    assert [(fill.expert, fill.slot) for fill in step(5, 8, 7)] == [(7, 0)]
