"""What `headrace status` is told: who is missing, and who only waits for the model."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, cast

import msgspec

from orchestrator import client
from orchestrator.cli.main import main
from orchestrator.settings import PipelineSettings
from orchestrator.standing import status_of
from protocol.messages import Capabilities, Epoch, Role, Status, WorkerStatus

if TYPE_CHECKING:
    import pytest

    from orchestrator.hub import Hub

SETTINGS = PipelineSettings(model_dir=Path("models"), run_dir=Path("run"))


class Nobody:
    """A hub that no worker has said HELLO to."""

    def num_ready(self, role: Role) -> int:
        return 0

    def statuses(self, num_restarts: object) -> list[WorkerStatus]:
        return []


def status(text: str, waiting: list[int] | None, *, is_supervising: bool = False) -> Status:
    settings = msgspec.structs.replace(SETTINGS, is_supervising=is_supervising)
    return status_of(settings, cast("Hub", Nobody()), text, {}, 0, waiting)


def test_who_waits_for_the_model_is_not_missing() -> None:
    """A worker is known by its command line, before it says who it is."""
    command = [sys.executable, "-c", "print(flush=True); input()", "dma_worker"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe) as worker:
        assert worker.stdout is not None
        worker.stdout.readline()  # until now it was this program
        told = status("loading: 1 of 2 GB", [worker.pid, os.getpid()])
        worker.kill()
    assert told.text == (
        f"loading: 1 of 2 GB; already here, until then idle: dma_worker (process {worker.pid}), "
        f"process {os.getpid()}"
    )
    assert not told.is_ready
    assert told.missing_roles == []  # one of them may be anything
    assert status("loading: 1 of 2 GB", []).text == "loading: 1 of 2 GB"


def test_who_is_still_to_be_started_is_told_while_it_loads(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [sys.executable, "-c", "print(flush=True); input()", "cpu_worker"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe) as worker:
        assert worker.stdout is not None
        worker.stdout.readline()
        told = status("loading", [worker.pid])
        kept = status("loading", [worker.pid], is_supervising=True)
        worker.kill()
    assert told.missing_roles == ["gpu_worker", "dma_worker"]
    assert "missing: gpu_worker; start `headrace gpu-worker`" in shown(told, monkeypatch, capsys)
    assert kept.missing_roles == []  # a supervisor starts them


def test_who_is_not_there_once_it_is_loaded_is_missing() -> None:
    told = status("waiting for workers", None)
    assert told.missing_roles == ["gpu_worker", "dma_worker", "cpu_worker"]
    assert not told.is_ready


def shown(told: Status, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    monkeypatch.setattr(client, "ask_status", lambda run_dir: told)
    assert main(["status"]) == 1
    return capsys.readouterr().out


def test_no_second_worker_is_advised(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = shown(status("loading", [os.getpid()]), monkeypatch, capsys)
    assert said == f"not ready: loading; already here, until then idle: process {os.getpid()}\n"

    starting = WorkerStatus("gpu_worker", 7, Epoch(1), False, 0.0, Capabilities(), 0)
    told = Status(False, "waiting for workers", ["gpu_worker", "dma_worker"], [starting], 0)
    said = shown(told, monkeypatch, capsys)
    assert "start `headrace dma-worker`" in said
    assert "starting" in said
    assert "headrace gpu-worker" not in said
