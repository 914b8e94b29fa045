"""What a layer-step costs beyond computing and copying, beside a bare ZeroMQ round trip.

    python -m benchmarks.layer_overhead            a table
    python -m benchmarks.layer_overhead --json     one JSON object on stdout
    python -m benchmarks.layer_overhead --quick    one short repetition, to see that it runs

The pipeline decodes with a latency log; for every layer-step the benchmark takes the time from
`routed` (the gpu_worker has the router's output) to `joined` (the model has the layer's output) and
takes away the time in which at least one branch was at work (the union of the copies and of the
experts on either processor). What is left is told apart by whether the layer missed any expert. The
round trip is one small message there and back between two blocking processes over ipc, measured
before and after each repetition.

The dense part (norm, attention, router, per layer) stands beside transformers' own eager decode of
the same model with its experts left out, measured in this process.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import zmq
from rich.console import Console
from rich.table import Table

from orchestrator.latency_log import LayerRecord, LogRecord

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

ROOT = Path(__file__).resolve().parent.parent
PROMPT = "def main():"
_MESSAGE = b"x" * 200


class Sample(msgspec.Struct, frozen=True):
    """Figures of one repetition, in us."""

    rtt_us: float
    hit_us: list[float]
    miss_us: list[float]
    dense_us: list[float]
    tokens_per_s: float


def main() -> int:
    args = _parse()
    progress = Console(stderr=True)
    eager_us = eager_dense_us(args.model, args.dtype)
    samples = []
    for number in range(args.repeat):
        progress.print(f"repetition {number + 1} of {args.repeat}", style="dim")
        samples.append(_repetition(args))
    result = _summary(samples, eager_us)
    if args.json:
        print(json.dumps(result, indent=2))
    else:
        _print_table(result, samples)
    return 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.layer_overhead",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "demo", metavar="DIR")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--slots", default="25%", help="so that both kinds of layers occur")
    parser.add_argument("--layer-steps", type=int, default=2000, help="per repetition, at least")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="one repetition of 200 layer-steps")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    args = parser.parse_args()
    if args.quick:
        args.layer_steps, args.repeat = 200, 1
    return args


# --------------------------------------------------------------------------- the pipeline


def _repetition(args: argparse.Namespace) -> Sample:
    before_us = round_trip_us()
    num_layers = json.loads((args.model / "config.json").read_text())["num_hidden_layers"]
    max_tokens = -(-args.layer_steps // num_layers)
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "latency.jsonl"
        done = subprocess.run(
            [
                sys.executable, "-m", "orchestrator.cli.main", "generate", "--model", args.model,
                "--prompt", PROMPT, "--max-tokens", str(max_tokens), "--ignore-eos",
                "--slots", args.slots, "--dtype", args.dtype, "--latency-log", log, "--json",
            ],
            cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True,
        )  # fmt: skip
        decoder = msgspec.json.Decoder(LogRecord)
        records = [decoder.decode(line) for line in log.read_bytes().splitlines()]
    after_us = round_trip_us()
    layers = [
        record
        for record in records
        if isinstance(record, LayerRecord) and record.is_complete and record.num_rows == 1
    ]
    return Sample(
        rtt_us=(before_us + after_us) / 2,
        hit_us=[overhead_us(layer) for layer in layers if not layer.m],
        miss_us=[overhead_us(layer) for layer in layers if layer.m],
        # The first layer's holds the embedding and the way from the orchestrator, too.
        dense_us=[layer.dense_ns / 1e3 for layer in layers if layer.layer],
        tokens_per_s=json.loads(done.stdout)["tokens_per_s"],
    )


def overhead_us(layer: LayerRecord) -> float:
    """Time from routed to joined in which no branch computed or copied, in us."""
    spans = [
        (span.started_ns, span.ended_ns)
        for spans in (layer.gpu_hits, layer.gpu_fills, layer.dma, layer.cpu_runs)
        for span in spans
    ]
    return (layer.joined_ns - layer.routed_ns - covered_ns(spans)) / 1e3


def covered_ns(spans: Iterable[tuple[int, int]]) -> int:
    """Length of the union of intervals (start, end)."""
    total, reached = 0, 0
    for start, end in sorted(spans):
        total += max(0, end - max(start, reached))
        reached = max(reached, end)
    return total


# --------------------------------------------------------------------------- the references


def round_trip_us(num_trips: int = 2000) -> float:
    """Median of a bare ROUTER/DEALER round trip between two blocking processes over ipc, in us."""
    with tempfile.TemporaryDirectory() as folder:
        endpoint = f"ipc://{folder}/rtt.sock"
        echo = subprocess.Popen([sys.executable, "-m", "benchmarks.layer_overhead_echo", endpoint])
        context = zmq.Context()
        socket = context.socket(zmq.ROUTER)
        try:
            socket.bind(endpoint)
            peer, _ = socket.recv_multipart()
            times_ns = []
            for _ in range(num_trips):
                started_ns = time.monotonic_ns()
                socket.send_multipart((peer, _MESSAGE))
                socket.recv_multipart()
                times_ns.append(time.monotonic_ns() - started_ns)
            socket.send_multipart((peer, b""))
            echo.wait(10)
        finally:
            echo.kill()
            echo.wait()
            socket.close(0)
            context.term()
    return statistics.median(times_ns[num_trips // 10 :]) / 1e3


def eager_dense_us(model_dir: Path, dtype: str, num_steps: int = 200) -> float:
    """transformers' eager decode without its experts: median us per layer."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    from transformers.utils import logging as transformers_logging

    def no_experts(
        module: torch.nn.Module, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        return torch.zeros_like(hidden)

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    warnings.simplefilter("ignore", FutureWarning)  # transformers renames arguments as it goes
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    ALL_EXPERTS_FUNCTIONS.register("left_out", no_experts)
    model = AutoModelForCausalLM.from_pretrained(
        model_dir, dtype=dtype if dtype == "auto" else getattr(torch, dtype)
    )
    model.set_experts_implementation("left_out")
    times_ns = []
    with torch.inference_mode():
        cache = model(torch.tensor([[1, 2, 3, 4]]), use_cache=True).past_key_values
        token = torch.tensor([[5]])
        for _ in range(num_steps):
            started_ns = time.monotonic_ns()
            model(token, past_key_values=cache, use_cache=True)
            times_ns.append(time.monotonic_ns() - started_ns)
    torch.set_num_threads(threads)
    return statistics.median(times_ns[num_steps // 10 :]) / 1e3 / model.config.num_hidden_layers


# --------------------------------------------------------------------------- the figures


def _quantile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else float("nan")


def _summary(samples: list[Sample], eager_us: float) -> dict[str, float]:
    """Medians over the repetitions; each ratio is to the round trip of its own repetition."""

    def ratio(kind: str, share: float) -> float:
        return statistics.median(
            _quantile(getattr(sample, kind), share) / sample.rtt_us for sample in samples
        )

    dense_us = statistics.median(_quantile(sample.dense_us, 0.5) for sample in samples)
    return {
        "rtt_us": statistics.median(sample.rtt_us for sample in samples),
        "hit_p50_ratio": ratio("hit_us", 0.5),
        "hit_p99_ratio": ratio("hit_us", 0.99),
        "miss_p50_ratio": ratio("miss_us", 0.5),
        "miss_p99_ratio": ratio("miss_us", 0.99),
        "dense_us": dense_us,
        "eager_us": eager_us,
        "dense_ratio_to_eager": dense_us / eager_us,
        "tokens_per_s": statistics.median(sample.tokens_per_s for sample in samples),
        "hit_layer_steps": sum(len(sample.hit_us) for sample in samples),
        "miss_layer_steps": sum(len(sample.miss_us) for sample in samples),
    }


def _rows(result: dict[str, float]) -> Iterator[tuple[str, str, str]]:
    rtt_us = result["rtt_us"]
    yield "ZeroMQ round trip, bare", f"{rtt_us:.0f} us", "1"
    for kind, text in (("hit", "layer-step, all hits"), ("miss", "layer-step with misses")):
        for share in ("p50", "p99"):
            ratio = result[f"{kind}_{share}_ratio"]
            yield f"{text}, {share}", f"{ratio * rtt_us:.0f} us", f"{ratio:.2f} round trips"
    yield (
        "dense part of a layer, p50",
        f"{result['dense_us']:.0f} us",
        (
            f"{result['dense_ratio_to_eager']:.2f} of transformers eager "
            f"({result['eager_us']:.0f} us, experts left out)"
        ),
    )


def _print_table(result: dict[str, float], samples: list[Sample]) -> None:
    table = Table(title="Beyond computing and copying, per layer-step")
    table.add_column("what")
    table.add_column("time", justify="right")
    table.add_column("ratio")
    for row in _rows(result):
        table.add_row(*row)
    console = Console()
    console.print(table)
    console.print(
        f"{result['hit_layer_steps']:.0f} all-hit and {result['miss_layer_steps']:.0f} missing "
        f"layer-steps in {len(samples)} repetitions; {result['tokens_per_s']:.1f} tokens/s"
    )


if __name__ == "__main__":
    sys.exit(main())
