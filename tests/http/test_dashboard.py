"""The dashboard asks for series that the server has."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

from orchestrator.http.metrics import ServerMetrics
from orchestrator.http.stats import StatsWindow
from tests.http.engines import StillEngine
from tests.process.pipelines import REPO_ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator


def asked() -> Iterator[str]:
    dashboard = json.loads((REPO_ROOT / "docs/grafana-dashboard.json").read_text())
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            yield from re.findall(r"headrace:\w+", target["expr"])


def test_every_series_of_the_dashboard_exists() -> None:
    engine = StillEngine()
    metrics = ServerMetrics("model")
    metrics.watch(engine, StatsWindow(engine, metrics).achieved)
    metrics.saw_answer("/health", 200)
    metrics.saw_end("stop", 1, 1, 0.5)
    told = set(re.findall(r"^(headrace:\w+)", metrics.text().decode(), re.MULTILINE))
    names = set(asked())
    assert len(names) > 15
    assert names <= told
