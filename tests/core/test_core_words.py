"""A gpu_worker that joins by itself: one decision per layer-step, no word that it need not hear.

What workers tell it in shared memory the core hears as `Copied` and `Executed`, late or not.
"""

from __future__ import annotations

import msgspec

from orchestrator.core.core import Core
from orchestrator.core.events import (
    AllIn,
    CoreConfig,
    Foreseen,
    Publish,
    Retire,
    Submit,
    Unpublish,
    WorkerJoined,
    WorkerLost,
)
from protocol.messages import (
    Arena,
    Copied,
    Copy,
    CopyId,
    Epoch,
    Execute,
    Executed,
    ExpertId,
    LayerId,
    Ran,
    RequestId,
    Routed,
    Run,
    SlotId,
    StepId,
)
from tests.core.step_core import StepCore

GPU, DMA, CPU = Epoch(1), Epoch(2), Epoch(3)
STEP = StepId(1)
CONFIG = CoreConfig(
    num_layers=3,
    top_k=2,
    expert_bytes=100,
    num_slots=4,
    max_rows=8,
    max_sequence_tokens=1000,
    fill_mode="1",
)


def core_in_step_1(*, num_slots: int = 4, fill_mode: str = "1", kind: type[Core] = Core) -> Core:
    core = kind(msgspec.structs.replace(CONFIG, num_slots=num_slots, fill_mode=fill_mode))
    core.handle(WorkerJoined(GPU, "gpu_worker", 0.0, Arena("shared", num_slots, 100)))
    core.handle(WorkerJoined(DMA, "dma_worker", 10.0))
    core.handle(WorkerJoined(CPU, "cpu_worker", 30.0))
    core.handle(Submit(RequestId("a"), [1], 5, frozenset()))
    return core


def routed(layer: int, *experts: int) -> Routed:
    ids = [ExpertId(expert) for expert in experts]
    return Routed(GPU, STEP, LayerId(layer), ids, [1] * len(ids), 0, is_self_joining=True)


def copied(copy: int) -> Copied:
    return Copied(DMA, CopyId(copy), 0, 1, 100)


def executed(layer: int, *experts: int) -> Executed:
    return Executed(CPU, STEP, LayerId(layer), [ExpertId(e) for e in experts], 0, 1, 100)


def ran(layer: int, *experts: int) -> Ran:
    return Ran(GPU, STEP, LayerId(layer), [ExpertId(expert) for expert in experts], 0, 1)


def test_one_decision_and_no_join() -> None:
    core = core_in_step_1(kind=StepCore)
    assert core.handle(routed(0, 3, 5)) == [
        Copy(DMA, CopyId(1), LayerId(0), ExpertId(3), SlotId(0), step=STEP),
        Execute(CPU, STEP, LayerId(0), [ExpertId(5)]),
    ]
    core.check()
    assert core.handle(copied(1)) == []  # the gpu_worker knows, and reads the slot
    assert core.handle(executed(0, 5)) == [AllIn(GPU, STEP, LayerId(0))]
    assert core.handle(executed(0, 5)) == []  # the message after the word
    core.check()
    # Hits alone are told, to be run.
    assert core.handle(routed(1, 7, 8)) == [
        Copy(DMA, CopyId(2), LayerId(1), ExpertId(7), SlotId(1), step=STEP),
        Execute(CPU, STEP, LayerId(1), [ExpertId(8)]),
    ]
    core.handle(executed(1, 8))
    core.handle(copied(2))
    assert core.handle(ran(0, 3)) == []
    core.check()


def test_hits_are_told_and_what_is_read_stays_until_it_is_reported() -> None:
    core = core_in_step_1(num_slots=1, fill_mode="all", kind=StepCore)
    core.handle(routed(0, 3))
    assert core.handle(copied(1)) == [AllIn(GPU, STEP, LayerId(0))]
    # Slot 0 is read by layer 0, so the fill of layer 1 waits, and the gpu_worker is told why.
    assert core.handle(routed(1, 4)) == [Run(GPU, STEP, LayerId(1), [], [], False, True)]
    assert core.handle(ran(0, 3)) == [
        Copy(DMA, CopyId(2), LayerId(1), ExpertId(4), SlotId(0), step=STEP)
    ]
    core.check()
    core.handle(copied(2))
    core.handle(ran(1, 4))
    core.check()


def test_nobody_rests_between_a_word_and_its_message() -> None:
    core = core_in_step_1()
    core.handle(routed(0, 3))  # filled
    core.handle(copied(1))
    core.handle(ran(0, 3))
    core.handle(routed(1, 1, 2))  # one filled, one on the CPU
    core.handle(copied(2))
    # The cpu_worker's word may be there; the gpu_worker may look at layer 2 in the table by now.
    for number, expert in enumerate((5, 6, 7)):
        commands = core.handle(Foreseen(LayerId(2), ExpertId(expert)))
        assert not any(isinstance(command, Copy) for command in commands)
        if number < 2:
            copy = CopyId(3 + number)
            assert Retire(copy, LayerId(2), ExpertId(expert), SlotId(2 + number)) in commands
    assert Unpublish(LayerId(0), ExpertId(3)) in commands  # the only victim that nobody reads
    core.check()
    core.handle(executed(1, 2))
    core.check()


def test_a_fill_begun_for_nobody_is_run_when_it_lands() -> None:
    core = core_in_step_1()
    core.handle(routed(0, 3))
    core.handle(copied(1))
    core.handle(ran(0, 3))
    core.handle(Foreseen(LayerId(1), ExpertId(4)))
    assert core.handle(routed(1, 4)) == [
        Copy(DMA, CopyId(2), LayerId(1), ExpertId(4), SlotId(1), is_awaited=False)
    ]
    assert core.handle(copied(2)) == [
        Publish(LayerId(1), ExpertId(4), SlotId(1)),
        Run(GPU, STEP, LayerId(1), [ExpertId(4)], [SlotId(1)], False),
        AllIn(GPU, STEP, LayerId(1)),
    ]
    core.check()


def test_parts_of_the_dead_are_placed_anew() -> None:
    core = core_in_step_1(kind=StepCore)
    core.handle(routed(0, 3, 5))
    assert core.handle(WorkerLost(DMA)) == [Execute(CPU, STEP, LayerId(0), [ExpertId(3)])]
    core.handle(executed(0, 5))
    assert core.handle(executed(0, 3)) == [AllIn(GPU, STEP, LayerId(0))]
    core.check()
