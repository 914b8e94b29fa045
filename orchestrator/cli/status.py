"""`headrace status`: who is there, and what a running pipeline is doing."""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING

from orchestrator.cli.options import add_run_dir
from protocol.errors import EXIT_FAULT, EXIT_OK

if TYPE_CHECKING:
    from pathlib import Path

_EPILOG = """\
example:
  headrace status --run-dir /run/user/1000/headrace

Exit code 0 when the pipeline can generate, 1 when something is missing."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register `status` with the command line."""
    parser = subparsers.add_parser(
        "status",
        help="who is there, and what is a running pipeline doing",
        description="Ask a running orchestrator how far it is and which workers have joined.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_run_dir(parser, "one per user")
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    parser.set_defaults(func=run_status)


def run_status(options: argparse.Namespace) -> int:
    """Returns 0 when ready, 1 when not; raises UserError when nobody answers."""
    import msgspec

    from orchestrator.client import ask_status
    from protocol.run_dir import RunDir, default_run_dir

    status = ask_status(RunDir(options.run_dir or default_run_dir(os.environ)))
    if options.json:
        sys.stdout.write(msgspec.json.encode(status).decode() + "\n")
    else:
        _print(status, options.run_dir)
    return EXIT_OK if status.is_ready else EXIT_FAULT


def _print(status: object, run_dir: Path | None) -> None:
    from rich.table import Table

    from orchestrator.cli.terminal import console_for
    from protocol.messages import Status

    assert isinstance(status, Status)
    console = console_for(sys.stdout)
    console.print(f"{'ready' if status.is_ready else 'not ready'}: {status.text}")
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for name in ("role", "process", "state", "rate", "threads", "restarts", "memory"):
        table.add_column(name)
    for worker in status.workers:
        table.add_row(
            worker.role,
            str(worker.pid),
            "ready" if worker.is_ready else "starting",
            f"{worker.bytes_per_s / 1e9:.2f} GB/s" if worker.bytes_per_s else "",
            str(worker.capabilities.num_threads),
            str(worker.num_restarts),
            worker.capabilities.numa_note,
        )
    if status.workers:
        console.print(table)
    starting = {worker.role for worker in status.workers if not worker.is_ready}
    for role in status.missing_roles:
        if role in starting:
            continue  # it is in the table, and a second one would be sent away
        where = "" if run_dir is None else f" --run-dir {run_dir}"
        console.print(f"missing: {role}; start `headrace {role.replace('_', '-')}{where}`")
    if status.num_dropped_messages:
        console.print(f"{status.num_dropped_messages} messages made no sense and were dropped")
