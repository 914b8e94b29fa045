"""`headrace simulate`: what would this machine do? A routing trace on a virtual clock."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.cli.plotting import need_matplotlib
from orchestrator.core.fill_choice import FILL_BEHIND_MODES
from orchestrator.core.policies import POLICY_NAMES
from orchestrator.core.split_rules import PLANNER_NAMES
from orchestrator.simulate.profiles import MAX_EXPERT_BYTES
from protocol.errors import EXIT_OK, UserError
from protocol.sizes import size
from protocol.worker_flags import number

if TYPE_CHECKING:
    from orchestrator.simulate.baselines import Contender
    from orchestrator.simulate.profiles import MachineProfile
    from orchestrator.simulate.study import Study
    from orchestrator.simulate.trace import RoutingTrace

_DEFAULT_STEPS = 2000
_SWEEPS = {
    "slots": "expert slots, % of all experts",
    "link": "link rate, GB/s",
    "host": "host rate, GB/s",
}

_EPILOG = """\
examples:
  headrace simulate --trace FILE.npz --profile laptop --slots 25%
  headrace simulate --trace FILE.npz --profile my-machine.toml --slots 10% --planner fill-only
  headrace simulate --trace FILE.npz --profile desktop --sweep slots=5,10,25,50 --plot sweep.svg

The same directory, policies and planners as in serving decide; only the clock is virtual."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register `simulate` with the command line."""
    parser = subparsers.add_parser(
        "simulate",
        help="what would a machine do with a recorded routing trace",
        description="Replay a routing trace through the core on a virtual clock, with the rates of "
        "a\nmachine profile, against bounds and other ways to do it.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--trace", type=Path, metavar="FILE", required=True, help=".npz trace")
    parser.add_argument(
        "--profile", metavar="NAME|FILE", default="desktop", help="machine (default: %(default)s)"
    )
    parser.add_argument("--slots", metavar="N|P%", default="25%", help="default: 25%%")
    parser.add_argument("--policy", choices=POLICY_NAMES, help="default: reuse-tables")
    parser.add_argument("--planner", choices=PLANNER_NAMES, help="default: fluid")
    parser.add_argument(
        "--fill-behind",
        choices=FILL_BEHIND_MODES,
        help="also copy experts that ran on the CPU, while the link idles (default: auto with the "
        "planner fluid, else off)",
    )
    parser.add_argument(
        "--prefetch",
        type=number(int, 0, "layers"),
        default=0,
        metavar="N",
        help="guess what the next N layers will ask for, and copy it (default: 0, none)",
    )
    parser.add_argument(
        "--steps",
        default=str(_DEFAULT_STEPS),
        metavar="N|all",
        help="decode steps to replay (default: %(default)s)",
    )
    parser.add_argument(
        "--skip", type=number(int, 0, "steps"), default=0, metavar="N", help="steps to pass over"
    )
    size = parser.add_mutually_exclusive_group()
    size.add_argument(
        "--expert-bytes",
        type=number(int, 1, "bytes", MAX_EXPERT_BYTES),
        metavar="N",
        help="default: what the trace says, else the profile",
    )
    size.add_argument("--model-shape", metavar="NAME", help="take the size of this model's experts")
    parser.add_argument("--weight-format", help="with --model-shape: bf16, fp8, q4_k, mxfp4, ..")
    parser.add_argument(
        "--baselines", action="store_true", help="also replay other ways (4 more replays)"
    )
    parser.add_argument(
        "--sweep",
        metavar="WHAT=A,B,..",
        help="replay for each value of slots (%%), link or host (GB/s)",
    )
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="with --sweep: a .png, .svg or .pdf"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    parser.set_defaults(func=run_simulate)


