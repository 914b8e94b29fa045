"""The adaptive split against each branch alone and against every fixed q, on a real pipeline.

    python benchmarks/adaptive_split.py --quick
    python benchmarks/adaptive_split.py --trace gpt-oss-20b_k4.npz --links 0.1,0.25,0.5,1,2 \\
        --slots 10,25,50 --json out.json

A checkpoint of random weights gets the recorded routing of a real model (--replay-routing), so
that the cache meets real habits; the link is emulated at so many times the rate of the host, which
is measured first. For each link and each number of slots a pipeline runs once per way:

    adaptive    --fill auto, all defaults
    fill-only   every miss over the link      cpu-only    every miss on the CPU
    q=1, 2, ..  at most that many fills per layer-step, the rest on the CPU

What counts is the mean time of a decode step after the warm-up, the slowest and the fastest tenth
left out, and its ratio to adaptive in the same run. With a device that is the CPU, what the device
computes takes the processor from the cpu_worker; that is true for every way alike.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.random_checkpoint import make_random_checkpoint
from orchestrator.simulate.trace import read_trace, synthetic_trace

#: bfloat16 experts of 4.3 MB.
HIDDEN, INTERMEDIATE = 1024, 704
PROMPT = "Water"


def main() -> None:
    options = parse()
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder:
        bench = Bench(options, Path(folder))
        host_gbps = options.host_gbps or bench.host_gbps()
        print(f"host: {host_gbps:.2f} GB/s", file=sys.stderr)
        cells = []
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
        )  # fmt: skip
        return json.loads(done.stdout)["cpu_bytes_per_s"] / 1e9

    def cell(self, link: float, host_gbps: float, slots: float) -> dict[str, object]:
        ways = {"adaptive": [], "fill-only": ["--planner", "fill-only"]}
        ways["cpu-only"] = ["--planner", "cpu-only"]
        fixed = range(1, self.top_k + 1) if self.options.exhaustive else (1, 2)
        ways |= {f"q={q}": ["--fill", str(q)] for q in fixed}
        step_us = {}
        for name, flags in ways.items():
            step_us[name] = self.step_us(link * host_gbps, slots, flags)
        return {
            "link_over_host": link,
            "slots_percent": slots,
            "step_us": step_us,
            "over_best_single": step_us["adaptive"]
            / min(step_us["fill-only"], step_us["cpu-only"]),
            "over_best_fixed": step_us["adaptive"] / min(step_us.values()),
        }

    def step_us(self, link_gbps: float, slots: float, flags: list[str]) -> float:
        log = self.folder / "log.jsonl"
        subprocess.run(
            [sys.executable, "-P", "-m", "orchestrator.cli.main", "generate",
             "--model", str(self.model), "--prompt", PROMPT, "--ignore-eos",
             "--max-tokens", str(self.options.tokens), "--slots", f"{slots:g}%",
             "--emulate-link-gbps", f"{link_gbps:.4f}", "--replay-routing", str(self.routing),
             "--latency-log", str(log), "--json", *flags],
            check=True, stdout=subprocess.DEVNULL, cwd=ROOT,
        )  # fmt: skip
        return trimmed_step_us(log, self.options.warm_up)


def trimmed_step_us(log: Path, warm_up: int) -> float:
    """Mean time of a sampled step after `warm_up` of them, without the extreme tenths."""
    steps = []
    for line in log.read_text().splitlines():
        record = json.loads(line)
        if record["kind"] == "step" and record["num_tokens"] == 1 and record["is_complete"]:
            steps.append((record["done_ns"] - record["started_ns"]) / 1000)
    kept = sorted(steps[warm_up:])
    cut = len(kept) // 10
    return statistics.fmean(kept[cut : len(kept) - cut or None])


def show(cell: dict) -> None:
    times = ", ".join(f"{name} {us / 1000:.1f}" for name, us in cell["step_us"].items())
    print(
        f"link {cell['link_over_host']:g} x host, {cell['slots_percent']:g} % resident: {times} ms "
        f"a step; adaptive over the better branch {cell['over_best_single']:.2f}, over the best of "
        f"all {cell['over_best_fixed']:.2f}",
        flush=True,
    )


def parse() -> argparse.Namespace:
    def numbers(text: str) -> list[float]:
        return [float(part) for part in text.split(",")]

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trace", type=Path, help="routing to replay (default: a made-up one)")
    parser.add_argument("--links", type=numbers, default=[0.1, 0.25, 0.5, 1.0, 2.0])
    parser.add_argument("--slots", type=numbers, default=[10.0, 25.0, 50.0])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--warm-up", type=int, default=40)
    parser.add_argument("--host-gbps", type=float, help="instead of measuring it")
    parser.add_argument("--exhaustive", action="store_true", help="every q up to top-k")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--quick", action="store_true", help="one link, one cache, few tokens")
    options = parser.parse_args()
    if options.quick:
        options.links, options.slots = options.links[2:3], options.slots[1:2]
        options.layers, options.tokens, options.warm_up = 4, 60, 20
    return options


if __name__ == "__main__":
    main()
