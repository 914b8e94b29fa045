"""What the HTTP server costs, and how it does with several clients at once.

    python -m benchmarks.serve [--json] [--quick]

One server process answers both ways in the same run: completions over HTTP as streams, and, for
comparison, the same requests over the pipeline's own socket without HTTP, one after the other in
turns so that a change of the machine's mood meets both. The cost at concurrency 1 is the median of
the ratios of neighbouring turns. Tokens/s are those of all clients together, from the first request
to the last token; TTFT and the time between tokens are seen by the client.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.server_process import ROOT, Answer, Server, call, server
from orchestrator.client import PipelineClient
from protocol.messages import Finished, SamplingParams
from protocol.run_dir import RunDir

PROMPT = "def main():"


def main() -> int:
    args = _parse()
    progress = Console(stderr=True)
    with (
        tempfile.TemporaryDirectory() as folder,
        server(args.model, Path(folder), "--slots", args.slots, *args.flags) as started,
    ):
        turns, loads = _measure(args, started, progress)
    result = {
        "model": args.model.name,
        "max_tokens": args.max_tokens,
        "bare_tokens_per_s": statistics.median(bare for bare, _ in turns),
        "http_tokens_per_s": statistics.median(http["tokens_per_s"] for _, http in turns),
        "http_to_bare": statistics.median(http["tokens_per_s"] / bare for bare, http in turns),
        "loads": loads,
    }
    if args.json:
        print(json.dumps(result, indent=2))
    else:
        _print(result)
    return 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.serve",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "demo", metavar="DIR")
    parser.add_argument("--slots", default="50%")
    parser.add_argument("--max-tokens", type=int, default=128, metavar="N")
    parser.add_argument("--repeat", type=int, default=7, metavar="N", help="turns (default: 7)")
    parser.add_argument("--concurrency", type=int, nargs="*", default=[1, 2, 4, 8], metavar="N")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--quick", action="store_true", help="few tokens, to see that it runs")
    parser.add_argument("flags", nargs="*", help="flags for the server, after --")
    args = parser.parse_args()
    if args.quick:
        args.repeat, args.max_tokens, args.concurrency = 2, 16, [1, 2]
    return args


def _measure(
    args: argparse.Namespace, started: Server, progress: Console
) -> tuple[list[tuple[float, dict[str, Any]]], list[dict[str, Any]]]:
    """Turns of (without HTTP, with HTTP), and loads of several clients."""
    _bare(started, args.max_tokens)  # both ways once, to warm up
    asyncio.run(_http(started.port, 1, args.max_tokens))
    turns = []
    for number in range(args.repeat):
        progress.print(f"turn {number + 1} of {args.repeat}", style="dim")
        bare = _bare(started, args.max_tokens)
        turns.append((bare, asyncio.run(_http(started.port, 1, args.max_tokens))))
    loads = []
    for concurrency in args.concurrency:
        progress.print(f"{concurrency} at once", style="dim")
        loads.append(asyncio.run(_http(started.port, concurrency, args.max_tokens)))
    return turns, loads


def _bare(started: Server, max_tokens: int) -> float:
    """Tokens/s of one request without HTTP, as its client sees it."""
    client = PipelineClient.connect(RunDir(started.run_dir), 10)
    try:
        started_s = time.monotonic()
        num_tokens = 0
        for reply in client.generate(
            PROMPT, max_tokens=max_tokens, sampling=SamplingParams(), ignore_eos=True
        ):
            if isinstance(reply, Finished):
                num_tokens = reply.stats.generated_tokens
        return num_tokens / (time.monotonic() - started_s)
    finally:
        client.close()


async def _http(port: int, concurrency: int, max_tokens: int) -> dict[str, Any]:
    """So many streams at once, and what they saw."""
    body = {
        "prompt": PROMPT,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    started_s = time.monotonic()
    answers = await asyncio.gather(
        *(call(port, "POST", "/v1/completions", body) for _ in range(concurrency))
    )
    ended_s = max(answer.stamps_s[-1] for answer in answers)
    assert all(answer.is_complete for answer in answers)
    gaps_s = sorted(gap for answer in answers for gap in _gaps(answer))
    return {
        "concurrency": concurrency,
        "tokens_per_s": concurrency * max_tokens / (ended_s - started_s),
        "ttft_ms": 1e3 * statistics.median(a.stamps_s[0] - a.started_s for a in answers),
        "itl_mean_ms": 1e3 * statistics.fmean(gaps_s),
        "itl_p99_ms": 1e3 * gaps_s[int(0.99 * (len(gaps_s) - 1))],
    }


def _gaps(answer: Answer) -> list[float]:
    return [b - a for a, b in zip(answer.stamps_s, answer.stamps_s[1:], strict=False)]


def _print(result: dict[str, Any]) -> None:
    console = Console()
    console.print(
        f"{result['model']}, {result['max_tokens']} tokens: without HTTP "
        f"{result['bare_tokens_per_s']:.1f} tokens/s, with it {result['http_tokens_per_s']:.1f}; "
        f"ratio of neighbouring turns {result['http_to_bare']:.3f}"
    )
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for name in ("at once", "tokens/s", "TTFT", "between tokens", "p99"):
        table.add_column(name, justify="right")
    for load in result["loads"]:
        table.add_row(
            str(load["concurrency"]),
            f"{load['tokens_per_s']:.1f}",
            f"{load['ttft_ms']:.0f} ms",
            f"{load['itl_mean_ms']:.1f} ms",
            f"{load['itl_p99_ms']:.1f} ms",
        )
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
