"""The simulator against the pipeline: same routing, slots, policy and planner.

    python -m benchmarks.simulator_accuracy --trace gpt-oss-20b_k4.npz --quick

A checkpoint of random weights runs recorded routing (--replay-routing) with a latency log. From the
log come the costs of the very run: rates of both branches alone and beside each other, the time
until each begins, gaps between copies and until the device takes what has landed, the dense part of
a layer, the device's time per expert, hand-overs. With these the simulator replays the same steps,
the prompt before them as well. What is compared is the mean time of a decode step; `error` is the
prediction over the measurement, less 1. All costs are plain means, for only these add up to a mean,
on a busy machine too; and they scatter about them as they did in the run (`error_by_means`: without
that), because a layer waits for the later of two branches. `floor_part` of the layer-steps with
misses were given to one branch alone by the floor rule, which the simulator has too.

That is a test of the simulator's model, not of its foresight: its costs are those of the run.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.adaptive_split import PROMPT, Bench
from orchestrator.core.fluid_split import BranchCosts
from orchestrator.simulate.bounds import shape_of
from orchestrator.simulate.machine import Scatter, Scattered
from orchestrator.simulate.replay import Replay
from orchestrator.simulate.trace import read_trace

#: Replays whose mean is the prediction, each with draws of its own.
NUM_DRAWS = 5
#: In the reason of a layer-step that the floor rule gave to one branch alone.
FLOOR = "to see whether that is faster"
#: Planner and fill-behind.
WAYS = (("fluid", "auto"), ("fill-only", "off"), ("cpu-only", "off"))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trace", type=Path, help="routing to replay (default: a made-up one)")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--slots", type=float, default=25.0, metavar="PERCENT")
    parser.add_argument("--link-gbps", type=float, default=2.5)
    parser.add_argument("--quick", action="store_true", help="4 layers, 150 tokens")
    options = parser.parse_args()
    if options.quick:
        options.layers, options.tokens = 4, 150
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder:
        bench = Bench(options, Path(folder))
        for planner, behind in WAYS:
            flags = ["--planner", planner, "--fill-behind", behind]
            records = bench.run_text(options.link_gbps, options.slots, flags).records()
            print(json.dumps(compare(bench, records, planner, behind)), flush=True)


def compare(bench: Bench, records: list[dict], planner: str, behind: str) -> dict[str, object]:
    layers = [r for r in records if r["kind"] == "layer" and r["is_complete"]]
    decode = [r for r in layers if r["num_rows"] == 1]
    header = next(r for r in records if r["kind"] == "log")
    steps = [r for r in records if r["kind"] == "step" and r["num_tokens"] == 1]
    costs, layer_s, rest_s, seen = costs_of(decode, steps, header["expert_bytes"])
    prompt_tokens = len(PROMPT.encode())
    trace = read_trace(bench.routing)
    trace = type(trace)(trace.ids[:, : bench.options.layers], trace.num_experts, trace.model,
                        header["expert_bytes"])  # fmt: skip

    def predict(scatter: Scatter | None) -> tuple[float, float, float]:
        """(seconds, hits, demanded fills) of all steps."""
        replay = Replay(
            shape_of(trace), costs, num_slots=header["num_slots"], policy="reuse-tables",
            planner=planner, fill_behind=behind, dense_s=layer_s, is_learning=True,
            scatter=scatter,
        )  # fmt: skip
        before = replay.run(trace.part(0, prompt_tokens))
        after = replay.run(trace.part(prompt_tokens, len(steps)))
        took_s = after.time_s - before.time_s
        return took_s, after.hits - before.hits, after.fills - before.fills

    drawn = [predict(Scatter(seen, seed)) for seed in range(NUM_DRAWS)]
    took_s, hits, fills = (mean(list(values)) for values in zip(*drawn, strict=True))
    predicted_s = took_s / len(steps) + rest_s
    by_means_s = predict(None)[0] / len(steps) + rest_s
    measured_s = mean([(r["done_ns"] - r["started_ns"]) * 1e-9 for r in steps])
    num_accesses = sum(len(r["hits"]) + r["m"] for r in decode)
    return {
        "planner": planner,
        "floor_part": mean([FLOOR in r["reason"] for r in decode if r["m"]]),
        "fill_behind": behind,
        "measured_ms": measured_s * 1e3,
        "predicted_ms": predicted_s * 1e3,
        "error": predicted_s / measured_s - 1,
        "error_by_means": by_means_s / measured_s - 1,
        "measured_hit_rate": sum(len(r["hits"]) for r in decode) / num_accesses,
        "predicted_hit_rate": hits / num_accesses,
        "measured_fills": sum(len(r["fills"]) for r in decode),
        "predicted_fills": fills,
        "costs": {name: getattr(costs, name) for name in costs.__struct_fields__},
        "layer_us": layer_s * 1e6,
        "rest_us": rest_s * 1e6,
        "log_us": {
            "dense": mean([r["dense_ns"] for r in decode]) / 1e3,
            "layer": mean([r["joined_ns"] - r["routed_ns"] for r in decode]) / 1e3,
        },
    }


def mean(values: list[float]) -> float:
    """0.0 of nothing."""
    return statistics.fmean(values) if values else 0.0


def costs_of(
    layers: list[dict], steps: list[dict], expert_bytes: int
) -> tuple[BranchCosts, float, float, dict[Scattered, list[float]]]:
    """(costs, dense time and hand-over per layer, what a step takes beside its layers, how its
    costs scatter), seconds."""
    spans: dict[str, list[float]] = {"link": [], "link+": [], "cpu": [], "cpu+": []}
    link_starts, cpu_starts, gaps, pickups, gpu, joins = [], [], [], [], [], []
    for layer in layers:
        is_both = bool(layer["dma"]) and bool(layer["cpu_runs"])
        for name, runs in (("link", layer["dma"]), ("cpu", layer["cpu_runs"])):
            for run in runs:
                took_s = (run["ended_ns"] - run["started_ns"]) * 1e-9
                if took_s > 0 and run["num_bytes"]:
                    spans[name + "+" * is_both].append(took_s / run["num_bytes"])
        copies = sorted((run["started_ns"], run["ended_ns"]) for run in layer["dma"])
        if copies:
            link_starts.append(max(copies[0][0] - layer["routed_ns"], 0) * 1e-9)
            gaps += [
                max(after[0] - before[1], 0) * 1e-9 for before, after in itertools.pairwise(copies)
            ]
            if layer["gpu_fills"]:
                last_ns = max(run["started_ns"] for run in layer["gpu_fills"])
                pickups.append(max(last_ns - copies[-1][1], 0) * 1e-9)
        if layer["cpu_runs"]:
            first = min(run["started_ns"] for run in layer["cpu_runs"])
            cpu_starts.append(max(first - layer["routed_ns"], 0) * 1e-9)
        for run in (*layer["gpu_hits"], *layer["gpu_fills"]):
            took_s = (run["ended_ns"] - run["started_ns"]) * 1e-9
            gpu += [took_s / len(run["experts"])] * len(run["experts"])
        ends = [run["ended_ns"] for name in ("dma", "cpu_runs", "gpu_hits", "gpu_fills")
                for run in layer[name]]  # fmt: skip
        if ends:
            joins.append(max(layer["joined_ns"] - max(ends), 0) * 1e-9)
    rates = {name: 1 / mean(found) for name, found in spans.items() if len(found) > 5}
    link = rates.get("link", rates.get("link+", 1e9))
    cpu = rates.get("cpu", rates.get("cpu+", 1e9))
    costs = BranchCosts(
        expert_bytes,
        link,
        rates.get("link+", link),
        cpu,
        rates.get("cpu+", cpu),
        fill_fixed_s=mean(gaps) * len(gaps) / max(len(gaps) + len(link_starts), 1),
        cpu_fixed_s=mean(cpu_starts),
        gpu_expert_s=mean(gpu),
        link_fixed_s=mean(link_starts) + mean(pickups),
    )
    layer_s = mean([layer["dense_ns"] * 1e-9 for layer in layers]) + mean(joins)
    rest_s = mean([(step["done_ns"] - step["joined_ns"]) * 1e-9 for step in steps])
    scatter: dict[Scattered, list[float]] = {
        "link": [*parts(spans["link"]), *parts(spans["link+"])],
        "cpu": [*parts(spans["cpu"]), *parts(spans["cpu+"])],
        "link_start": link_starts,
        "cpu_start": cpu_starts,
        "device": gpu,
    }
    return costs, layer_s, rest_s, scatter


def parts(times: list[float]) -> list[float]:
    """Of their mean: what both rates of a branch have in common."""
    usual = mean(times)
    return [time / usual for time in times]


if __name__ == "__main__":
    main()
