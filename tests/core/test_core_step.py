"""One step at a time through the core's one door, command by command."""

from __future__ import annotations

import msgspec
import pytest

from orchestrator.core.events import (
    CoreConfig,
    Planned,
    RequestDone,
    Stalled,
    Submit,
    TokenOut,
    WorkerFault,
    WorkerJoined,
    WorkerLost,
)
from protocol.messages import (
    Arena,
    AttachArena,
    Copied,
    Copy,
    CopyId,
    DropSequence,
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

GPU, DMA, CPU, CPU2 = Epoch(1), Epoch(2), Epoch(3), Epoch(4)
ARENA = Arena(kind="shared", num_slots=4, slot_bytes=100)
SAMPLING = SamplingParams(seed=7)
CONFIG = CoreConfig(
    num_layers=1,
    top_k=2,
    expert_bytes=100,
    num_slots=4,
    max_rows=8,
    max_sequence_tokens=64,
    fill_mode="1",
)


def experts(*numbers: int) -> list[ExpertId]:
    return [ExpertId(number) for number in numbers]


def slots(*numbers: int) -> list[SlotId]:
    return [SlotId(number) for number in numbers]


def routed(step: int, layer: int, *chosen: int, epoch: Epoch = GPU) -> Routed:
    return Routed(epoch, StepId(step), LayerId(layer), experts(*chosen), [1] * len(chosen), 0)


def ran(step: int, layer: int, *done: int) -> Ran:
    return Ran(GPU, StepId(step), LayerId(layer), experts(*done), 0, 1)


def executed(epoch: Epoch, step: int, layer: int, *done: int) -> Executed:
    return Executed(epoch, StepId(step), LayerId(layer), experts(*done), 10, 17, 100 * len(done))


def step_done(step: int, token: int | None) -> StepDone:
    answers = [None if token is None else Sampled(token)]
    return StepDone(GPU, StepId(step), answers, 0, 0)


def copied(copy: int, epoch: Epoch = DMA) -> Copied:
    return Copied(epoch, CopyId(copy), 100, 105, 100)


def started(config: CoreConfig = CONFIG, *, dma: bool = True, num_cpus: int = 1) -> StepCore:
    core = StepCore(config)
    core.handle(WorkerJoined(GPU, "gpu_worker", 0.0, ARENA))
    if dma:
        core.handle(WorkerJoined(DMA, "dma_worker", 10.0))
    for epoch in (CPU, CPU2)[:num_cpus]:
        core.handle(WorkerJoined(epoch, "cpu_worker", 30.0))
    return core


def submit(core: StepCore, *prompt: int, max_tokens: int = 2, name: str = "a") -> list[object]:
    request = Submit(RequestId(name), list(prompt), max_tokens, frozenset({99}), SAMPLING)
    return list(core.handle(request))


def test_a_request_from_its_prompt_to_its_last_token() -> None:
    core = started()
    assert submit(core, 5, 6) == [
        StartStep(GPU, StepId(1), [StepPart(SequenceId(1), 0, [5, 6], SAMPLING, 2)])
    ]

    # Nothing is resident: one miss is filled, the other runs on the CPU, and nothing joins yet.
    assert core.handle(routed(1, 0, 3, 8)) == [
        Copy(DMA, CopyId(1), LayerId(0), ExpertId(3), SlotId(0)),
        Execute(CPU, StepId(1), LayerId(0), experts(8)),
    ]
    assert core.handle(copied(1)) == [
        Run(GPU, StepId(1), LayerId(0), experts(3), slots(0), join=False)
    ]
    assert core.handle(executed(CPU, 1, 0, 8)) == [
        Run(GPU, StepId(1), LayerId(0), [], [], join=True)
    ]
    assert core.handle(ran(1, 0, 3)) == []
    assert core.handle(step_done(1, 42)) == [
        TokenOut(RequestId("a"), 42, ""),
        StartStep(GPU, StepId(2), [StepPart(SequenceId(1), 2, [42], SAMPLING, 2)]),
    ]

    # Expert 3 is a hit now: it runs at once, and the fill that lands last carries the join.
    assert core.handle(routed(2, 0, 9, 3)) == [
        Copy(DMA, CopyId(2), LayerId(0), ExpertId(9), SlotId(1)),
        Run(GPU, StepId(2), LayerId(0), experts(3), slots(0), join=False),
    ]
    assert core.handle(copied(2)) == [
        Run(GPU, StepId(2), LayerId(0), experts(9), slots(1), join=True)
    ]
    drop, done = core.handle(step_done(2, 43))[1:]
    assert drop == DropSequence(GPU, SequenceId(1))
    assert isinstance(done, RequestDone)
    assert done.reason == "length"
    assert msgspec.structs.asdict(done.counters) == {
        "layer_steps": 2,
        "hits": 1,
        "fills": 2,
        "cpu_experts": 1,
        "evictions": 0,
        "fills_behind": 0,
        "fill_bytes": 200,
        "cpu_bytes": 100,
        "fill_busy_ns": 10,
        "cpu_busy_ns": 7,
    }
    assert core.is_idle
    core.check()


def test_when_every_expert_is_resident_one_command_runs_and_joins() -> None:
    core = started()
    submit(core, 5, max_tokens=3)
    core.handle(routed(1, 0, 3))
    core.handle(copied(1))
    core.handle(ran(1, 0, 3))
    core.handle(step_done(1, 42))
    assert core.handle(routed(2, 0, 3)) == [
        Run(GPU, StepId(2), LayerId(0), experts(3), slots(0), join=True)
    ]


def test_one_slot_is_filled_in_waves() -> None:
    config = msgspec.structs.replace(CONFIG, num_slots=1, fill_mode="all")
    core = started(config, num_cpus=0)
    submit(core, 5)
    commands = core.handle(routed(1, 0, 4, 2, 7))
    for wave, expert in enumerate((4, 2, 7), start=1):
        assert commands == [Copy(DMA, CopyId(wave), LayerId(0), ExpertId(expert), SlotId(0))]
        assert core.handle(copied(wave)) == [
            Run(GPU, StepId(1), LayerId(0), experts(expert), slots(0), join=wave == 3)
        ]
        core.check()
        commands = core.handle(ran(1, 0, expert))


def test_a_hit_is_not_evicted_before_it_ran() -> None:
    config = msgspec.structs.replace(CONFIG, num_slots=1, fill_mode="all")
    core = started(config, num_cpus=0)
    submit(core, 5)
    core.handle(routed(1, 0, 4))
    core.handle(copied(1))
    core.handle(step_done(1, 42))  # Ran has not come yet: the slot is still read
    assert core.handle(routed(2, 0, 8)) == []
    assert core.handle(ran(1, 0, 4)) == [Copy(DMA, CopyId(2), LayerId(0), ExpertId(8), SlotId(0))]


def test_planned_is_emitted_only_when_asked_for() -> None:
    core = started(msgspec.structs.replace(CONFIG, report_plans=True))
    submit(core, 5, 6)
    planned = core.handle(routed(1, 0, 3, 8))[0]
    assert isinstance(planned, Planned)
    assert (planned.num_rows, planned.hits) == (2, [])
    assert (planned.fills, planned.cpu) == (experts(3), experts(8))
    assert planned.split.num_fills == 1


def test_two_cpu_workers_divide_by_their_rates() -> None:
    config = msgspec.structs.replace(CONFIG, fill_mode="none")
    core = started(config, num_cpus=1)
    core.handle(WorkerJoined(CPU2, "cpu_worker", 10.0))
    submit(core, 5)
    assert core.handle(routed(1, 0, 0, 1, 2, 3)) == [
        Execute(CPU, StepId(1), LayerId(0), experts(0, 1, 2)),
        Execute(CPU2, StepId(1), LayerId(0), experts(3)),
    ]


def test_without_any_branch_work_waits_and_says_so_once() -> None:
    core = started(dma=False, num_cpus=0)
    submit(core, 5)
    (stalled,) = core.handle(routed(1, 0, 3, 8))
    assert isinstance(stalled, Stalled)
    assert stalled.missing_role == "dma_worker"
    assert submit(core, 5, name="b") == []
    assert core.handle(WorkerJoined(CPU, "cpu_worker", 1.0)) == [
        Execute(CPU, StepId(1), LayerId(0), experts(3, 8))
    ]
    core.check()


def test_a_request_without_a_gpu_worker_waits_and_says_so_once() -> None:
    core = StepCore(CONFIG)
    (stalled,) = submit(core, 5)
    assert isinstance(stalled, Stalled)
    assert stalled.missing_role == "gpu_worker"
    assert submit(core, 5, name="b") == []
    assert core.handle(WorkerJoined(DMA, "dma_worker", 10.0)) == []
    assert core.handle(WorkerJoined(GPU, "gpu_worker", 0.0, ARENA)) == [
        AttachArena(DMA, ARENA),
        StartStep(GPU, StepId(1), [StepPart(SequenceId(1), 0, [5], SAMPLING, 1)]),
    ]


def test_the_gpu_worker_fills_its_own_slots_when_nobody_else_can() -> None:
    arena = Arena(kind="in_process", num_slots=4, slot_bytes=100)
    core = StepCore(CONFIG)
    core.handle(WorkerJoined(DMA, "dma_worker", 10.0))
    assert core.handle(WorkerJoined(GPU, "gpu_worker", 5.0, arena)) == []
    submit(core, 5)
    assert core.handle(routed(1, 0, 3)) == [
        Copy(GPU, CopyId(1), LayerId(0), ExpertId(3), SlotId(0))
    ]
    assert core.handle(copied(1)) == []  # the dma_worker was never asked
    assert core.handle(WorkerLost(DMA)) == []
    assert core.handle(copied(1, GPU)) == [
        Run(GPU, StepId(1), LayerId(0), experts(3), slots(0), join=True)
    ]


@pytest.mark.parametrize(
    ("event", "sentence"),
    [
        (WorkerJoined(Epoch(9), "gpu_worker", 0.0, ARENA), "second gpu_worker"),
        (WorkerJoined(Epoch(9), "dma_worker"), "second dma_worker"),
        (WorkerJoined(Epoch(9), "cpu_worker", float("nan")), "rate"),
    ],
)
def test_a_worker_that_cannot_join_is_a_fault_and_changes_nothing(
    event: WorkerJoined, sentence: str
) -> None:
    core = started()
    before = core.snapshot()
    with pytest.raises(WorkerFault, match=sentence) as caught:
        core.handle(event)
    assert caught.value.epoch == 9
    assert core.snapshot() == before
    core.check()


def test_an_arena_with_too_few_slots_is_a_fault() -> None:
    core = StepCore(CONFIG)
    small = Arena(kind="shared", num_slots=3, slot_bytes=100)
    with pytest.raises(WorkerFault, match="no arena of 4 slots"):
        core.handle(WorkerJoined(GPU, "gpu_worker", 0.0, small))
    with pytest.raises(WorkerFault, match="no arena of 4 slots"):
        core.handle(WorkerJoined(GPU, "gpu_worker", 0.0, None))


def test_a_routing_that_contradicts_itself_is_a_fault() -> None:
    core = started()
    submit(core, 5)
    with pytest.raises(WorkerFault, match="confuses"):
        core.handle(routed(1, 0, 3, 3))
    with pytest.raises(WorkerFault, match="confuses"):
        core.handle(Routed(GPU, StepId(1), LayerId(0), experts(3, 4), [1], 0))
    core.check()


def test_a_step_that_was_to_sample_and_brings_no_token_is_a_fault() -> None:
    core = started()
    submit(core, 5)
    core.handle(routed(1, 0, 3))
    core.handle(copied(1))
    with pytest.raises(WorkerFault, match="without the token"):
        core.handle(step_done(1, None))
