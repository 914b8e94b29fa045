"""Other ways to run a model that does not fit, implemented from their descriptions.

    fill-only       global LRU, every miss passes the link (the CPU computes nothing)
    cpu-only        nothing becomes resident: every expert runs on the CPU
    static          the experts chosen most often are placed once and stay; the rest run on the CPU
    fixed-fraction  global LRU, round(f m) of the m misses are filled, the most recently demanded
                    first, with f = P_ov / (P_ov + C_ov) from a calibration of both at once

`headrace` is the default of this project. All run on the same clock.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import msgspec

from orchestrator.core.fill_choice import FillBehindMode
from orchestrator.settings import DEFAULT_FILL_BEHIND, DEFAULT_PLANNER, DEFAULT_POLICY
from orchestrator.simulate.bounds import shape_of
from orchestrator.simulate.machine import VirtualMachine
from orchestrator.simulate.replay import Replay, ReplayResult

if TYPE_CHECKING:
    from orchestrator.core.fluid_split import BranchCosts
    from orchestrator.simulate.trace import RoutingTrace


class Contender(msgspec.Struct, frozen=True):
    """How misses are treated: an eviction policy, a planner, fill-behind, and how many layers ahead
    experts are guessed and copied (0: none)."""

    policy: str
    planner: str
    fill_behind: FillBehindMode
    prefetch: int = 0


HEADRACE = Contender(DEFAULT_POLICY, DEFAULT_PLANNER, DEFAULT_FILL_BEHIND)
BASELINES: dict[str, Contender] = {
    "fill-only": Contender("lru", "fill-only", "off"),
    "cpu-only": Contender("lru", "cpu-only", "off"),
    "fixed-fraction": Contender("lru", "fixed-fraction", "off"),
}


def replay(
    trace: RoutingTrace, costs: BranchCosts, num_slots: int, dense_s: float, way: Contender
) -> ReplayResult:
    """`trace` from an empty cache of `num_slots`. ValueError for an unknown policy or planner."""
    run = Replay(
        shape_of(trace),
        costs,
        num_slots=num_slots,
        policy=way.policy,
        planner=way.planner,
        fill_behind=way.fill_behind,
        dense_s=dense_s,
        prefetch=way.prefetch,
    )
    return run.run(trace)


def replay_static(
    trace: RoutingTrace, costs: BranchCosts, num_slots: int, dense_s: float
) -> ReplayResult:
    """Static placement. The counts are of this very trace, which flatters it: no placement made
    beforehand could be better."""
    steps: list[list[list[int]]] = trace.ids.tolist()
    counts: Counter[tuple[int, int]] = Counter(
        (layer, expert)
        for step in steps
        for layer, experts in enumerate(step)
        for expert in experts
    )
    placed = {key for key, _ in counts.most_common(num_slots)}
    machine: VirtualMachine[None] = VirtualMachine(costs)
    hits = cpu_experts = 0
    for step in steps:
        for layer, experts in enumerate(step):
            machine.compute(dense_s)
            num_hits = sum((layer, expert) in placed for expert in experts)
            num_cpu = len(experts) - num_hits
            hits += num_hits
            cpu_experts += num_cpu
            if num_cpu:
                machine.run(0, num_cpu)
            elif costs.gpu_expert_s:
                machine.compute(costs.gpu_expert_s)
    return ReplayResult(
        num_steps=trace.num_steps,
        num_layer_steps=trace.num_steps * trace.num_layers,
        num_accesses=trace.num_steps * trace.num_layers * trace.top_k,
        hits=hits,
        fills=0,
        fills_behind=0,
        cpu_experts=cpu_experts,
        time_s=machine.now_s,
        link_busy_s=machine.link_busy_s,
        cpu_busy_s=machine.cpu_busy_s,
        copied_bytes=0.0,
    )