def run_simulate(options: argparse.Namespace) -> int:
    """Returns 0; raises UserError for bad input."""
    import msgspec

    from orchestrator.simulate.profiles import load_profile
    from orchestrator.simulate.study import parse_slots, study
    from orchestrator.simulate.trace import read_trace

    profile = load_profile(options.profile)
    sweep = None if options.sweep is None else _parse_sweep(options.sweep)
    if options.plot is not None:
        if sweep is None:
            raise UserError("--plot shows a sweep; say which with --sweep.")
        need_matplotlib(options.plot)
    num_steps = _parse_steps(options.steps)
    trace = read_trace(options.trace).part(options.skip, num_steps)
    expert_bytes = _expert_bytes(options, trace, profile)
    way = _way(options)
    if sweep is None:
        slots = parse_slots(options.slots, trace.total_experts)
        answer = study(trace, profile, expert_bytes, slots, way, has_baselines=options.baselines)
        if options.json:
            sys.stdout.write(msgspec.json.encode(answer).decode() + "\n")
        else:
            _show(answer)
        return EXIT_OK

    what, values = sweep
    answers = [
        study(
            trace,
            machine,
            expert_bytes,
            parse_slots(slots_text, trace.total_experts),
            way,
            has_baselines=True,
        )
        for machine, slots_text in (_at(profile, options.slots, what, value) for value in values)
    ]
    if options.json:
        rows = [
            {"value": value, **msgspec.to_builtins(answer)}
            for value, answer in zip(values, answers, strict=True)
        ]
        sys.stdout.write(msgspec.json.encode({"sweep": what, "rows": rows}).decode() + "\n")
    else:
        _show_sweep(what, values, answers)
    if options.plot is not None:
        _plot(what, values, answers, options.plot)
    return EXIT_OK


# ---- options ----


def _way(options: argparse.Namespace) -> Contender:
    from orchestrator.simulate.baselines import HEADRACE, Contender

    planner = options.planner or HEADRACE.planner
    behind = options.fill_behind
    if behind is None:
        behind = HEADRACE.fill_behind if planner == HEADRACE.planner else "off"
    return Contender(options.policy or HEADRACE.policy, planner, behind, options.prefetch)


def _parse_steps(text: str) -> int | None:
    if text == "all":
        return None
    try:
        count = int(text) if text.isascii() else 0
    except ValueError:
        count = 0
    if count < 1:
        raise UserError(f"--steps is a whole number from 1 on or 'all', not {text[:40]!r}.")
    return count


def _parse_sweep(text: str) -> tuple[str, list[float]]:
    what, _, listed = text.partition("=")
    try:
        values = [float(value) for value in listed.split(",")]
    except ValueError:
        values = []
    if what not in _SWEEPS or not values or not all(0 < value < 1e6 for value in values):
        raise UserError(
            f"--sweep is slots, link or host with positive values, as in slots=5,10,25; "
            f"not {text[:60]!r}."
        )
    return what, values


def _at(profile: MachineProfile, slots: str, what: str, value: float) -> tuple[MachineProfile, str]:
    """The machine and the slots at one value of a sweep. A changed rate voids measured rates
    beside each other: they follow from the two."""
    import msgspec

    if what == "slots":
        return profile, f"{value:g}%"
    changed: dict[str, float | None] = {f"{what}_gbps": value}
    changed |= {"link_beside_cpu_gbps": None, "cpu_beside_link_gbps": None}
    return msgspec.structs.replace(profile, **changed), slots


def _expert_bytes(options: argparse.Namespace, trace: RoutingTrace, profile: MachineProfile) -> int:
    from orchestrator.simulate.profiles import WEIGHT_BITS, model_shape

    if options.weight_format is not None:
        if options.model_shape is None:
            raise UserError("--weight-format needs --model-shape.")
        if options.weight_format not in WEIGHT_BITS:
            known = ", ".join(WEIGHT_BITS)
            raise UserError(f"There is no weight format {options.weight_format!r}; known: {known}.")
    if options.expert_bytes is not None:
        return int(options.expert_bytes)
    if options.model_shape is not None:
        shape = model_shape(options.model_shape)
        if (shape.num_layers, shape.num_experts) != (trace.num_layers, trace.num_experts):
            raise UserError(
                f"The trace has {trace.num_layers} layers of {trace.num_experts} experts, but "
                f"{options.model_shape} has {shape.num_layers} of {shape.num_experts}."
            )
        return shape.expert_bytes(options.weight_format)
    return trace.expert_bytes or profile.expert_bytes


