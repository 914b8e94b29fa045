"""The published table: what the core writes into it, and that passing layers changes nothing else.

A gpu_worker that passes layers by itself and one that asks for every layer see the same evictions
at the same places: recency comes from the reports, so LRU stays exact.
"""

from __future__ import annotations

import random

import msgspec
import pytest

from orchestrator.core.core import Core
from orchestrator.core.events import (
    CoreConfig,
    Foreseen,
    Passed,
    Planned,
    Publish,
    RequestDone,
    ResetTable,
    Retire,
    Retired,
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
    Execute,
    Executed,
    ExpertId,
    LayerId,
    Ran,
    RequestId,
    Routed,
    Run,
    Sampled,
    SlotId,
    StartStep,
    StepDone,
    StepId,
)
from tests.core.reference_directory import ReferenceDirectory, lru_rank

GPU, DMA, CPU, NEXT = Epoch(1), Epoch(2), Epoch(3), Epoch(4)
Key = tuple[int, int]
CONFIG = CoreConfig(
    num_layers=3,
    top_k=2,
    expert_bytes=100,
    num_slots=7,
    max_rows=8,
    max_sequence_tokens=100_000,
    fill_mode="all",
    report_plans=True,
)


class Machine:
    """The workers of one core, each as fast as can be; `passes`: the gpu_worker uses the table."""

    def __init__(self, config: CoreConfig, *, passes: bool, num_steps: int) -> None:
        self.core = Core(config)
        self.passes = passes
        self.table: dict[Key, int] = {}
        self.evicted: list[Key] = []
        self.plans: list[Planned] = []
        self.done: RequestDone | None = None
        self.num_passed = 0
        self._inbox: list[object] = []
        arena = Arena("shared", config.num_slots, 100)
        self.tell(WorkerJoined(GPU, "gpu_worker", 0.0, arena))
        self.tell(WorkerJoined(DMA, "dma_worker", 10.0))
        self.tell(WorkerJoined(CPU, "cpu_worker", 30.0))
        self.tell(Submit(RequestId("a"), [1], num_steps, frozenset()))

    def tell(self, event: object) -> list[object]:
        commands = list(self.core.handle(event))  # type: ignore[arg-type]
        for command in commands:
            match command:
                case Publish():
                    self.table[command.layer, command.expert] = command.slot
                case Unpublish():
                    del self.table[command.layer, command.expert]
                    self.evicted.append((command.layer, command.expert))
                case Planned():
                    self.plans.append(command)
                case RequestDone():
                    self.done = command
        self._inbox += commands
        return commands

    def layer(self, step: int, layer: int, experts: list[int]) -> None:
        """One layer-step from its routing to its join."""
        ids, rows = [ExpertId(expert) for expert in experts], [1] * len(experts)
        if self.passes and all((layer, expert) in self.table for expert in experts):
            self.num_passed += 1
            self.tell(Passed(GPU, StepId(step), LayerId(layer), ids, rows, 0, 0, 0, 0))
            return
        self._inbox.clear()
        self.tell(Routed(GPU, StepId(step), LayerId(layer), ids, rows, 0))
        while self._inbox:
            match self._inbox.pop(0):
                case Copy(copy=copy):
                    self.tell(Copied(DMA, copy, 0, 1, 100))
                case Execute() as execute:
                    self.tell(Executed(CPU, execute.step, execute.layer, execute.experts, 0, 1, 1))
                case Run(experts=run) if run:
                    self.tell(Ran(GPU, StepId(step), LayerId(layer), run, 0, 1))

    def step(self, step: int, routing: list[list[int]]) -> None:
        for layer, experts in enumerate(routing):
            self.layer(step, layer, experts)
        self.tell(StepDone(GPU, StepId(step), [Sampled(5)], 0, 0))

    def residents(self) -> list[Key]:
        return list(self.core._dispatch.directory.residents())


def trace(num_steps: int, num_layers: int, num_experts: int, seed: int) -> list[list[list[int]]]:
    """Two experts per layer, which mostly stay those of the step before."""
    rng = random.Random(seed)
    current = [rng.sample(range(num_experts), 2) for _ in range(num_layers)]
    steps = []
    for _ in range(num_steps):
        for layer in range(num_layers):
            if rng.random() < 0.35:
                current[layer] = rng.sample(range(num_experts), 2)
        steps.append([list(experts) for experts in current])
    return steps


