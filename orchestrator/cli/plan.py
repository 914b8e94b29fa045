"""`headrace plan`: does a model fit this machine? Answered from config.json and file headers."""

from __future__ import annotations

import argparse
import asyncio
import sys
from typing import TYPE_CHECKING

from orchestrator.cli.options import DEVICES, DTYPES, add_dense_dtype, add_model, expert_dtype
from protocol.errors import EXIT_FAULT, EXIT_OK, UserError
from protocol.worker_flags import number

if TYPE_CHECKING:
    from pathlib import Path

    from orchestrator.fit import Fit, FitFinding

_EPILOG = """\
examples:
  headrace plan --model DIR --vram-gb 24
  headrace plan --model DIR --vram-gb 24 --context 32768 --dtype bfloat16
  headrace plan --model DIR --slots 25% --device cpu

Exit code 0 when it fits, 1 when something does not."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register `plan` with the command line."""
    parser = subparsers.add_parser(
        "plan",
        help="does a model fit this machine, before anything is loaded",
        description="Say what a model needs (experts, dense weights, KV cache), how many expert "
        "slots\na VRAM budget holds, and whether host memory and limits allow it. Loads nothing.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_model(parser, required=True)
    size = parser.add_mutually_exclusive_group()
    size.add_argument(
        "--vram-gb",
        type=number(float, 1e-9, "GB"),
        metavar="X",
        help="device memory to plan for, in GB (10^9 bytes): how many slots fit?",
    )
    size.add_argument("--slots", metavar="N|P%", help="plan for so many slots (default: 25%%)")
    parser.add_argument("--device", choices=DEVICES, help="default: cuda with --vram-gb, else cpu")
    parser.add_argument("--dtype", choices=DTYPES, default="auto", help="default: %(default)s")
    parser.add_argument(
        "--expert-dtype",
        type=expert_dtype,
        metavar="NAME",
        default="auto",
        help="plan for experts in this format, as `headrace generate` takes it (default: auto)",
    )
    add_dense_dtype(parser)
    parser.add_argument(
        "--context",
        type=number(int, 1, "tokens"),
        metavar="N",
        help="tokens of KV cache to plan for (default: the model's own limit, at most 8192)",
    )
    parser.add_argument(
        "--max-num-seqs",
        type=number(int, 1, "sequences"),
        metavar="N",
        help="requests at once, each with such a cache (default: 4, as when serving)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    parser.set_defaults(func=run_plan)


def run_plan(options: argparse.Namespace) -> int:
    """Returns 0 when everything fits, 1 when not; raises UserError for bad input."""
    import msgspec

    from expert_store.memory import memory_room
    from orchestrator.fit import Question, plan_fit
    from orchestrator.loading import LoaderFault, inspect_model
    from orchestrator.settings import DEFAULT_MAX_NUM_SEQS, MANY_EXPERTS, count_slots
    from protocol.machine import read_memlock, read_shm

    if options.slots is not None:
        # A mistyped number is told before the model is looked at, which takes seconds.
        count_slots(options.slots, MANY_EXPERTS)
    dense = options.dense_dtype or "auto"
    wanted = (options.model, options.dtype, options.expert_dtype, dense)
    try:
        inspection = asyncio.run(inspect_model(*wanted))
    except LoaderFault as fault:
        raise UserError(f"The model cannot be looked at: {fault}.") from None
    device = options.device or ("cuda" if options.vram_gb is not None else "cpu")
    question = Question(
        device=device,
        vram_bytes=None if options.vram_gb is None else int(options.vram_gb * 1e9),
        slots=options.slots,
        context=options.context,
        max_num_seqs=options.max_num_seqs or DEFAULT_MAX_NUM_SEQS,
    )
    room = memory_room()
    fit = plan_fit(inspection, question, room, read_memlock(), read_shm())
    fit = msgspec.structs.replace(fit, findings=fit.findings + text_findings(options.model))
    if options.json:
        sys.stdout.write(msgspec.json.encode(fit).decode() + "\n")
    else:
        _show(fit)
    return EXIT_OK if fit.fits else EXIT_FAULT


def text_findings(model_dir: Path) -> list[FitFinding]:
    """What keeps text from becoming tokens. It has no size, so the model fits all the same."""
    from orchestrator.fit import FitFinding
    from orchestrator.text_model import TextModel

    told: list[str] = []
    try:
        TextModel.load(model_dir, tell=told.append)
    except UserError as error:
        told.append(f"{error} `headrace generate` and `serve` refuse the model as it is.")
    return [FitFinding("text", "note", sentence) for sentence in told]


def _types(fit: Fit) -> str:
    return fit.dtype if fit.expert_format is None else f"{fit.dtype}, experts {fit.expert_format}"


def _show(fit: Fit) -> None:
    from rich.table import Table
    from rich.text import Text

    from orchestrator.cli.terminal import console_for
    from protocol.sizes import size

    console = console_for(sys.stdout)
    console.print(f"{fit.model} ({fit.architecture}, {_types(fit)})", style="bold")
    console.print(
        f"{fit.total_experts} experts in {fit.num_layers} MoE layers, {fit.top_k} per token, "
        f"{size(fit.expert_bytes)} each: {size(fit.store_bytes)}; dense weights "
        f"{size(fit.dense_bytes)}; KV cache {size(fit.kv_bytes)} for "
        f"{fit.max_num_seqs} x {fit.context} tokens"
    )
    table = Table(box=None, padding=(0, 2, 0, 0))
    colours = {"yes": "green", "note": "yellow", "no": "bold red"}
    for finding in fit.findings:
        verdict = Text(finding.verdict, style=colours[finding.verdict])
        table.add_row(finding.resource, verdict, finding.text)
    console.print(table)
    console.print("It fits." if fit.fits else "It does not fit.", style="bold")
