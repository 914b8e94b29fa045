"""Who waits sleeps: processor time of every process while nothing happens, and while one stands
still. It is processor time, not elapsed time, so a busy machine changes little about it."""

from __future__ import annotations

import signal
import time
from typing import TYPE_CHECKING

import psutil
import pytest

from tests.process.pipelines import Pipeline, Processes, wait_until

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(300)]

IDLE_S = 5.0
#: Of a processor; a wait that spins takes all of it.
MOST_IDLE = 0.01


def pids_of(pipeline: Pipeline) -> dict[str, int]:
    """Every process of the pipeline, by role."""
    status = pipeline.wait_for(lambda status: status.is_ready)
    pids: dict[str, int] = {worker.role: worker.pid for worker in status.workers}
    return {**pids, "orchestrator": pipeline.orchestrator.pid}


def cpu_s(pids: dict[str, int]) -> dict[str, float]:
    """Processor time so far of each, in seconds."""
    times = {role: psutil.Process(pid).cpu_times() for role, pid in pids.items()}
    return {role: spent.user + spent.system for role, spent in times.items()}


def spent_while(pids: dict[str, int], seconds: float) -> dict[str, float]:
    """Part of a processor that each takes over so many seconds."""
    before, began_s = cpu_s(pids), time.monotonic()
    time.sleep(seconds)
    after, took_s = cpu_s(pids), time.monotonic() - began_s
    return {role: (after[role] - before[role]) / took_s for role in pids}


def test_waiting_takes_no_processor(tiny_model: Path, tmp_path: Path, processes: Processes) -> None:
    # Without fills the CPU has its part in every step, whatever is fastest here.
    flags = ("--supervise", "--slots", "25%", "--fill", "none")
    pipeline = Pipeline(processes, tiny_model, tmp_path / "run", *flags)
    pids = pids_of(pipeline)
    pipeline.generate(max_tokens=20)
    spent = spent_while(pids, IDLE_S)
    assert all(part < MOST_IDLE for part in spent.values()), spent

    # A worker that stands still in the middle of a step: whoever waits for it sleeps.
    generate = pipeline.begin_generate(max_tokens=100_000)
    for role in ("cpu_worker", "gpu_worker"):
        busy_s = cpu_s(pids)[role]
        wait_until(lambda role=role, busy_s=busy_s: cpu_s(pids)[role] > busy_s + 0.05)  # type: ignore[misc]
        stopped = psutil.Process(pids[role])
        stopped.send_signal(signal.SIGSTOP)
        time.sleep(0.5)
        spent = spent_while(pids, 2.0)
        stopped.send_signal(signal.SIGCONT)
        assert all(part < 3 * MOST_IDLE for part in spent.values()), (role, spent)
    generate.terminate()
