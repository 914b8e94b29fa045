"""What `headrace top` shows of one answer."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console

from orchestrator.cli.top import view

STATS: dict[str, Any] = {
    "model": "demo",
    "state": "ready",
    "text": "",
    "uptime_s": 60.0,
    "requests": {"running": 1, "waiting": 0, "ended": {"stop": 2}},
    "window": {
        "tokens_per_s": 9.0,
        "hit_rate": 0.5,
        "split_q_ratio": 0.25,
        "ipc_wait_us_per_layer": 10.0,
        "gpu_busy": 0.5,
        "link_busy": 0.5,
        "link_bytes_per_s": 1e9,
        "cpu_busy": 0.5,
        "cpu_bytes_per_s": 1e9,
    },
    "experts": {
        "hit_rate": 0.5,
        "fill_bytes": 3_800_000,
        "cpu_bytes": 0,
        "calibrated_link_bytes_per_s": 1e9,
        "calibrated_host_bytes_per_s": 1e9,
    },
    "slots": {
        "resident": 12,
        "total": 16,
        "resident_per_layer": [0, 4, 8],
        "experts_per_layer": [8, 8, 8],
    },
    "workers": [],
    "restarts": {},
}


def test_cells_and_columns_have_a_legend() -> None:
    screen = io.StringIO()
    Console(file=screen, width=160).print(view(STATS))
    shown = screen.getvalue()
    assert "[  \u2592\u2592\u2588\u2588] 12 of 16 slots" in shown
    for words in ("\u2592 half", "\u2588 all", "two cells per layer", "measured: what the split"):
        assert words in shown
    assert "3.80 MB" in shown
