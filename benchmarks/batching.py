"""What decoding several requests together gives, and what it costs each of them.

    python benchmarks/batching.py [--model DIR] [-- flags of the orchestrator]

One supervised pipeline; then 1, 2, 4 ... requests at once, each as long as the others, every
number several times in turn. Per number: tokens/s of all together, tokens/s of one of them, and how
many bytes of expert weights a token cost (fills and CPU), which is what sharing a step saves. The
last column is the gain over one request at a time, of the same run.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from orchestrator.client import PipelineClient
from protocol.messages import Finished, RequestStats, SamplingParams
from protocol.run_dir import RunDir

REPO_ROOT = Path(__file__).resolve().parents[1]
PROMPTS = ("Once upon a time", "The stone grinds", "def main():", "In the year 1900 a")


def run_one(run_dir: Path, number: int, num_tokens: int) -> RequestStats:
    """One request to its end."""
    client = PipelineClient.connect(RunDir(run_dir), 30)
    try:
        for reply in client.generate(
            PROMPTS[number % len(PROMPTS)],
            max_tokens=num_tokens,
            sampling=SamplingParams(0.8, seed=number),
            ignore_eos=True,
        ):
            if isinstance(reply, Finished):
                return reply.stats
    finally:
        client.close()
    raise RuntimeError("a request without an end")


def run_together(run_dir: Path, count: int, num_tokens: int) -> tuple[float, float, float]:
    """(tokens/s of all, tokens/s of one, expert bytes per token) of `count` requests at once."""
    found: list[RequestStats] = []
    threads = [
        threading.Thread(target=lambda n=n: found.append(run_one(run_dir, n, num_tokens)))
        for n in range(count)
    ]
    started_s = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    elapsed_s = time.monotonic() - started_s
    # A shared step counts whole for each who shares it.
    num_bytes = sum(stats.fill_bytes + stats.cpu_bytes for stats in found) / count
    return (
        count * num_tokens / elapsed_s,
        statistics.median(stats.tokens_per_s for stats in found),
        num_bytes / (count * num_tokens),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=REPO_ROOT / "models/demo")
    parser.add_argument("--tokens", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--counts", type=int, nargs="+", default=[1, 2, 4])
    options, flags = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as directory:
        run_dir = Path(directory) / "run"
        command = [sys.executable, "-m", "orchestrator.cli.main", "orchestrator", "--supervise"]
        command += ["--model", str(options.model), "--run-dir", str(run_dir)]
        command += ["--max-num-seqs", str(max(options.counts))]
        with subprocess.Popen([*command, *(flag for flag in flags if flag != "--")]) as pipeline:
            try:
                client = PipelineClient.connect(RunDir(run_dir), 60)
                client.wait_until_ready(120, lambda status: None)
                client.close()
                measure(run_dir, options)
            finally:
                pipeline.terminate()


def measure(run_dir: Path, options: argparse.Namespace) -> None:
    run_together(run_dir, 1, options.tokens)  # warms the slots
    rows: dict[int, list[tuple[float, float, float]]] = {count: [] for count in options.counts}
    for _ in range(options.rounds):
        for count in options.counts:
            rows[count].append(run_together(run_dir, count, options.tokens))
    middle = {
        count: [statistics.median(column) for column in zip(*of_count, strict=True)]
        for count, of_count in rows.items()
    }
    first = middle[options.counts[0]][0]
    print(f"{'at once':>8} {'tokens/s':>9} {'of one':>9} {'MB/token':>9} {'gain':>6}")
    for count, (together, of_one, num_bytes) in middle.items():
        gain = together / first
        print(f"{count:8} {together:9.1f} {of_one:9.1f} {num_bytes / 1e6:9.2f} {gain:6.2f}")


if __name__ == "__main__":
    main()
