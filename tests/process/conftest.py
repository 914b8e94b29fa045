"""A tiny checkpoint, and processes that end with their test."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.process.pipelines import Processes

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.checkpoints import make_checkpoint

    return make_checkpoint("qwen3_moe", tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    logs = tmp_path / "logs"
    logs.mkdir()
    started = Processes(logs)
    try:
        yield started
    finally:
        started.end()
