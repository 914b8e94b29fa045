"""How an engine ends when something goes wrong that nobody foresaw: with nobody left behind."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from expert_store.reports import Progress
from orchestrator import engine as engine_module
from orchestrator import supervisor
from orchestrator.ending import Ending
from orchestrator.engine import Engine
from orchestrator.loading import LoaderFault
from orchestrator.settings import PipelineSettings
from orchestrator.trace_recorder import TraceRecorder
from protocol.errors import EXIT_FAULT, EXIT_USER_ERROR, UserError
from tests.process.pipelines import is_over

if TYPE_CHECKING:
    from collections.abc import Callable

DEMO = Path(__file__).resolve().parents[2] / "models/demo"
pytestmark = pytest.mark.process


def test_what_a_person_can_put_right_is_their_sentence() -> None:
    assert Ending.of(UserError("Do so.")) == Ending(EXIT_USER_ERROR, "Do so.")
    assert Ending.of(LoaderFault("it hangs")) == Ending(EXIT_FAULT, "Loading failed: it hangs.")


@pytest.fixture
def worker_pids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[int]]:
    """Workers that never get further than their imports, and their processes."""
    pids = tmp_path / "pids"
    pids.mkdir()
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\n: > {pids}/$$\nexec sleep 60\n")
    program.chmod(0o700)
    monkeypatch.setattr(supervisor.sys, "executable", str(program))
    return lambda: [int(entry.name) for entry in pids.iterdir()]


def end_of(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    worker_pids: Callable[[], list[int]],
    error: Exception,
    front: Any = None,
) -> Ending:
    """The end of a supervised engine whose loader raises `error` once its workers live."""

    async def load_store(*arguments: Any, **more: Any) -> None:
        next(filter(callable, arguments))(Progress(0, 1, "loading"))
        while len(worker_pids()) < 3:  # noqa: ASYNC110 - no event tells of a file
            await asyncio.sleep(0.01)
        raise error

    monkeypatch.setattr(engine_module, "load_store", load_store)
    settings = PipelineSettings(model_dir=DEMO, run_dir=tmp_path / "run", is_supervising=True)
    return asyncio.run(asyncio.wait_for(Engine(settings, front).run(), 60))


def test_a_fault_of_ours_ends_the_workers_and_is_told(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    worker_pids: Callable[[], list[int]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.ERROR, "headrace"):
        ending = end_of(tmp_path, monkeypatch, worker_pids, ZeroDivisionError("of nought"))
    assert len(worker_pids()) == 3
    assert all(is_over(pid) for pid in worker_pids())
    assert ending.exit_code == EXIT_FAULT
    assert "fault of its own" in ending.sentence
    assert "start it again" in ending.sentence
    (record,) = caplog.records
    assert record.exc_info is not None
    assert record.exc_info[0] is ZeroDivisionError
    assert not (tmp_path / "run").exists()


def test_a_fault_while_it_takes_leave_ends_the_workers_too(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    worker_pids: Callable[[], list[int]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Front:
        async def start(self, engine: Engine) -> None:
            pass

        async def drain(self) -> None:
            pass

        async def stop(self) -> None:
            raise RuntimeError("the server does not stop")

    ending = end_of(tmp_path, monkeypatch, worker_pids, UserError("Mend the file."), Front())
    assert all(is_over(pid) for pid in worker_pids())
    assert ending.sentence == "Mend the file."  # why it ends is worth more than how
    assert "the server does not stop" in caplog.text


def test_a_recording_that_cannot_be_kept_is_no_success(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def load_store(*arguments: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)  # an orderly end
        await asyncio.sleep(60)

    monkeypatch.setattr(engine_module, "load_store", load_store)
    monkeypatch.setattr(TraceRecorder, "close", lambda recorder: "The trace is lost.")
    path = tmp_path / "trace.npz"
    settings = PipelineSettings(model_dir=DEMO, run_dir=tmp_path / "run", record_routing=path)
    ending = asyncio.run(asyncio.wait_for(Engine(settings).run(), 60))
    assert ending == Ending(EXIT_FAULT, "The trace is lost.")
    assert Ending(EXIT_USER_ERROR, "Do so.").and_lost("It is lost.").exit_code == EXIT_USER_ERROR
    assert os.listdir(tmp_path) == []
