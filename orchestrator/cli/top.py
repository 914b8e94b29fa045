"""`headrace top`: watch a server, once a second."""

from __future__ import annotations

import argparse
import os
import sys
import time
from typing import TYPE_CHECKING, Any

from orchestrator.cli.asking import ServerAddress, add_server
from protocol.errors import EXIT_OK
from protocol.sizes import size
from protocol.worker_flags import number

if TYPE_CHECKING:
    from rich.console import RenderableType

_EPILOG = """\
example:
  headrace top --url http://127.0.0.1:8000
  headrace top --once            # print it once, for a script or a log"""

_SHADES = " \u2591\u2592\u2593\u2588"
_LEGEND = (
    "two cells per layer, the first layer left; blank: no expert of it is in a slot, "
    f"{_SHADES[1]} a quarter, {_SHADES[2]} half, {_SHADES[3]} three quarters, {_SHADES[4]} all\n"
    "busy and while busy: in the last 10 s; measured: what the split reckons with"
)


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register `top` with the command line."""
    parser = subparsers.add_parser(
        "top",
        help="watch a server: tokens, hits, bandwidths, workers",
        description="Watch a server: tokens/s, hit rate, split of the misses, GB/s of each "
        "branch,\nresidency of each layer, workers. Ctrl-C ends.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_server(parser)
    parser.add_argument("--once", action="store_true", help="print it once and end")
    parser.add_argument(
        "--every",
        type=number(float, 0.1, "seconds"),
        default=1.0,
        metavar="S",
        help="seconds between two looks (default: 1)",
    )
    parser.set_defaults(func=run)


def run(options: argparse.Namespace) -> int:
    """Returns the exit code; raises UserError when no server answers."""
    from rich.live import Live

    from orchestrator.cli.terminal import console_for

    server = ServerAddress(options, os.environ)
    console = console_for(sys.stdout)
    if options.once:
        console.print(view(server.get("/v1/stats")))
        return EXIT_OK
    first = view(server.get("/v1/stats"))
    with Live(first, console=console, screen=console.is_terminal, auto_refresh=False) as live:
        while True:
            time.sleep(options.every)
            live.update(view(server.get("/v1/stats")), refresh=True)


def view(stats: dict[str, Any]) -> RenderableType:
    """Everything on one screen, from an answer of GET /v1/stats."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    window, experts, requests = stats["window"], stats["experts"], stats["requests"]
    state = stats["state"] if stats["state"] == "ready" else f"{stats['state']}: {stats['text']}"
    head = Text(f"{stats['model']}  {state}, up {stats['uptime_s'] / 60:.0f} min")
    figures = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    figures.add_row("tokens/s", f"{window['tokens_per_s']:.1f}")
    figures.add_row(
        "requests",
        f"{requests['running']} running, {requests['waiting']} waiting, "
        f"{sum(requests['ended'].values())} ended",
    )
    figures.add_row(
        "hit rate", f"{window['hit_rate']:.1%} now, {experts['hit_rate']:.1%} since the start"
    )
    figures.add_row(
        "split", f"{window['split_q_ratio']:.1%} of misses filled, the others on the CPU"
    )
    figures.add_row("ipc wait", f"{window['ipc_wait_us_per_layer']:.0f} us per layer")
    return Group(head, "", figures, "", _branches(window, experts), "", _heat(stats["slots"]), "",
                 _workers(stats))  # fmt: skip


def _branches(window: dict[str, Any], experts: dict[str, Any]) -> RenderableType:
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for name in ("branch", "busy", "while busy", "measured", "since the start"):
        table.add_column(name)
    table.add_row("device", f"{window['gpu_busy']:.0%}", "", "", "")
    for name, path, key in (("link", "link", "fill_bytes"), ("CPU", "cpu", "cpu_bytes")):
        calibrated = "link" if path == "link" else "host"
        table.add_row(
            name,
            f"{window[f'{path}_busy']:.0%}",
            f"{window[f'{path}_bytes_per_s'] / 1e9:.2f} GB/s",
            f"{experts[f'calibrated_{calibrated}_bytes_per_s'] / 1e9:.2f} GB/s",
            size(experts[key]),
        )
    return table


def _heat(slots: dict[str, Any]) -> RenderableType:
    """One cell per layer, darker the more of its experts are in slots."""
    from rich.text import Text

    cells = ""
    for resident, total in zip(
        slots["resident_per_layer"], slots["experts_per_layer"], strict=True
    ):
        share = resident / total if total else 0.0
        cells += 2 * _SHADES[min(len(_SHADES) - 1, round(share * (len(_SHADES) - 1)))]
    heat = Text(
        f"residency by layer [{cells}] {slots['resident']} of {slots['total']} slots hold an expert"
    )
    return heat.append("\n").append(_LEGEND, "dim")


def _workers(stats: dict[str, Any]) -> RenderableType:
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for name in ("worker", "process", "state", "measured", "replaced"):
        table.add_column(name)
    for worker in stats["workers"]:
        rate = worker["bytes_per_s"]
        table.add_row(
            worker["role"],
            str(worker["pid"]),
            "ready" if worker["is_ready"] else "starting",
            f"{rate / 1e9:.2f} GB/s" if rate else "",
            str(stats["restarts"].get(worker["role"], 0)),
        )
    return table
