"""The adaptive split against each branch alone and against every fixed q, on real pipelines.

    python -m benchmarks.adaptive_split --quick
    python -m benchmarks.adaptive_split --trace gpt-oss-20b_k4.npz --exhaustive --json grid.json
    python -m benchmarks.adaptive_split --trace gpt-oss-20b_k4.npz --links 0.25 --slots 25
    python -m benchmarks.adaptive_split --trace gpt-oss-20b_k4.npz --disturbances --json FILE

A checkpoint of random weights gets the recorded routing of a real model (--replay-routing), so
that the cache meets real habits; the link is emulated at so many times the rate of the host, which
is measured first. For each link and each number of slots there is a pipeline per way:

    adaptive    --fill auto, all defaults
    fill-only   every miss over the link      cpu-only    every miss on the CPU
    q=1, 2      at most that many fills per layer-step, the rest on the CPU; --exhaustive: up to
                top-k

All of them run the same text in turns of less than half a second (see `turns`), so a noisy machine
is noisy for all alike: a second in which it is slow, as virtual ones are, would spoil a long turn
of one way and spare the others. Adaptive is held against each other way by itself: the mean time of
the decode steps that both have made within their turns, the slowest and the fastest tenth of each
left out. `in_time` says whether adaptive is within 3 % of the better branch alone and within 8 % of
the best of all. With a device that is the CPU, what the device computes takes the processor from
the cpu_worker; that is true for every way alike.

A cell takes a minute or two on two cores, most of it the starts. --disturbances is another thing:
see `benchmarks/disturbances.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.disturbances import ONE_PROCESSOR, disturb
from benchmarks.random_checkpoint import make_random_checkpoint
from benchmarks.turns import RunningText, run_in_turns
from orchestrator.simulate.trace import read_trace, synthetic_trace

#: bfloat16 experts of 4.3 MB.
HIDDEN, INTERMEDIATE = 1024, 704
PROMPT = "Water"
MAX_OVER_SINGLE, MAX_OVER_BEST = 1.03, 1.08
FULL = {
    "links": [0.1, 0.25, 0.5, 1.0, 2.0],
    "slots": [10.0, 25.0, 50.0],
    "layers": 6,
    "warm_up": 40,
    "turns": 24,
}
QUICK = {"links": [0.5], "slots": [25.0], "layers": 4, "warm_up": 20, "turns": 12}


def main() -> None:
    options = parse()
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder:
        bench = Bench(options, Path(folder))
        host_gbps = options.host_gbps or bench.host_gbps()
        print(f"host: {host_gbps:.2f} GB/s", file=sys.stderr)
        cells = []
        if options.disturbances:
            for name in options.disturbances.split(","):
                cells.append(bench.disturbance(name, host_gbps))
                print(json.dumps(cells[-1]), flush=True)
        else:
            for link in options.links:
                for slots in options.slots:
                    cells.append(bench.cell(link, host_gbps, slots))
                    show(cells[-1])
    if options.json is not None:
        options.json.write_text(json.dumps({"host_gbps": host_gbps, "cells": cells}, indent=2))


class Bench:
    def __init__(self, options, folder: Path) -> None:
        self.options = options
        self.folder = folder
        trace = (
            read_trace(options.trace)
            if options.trace is not None
            else synthetic_trace(2000, 24, 32, 4, seed=1)
        ).part(0, options.tokens + 64)
        self.top_k = trace.top_k
        self.routing = folder / "routing.npz"
        np.savez(self.routing, ids=trace.ids, num_experts=trace.num_experts)
        self.model = make_random_checkpoint(
            folder / "model",
            num_layers=options.layers,
            num_experts=trace.num_experts,
            hidden_size=HIDDEN,
            intermediate_size=INTERMEDIATE,
            top_k=trace.top_k,
            num_heads=8,
            num_kv_heads=2,
        )

    def host_gbps(self) -> float:
        """What the CPU computes experts at, by the very kernel."""
        done = subprocess.run(
            [sys.executable, "-P", "-m", "orchestrator.cli.main", "calibrate", "--quick", "--json",
             "--hidden", str(HIDDEN), "--intermediate", str(INTERMEDIATE), "--memory-gb", "0.5"],
            capture_output=True, text=True, check=True, cwd=ROOT,
            env={**os.environ, "XDG_CACHE_HOME": str(self.folder / "cache")},
        )  # fmt: skip
        return json.loads(done.stdout)["cpu_bytes_per_s"] / 1e9

    def flags(self, link_gbps: float, slots: float) -> list[str]:
        return [
            "--slots", f"{slots:g}%", "--emulate-link-gbps", f"{link_gbps:.4f}",
            "--replay-routing", str(self.routing),
        ]  # fmt: skip

    def ways(self) -> dict[str, list[str]]:
        ways = {"adaptive": [], "fill-only": ["--planner", "fill-only"]}
        ways["cpu-only"] = ["--planner", "cpu-only"]
        fixed = range(1, self.top_k + 1) if self.options.exhaustive else (1, 2)
        return ways | {f"q={q}": ["--fill", str(q)] for q in fixed}

    def cell(self, link: float, host_gbps: float, slots: float) -> dict[str, object]:
        options = self.options
        common = self.flags(link * host_gbps, slots)
        texts = run_in_turns(
            self.model,
            self.folder,
            {name: [*common, *flags] for name, flags in self.ways().items()},
            warm_up=options.warm_up,
            max_tokens=options.tokens,
            turn_s=options.turn_s,
            num_turns=options.turns,
        )
        others = {}
        for name, text in texts.items():
            if name != "adaptive":
                pair = {"adaptive": texts["adaptive"], name: text}
                step_us, num_steps = common_step_us(pair, options.warm_up)
                over = step_us["adaptive"] / step_us[name]
                others[name] = {"step_us": step_us[name], "num_steps": num_steps, "over": over}
        over_single = max(others[name]["over"] for name in ("fill-only", "cpu-only"))
        over_best = max(other["over"] for other in others.values())
        return {
            "link_over_host": link,
            "slots_percent": slots,
            "others": others,
            "over_best_single": over_single,
            "over_best_of_all": over_best,
            "in_time": over_single <= MAX_OVER_SINGLE and over_best <= MAX_OVER_BEST,
        }

    def disturbance(self, name: str, host_gbps: float) -> dict[str, object]:
        """25 % resident; a link as fast as the host where it is to carry most of the misses (see
        `ONE_PROCESSOR`), else of half its rate: the branch that suffers has had most of them."""
        options = self.options
        flags = self.flags((1.0 if name in ONE_PROCESSOR else 0.5) * host_gbps, 25.0)
        calm, disturbed = (40, 60) if options.quick else (80, 150)
        log = self.folder / "disturbed.jsonl"
        return disturb(name, self.model, log, flags, calm, disturbed, os.cpu_count() or 1)

    def run_text(self, link_gbps: float, slots: float, flags: list[str]) -> RunningText:
        """One way by itself, to the end of its tokens."""
        log = self.folder / "log.jsonl"
        log.unlink(missing_ok=True)
        common = self.flags(link_gbps, slots)
        text = RunningText(self.model, log, [*common, *flags], self.options.tokens)
        try:
            text.wait_to_end()
        finally:
            text.end()
        return text


def common_step_us(texts: dict[str, RunningText], warm_up: int) -> tuple[dict[str, float], int]:
    """(mean time by way over the steps that all have made in their turns, how many these are)."""
    found = {name: text.step_us_in_turns() for name, text in texts.items()}
    common = set.intersection(*(set(steps) for steps in found.values()))
    numbers = sorted(number for number in common if number >= warm_up)
    if not numbers:
        raise RuntimeError("no step was made by all; take longer turns or more of them")
    return (
        {name: trimmed_mean([steps[n] for n in numbers]) for name, steps in found.items()},
        len(numbers),
    )


def trimmed_mean(values: list[float]) -> float:
    """Without the extreme tenths."""
    kept, cut = sorted(values), len(values) // 10
    return statistics.fmean(kept[cut : len(kept) - cut or None])


def show(cell: dict) -> None:
    others = ", ".join(
        f"{name} {other['over']:.2f} ({other['step_us'] / 1000:.1f} ms, {other['num_steps']} steps)"
        for name, other in cell["others"].items()
    )
    print(
        f"link {cell['link_over_host']:g} x host, {cell['slots_percent']:g} % resident: adaptive "
        f"over {others}; over the better branch {cell['over_best_single']:.2f}, over the best of "
        f"all {cell['over_best_of_all']:.2f}",
        flush=True,
    )


def parse() -> argparse.Namespace:
    def numbers(text: str) -> list[float]:
        return [float(part) for part in text.split(",")]

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trace", type=Path, help="routing to replay (default: a made-up one)")
    parser.add_argument("--links", type=numbers, help="times the host's rate (0.1 to 2)")
    parser.add_argument("--slots", type=numbers, help="percent resident (10, 25, 50)")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--tokens", type=int, default=1500, help="most steps of a text")
    parser.add_argument("--warm-up", type=int)
    parser.add_argument("--turn-s", type=float, default=0.4)
    parser.add_argument("--turns", type=int)
    parser.add_argument("--host-gbps", type=float, help="instead of measuring it")
    parser.add_argument("--exhaustive", action="store_true", help="every q up to top-k")
    parser.add_argument(
        "--disturbances", nargs="?", const="cpu,link,bus", metavar="NAMES", help="instead of cells"
    )
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--quick", action="store_true", help="one link, one cache, few tokens")
    options = parser.parse_args()
    defaults = QUICK if options.quick else FULL
    for name, value in defaults.items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    return options


if __name__ == "__main__":
    main()
