"""The replay against the core that serves: the same trace, the same machine, the same decisions."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from orchestrator.core.core import Core
from orchestrator.core.events import CoreConfig, Planned, Submit, WorkerJoined
from orchestrator.core.fluid_split import BranchCosts
from orchestrator.simulate.bounds import shape_of
from orchestrator.simulate.machine import Scatter, VirtualMachine
from orchestrator.simulate.replay import Replay
from orchestrator.simulate.trace import synthetic_trace
from protocol.messages import (
    Arena,
    Copied,
    Copy,
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
    StepDone,
    StepId,
)

if TYPE_CHECKING:
    from orchestrator.core.events import CoreCommand, CoreEvent

GPU, DMA, CPU = Epoch(1), Epoch(2), Epoch(3)
TRACE = synthetic_trace(90, 4, 16, 3, seed=3, keep=0.5)
NUM_SLOTS, DENSE_S = 16, 1e-4
#: A link that carries some of the misses, and copies that cost the CPU dear.
COSTS = BranchCosts(
    4_000_000, 9e9, 9e9, 20e9, 12e9, cpu_fixed_s=20e-6, gpu_expert_s=20e-6, link_fixed_s=30e-6
)
Counts = tuple[int, int, int]


class ServedByTheCore:
    """A pipeline whose workers are the virtual machine; nothing is copied behind."""

    def __init__(self, planner: str, scatter: Scatter, *, is_stated: bool) -> None:
        config = CoreConfig(
            TRACE.num_layers,
            TRACE.top_k,
            COSTS.expert_bytes,
            NUM_SLOTS,
            max_rows=8,
            max_sequence_tokens=1000,
            policy="reuse-tables",
            planner=planner,
            num_experts=TRACE.num_experts,
            costs=COSTS,
            host_bytes_per_s=COSTS.cpu_bytes_per_s if is_stated else None,
            report_plans=True,
        )
        self.core = Core(config)
        self.machine: VirtualMachine[int] = VirtualMachine(COSTS, scatter)
        self.rules: set[str] = set()
        self.hear(WorkerJoined(GPU, "gpu_worker", 0.0, Arena("shared", NUM_SLOTS, 4_000_000)))
        self.hear(WorkerJoined(DMA, "dma_worker", COSTS.link_bytes_per_s))
        self.hear(WorkerJoined(CPU, "cpu_worker", COSTS.cpu_bytes_per_s))
        self.hear(Submit(RequestId("a"), [1], TRACE.num_steps, frozenset()))

    def hear(self, event: CoreEvent) -> list[CoreCommand]:
        commands = self.core.handle(event)
        self.core.settle()
        return commands

    def step(self, number: int, layers: list[list[int]]) -> list[Counts]:
        counts = [self.layer_step(number, index, chosen) for index, chosen in enumerate(layers)]
        self.hear(StepDone(GPU, StepId(number), [Sampled(1)], 0, 0))
        return counts

    def layer_step(self, number: int, index: int, chosen: list[int]) -> Counts:
        """Hits, fills, and what ran on the CPU."""
        step, layer, machine = StepId(number), LayerId(index), self.machine
        machine.compute(DENSE_S)
        begin_ns = round(machine.now_s * 1e9)
        experts = [ExpertId(expert) for expert in chosen]
        commands = self.core.handle(Routed(GPU, step, layer, experts, [1] * len(chosen), begin_ns))
        (plan,) = [command for command in commands if isinstance(command, Planned)]
        if plan.fills or plan.cpu:
            machine.run(len(plan.fills), len(plan.cpu), len(plan.hits))
        else:
            machine.compute(len(plan.hits) * COSTS.gpu_expert_s)
        spans = iter(machine.worked.fills)
        for command in commands:
            if isinstance(command, Copy):
                begin, end = (round(time_s * 1e9) for time_s in next(spans))
                told = Copied(DMA, command.copy, begin, end, COSTS.expert_bytes)
                (run,) = [word for word in self.core.handle(told) if isinstance(word, Run)]
                self.core.handle(self.ran(run, machine.worked.expert_s))
        for command in commands:
            if isinstance(command, Run) and command.experts:
                self.core.handle(self.ran(command, machine.worked.expert_s))
            elif isinstance(command, Execute):
                assert machine.worked.cpu is not None
                begin, end = (round(time_s * 1e9) for time_s in machine.worked.cpu)
                done = Executed(CPU, step, layer, command.experts, begin, end, 1)
                self.core.handle(done)
        self.core.settle()
        self.rules.add(plan.split.rule)
        return len(plan.hits), len(plan.fills), len(plan.cpu)

    def ran(self, run: Run, expert_s: float) -> Ran:
        took_ns = round(expert_s * 1e9) * len(run.experts)
        return Ran(GPU, run.step, run.layer, run.experts, 0, took_ns)


def scatter() -> Scatter:
    return Scatter({"cpu": [0.8, 0.9, 1.0, 1.7], "link": [0.9, 1.0, 1.2], "cpu_start": [1.0, 3.0]})


@pytest.mark.parametrize("is_stated", [True, False])
@pytest.mark.parametrize("planner", ["fluid", "closed-form", "fill-only", "cpu-only"])
def test_the_replay_decides_as_the_core_does(planner: str, is_stated: bool) -> None:
    """Layer-step by layer-step; the floor rule and its probes, and misses that are filled though
    they are worth less than their victims, are part of it."""
    served = ServedByTheCore(planner, scatter(), is_stated=is_stated)
    replay = Replay(
        shape_of(TRACE),
        COSTS,
        num_slots=NUM_SLOTS,
        policy="reuse-tables",
        planner=planner,
        fill_behind="off",
        dense_s=DENSE_S,
        is_learning=not is_stated,
        scatter=scatter(),
    )
    for number, layers in enumerate(TRACE.ids.tolist()):
        expected = served.step(number + 1, layers)
        counts = []
        for layer, chosen in enumerate(layers):
            before = replay.counts
            replay.layer_step(layer, chosen)
            counts.append(
                tuple(now - then for now, then in zip(replay.counts, before, strict=True))
            )
        assert counts == expected, f"in step {number}"
    assert served.machine.now_s == replay.machine.now_s
    assert ("floor" in served.rules) == (planner == "fluid" and not is_stated)
