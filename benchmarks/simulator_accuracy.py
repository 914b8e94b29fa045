"""The simulator against the pipeline: same routing, slots, policy and planner.

    python benchmarks/simulator_accuracy.py --trace gpt-oss-20b_k4.npz --quick

A checkpoint of random weights runs recorded routing (--replay-routing) with a latency log. From the
log come the costs of the very run: median rates of both branches alone and beside each other, the
time until each begins, the dense part of a layer, the device's time per expert. With these the
simulator replays the same steps. What is compared is the mean time of a decode step over all steps,
the slowest tenth left out; `error` is the prediction over the measurement, less 1.

That is a test of the simulator's model, not of its foresight: its costs are those of the run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.adaptive_split import PROMPT, Bench
from orchestrator.core.fluid_split import BranchCosts
from orchestrator.simulate.baselines import Contender, replay
from orchestrator.simulate.trace import read_trace


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trace", type=Path, help="routing to replay (default: a made-up one)")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--slots", type=float, default=25.0, metavar="PERCENT")
    parser.add_argument("--link-gbps", type=float, default=2.5)
    parser.add_argument("--quick", action="store_true", help="4 layers, 80 tokens")
    options = parser.parse_args()
    options.warm_up = 0
    if options.quick:
        options.layers, options.tokens = 4, 80
    rows = []
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder:
        bench = Bench(options, Path(folder))
        for planner in ("fluid", "fill-only", "cpu-only"):
            flags = ["--planner", planner, "--fill-behind", "off"]
            bench.step_us(options.link_gbps, options.slots, flags)
            records = [json.loads(line) for line in (Path(folder) / "log.jsonl").open()]
            rows.append(compare(bench, records, planner))
            print(json.dumps(rows[-1]), flush=True)


def compare(bench: Bench, records: list[dict], planner: str) -> dict[str, object]:
    layers = [r for r in records if r["kind"] == "layer" and r["is_complete"]]
    decode = [r for r in layers if r["num_rows"] == 1]
    expert_bytes = next(r for r in records if r["kind"] == "log")["expert_bytes"]
    num_slots = next(r for r in records if r["kind"] == "log")["num_slots"]
    steps = {r["step"]: r for r in records if r["kind"] == "step" and r["num_tokens"] == 1}
    measured = sorted((r["done_ns"] - r["started_ns"]) * 1e-9 for r in steps.values())
    kept = measured[: len(measured) - len(measured) // 10 or None]
    costs, dense_s, join_s, rest_s = costs_of(decode, steps, expert_bytes)
    prompt_tokens = len(PROMPT.encode())
    trace = read_trace(bench.routing)
    ids = trace.part(prompt_tokens, len(steps))
    ids = type(ids)(ids.ids[:, : bench.options.layers], ids.num_experts, ids.model, expert_bytes)
    way = Contender("reuse-tables", planner, "off")
    result = replay(ids, costs, num_slots, dense_s + join_s, way)
    predicted_s = result.step_s + rest_s
    measured_s = statistics.fmean(kept)
    return {
        "planner": planner,
        "measured_ms": measured_s * 1e3,
        "predicted_ms": predicted_s * 1e3,
        "error": predicted_s / measured_s - 1,
        "measured_hit_rate": sum(len(r["hits"]) for r in decode)
        / sum(len(r["hits"]) + r["m"] for r in decode),
        "predicted_hit_rate": result.hit_rate,
    }


def costs_of(
    layers: list[dict], steps: dict[int, dict], expert_bytes: int
) -> tuple[BranchCosts, float, float, float]:
    """(costs, dense time per layer, hand-over per layer, what a step takes beside its layers)."""
    rates: dict[str, list[float]] = {"link": [], "link+": [], "cpu": [], "cpu+": []}
    link_starts, cpu_starts, gpu, joins = [], [], [], []
    for layer in layers:
        is_both = bool(layer["dma"]) and bool(layer["cpu_runs"])
        for name, spans in (("link", layer["dma"]), ("cpu", layer["cpu_runs"])):
            for span in spans:
                took_s = (span["ended_ns"] - span["started_ns"]) * 1e-9
                if took_s > 0:
                    rates[name + "+" * is_both].append(span["num_bytes"] / took_s)
        if layer["dma"]:
            first = min(span["started_ns"] for span in layer["dma"])
            link_starts.append(max(first - layer["routed_ns"], 0) * 1e-9)
        if layer["cpu_runs"]:
            first = min(span["started_ns"] for span in layer["cpu_runs"])
            cpu_starts.append(max(first - layer["routed_ns"], 0) * 1e-9)
        for span in (*layer["gpu_hits"], *layer["gpu_fills"]):
            took_s = (span["ended_ns"] - span["started_ns"]) * 1e-9
            gpu.append(took_s / max(len(span["experts"]), 1))
        ends = [span["ended_ns"] for name in ("dma", "cpu_runs", "gpu_hits", "gpu_fills")
                for span in layer[name]]  # fmt: skip
        if ends:
            joins.append(max(layer["joined_ns"] - max(ends), 0) * 1e-9)
    middle = {name: statistics.median(found) for name, found in rates.items() if found}
    link = middle.get("link", middle.get("link+", 1e9))
    cpu = middle.get("cpu", middle.get("cpu+", 1e9))
    costs = BranchCosts(
        expert_bytes,
        link,
        middle.get("link+", link),
        cpu,
        middle.get("cpu+", cpu),
        cpu_fixed_s=statistics.median(cpu_starts) if cpu_starts else 0.0,
        gpu_expert_s=statistics.median(gpu) if gpu else 0.0,
        link_fixed_s=statistics.median(link_starts) if link_starts else 0.0,
    )
    dense_s = statistics.median(layer["dense_ns"] for layer in layers) * 1e-9
    rest_s = (
        statistics.median(step["done_ns"] - step["joined_ns"] for step in steps.values()) * 1e-9
    )
    return costs, dense_s, statistics.median(joins) if joins else 0.0, rest_s


if __name__ == "__main__":
    main()
