"""What the latency log costs: tokens/s with it and without it, in turns, on two pipelines.

    python -m benchmarks.log_cost [--json]

Both pipelines stay up; requests alternate between them, so that a change of the machine's mood
meets both. An idle pipeline burns nothing. The figure is the median of the ratios of neighbouring
runs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parent.parent
_HEADRACE = (sys.executable, "-m", "orchestrator.cli.main")
_START_TIMEOUT_S = 300.0


@contextlib.contextmanager
def pipeline(model: Path, run_dir: Path, *flags: object) -> Iterator[Path]:
    """A supervised pipeline, ready to generate until the end of the context."""
    process = subprocess.Popen(
        [*_HEADRACE, "orchestrator", "--supervise", "--model", model, "--run-dir", run_dir,
         *map(str, flags)],
        cwd=ROOT,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + _START_TIMEOUT_S
        while not _is_ready(run_dir):
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit("the pipeline did not start; its own message is above")
            time.sleep(0.5)
        yield run_dir
    finally:
        process.terminate()
        process.wait(30)


def _is_ready(run_dir: Path) -> bool:
    done = subprocess.run(
        [*_HEADRACE, "status", "--run-dir", run_dir, "--json"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    return bool(done.stdout) and json.loads(done.stdout)["is_ready"]


def generate(run_dir: Path, num_tokens: int) -> dict[str, Any]:
    """One request's result."""
    done = subprocess.run(
        [*_HEADRACE, "generate", "--run-dir", run_dir, "--prompt", "def main():", "--ignore-eos",
         "--max-tokens", str(num_tokens), "--json"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.log_cost",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "demo", metavar="DIR")
    parser.add_argument("--tokens", type=int, default=200, help="per run")
    parser.add_argument("--repeat", type=int, default=7, help="pairs of runs")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # Stated rates: both split the same way.
        flags = ("--slots", "25%", "--host-gbps", 2, "--link-gbps", 1)
        with (
            pipeline(args.model, folder / "off", *flags) as off,
            pipeline(args.model, folder / "on", *flags, "--latency-log", folder / "log") as on,
        ):
            for warm_up in (off, on):
                generate(warm_up, 20)
            pairs = [
                (generate(off, args.tokens), generate(on, args.tokens)) for _ in range(args.repeat)
            ]
    ratios = [b["tokens_per_s"] / a["tokens_per_s"] for a, b in pairs]
    result = {
        "tokens_per_s_off": statistics.median(a["tokens_per_s"] for a, _ in pairs),
        "tokens_per_s_on": statistics.median(b["tokens_per_s"] for _, b in pairs),
        "ratio_on_to_off": statistics.median(ratios),
        "ratios": sorted(ratios),
    }
    if args.json:
        print(json.dumps(result, indent=2))
        return 0
    table = Table(title="The latency log, off and on")
    table.add_column("")
    table.add_column("tokens/s", justify="right")
    table.add_row("off", f"{result['tokens_per_s_off']:.1f}")
    table.add_row("on", f"{result['tokens_per_s_on']:.1f}")
    console = Console()
    console.print(table)
    console.print(
        f"on / off: median {result['ratio_on_to_off']:.3f} of {len(ratios)} pairs, "
        f"from {min(ratios):.3f} to {max(ratios):.3f}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
