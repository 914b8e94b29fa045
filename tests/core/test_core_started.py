"""Experts that the gpu_worker begins from the table, in a layer that it has to ask for."""

from __future__ import annotations

import msgspec
import pytest

from orchestrator.core.core import Core
from orchestrator.core.events import (
    AllIn,
    CoreConfig,
    Foreseen,
    Retire,
    Submit,
    Unpublish,
    WorkerFault,
    WorkerJoined,
    WorkerLost,
)
from protocol.messages import (
    Arena,
    Copied,
    Copy,
    CopyId,
    Epoch,
    ExpertId,
    LayerId,
    Ran,
    RequestId,
    Routed,
    Run,
    Sampled,
    SlotId,
    StepDone,
    StepId,
)

GPU, DMA = Epoch(1), Epoch(2)
LAYER = LayerId(0)
CONFIG = CoreConfig(
    num_layers=1,
    top_k=2,
    expert_bytes=100,
    num_slots=3,
    max_rows=8,
    max_sequence_tokens=1000,
    fill_mode="all",
)
ASK = Run(GPU, StepId(2), LAYER, [], [], False, True)


def in_step_2(num_slots: int) -> Core:
    """Experts 0 and 1 lie in slots 0 and 1."""
    core = Core(msgspec.structs.replace(CONFIG, num_slots=num_slots))
    core.handle(WorkerJoined(GPU, "gpu_worker", 0.0, Arena("shared", num_slots, 100)))
    core.handle(WorkerJoined(DMA, "dma_worker", 10.0))
    core.handle(Submit(RequestId("a"), [1], 5, frozenset()))
    core.handle(routed([0, 1], [], step=1))
    for copy in (1, 2):
        core.handle(copied(copy))
    core.handle(ran(0, 1, step=1))
    core.handle(StepDone(GPU, StepId(1), [Sampled(5)], 0, 0))
    return core


def routed(experts: list[int], started: list[int], step: int = 2) -> Routed:
    return Routed(
        GPU,
        StepId(step),
        LAYER,
        [ExpertId(expert) for expert in experts],
        [1] * len(experts),
        0,
        is_self_joining=True,
        started=[ExpertId(expert) for expert in started],
    )


def copied(copy: int) -> Copied:
    return Copied(DMA, CopyId(copy), 0, 1, 100)


def ran(*experts: int, step: int = 2) -> Ran:
    return Ran(GPU, StepId(step), LAYER, [ExpertId(expert) for expert in experts], 0, 1)


def test_what_is_begun_is_pinned_and_not_told() -> None:
    core = in_step_2(num_slots=3)
    assert core.handle(routed([0, 5], [0])) == [
        Copy(DMA, CopyId(3), LAYER, ExpertId(5), SlotId(2), step=StepId(2))
    ]
    core.check()
    assert core.handle(copied(3))[-1] == AllIn(GPU, StepId(2), LAYER)
    # Slot 0 is read until it is reported, so another expert leaves.
    commands = core.handle(Foreseen(LAYER, ExpertId(7)))
    assert commands[0] == Unpublish(LAYER, ExpertId(1))
    core.check()
    core.handle(ran(0, 5))
    core.check()


def test_a_hit_that_was_not_seen_is_told() -> None:
    core = in_step_2(num_slots=3)
    assert core.handle(routed([0, 1, 5], [1]))[-1] == Run(
        GPU, StepId(2), LAYER, [ExpertId(0)], [SlotId(0)], False
    )
    core.check()


def test_nothing_is_decided_while_what_has_left_is_read() -> None:
    core = in_step_2(num_slots=2)
    assert core.handle(Foreseen(LAYER, ExpertId(3))) == [
        Unpublish(LAYER, ExpertId(0)),
        Retire(CopyId(3), LAYER, ExpertId(3), SlotId(0)),
    ]
    question = routed([0, 5], [0])
    assert core.handle(question) == [ASK]
    assert core.handle(question) == []
    assert core.handle(ran()) == []
    core.check()
    assert core.handle(ran(0)) == [
        Copy(DMA, CopyId(3), LAYER, ExpertId(3), SlotId(0), is_awaited=False),
        Unpublish(LAYER, ExpertId(1)),
        Copy(DMA, CopyId(4), LAYER, ExpertId(5), SlotId(1), step=StepId(2)),
    ]
    core.check()
    assert core.handle(copied(4))[-1] == AllIn(GPU, StepId(2), LAYER)
    core.handle(ran(5))
    core.check()


def test_a_layer_put_off_ends_with_its_gpu_worker() -> None:
    core = in_step_2(num_slots=2)
    core.handle(Foreseen(LAYER, ExpertId(3)))
    assert core.handle(routed([0, 5], [0])) == [ASK]
    core.handle(WorkerLost(GPU))
    core.check()
    core.handle(WorkerJoined(Epoch(9), "gpu_worker", 0.0, Arena("shared", 2, 100)))
    core.check()
    assert core.handle(ran(0)) == []
    again = msgspec.structs.replace(routed([0, 5], [], step=3), epoch=Epoch(9))
    assert [type(command) for command in core.handle(again)] == [Copy, Copy]


@pytest.mark.parametrize(
    "wrong",
    [
        routed([0, 5], [1]),  # nobody chose it
        routed([0, 5], [5]),  # it was never there
        msgspec.structs.replace(routed([0, 5], [0]), is_self_joining=False),
    ],
)
def test_what_cannot_have_been_seen_is_a_fault(wrong: Routed) -> None:
    core = in_step_2(num_slots=3)
    with pytest.raises(WorkerFault):
        core.handle(wrong)
    core.check()
    assert core.handle(routed([0, 5], [0]))
