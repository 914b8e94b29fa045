"""Headrace's default against the fixed-fraction rule: three machines, three cache sizes.

    python benchmarks/simulate_profiles.py --trace FILE.npz --json

Each cell replays the trace twice on the virtual clock, from an empty cache: with the default
policy, planner and fill-behind, and with the fixed-fraction rule (global LRU, plain rounding, most
recently demanded first). The ratio of their step times is what counts; below 1 is a gain. Per cache
size, how much of the gap between LRU (the better of global and per-layer) and Belady the default
policy closes when every miss is filled. Exit code 1 if the geometric mean is above --limit or a
ratio above 1.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from orchestrator.core.fill_choice import FILL_BEHIND_MODES
from orchestrator.core.policies import POLICY_NAMES
from orchestrator.core.split_rules import PLANNER_NAMES
from orchestrator.simulate.baselines import BASELINES, HEADRACE, Contender, replay
from orchestrator.simulate.bounds import belady_misses, forced_fill_misses
from orchestrator.simulate.profiles import load_profile
from orchestrator.simulate.study import gap_closed, parse_slots
from orchestrator.simulate.trace import read_trace
from protocol.errors import UserError


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--profiles", default="laptop,desktop,workstation")
    parser.add_argument("--slots", default="10%,25%,50%")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--skip", type=int, default=0)
    parser.add_argument("--expert-bytes", type=int, default=13_200_000)
    parser.add_argument("--policy", choices=POLICY_NAMES, default=HEADRACE.policy)
    parser.add_argument("--planner", choices=PLANNER_NAMES, default=HEADRACE.planner)
    parser.add_argument("--fill-behind", choices=FILL_BEHIND_MODES, default=HEADRACE.fill_behind)
    parser.add_argument("--limit", type=float, default=0.80)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    try:
        trace = read_trace(options.trace).part(options.skip, options.steps)
        profiles = [load_profile(name) for name in options.profiles.split(",")]
        sizes = [
            (text, parse_slots(text, trace.total_experts)) for text in options.slots.split(",")
        ]
    except UserError as error:
        print(f"simulate_profiles: {error}", file=sys.stderr)
        return error.exit_code

    way = Contender(options.policy, options.planner, options.fill_behind)
    gaps = []
    for text, num_slots in sizes:
        num_accesses = trace.ids.size
        lru = max(
            1 - sum(forced_fill_misses(trace, name, num_slots)) / num_accesses
            for name in ("lru", "lru-layer")
        )
        belady = 1 - sum(belady_misses(trace, num_slots)) / num_accesses
        costs = profiles[0].costs(options.expert_bytes)
        forced = replay(trace, costs, num_slots, 1e-4, Contender(way.policy, "fill-only", "off"))
        row = {
            "slots": text,
            "lru_hit_rate": lru,
            "belady_hit_rate": belady,
            "hit_rate": forced.hit_rate,
            "gap_closed": gap_closed(forced.hit_rate, lru, belady),
        }
        gaps.append(row)
        if not options.json:
            print(" ".join(_word(key, value) for key, value in row.items()), flush=True)

    cells = []
    for profile in profiles:
        costs, dense_s = profile.costs(options.expert_bytes), profile.dense_us * 1e-6
        for text, num_slots in sizes:
            ours = replay(trace, costs, num_slots, dense_s, way)
            rule = replay(trace, costs, num_slots, dense_s, BASELINES["fixed-fraction"])
            row = {
                "profile": profile.name,
                "slots": text,
                "ratio": ours.time_s / rule.time_s,
                "step_us": ours.step_s * 1e6,
                "fixed_fraction_us": rule.step_s * 1e6,
                "hit_rate": ours.hit_rate,
                "fixed_fraction_hit_rate": rule.hit_rate,
                "fills": ours.fills,
                "fills_behind": ours.fills_behind,
                "link_idle": ours.link_idle,
            }
            cells.append(row)
            if not options.json:
                print(" ".join(_word(key, value) for key, value in row.items()), flush=True)

    ratios = [cell["ratio"] for cell in cells]
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    passed = mean <= options.limit and max(ratios) <= 1.0
    if options.json:
        answer = {
            "steps": trace.num_steps,
            "gaps": gaps,
            "cells": cells,
            "geometric_mean": mean,
            "largest": max(ratios),
            "passed": passed,
        }
        print(json.dumps(answer))
    else:
        print(f"geometric mean {mean:.3f}, largest {max(ratios):.3f}, {trace.num_steps} steps")
    return 0 if passed else 1


def _word(key: str, value: object) -> str:
    return f"{key}={value:.3f}" if isinstance(value, float) else f"{key}={value}"


if __name__ == "__main__":
    sys.exit(main())