@pytest.mark.parametrize("policy", ["lru", "lfu", "lru-layer"])
@pytest.mark.parametrize("fill_mode", ["all", "auto", "1"])
def test_passing_layers_changes_no_decision(policy: str, fill_mode: str) -> None:
    config = msgspec.structs.replace(CONFIG, policy=policy, fill_mode=fill_mode, num_slots=9)
    num_steps = 1500 if (policy, fill_mode) == ("lru", "all") else 250
    steps = trace(num_steps, 3, 5, seed=3)
    passing, asking = (
        Machine(config, passes=passes, num_steps=len(steps)) for passes in (True, False)
    )
    for number, routing in enumerate(steps, 1):
        passing.step(number, routing)
        asking.step(number, routing)
        assert passing.residents() == asking.residents()
    assert passing.num_passed > num_steps // 8
    assert passing.evicted == asking.evicted
    assert passing.plans == asking.plans
    assert passing.done is not None
    assert asking.done is not None
    counters = msgspec.structs.replace(asking.done.counters, fill_busy_ns=0, cpu_busy_ns=0)
    assert msgspec.structs.replace(passing.done.counters, fill_busy_ns=0, cpu_busy_ns=0) == counters
    passing.core.check()


def test_lru_with_passed_layers_is_the_reference_lru() -> None:
    steps = trace(400, 3, 4, seed=8)
    machine = Machine(CONFIG, passes=True, num_steps=len(steps))
    reference = ReferenceDirectory(CONFIG.num_slots, lru_rank)
    evicted: list[Key] = []
    for number, routing in enumerate(steps, 1):
        for layer, experts in enumerate(routing):
            misses = []
            for key in ((layer, expert) for expert in experts):
                slot = reference.slot_of(key)
                if slot is None:
                    misses.append(key)
                else:
                    reference.refresh(key)
                    reference.pin(slot)
            for key in misses:
                legal = reference.legal_reserve(key)
                assert legal is not None
                slots, victim = legal
                slot = min(slots)
                reference.reserved(key, slot)
                reference.pin(slot)
                assert reference.commit(slot, reference.rows[slot].generation)
                evicted += [] if victim is None else [victim]
            for row in reference.rows:
                row.pins = 0
        machine.step(number, routing)
        assert machine.residents() == reference.residents()
    assert machine.num_passed > 100
    assert machine.evicted == evicted


def waiting_in_step_1(*, num_slots: int = 2) -> Core:
    """One request, its first step begun, layer 0 with experts 0 and 1 resident and joined."""
    core = Core(msgspec.structs.replace(CONFIG, num_slots=num_slots, report_plans=False))
    core.handle(WorkerJoined(GPU, "gpu_worker", 0.0, Arena("shared", num_slots, 100)))
    core.handle(WorkerJoined(DMA, "dma_worker", 10.0))
    core.handle(Submit(RequestId("a"), [1], 9, frozenset()))
    core.handle(routed(0, 0, 1))
    for copy in (1, 2):
        core.handle(copied(copy))
    core.handle(Ran(GPU, StepId(1), LayerId(0), [ExpertId(0), ExpertId(1)], 0, 1))
    core.check()
    return core


def routed(layer: int, *experts: int, step: int = 1) -> Routed:
    ids = [ExpertId(expert) for expert in experts]
    return Routed(GPU, StepId(step), LayerId(layer), ids, [1] * len(ids), 0)


def passed(layer: int, *experts: int, step: int = 1) -> Passed:
    ids = [ExpertId(expert) for expert in experts]
    return Passed(GPU, StepId(step), LayerId(layer), ids, [1] * len(ids), 0, 0, 0, 0)


def copied(copy: int) -> Copied:
    return Copied(DMA, CopyId(copy), 0, 1, 100)


def test_the_table_is_for_one_gpu_worker_at_a_time() -> None:
    core = Core(CONFIG)
    joined = WorkerJoined(GPU, "gpu_worker", 0.0, Arena("shared", 7, 100))
    assert core.handle(joined) == [ResetTable(GPU)]
    assert core.handle(WorkerLost(GPU)) == [ResetTable(None)]


def test_an_expert_is_published_when_it_has_landed_and_unpublished_before_it_is_overwritten() -> (
    None
):
    core = waiting_in_step_1()
    assert core.handle(routed(1, 4)) == [
        Unpublish(LayerId(0), ExpertId(0)),
        Copy(DMA, CopyId(3), LayerId(1), ExpertId(4), SlotId(0)),
    ]
    assert core.handle(copied(3))[0] == Publish(LayerId(1), ExpertId(4), SlotId(0))


