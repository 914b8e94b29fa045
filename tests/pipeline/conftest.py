"""Whole pipelines on tiny checkpoints: real processes, from a command line to its tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.process.pipelines import Processes

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    logs = tmp_path / "logs"
    logs.mkdir()
    started = Processes(logs)
    try:
        yield started
    finally:
        started.end()
