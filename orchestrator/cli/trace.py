"""`headrace trace`: record which experts a model chooses, or look at a recording."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from orchestrator.cli.generate import add_flags, run_generate
from protocol.errors import UserError

_DESCRIPTION = """\
record: generate a text as `headrace generate` does, with all its flags, and write which experts
every decode step chose. show: what is in such a file. Traces feed `headrace simulate --trace` and
`--replay-routing`; docs/policies.md has their form. No word of any prompt is in them."""

_EPILOG = """\
examples:
  headrace trace record run.npz --model DIR --prompt "Once upon a time" --max-tokens 500
  headrace trace show run.npz"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register `trace` with the command line."""
    parser = subparsers.add_parser(
        "trace",
        help="record or show a routing trace",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("action", choices=("record", "show"))
    parser.add_argument("file", type=Path, metavar="FILE.npz")
    add_flags(parser, is_prompt_required=False)
    parser.set_defaults(func=run)


def run(options: argparse.Namespace) -> int:
    """Returns the exit code; raises UserError."""
    if options.action == "show":
        return _show(options.file, is_json=options.json)
    if options.model is None:
        raise UserError("headrace trace record needs --model; see headrace trace --help.")
    if options.prompt is None and options.prompt_file is None:
        raise UserError("headrace trace record needs --prompt; see headrace trace --help.")
    options.record_routing = options.file
    return run_generate(options)


def _show(path: Path, *, is_json: bool) -> int:
    from orchestrator.simulate.bounds import forced_fill_misses
    from orchestrator.simulate.trace import read_trace

    trace = read_trace(path)
    kept = trace.num_layers * trace.top_k
    again = 1 - sum(forced_fill_misses(trace, "lru-layer", kept)) / trace.ids.size
    facts = {
        "model": trace.model,
        "steps": trace.num_steps,
        "layers": trace.num_layers,
        "experts": trace.num_experts,
        "top_k": trace.top_k,
        "expert_bytes": trace.expert_bytes,
        # What a cache of one token's experts would hit.
        "shared_with_last_token": round(again, 4),
    }
    if is_json:
        print(json.dumps(facts))
    else:
        for name, value in facts.items():
            print(f"{name.replace('_', ' '):<24}{value}")
    return 0
