"""How fast the CPU computes experts, beside how fast it can read memory at all, and beside torch.

    python -m benchmarks.cpu_experts               a table
    python -m benchmarks.cpu_experts --quick       fewer cases, within 50 s
    python -m benchmarks.cpu_experts --json        one JSON object on stdout
    python -m benchmarks.cpu_experts --processor-time
                                                   rates per second of processor time and thread,
                                                   for a machine that others use meanwhile

Experts lie in a segment like a store's, larger than any cache by far, and are visited far apart.
Each call computes eight of them, as a layer-step of decode does, with all its rows in each. The
read ceiling, the native kernels and torch take turns in short slices of the same memory with the
same number of threads; what is shown is the median over the rounds, so that a moment in which
somebody else used the machine touches all three or none. Machines differ in how they read fastest,
so several ways are tried first and the ceiling is the best of them. Weights count once per call,
however many rows, quantised ones with their scales. For several rows, `bound_ms` is what an expert
may take: the longer of reading its weights at the ceiling and twice its multiplications at torch's
best matrix product (`torch_gflops`).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import time
from functools import partial
from typing import TYPE_CHECKING, get_args

import msgspec
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.expert_blocks import FORMATS, fill, layout_of, torch_compute
from expert_kernels.native import MaxIsa, NativeExpertFunction
from expert_kernels.native_library import NativeLibraryError
from expert_kernels.step_rows import as_tensor
from expert_store.memory import memory_room
from expert_store.segment import SegmentMap, create_segment, size_segment

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.expert_blocks import TorchCompute
    from expert_store.layout import StoreLayout

#: hidden size, intermediate size, experts of a layer: Qwen3-30B-A3B, Qwen3-Next, Mixtral, gpt-oss.
SHAPES = ((2048, 768, 128), (2048, 512, 256), (4096, 14336, 8), (2880, 2880, 32))
WORKING_SET_BYTES = 3_000_000_000
EXPERTS_PER_CALL = 8
_READ_BYTES = 256 * 1024 * 1024
#: Streams of a thread, bytes that it asks ahead, and farther into the second-level cache: ways to
#: read, of which the fastest counts.
_WAYS = tuple(
    (streams, *ahead)
    for ahead in ((256, 0), (1024, 0), (256, 1024))
    for streams in (1, 2, 4, 8, 16)
)
_WAY_BYTES = 64 * 1024 * 1024
_WAY_ROUNDS = 9
_SLICE_S = 0.1
_PRODUCT = (512, 2048, 1536)  # rows, inputs, outputs
QUICK_FORMATS = ("bfloat16", "int8", "int4", "mxfp4", "nvfp4", "fp8")


class Row(msgspec.Struct, frozen=True):
    """One case. Rates in GB/s of weights; `*_ms` per expert."""

    format: str
    hidden: int
    intermediate: int
    experts: int
    rows: int
    threads: int
    gbps: float
    ceiling_gbps: float
    torch_gbps: float
    share: float
    """Median over the rounds of native rate / read ceiling."""
    time_ms: float
    bound_ms: float


class Reading(msgspec.Struct, frozen=True):
    """The fastest way to read, with some number of threads."""

    streams: int
    ahead_bytes: int
    farther_bytes: int
    gbps: float

    @property
    def way(self) -> tuple[int, int, int]:
        return self.streams, self.ahead_bytes, self.farther_bytes


class Case(msgspec.Struct, frozen=True):
    format: str
    shape: tuple[int, int, int]
    rows: int
    threads: int


def main() -> int:
    args = _parse()
    progress = Console(stderr=True)
    try:
        NativeExpertFunction(_layout_of(_cases(args)[0]), max_isa=args.max_isa)
    except NativeLibraryError as error:
        print(f"cpu_experts: there are no native kernels to measure: {error}", file=sys.stderr)
        return 2
    room = memory_room().available_bytes
    needed_bytes = WORKING_SET_BYTES + 2**30
    if room < needed_bytes:
        print(
            f"cpu_experts: needs {needed_bytes / 1e9:.1f} GB of memory, {room / 1e9:.1f} are free",
            file=sys.stderr,
        )
        return 2
    rows = []
    with Memory() as memory:
        memory.fill(_layout_of(_cases(args)[0]))
        threads = sorted({case.threads for case in _cases(args)})
        gflops = {n: torch_gflops(n, _stopwatch(args, n)) for n in threads}
        readings = {n: fastest_reading(memory.blocks, args, n) for n in threads}
        for number, case in enumerate(_cases(args)):
            progress.print(f"{number + 1} of {len(_cases(args))}: {case}", style="dim")
            memory.fill(_layout_of(case))
            n = case.threads
            rows.append(measure(case, memory.blocks, args, gflops[n], readings[n]))
        result = {
            "isa": NativeExpertFunction(_layout_of(_cases(args)[0]), max_isa=args.max_isa).isa,
            "cpus": len(os.sched_getaffinity(0)),
            "has_huge_pages": memory.has_huge_pages,
            "torch_gflops": {str(n): round(rate, 1) for n, rate in gflops.items()},
            "reading": {str(n): msgspec.to_builtins(found) for n, found in readings.items()},
            "rows": [msgspec.to_builtins(row) for row in rows],
        }
    if args.json:
        print(json.dumps(result, indent=2))
    else:
        _print_table(rows, result, readings)
    return 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cpu_experts",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument(
        "--quick", action="store_true", help="within 50 s: fewer formats and shapes"
    )
    parser.add_argument("--max-isa", choices=get_args(MaxIsa)[1:], default="best")
    parser.add_argument(
        "--processor-time",
        action="store_true",
        help="count the processor's time instead of the clock's: others may use the machine",
    )
    parser.add_argument("--threads", type=int, nargs="+", metavar="N", help="default: 1 and all")
    parser.add_argument("--formats", nargs="+", choices=FORMATS, metavar="FORMAT")
    args = parser.parse_args()
    args.threads = args.threads or sorted({1, len(os.sched_getaffinity(0))})
    args.formats = args.formats or (list(QUICK_FORMATS) if args.quick else list(FORMATS))
    args.slice_s = _SLICE_S if args.quick else 2.5 * _SLICE_S
    args.rounds = 3 if args.quick else 9
    return args


def _cases(args: argparse.Namespace) -> list[Case]:
    """Format by format and shape by shape, so that memory is filled anew as seldom as can be."""
    most = max(args.threads)
    cases: list[Case] = []
    for name in args.formats:
        is_short = args.quick and name != args.formats[0]
        many = (32,) if is_short else (4, 32) if args.quick else (2, 4, 8, 32, 128)
        for shape in SHAPES[:1] if is_short else SHAPES:
            threads = [most] if is_short else args.threads
            cases += [Case(name, shape, 1, num_threads) for num_threads in threads]
            if shape == SHAPES[0]:
                cases += [Case(name, shape, num_rows, most) for num_rows in many]
    return cases


def _layout_of(case: Case) -> StoreLayout:
    return layout_of(case.format, case.shape, EXPERTS_PER_CALL)


class Memory:
    """A segment of weights, of whatever pages the kernel grants a store's segment."""

    def __enter__(self) -> Memory:
        self._fd = create_segment("headrace-benchmark")
        size_segment(self._fd, WORKING_SET_BYTES)
        self._map = SegmentMap(self._fd, writable=True)
        self.has_huge_pages = self._map.has_huge_pages
        self.blocks = as_tensor(self._map.memory, torch.uint8, 0, [WORKING_SET_BYTES])
        self._filled: object = None
        return self

    def __exit__(self, *_: object) -> None:
        del self.blocks
        self._map.close()
        os.close(self._fd)

    def fill(self, layout: StoreLayout) -> None:
        """Random weights of that layout, unless they are there already."""
        filled = (layout.dtype, None) if layout.weights is None else layout.tensors
        if filled != self._filled:
            fill(self.blocks, layout)
            self._filled = filled


