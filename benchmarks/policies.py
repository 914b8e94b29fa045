"""What a decision costs per policy, and how well the policy keeps company, in one run.

    python benchmarks/policies.py --json
    python benchmarks/policies.py --trace FILE.npz --slots 25%

For each policy and each layer-step, in microseconds (p10, p50 and p90 of the second half; the p10
is what a machine with nothing else to do would show):

    decision    everything between the router and the commands: the policy's note, look-up, pins,
                rank and admission, the fluid split, fill-behind, reservations
    release     commits and unpins, after the commands are out
    settle      what the policy learns from the router's choice, after the commands are out

`over_lru` is the decision's p50 over that of lru in the same run, which is what to compare on a
busy machine. Hit rates are of the fluid split with copies that land at once.
Without --trace a made-up trace of 48 layers x 128 experts, top-8, is used: real enough for time,
not for hit rates.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from time import perf_counter_ns

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from orchestrator.core.directory import ExpertDirectory
from orchestrator.core.fill_choice import FillBehind, FillChoice
from orchestrator.core.fluid_split import FluidSplit
from orchestrator.core.planner import DemandMemory
from orchestrator.core.policies import POLICY_NAMES, DeferringPolicy, make_policy
from orchestrator.native_reuse import load_kernel
from orchestrator.simulate.bounds import shape_of
from orchestrator.simulate.profiles import load_profile
from orchestrator.simulate.study import parse_slots
from orchestrator.simulate.trace import read_trace, synthetic_trace
from protocol.errors import UserError


class Bench:
    """One policy through the decisions of a layer-step; copies land at once."""

    def __init__(self, trace, policy, num_slots, costs):
        shape = shape_of(trace)
        self.policy = make_policy(policy, shape, load_kernel())
        self.is_deferring = isinstance(self.policy, DeferringPolicy)
        self.directory = ExpertDirectory(num_slots, self.policy)
        self.memory = DemandMemory(num_slots + 8 * shape.num_layers * shape.top_k)
        self.choice = FillChoice(self.policy, self.memory.last_demand)
        self.split = FluidSplit(costs)
        self.behind = FillBehind("auto", costs)
        self.decision_ns: list[int] = []
        self.release_ns: list[int] = []
        self.settle_ns: list[int] = []

    def layer_step(self, layer, experts):
        directory = self.directory
        begin = perf_counter_ns()
        directory.layer_step(layer, experts)
        pinned, misses = [], []
        keys = [(layer, expert) for expert in experts]
        for key in keys:
            slot = directory.slot_of(key)
            if slot is None:
                misses.append(key)
            else:
                directory.pin(slot)
                directory.refresh(key)
                pinned.append(slot)
        reservations = []
        if misses:
            candidates = self.choice.candidates(directory, misses)
            split = self.split.plan(
                len(misses), candidates.num_admitted, has_cpu=True, has_link=True
            )
            fills = candidates.ranked[: split.num_fills]
            fills += [copy.key for copy in self.behind.choose(candidates, split.num_fills, 0)]
            reservations = [directory.reserve(key) for key in fills]
        if self.choice.needs_last_demand:
            self.memory.demanded(keys)
        decided = perf_counter_ns()
        for reservation in reservations:
            directory.commit(reservation.slot, reservation.generation)
        for slot in pinned:
            directory.unpin(slot)
        released = perf_counter_ns()
        if self.is_deferring:
            self.policy.settle()
        end = perf_counter_ns()
        self.decision_ns.append(decided - begin)
        self.release_ns.append(released - decided)
        self.settle_ns.append(end - released)


def percentiles(samples_ns: list[int]) -> tuple[float, float, float]:
    """p10, p50 and p90 of the second half, us."""
    half = sorted(samples_ns[len(samples_ns) // 2 :])
    low, high = half[int(len(half) * 0.1)], half[int(len(half) * 0.9)]
    return low / 1e3, statistics.median(half) / 1e3, high / 1e3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--slots", default="25%")
    parser.add_argument("--profile", default="desktop")
    parser.add_argument("--policies", default=",".join(POLICY_NAMES))
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    try:
        if options.trace is None:
            trace = synthetic_trace(options.steps, 48, 128, 8)
        else:
            trace = read_trace(options.trace).part(0, options.steps)
        num_slots = parse_slots(options.slots, trace.total_experts)
        profile = load_profile(options.profile)
    except UserError as error:
        print(f"policies: {error}", file=sys.stderr)
        return error.exit_code

    costs = profile.costs(trace.expert_bytes or profile.expert_bytes)
    benches = {name: Bench(trace, name, num_slots, costs) for name in options.policies.split(",")}
    # Interleaved, so that what else runs on the machine falls on all of them alike.
    for step in trace.ids.tolist():
        for bench in benches.values():
            for layer, experts in enumerate(step):
                bench.layer_step(layer, experts)
    lru = benches.get("lru")
    lru_us = percentiles(lru.decision_ns)[1] if lru is not None else None
    rows = []
    for name, bench in benches.items():
        row = {"policy": name, "hit_rate": bench.directory.hits / trace.ids.size}
        for part in ("decision", "release", "settle"):
            p10, p50, p90 = percentiles(getattr(bench, f"{part}_ns"))
            row |= {f"{part}_p10_us": p10, f"{part}_p50_us": p50, f"{part}_p90_us": p90}
        row["over_lru"] = None if lru_us is None else row["decision_p50_us"] / lru_us
        rows.append(row)
    if options.json:
        shape = {
            "layers": trace.num_layers,
            "experts": trace.num_experts,
            "top_k": trace.top_k,
            "slots": num_slots,
            "steps": trace.num_steps,
        }
        print(json.dumps({**shape, "policies": rows}))
    else:
        for row in rows:
            print(
                " ".join(
                    f"{key}={value:.2f}" if isinstance(value, float) else f"{key}={value}"
                    for key, value in row.items()
                )
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
