"""`headrace calibrate`: measure link and CPU, alone and beside each other, and keep the result."""

from __future__ import annotations

import argparse
import asyncio
import datetime
import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.cli.options import DEVICES, DTYPES, add_model
from protocol.errors import UserError
from protocol.sizes import size
from protocol.worker_flags import number

if TYPE_CHECKING:
    from expert_store.formats import WeightFormat
    from expert_store.layout import Dtype, ExpertForm
    from orchestrator.calibrate.profile import CalibrationProfile

_DESCRIPTION = """\
Measure how fast this machine computes experts on the CPU and sends them over the link, each alone
and both at once, with the workers that serve. The result is kept in the user's cache directory and
used from the next `headrace generate`, `serve` or `orchestrator` on; while serving, rates are
measured all the time and followed when they change. Nothing else should run meanwhile."""

_EPILOG = """\
examples:
  headrace calibrate --model DIR                    for the experts of a model
  headrace calibrate --hidden 2880 --intermediate 2880 --dtype bfloat16 --plot rates.svg
  headrace calibrate --model DIR --device cuda
  headrace calibrate --quick --json"""

_GIB = 1 << 30


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register `calibrate` with the command line."""
    parser = subparsers.add_parser(
        "calibrate",
        help="measure link and CPU",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_model(parser, required=False)
    parser.add_argument(
        "--hidden",
        type=number(int, 32, "values"),
        default=2048,
        metavar="N",
        help="without --model: size of a hidden row (default: %(default)s)",
    )
    parser.add_argument(
        "--intermediate",
        type=number(int, 32, "values"),
        default=768,
        metavar="N",
        help="without --model: size between an expert's projections (default: %(default)s)",
    )
    parser.add_argument("--dtype", choices=DTYPES, default="auto", help="type of the weights")
    parser.add_argument(
        "--device", choices=DEVICES, default="cpu", help="where slots lie (default: %(default)s)"
    )
    parser.add_argument(
        "--emulate-link-gbps",
        type=number(float, 1e-9, "GB/s"),
        metavar="Z",
        help="pace fills to Z GB/s, as in generate",
    )
    parser.add_argument(
        "--memory-gb",
        type=number(float, 0.01, "GB"),
        metavar="X",
        help="size of the made-up experts; by default enough that no cache holds them, and at most "
        "half of what is free",
    )
    parser.add_argument("--quick", action="store_true", help="under ten seconds, less exact")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the result (.png, .svg)")
    parser.add_argument("--json", action="store_true", help="print the profile as JSON")
    parser.set_defaults(func=run)


def run(options: argparse.Namespace) -> int:
    """Returns the exit code; raises UserError."""
    import msgspec

    from orchestrator.calibrate.profile import cache_dir, prepare_folder, save_profile
    from orchestrator.cli.plotting import need_matplotlib

    if options.plot is not None:
        need_matplotlib(options.plot)
    folder = cache_dir(os.environ)
    prepare_folder(folder)
    profile = asyncio.run(_measure(options))
    # Told before it is kept: minutes of measuring are not lost to a disk that is full by now.
    if options.json:
        sys.stdout.write(msgspec.json.encode(profile).decode() + "\n")
    else:
        _show(profile)
    path = save_profile(profile, folder)
    if not options.json:
        print(f"kept in {path}")
    if options.plot is not None:
        from orchestrator.calibrate.picture import draw

        draw(profile, options.plot)
    return 0


async def _experts(options: argparse.Namespace) -> tuple[ExpertForm, Dtype, WeightFormat | None]:
    from orchestrator.calibrate.store import gated_form
    from orchestrator.loading import LoaderFault, inspect_model

    if options.model is None:
        dtype: Dtype = "bfloat16" if options.dtype == "auto" else options.dtype
        return gated_form(options.hidden, options.intermediate), dtype, None
    try:
        inspection = await inspect_model(options.model, options.dtype, "auto")
    except LoaderFault as fault:
        raise UserError(f"The model cannot be looked at: {fault}.") from None
    layout = inspection.layout
    return layout.form, layout.dtype, layout.weights


async def _measure(options: argparse.Namespace) -> CalibrationProfile:
    from expert_store.memory import memory_room
    from orchestrator.calibrate.bench import Bench
    from orchestrator.calibrate.course import QUICK, THOROUGH, measure
    from orchestrator.calibrate.profile import key_of, profile_of
    from orchestrator.calibrate.store import bench_layout, fill_store

    form, dtype, weights = await _experts(options)
    room_bytes = memory_room().available_bytes // 2
    wanted_bytes = _GIB // 2 if options.quick else max(2 * _GIB, 4 * _last_level_cache_bytes())
    if options.memory_gb is not None:
        wanted_bytes = int(options.memory_gb * 1e9)
    layout = bench_layout(form, dtype, weights, min(wanted_bytes, room_bytes))
    if layout.total_bytes > room_bytes:
        raise UserError(
            f"A calibration needs {size(layout.total_bytes)} and at most half of what is "
            f"free, {size(room_bytes)}, is taken; free memory."
        )
    paced = (options.emulate_link_gbps or 0.0) * 1e9
    fd = os.memfd_create("headrace-calibration", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, layout.total_bytes)
        with _Progress() as progress, tempfile.TemporaryDirectory(prefix="headrace-") as folder:
            fill_store(fd, layout, lambda done, total: progress.show(0.0, "making experts"))
            progress.show(0.0, "starting workers")
            async with Bench(
                layout,
                fd,
                Path(folder) / "run",
                device=options.device,
                emulate_link_bytes_per_s=paced,
            ) as bench:
                plan = QUICK if options.quick else THOROUGH
                measured = await measure(bench.driver, layout, plan, progress.show)
                threads, isa = bench.num_threads, bench.isa
    finally:
        os.close(fd)
    return profile_of(
        measured,
        key_of(layout, options.device, paced),
        measured_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        expert_bytes=layout.expert_bytes,
        num_threads=threads,
        isa=isa,
    )


def _last_level_cache_bytes() -> int:
    """Of the first processor; 0 where the system does not say."""
    largest = 0
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        try:
            text = path.read_text().strip()
            largest = max(largest, int(text.rstrip("KM")) << (20 if text.endswith("M") else 10))
        except (OSError, ValueError):
            continue
    return largest


class _Progress:
    """A bar on stderr where a person watches, else nothing."""

    def __enter__(self) -> _Progress:
        from rich.progress import Progress

        from orchestrator.cli.terminal import console_for

        self._bar = Progress(
            console=console_for(sys.stderr), transient=True, disable=not sys.stderr.isatty()
        )
        self._task = self._bar.add_task("", total=1.0)
        self._bar.start()
        return self

    def show(self, part: float, text: str) -> None:
        self._bar.update(self._task, completed=part, description=text)

    def __exit__(self, *details: object) -> None:
        self._bar.stop()


def _show(profile: CalibrationProfile) -> None:
    from rich.table import Table

    from orchestrator.cli.terminal import console_for

    console = console_for(sys.stdout)
    key = profile.key
    experts = f"{key.weight_format} experts of {size(profile.expert_bytes)}"
    console.print(f"{key.machine}; {experts}; link: {key.link}", style="bold")
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("", "alone", "beside the other", "error", "before the first byte"):
        table.add_column(heading, justify="left" if not heading else "right")
    for name, alone, beside, error, fixed in (
        (
            f"CPU, {profile.num_threads} threads, {profile.isa}",
            profile.cpu_bytes_per_s,
            profile.cpu_beside_link_bytes_per_s,
            profile.cpu_error_part,
            profile.cpu_fixed_s,
        ),
        (
            "link",
            profile.link_bytes_per_s,
            profile.link_beside_cpu_bytes_per_s,
            profile.link_error_part,
            profile.link_fixed_s,
        ),
    ):
        table.add_row(
            name,
            f"{alone / 1e9:.2f} GB/s",
            f"{beside / 1e9:.2f} GB/s",
            f"{error:.1%}",
            f"{fixed * 1e6:.0f} us",
        )
    console.print(table)
    console.print(
        f"one more row of an expert costs the CPU {profile.cpu_row_part:.0%} of the first"
    )
    if profile.flat_from_bytes is None:
        console.print(
            "the CPU's rate still falls with the working set: with --memory-gb for a larger one it "
            "may be lower",
            style="yellow",
        )
    else:
        console.print(f"the CPU's rate is flat from {profile.flat_from_bytes / 1e6:.0f} MB on")
