"""Does it pay to pin the kernels' threads to cores, and to use one fewer when others are busy?

    python -m benchmarks.pool_threads            a table
    python -m benchmarks.pool_threads --json     one JSON object on stdout

Calls of eight experts, one row, as layer-steps of decode, with a pause in between in which the
threads go to sleep as they do between layers. The same calls are made by all threads wherever the
system puts them, by all threads with a core for each, and by one thread fewer; alone and beside a
process that keeps one core busy. All arms take turns in short slices; shown are the medians of the
slices' rates and the percentiles of all calls.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.cpu_experts import EXPERTS_PER_CALL, SHAPES, WORKING_SET_BYTES, Memory
from benchmarks.expert_blocks import FORMATS, layout_of
from expert_kernels.native import NativeExpertFunction

if TYPE_CHECKING:
    from collections.abc import Callable

_BUSY = "while True: pass"


class Arm:
    """A pool of so many threads, on cores of their own while it runs if `is_pinned`."""

    def __init__(self, num_threads: int, *, is_pinned: bool, format_name: str) -> None:
        before = _threads()
        layout = layout_of(format_name, SHAPES[0], EXPERTS_PER_CALL)
        self.function = NativeExpertFunction(layout, num_threads=num_threads)
        self._threads = [0, *sorted(_threads() - before)]  # 0: the calling one
        self._is_pinned = is_pinned
        self._cpus = sorted(os.sched_getaffinity(0))
        self.name = f"{num_threads} threads" + (", pinned" if is_pinned else "")
        self.rates: list[float] = []
        self.calls_ms: list[float] = []

    def run(self, blocks: torch.Tensor, slice_s: float, pause_s: float) -> None:
        """One slice."""
        for thread, cpu in zip(self._threads, self._cpus, strict=False):
            os.sched_setaffinity(thread, {cpu} if self._is_pinned else self._cpus)
        function, size = self.function, self.function.layout.block_bytes
        num_blocks = WORKING_SET_BYTES // size
        x = torch.randn(1, function.hidden_size).to(function.dtype)
        calls_s, end_s = [], time.perf_counter() + slice_s
        turn = len(self.calls_ms)
        while time.perf_counter() < end_s:
            numbers = [(turn * EXPERTS_PER_CALL + i) * 61 % num_blocks for i in range(8)]
            batch = [function.tensors_of(blocks[n * size : (n + 1) * size]) for n in numbers]
            time.sleep(pause_s)
            started_s = time.perf_counter()
            function.run_each(batch, x)
            calls_s.append(time.perf_counter() - started_s)
            turn += 1
        self.rates.append(len(calls_s) * EXPERTS_PER_CALL * size / sum(calls_s) / 1e9)
        self.calls_ms += [1e3 * seconds for seconds in calls_s]
        for thread in self._threads:
            os.sched_setaffinity(thread, self._cpus)


def _threads() -> set[int]:
    return {int(name) for name in os.listdir("/proc/self/task")}


def measure(arms: list[Arm], blocks: torch.Tensor, rounds: int, pause_s: float) -> list[object]:
    """Rounds of one slice per arm."""
    for arm in arms:
        arm.rates, arm.calls_ms = [], []
    with torch.inference_mode():
        for _ in range(rounds):
            for arm in arms:
                arm.run(blocks, 0.3, pause_s)
    rows: list[object] = []
    for arm in arms:
        hundredths = statistics.quantiles(arm.calls_ms, n=100)
        rows.append(
            {
                "arm": arm.name,
                "gbps": round(statistics.median(arm.rates), 2),
                "p50_ms": round(hundredths[49], 3),
                "p95_ms": round(hundredths[94], 3),
                "p99_ms": round(hundredths[98], 3),
            }
        )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.pool_threads",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument("--format", choices=FORMATS, default="bfloat16")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--pause-us", type=int, default=300)
    args = parser.parse_args()
    most = len(os.sched_getaffinity(0))
    if most < 2:
        parser.error("one core leaves nothing to compare")
    torch.set_num_threads(1)
    results: dict[str, object] = {"cpus": most, "format": args.format}
    with Memory() as memory:
        arms = [
            Arm(most, is_pinned=False, format_name=args.format),
            Arm(most, is_pinned=True, format_name=args.format),
            Arm(most - 1, is_pinned=False, format_name=args.format),
        ]
        memory.fill(arms[0].function.layout)

        def run() -> list[object]:
            return measure(arms, memory.blocks, args.rounds, args.pause_us / 1e6)

        results["alone"] = run()
        results["one core busy"] = _beside_a_busy_process(run)
    if args.json:
        print(json.dumps(results, indent=2))
    else:
        _print_table(results)
    return 0


def _beside_a_busy_process(run: Callable[[], list[object]]) -> list[object]:
    with subprocess.Popen([sys.executable, "-c", _BUSY]) as busy:
        try:
            return run()
        finally:
            busy.kill()


def _print_table(results: dict[str, object]) -> None:
    for when in ("alone", "one core busy"):
        rows = results[when]
        assert isinstance(rows, list)
        table = Table(title=f"{results['format']}, {when}")
        for name in rows[0]:
            table.add_column(name, justify="right")
        for row in rows:
            table.add_row(*(str(value) for value in row.values()))
        Console().print(table)


if __name__ == "__main__":
    sys.exit(main())
