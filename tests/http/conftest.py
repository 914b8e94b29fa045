"""One server with the demo model for all tests of this folder that need a real one."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

import pytest

from tests.http.servers import KEY, Server
from tests.process.pipelines import Processes

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(scope="package")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with a key, a small queue and little patience between comments."""
    folder = tmp_path_factory.mktemp("server")
    processes = Processes(folder)
    try:
        started = Server(
            processes,
            folder / "run",
            "--api-key", KEY, "--max-queue", "12", "--keep-alive", "0.2", "--max-body-mb", "1",
            "--cors-origins", "https://pages.example", "--max-messages", "50",
        )  # fmt: skip
        started.wait_until_ready()
        yield started
        started.client.close()
    finally:
        processes.end()


@pytest.fixture
def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    logs = tmp_path / "logs"
    logs.mkdir()
    started = Processes(logs)
    try:
        yield started
    finally:
        started.end()
