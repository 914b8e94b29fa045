"""How fast the loader fills the expert store from the page cache, and what memory it takes.

    python -m benchmarks.loading             makes a random 2 GB checkpoint, loads it, removes it
    python -m benchmarks.loading --model DIR --json
    python -m benchmarks.loading --expert-dtype int4     quantises while it loads

The reference of the same run is `cat` of the same files to nowhere: what the page cache gives.
Memory is the loader's resident set and the segment together, sampled every 10 ms, beside the store.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table

from benchmarks.random_checkpoint import make_random_checkpoint
from expert_store.reports import Loaded, decode_report
from expert_store.segment import create_segment

ROOT = Path(__file__).resolve().parent.parent


def load_once(model: Path, dtype: str, expert_dtype: str) -> tuple[Loaded, float, int]:
    """One load: its report, the process's wall time in s, the peak of memory beside the store."""
    fd = create_segment("benchmark")
    started = time.monotonic()
    try:
        with subprocess.Popen(
            [
                sys.executable, "-m", "expert_store", "load", "--model", model, "--dtype", dtype,
                "--expert-dtype", expert_dtype, "--fd", str(fd),
            ],
            cwd=ROOT, pass_fds=(fd,), stdout=subprocess.PIPE, text=True,
        ) as loader:  # fmt: skip
            peak_bytes = _peak_beside_store(loader)
            assert loader.stdout is not None
            report = decode_report(loader.stdout.read().splitlines()[-1])
    finally:
        os.close(fd)
    if not isinstance(report, Loaded):
        raise SystemExit(f"loading: {report}")
    return report, time.monotonic() - started, peak_bytes


def _peak_beside_store(loader: subprocess.Popen[str]) -> int:
    """Largest resident set of the loader, its view of the segment not counted."""
    peak_bytes = 0
    process = psutil.Process(loader.pid)
    while loader.poll() is None:
        try:
            memory = process.memory_info()
        except psutil.NoSuchProcess:
            break
        peak_bytes = max(peak_bytes, memory.rss)
        time.sleep(0.01)
    return peak_bytes


def cat_bytes_per_s(model: Path) -> float:
    """Rate at which the page cache gives the checkpoint to `cat`."""
    files = sorted(model.glob("*.safetensors"))
    num_bytes = sum(file.stat().st_size for file in files)
    started = time.monotonic()
    with Path(os.devnull).open("wb") as nowhere:
        # A pipe makes cat copy the bytes; to /dev/null itself it would only say that it did.
        cat = subprocess.Popen(["cat", *files], stdout=subprocess.PIPE)
        subprocess.run(["dd", "bs=1M", "status=none"], stdin=cat.stdout, stdout=nowhere, check=True)
        cat.wait()
    return num_bytes / (time.monotonic() - started)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.loading",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", type=Path, metavar="DIR", help="default: a random one of 2 GB")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--expert-dtype", default="auto", metavar="NAME")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = args.model or make_random_checkpoint(
            Path(folder) / "model",
            num_layers=4,
            num_experts=56,
            hidden_size=2048,
            intermediate_size=768,
        )
        cat_bytes_per_s(model)  # brings the files into the page cache
        reference = cat_bytes_per_s(model)
        loads = [load_once(model, args.dtype, args.expert_dtype) for _ in range(args.repeat)]
    layout = loads[0][0].layout
    rate = statistics.median(report.bytes_per_s for report, _, _ in loads)
    result = {
        "expert_dtype": args.expert_dtype,
        "store_bytes": layout.total_bytes,
        "bytes_per_s": rate,
        "cat_bytes_per_s": reference,
        "ratio_to_cat": rate / reference,
        "load_s": statistics.median(report.seconds for report, _, _ in loads),
        "process_s": statistics.median(seconds for _, seconds, _ in loads),
        "peak_beside_store_bytes": max(peak for _, _, peak in loads),
    }
    if args.json:
        print(json.dumps(result, indent=2))
        return 0
    table = Table(title=f"Loading {layout.total_bytes / 1e9:.2f} GB of experts")
    table.add_column("what")
    table.add_column("figure", justify="right")
    table.add_row("load", f"{rate / 1e9:.2f} GB/s ({result['ratio_to_cat']:.2f} of cat)")
    table.add_row("cat through a pipe", f"{reference / 1e9:.2f} GB/s")
    table.add_row("reading and converting", f"{result['load_s']:.1f} s")
    table.add_row("the whole process", f"{result['process_s']:.1f} s")
    table.add_row("memory beside the store", f"{result['peak_beside_store_bytes'] / 1e6:.0f} MB")
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