# ---- output ----


def _show(answer: Study) -> None:
    from rich.table import Table

    from orchestrator.cli.terminal import console_for

    console = console_for(sys.stdout)
    console.print(
        f"{answer.model}: {answer.num_steps} steps on {answer.profile}, {answer.num_slots} slots "
        f"of {size(answer.expert_bytes)}; {answer.policy}, {answer.planner}, "
        f"fill-behind {answer.fill_behind}",
        style="bold",
    )
    console.print(
        f"{answer.tokens_per_s:.1f} tokens/s ({answer.step_us:.0f} us a step); hit rate "
        f"{answer.hit_rate:.3f} (LRU {answer.lru_hit_rate:.3f}, Belady {answer.belady_hit_rate:.3f}"
        f"); the policy alone, every miss filled: {answer.policy_hit_rate:.3f}"
        + (
            ""
            if answer.policy_gap_closed is None
            else f", {answer.policy_gap_closed:.0%} of the gap"
        )
    )
    console.print(
        f"{answer.fills} fills, {answer.fills_behind} of them behind ({answer.copied_gb:.1f} GB); "
        f"{answer.cpu_experts} experts on the CPU; idle: link {answer.link_idle:.0%}, "
        f"CPU {answer.cpu_idle:.0%}"
    )
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("held against")
    table.add_column("us a step", justify="right")
    table.add_column("its time over ours", justify="right")
    for name, step_us in [*answer.bounds_us.items(), *answer.baselines_us.items()]:
        table.add_row(name, f"{step_us:.0f}", f"{step_us / answer.step_us:.2f}")
    console.print(table)


def _show_sweep(what: str, values: list[float], answers: list[Study]) -> None:
    from rich.table import Table

    from orchestrator.cli.terminal import console_for

    first = answers[0]
    table = Table(box=None, padding=(0, 2, 0, 0), title=f"{first.model} on {first.profile}")
    for heading in (_SWEEPS[what], "tokens/s", "hit rate", "fills", "link idle", "CPU idle"):
        table.add_column(heading, justify="right")
    for name in first.baselines_us:
        table.add_column(f"{name} tokens/s", justify="right")
    for value, answer in zip(values, answers, strict=True):
        table.add_row(
            f"{value:g}",
            f"{answer.tokens_per_s:.1f}",
            f"{answer.hit_rate:.3f}",
            str(answer.fills),
            f"{answer.link_idle:.0%}",
            f"{answer.cpu_idle:.0%}",
            *(f"{1e6 / step_us:.1f}" for step_us in answer.baselines_us.values()),
        )
    console_for(sys.stdout).print(table)


def _plot(what: str, values: list[float], answers: list[Study], path: Path) -> None:
    import matplotlib  # type: ignore[import-not-found, unused-ignore]

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    axes.plot(values, [answer.tokens_per_s for answer in answers], "o-", lw=2.5, label="headrace")
    # Some may lie on top of each other: dashes of different lengths show both.
    for index, name in enumerate(answers[0].baselines_us):
        speeds = [1e6 / answer.baselines_us[name] for answer in answers]
        label = "static, placed in hindsight" if name == "static" else name
        axes.plot(values, speeds, ".", ls=(0, (6 - index, 2 + index)), lw=1, label=label)
    best = [1e6 / answer.bounds_us["Belady, best split"] for answer in answers]
    axes.plot(values, best, ":", color="grey", label="bound: Belady from empty, best split")
    axes.set_xlabel(_SWEEPS[what])
    axes.set_ylabel("tokens/s")
    axes.set_ylim(bottom=0)
    axes.set_title(f"{answers[0].model} on {answers[0].profile}")
    axes.grid(alpha=0.3)
    axes.legend()
    try:
        figure.savefig(path)
    except OSError as error:
        raise UserError(f"The plot cannot be written: {error}.") from None
    finally:
        pyplot.close(figure)
