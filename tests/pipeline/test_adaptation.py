"""A cpu_worker that becomes slow while it serves: the split moves, and the log says so."""

from __future__ import annotations

import json
import signal
import threading
import time
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from tests.checkpoints import make_checkpoint
from tests.process.pipelines import Pipeline

if TYPE_CHECKING:
    from pathlib import Path

    from tests.process.pipelines import Processes

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]

NUM_TOKENS, NUM_SLOWED_TOKENS = 50, 80
#: So many tokens after the disturbance the split has moved.
FOLLOWED_TOKENS = 20
#: The process may run for the first of these, then stands still for the second, again and again.
RUN_S, STAND_S = 0.002, 0.06
#: So slow a link that a CPU at its usual speed gets most of the work.
LINK_GBPS = "0.02"


class Brake(threading.Thread):
    """Slows a process down from outside, as a governor or a neighbour would."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self._process = psutil.Process(pid)
        self._is_off = threading.Event()

    def run(self) -> None:
        while not self._is_off.is_set():
            self._process.send_signal(signal.SIGSTOP)
            time.sleep(STAND_S)
            self._process.send_signal(signal.SIGCONT)
            time.sleep(RUN_S)

    def release(self) -> None:
        self._is_off.set()
        self.join()


def records(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.read_text().splitlines()]


def sampled(written: list[dict[str, Any]], since_ns: int) -> list[int]:
    """When each token after `since_ns` was sampled."""
    return [
        record["done_ns"]
        for record in written
        if record["kind"] == "step" and record["is_sampled"] and record["done_ns"] > since_ns
    ]


def cpu_share(written: list[dict[str, Any]], start_ns: int, end_ns: int) -> float:
    """The part of the misses that was given to the CPU."""
    layers = [
        record
        for record in written
        if record["kind"] == "layer" and start_ns < record["routed_ns"] < end_ns
    ]
    return sum(len(record["cpu"]) for record in layers) / sum(record["m"] for record in layers)


def test_a_slowed_cpu_worker_loses_its_work_within_twenty_tokens(
    tmp_path: Path, processes: Processes
) -> None:
    model = make_checkpoint("qwen3_moe", tmp_path / "model", dtype="float32")
    log = tmp_path / "log.jsonl"
    pipeline = Pipeline(
        processes, model, tmp_path / "run", "--supervise", "--slots", "25%", "--policy", "lru",
        "--fill-behind", "off", "--latency-log", str(log), "--emulate-link-gbps", LINK_GBPS,
        "--probe", "on",
    )  # fmt: skip
    status = pipeline.wait_for(lambda status: status.is_ready)
    pipeline.generate(NUM_TOKENS)
    brake = Brake(next(worker.pid for worker in status.workers if worker.role == "cpu_worker"))
    disturbed_ns = time.monotonic_ns()
    brake.start()
    try:
        pipeline.generate(NUM_SLOWED_TOKENS)
    finally:
        brake.release()
    processes.end()

    said = processes.said(pipeline.orchestrator)
    assert said.count("headrace calibrate") == 1, said  # measured at the start, in one line
    written = records(log)
    calm_share = cpu_share(written, 0, disturbed_ns)
    assert calm_share > 0.3
    # A process that stands still is late to begin, slow to end, or both.
    drifts = [
        record["at_ns"]
        for record in written
        if record.get("at_ns", 0) > disturbed_ns
        and (
            (record["kind"] == "lag" and record["cost"] == "cpu_fixed_s")
            or (record["kind"] == "drift" and record["branch"] == "cpu")
        )
    ]
    assert drifts, "nobody noticed"
    tokens = sampled(written, disturbed_ns)
    # Hardly anything runs on the CPU then, probes aside.
    end_ns = time.monotonic_ns()
    assert cpu_share(written, tokens[FOLLOWED_TOKENS], end_ns) < 0.5 * calm_share
