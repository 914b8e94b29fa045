"""Pipelines that run in turns, so that a noisy machine is noisy for all of them alike.

Each way of running is a pipeline of its own that generates one long text. All but one of them stand
still (SIGSTOP for every process), and twice a second or so it is the next one's turn. The steps of
a text are numbered, and with replayed routing step i asks for the same experts in every pipeline:
two ways are compared over the steps that both have made, wholly within turns of their own.
"""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[1]
#: Longest wait for the first steps of a pipeline.
START_S = 180.0


class RunningText:
    """One pipeline at work on one text; it stands still unless it has the turn."""

    def __init__(self, model: Path, log: Path, flags: list[str], max_tokens: int) -> None:
        self.log = log
        self.turns: list[tuple[int, int]] = []
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "orchestrator.cli.main", "generate",
             "--model", str(model), "--prompt", "Water", "--ignore-eos",
             "--max-tokens", str(max_tokens), "--latency-log", str(log),
             "--worker-timeout", "600", "--json", *flags],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=ROOT,
        )  # fmt: skip

    def processes(self) -> list[psutil.Process]:
        """All of the pipeline, the orchestrator's parent first."""
        with contextlib.suppress(psutil.NoSuchProcess):
            root = psutil.Process(self._process.pid)
            return [root, *root.children(recursive=True)]
        return []

    def worker(self, role: str) -> psutil.Process:
        """The process of this role, such as "cpu_worker"."""
        return next(process for process in self.processes() if role in process.cmdline())

    @property
    def is_over(self) -> bool:
        return self._process.poll() is not None

    def signal(self, signum: int) -> None:
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signum)

    def wait_for_steps(self, count: int) -> None:
        """Until so many decode steps are in the log. RuntimeError when the text ends before."""
        deadline = time.monotonic() + START_S
        while len(self.steps()) < count:
            if self.is_over or time.monotonic() > deadline:
                raise RuntimeError(f"the pipeline of {self.log.name} does not get to {count} steps")
            time.sleep(0.1)

    def wait_to_end(self, timeout_s: float = 600.0) -> None:
        """Until the text is complete. subprocess.TimeoutExpired when it never is."""
        self._process.wait(timeout_s)

    def turn(self, seconds: float) -> None:
        """Run for so long."""
        begin_ns = time.monotonic_ns()
        self.signal(signal.SIGCONT)
        time.sleep(seconds)
        self.signal(signal.SIGSTOP)
        self.turns.append((begin_ns, time.monotonic_ns()))

    def records(self) -> list[dict]:
        """What the log has so far; a line that is being written is left out."""
        if not self.log.exists():
            return []
        records = []
        for line in self.log.read_text().splitlines():
            with contextlib.suppress(json.JSONDecodeError):
                records.append(json.loads(line))
        return records

    def steps(self) -> list[dict]:
        """Its decode steps, in order."""
        return [r for r in self.records() if r["kind"] == "step" and r["num_tokens"] == 1]

    def step_us_in_turns(self) -> dict[int, float]:
        """By number: the time of each step that began and ended within one turn, microseconds."""
        found = {}
        for number, step in enumerate(self.steps()):
            start_ns, end_ns = step["started_ns"], step["done_ns"]
            if any(begin <= start_ns and end_ns <= end for begin, end in self.turns):
                found[number] = (end_ns - start_ns) / 1000
        return found

    def end(self) -> None:
        """Whatever state it is in."""
        processes = self.processes()
        self.signal(signal.SIGCONT)
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            for process in processes:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            self._process.wait(10)


def run_in_turns(
    model: Path,
    folder: Path,
    ways: dict[str, list[str]],
    *,
    warm_up: int,
    max_tokens: int,
    turn_s: float,
    num_turns: int,
) -> dict[str, RunningText]:
    """Start all `ways`, let each get `warm_up` steps ahead, then give each `num_turns` turns.
    All are over, and their logs are whole, when this returns."""
    texts: dict[str, RunningText] = {}
    try:
        for name, flags in ways.items():
            log = folder / f"{name}.jsonl"
            log.unlink(missing_ok=True)
            texts[name] = RunningText(model, log, flags, max_tokens)
            texts[name].wait_for_steps(warm_up)
            texts[name].signal(signal.SIGSTOP)
        for _ in range(num_turns):
            for text in texts.values():
                text.turn(turn_s)
    finally:
        for text in texts.values():
            text.end()
    return texts