def _stopwatch(args: argparse.Namespace, num_threads: int) -> Callable[[], float]:
    """Seconds since some moment: of the clock, or of a processor whose work `num_threads` share."""
    if not args.processor_time:
        return time.perf_counter
    return lambda: time.process_time() / num_threads


def torch_gflops(num_threads: int, now_s: Callable[[], float] = time.perf_counter) -> float:
    """torch's best rate for a large product, float32 or bfloat16, in 1e9 operations per second."""
    torch.set_num_threads(num_threads)
    rows, inputs, outputs = _PRODUCT

    def rate(dtype: torch.dtype, num_rows: int) -> float:
        a, b = torch.randn(num_rows, inputs).to(dtype), torch.randn(inputs, outputs).to(dtype)
        best_s = float("inf")
        for _ in range(3):
            started_s = now_s()
            torch.mm(a, b)
            best_s = min(best_s, now_s() - started_s)
        return 2 * num_rows * inputs * outputs / best_s / 1e9

    # Where the processor has nothing for bfloat16, a large product would take seconds.
    few = max(1, rows // 32)
    dtypes = [torch.float32]
    if rate(torch.bfloat16, few) > rate(torch.float32, few):
        dtypes.append(torch.bfloat16)
    return max(rate(dtype, rows) for dtype in dtypes)


def fastest_reading(blocks: torch.Tensor, args: argparse.Namespace, num_threads: int) -> Reading:
    """The way whose median rate is best, all of them by turns."""
    native = NativeExpertFunction(
        _layout_of(_cases(args)[0]), max_isa=args.max_isa, num_threads=num_threads
    )
    now_s = _stopwatch(args, num_threads)
    size = min(_WAY_BYTES, blocks.numel())
    rates: dict[tuple[int, int, int], list[float]] = {way: [] for way in _WAYS}
    for turn in range(_WAY_ROUNDS * len(_WAYS)):
        way = _WAYS[turn % len(_WAYS)]
        start = turn % (blocks.numel() // size) * size
        began_s = now_s()
        native.read(blocks[start : start + size], *way)
        rates[way].append(size / (now_s() - began_s) / 1e9)
    native.close()
    gbps, way = max((statistics.median(found), way) for way, found in rates.items())
    return Reading(*way, gbps=round(gbps, 6))


def measure(
    case: Case,
    blocks: torch.Tensor,
    args: argparse.Namespace,
    gflops: float,
    reading: Reading,
) -> Row:
    """Rounds of slices: read, native, torch."""
    layout = _layout_of(case)
    native = NativeExpertFunction(layout, max_isa=args.max_isa, num_threads=case.threads)
    compute_with_torch = torch_compute(layout)
    torch.set_num_threads(case.threads)
    num_blocks = WORKING_SET_BYTES // layout.block_bytes
    tensors = [
        native.tensors_of(blocks[i * layout.block_bytes : (i + 1) * layout.block_bytes])
        for i in range(num_blocks)
    ]
    x = torch.randn(case.rows, native.hidden_size).to(native.dtype)
    turns = {"read": 0, "native": 0, "torch": 0}

    def batch_of(turn: int, size: int) -> list[dict[str, torch.Tensor]]:
        stride = _stride(num_blocks)
        return [tensors[(turn * size + i) * stride % num_blocks] for i in range(size)]

    def read(turn: int) -> int:
        start = turn * _READ_BYTES % (WORKING_SET_BYTES - _READ_BYTES)
        native.read(blocks[start : start + _READ_BYTES], *reading.way)
        return _READ_BYTES

    def run(compute: TorchCompute, size: int) -> Callable[[int], int]:
        def call(turn: int) -> int:
            batch = batch_of(turn, size)
            compute(batch, x)
            return len(batch) * layout.expert_bytes

        return call

    size = min(EXPERTS_PER_CALL, num_blocks)
    # Rows of a worker's step have their places before it begins.
    results = torch.empty((size, case.rows, native.hidden_size))
    # torch computes them one by one anyway; with many rows, eight would far outlast a slice.
    works = {
        "read": read,
        "native": run(partial(native.run_each, out=results), size),
        "torch": run(compute_with_torch, 1),
    }
    rates: dict[str, list[float]] = {name: [] for name in works}
    now_s = _stopwatch(args, case.threads)
    with torch.inference_mode():
        for _ in range(args.rounds):
            for name, work in works.items():
                num_bytes, started_s, began_s = 0, time.perf_counter(), now_s()
                while not num_bytes or time.perf_counter() - started_s < args.slice_s:
                    num_bytes += work(turns[name])
                    turns[name] += 1
                rates[name].append(num_bytes / (now_s() - began_s) / 1e9)
    native.close()
    ceiling_gbps, gbps, torch_gbps = (statistics.median(found) for found in rates.values())
    hidden, intermediate, _ = case.shape
    flops = 2 * case.rows * 3 * hidden * intermediate
    read_ms = layout.expert_bytes / ceiling_gbps / 1e6
    return Row(
        case.format,
        *case.shape,
        case.rows,
        case.threads,
        gbps=round(gbps, 6),
        ceiling_gbps=round(ceiling_gbps, 6),
        torch_gbps=round(torch_gbps, 6),
        share=round(
            statistics.median(n / c for n, c in zip(rates["native"], rates["read"], strict=True)),
            3,
        ),
        time_ms=round(layout.expert_bytes / gbps / 1e6, 6),
        bound_ms=round(max(read_ms, 2 * flops / gflops / 1e6), 6),
    )


def _stride(num_blocks: int) -> int:
    """Steps that visit all blocks, neighbours far apart."""
    stride = max(1, int(num_blocks * 0.618))
    while math.gcd(stride, num_blocks) != 1:
        stride += 1
    return stride


def _print_table(rows: list[Row], result: dict[str, object], readings: dict[int, Reading]) -> None:
    table = Table(title=f"Experts on {result['cpus']} cpus, {result['isa']}")
    for name in ("format", "H x I", "rows", "threads", "GB/s", "of", "share", "torch", "ms", "<="):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            row.format,
            f"{row.hidden} x {row.intermediate}",
            str(row.rows),
            str(row.threads),
            f"{row.gbps:.1f}",
            f"{row.ceiling_gbps:.1f}",
            f"{row.share:.2f}",
            f"{row.torch_gbps:.1f}",
            f"{row.time_ms:.2f}",
            f"{row.bound_ms:.2f}",
        )
    Console().print(table)
    for num_threads, reading in readings.items():
        print(
            f"reading with {num_threads} threads: {reading.streams} streams each, "
            f"{reading.ahead_bytes} bytes ahead (and {reading.farther_bytes} farther), "
            f"{reading.gbps:.1f} GB/s"
        )


if __name__ == "__main__":
    sys.exit(main())