def test_a_layer_that_cannot_have_been_passed_is_a_fault() -> None:
    core = waiting_in_step_1()
    for event in (passed(1, 4), passed(1, 0, 0)):
        with pytest.raises(WorkerFault):
            core.handle(event)
    core.check()


def test_late_and_repeated_reports_are_dropped() -> None:
    core = waiting_in_step_1()
    before = core.snapshot().num_ignored_events
    assert core.handle(passed(0, 0, 1)) == []
    assert core.handle(passed(1, 0, step=9)) == []
    assert core.handle(msgspec.structs.replace(passed(1, 0), epoch=NEXT)) == []
    assert core.snapshot().num_ignored_events == before + 3


def test_a_fill_in_the_background_waits_for_the_grace_period() -> None:
    core = waiting_in_step_1()
    assert core.handle(Foreseen(LayerId(2), ExpertId(3))) == [
        Unpublish(LayerId(0), ExpertId(0)),
        Retire(CopyId(3), LayerId(2), ExpertId(3), SlotId(0)),
    ]
    core.check()
    assert core.handle(Foreseen(LayerId(2), ExpertId(3))) == []  # it is on its way
    copy = Copy(DMA, CopyId(3), LayerId(2), ExpertId(3), SlotId(0), is_awaited=False)
    assert core.handle(Retired(CopyId(3))) == [copy]
    assert core.handle(Retired(CopyId(3))) == []
    assert core.handle(copied(3)) == [Publish(LayerId(2), ExpertId(3), SlotId(0))]
    core.check()


def test_a_routed_layer_ends_every_grace_period_and_adopts_what_it_wants() -> None:
    core = waiting_in_step_1(num_slots=3)
    core.handle(Foreseen(LayerId(1), ExpertId(3)))
    copy = Copy(DMA, CopyId(3), LayerId(1), ExpertId(3), SlotId(2), is_awaited=False)
    assert core.handle(routed(1, 3)) == [copy]
    core.check()
    assert core.handle(Retired(CopyId(3))) == []
    publish, run = core.handle(copied(3))
    assert publish == Publish(LayerId(1), ExpertId(3), SlotId(2))
    assert run == Run(GPU, StepId(1), LayerId(1), [ExpertId(3)], [SlotId(2)], True)
    core.check()


def test_between_steps_nothing_is_in_use() -> None:
    core = waiting_in_step_1()
    for layer in (1, 2):
        core.handle(routed(layer, layer))
        core.handle(copied(layer + 2))
        core.handle(Ran(GPU, StepId(1), LayerId(layer), [ExpertId(layer)], 0, 1))
    core.handle(Foreseen(LayerId(2), ExpertId(3)))
    commands = core.handle(StepDone(GPU, StepId(1), [Sampled(5)], 0, 0))
    kinds = [type(command) for command in commands]
    assert kinds.index(Copy) < kinds.index(StartStep)
    core.check()


def test_an_expert_that_left_in_the_background_may_have_been_used_before() -> None:
    core = waiting_in_step_1()
    core.handle(Foreseen(LayerId(2), ExpertId(3)))
    with pytest.raises(WorkerFault):
        core.handle(passed(1, 9))
    core = Core(msgspec.structs.replace(CONFIG, num_layers=1, num_slots=2, report_plans=False))
    core.handle(WorkerJoined(GPU, "gpu_worker", 0.0, Arena("shared", 2, 100)))
    core.handle(WorkerJoined(DMA, "dma_worker", 10.0))
    core.handle(Submit(RequestId("a"), [1], 9, frozenset()))
    core.handle(routed(0, 0, 1))
    for copy in (1, 2):
        core.handle(copied(copy))
    core.handle(Ran(GPU, StepId(1), LayerId(0), [ExpertId(0), ExpertId(1)], 0, 1))
    core.handle(StepDone(GPU, StepId(1), [Sampled(5)], 0, 0))
    core.handle(Foreseen(LayerId(0), ExpertId(3)))  # expert 0 leaves while step 2 looks at it
    core.handle(passed(0, 0, 1, step=2))
    assert core.snapshot().num_layers_joined == 1
    core.check()


def test_fills_in_the_background_end_with_the_link() -> None:
    core = waiting_in_step_1()
    core.handle(Foreseen(LayerId(2), ExpertId(3)))
    core.handle(WorkerLost(DMA))
    assert core.snapshot().num_filling == 0
    assert core.handle(Retired(CopyId(3))) == []
    core.check()
