"""What a disturbance costs a running pipeline, and how soon the split has followed it.

Three of them, each on a pipeline of its own that generates one text with replayed routing:

    cpu    the cpu_worker may run for 2 ms of every 40
    link   the dma_worker may run for 2 ms of every 20
    bus    other processes copy memory as fast as it goes, one per processor

For `link` and `bus` the cpu_worker is kept on one processor from the start: with all of them it is
so much faster than an emulated link, whose copies take a processor too, that hardly a miss is
filled and the split has nowhere to go.

`moved_after`: decode steps from the disturbance until the part of the misses that is filled has
gone half of the way from what it was to what it settles at, over five steps; None where that
part hardly changes. `lost_ms`: what the steps took until then beyond a settled step.
`worst_over_settled`: the slowest step over the settled one.
"""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING

from benchmarks.turns import RunningText

if TYPE_CHECKING:
    from pathlib import Path

    import psutil

#: How long a process may run, and then stands still, seconds.
BRAKES = {"cpu": ("cpu_worker", 0.002, 0.038), "link": ("dma_worker", 0.002, 0.018)}
#: Disturbances under which the cpu_worker has one processor.
ONE_PROCESSOR = ("link", "bus")
#: A change of the filled part below this is none.
LEAST_MOVE = 0.1
_BUS_EATER = """
import numpy
a = numpy.zeros(1 << 27, numpy.uint8)
b = numpy.ones(1 << 27, numpy.uint8)
while True:
    a[:] = b
"""


class Brake(threading.Thread):
    """Slows a process down from outside, as a governor or a quota would."""

    def __init__(self, process: psutil.Process, run_s: float, stand_s: float) -> None:
        super().__init__(daemon=True)
        self._process, self._run_s, self._stand_s = process, run_s, stand_s
        self._is_off = threading.Event()

    def run(self) -> None:
        while not self._is_off.is_set():
            self._process.send_signal(signal.SIGSTOP)
            time.sleep(self._stand_s)
            self._process.send_signal(signal.SIGCONT)
            time.sleep(self._run_s)

    def release(self) -> None:
        self._is_off.set()
        self.join()


class BusEater:
    """So many processes that copy memory."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._processes: list[subprocess.Popen] = []

    def start(self) -> None:
        self._processes = [
            subprocess.Popen([sys.executable, "-c", _BUS_EATER]) for _ in range(self._count)
        ]

    def release(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()


def keep_on_one_processor(process: psutil.Process) -> None:
    """All its threads on the first processor that it may use."""
    first = min(process.cpu_affinity())
    for thread in process.threads():
        os.sched_setaffinity(thread.id, {first})


def disturb(
    name: str, model: Path, log: Path, flags: list[str], calm: int, disturbed: int, num_eaters: int
) -> dict[str, object]:
    """One disturbance: `calm` steps, then `disturbed` steps under it."""
    log.unlink(missing_ok=True)
    text = RunningText(model, log, flags, calm + disturbed + 200)
    disturbance: Brake | BusEater | None = None
    try:
        if name in ONE_PROCESSOR:
            text.wait_for_steps(1)
            keep_on_one_processor(text.worker("cpu_worker"))
        text.wait_for_steps(calm)
        if name == "bus":
            disturbance = BusEater(num_eaters)
        else:
            role, run_s, stand_s = BRAKES[name]
            disturbance = Brake(text.worker(role), run_s, stand_s)
        at_ns = time.monotonic_ns()
        disturbance.start()
        num_before = len(text.steps())
        text.wait_for_steps(num_before + disturbed)
    finally:
        if disturbance is not None:
            disturbance.release()
        text.end()
    return judge(name, text, at_ns, disturbed)


def judge(name: str, text: RunningText, at_ns: int, disturbed: int) -> dict[str, object]:
    records = text.records()
    filled: dict[int, list[int]] = {}
    for record in records:
        if record["kind"] == "layer" and record["num_rows"] == 1:
            counts = filled.setdefault(record["step"], [0, 0])
            counts[0] += len(record["fills"])
            counts[1] += record["m"]
    steps = text.steps()
    before = [step for step in steps if step["done_ns"] <= at_ns][-40:]
    after = [step for step in steps if step["started_ns"] >= at_ns][:disturbed]
    settled = after[-(len(after) // 3) :]

    def part(chosen: list[dict]) -> float:
        counts = [filled.get(step["step"], [0, 0]) for step in chosen]
        return sum(fills for fills, _ in counts) / max(sum(misses for _, misses in counts), 1)

    def ms(step: dict) -> float:
        return (step["done_ns"] - step["started_ns"]) / 1e6

    was, became = part(before), part(settled)
    settled_ms = statistics.median(map(ms, settled))
    moved_after: int | None = None
    if abs(became - was) >= LEAST_MOVE:
        for end in range(5, len(after) + 1):
            if (part(after[end - 5 : end]) - was) / (became - was) >= 0.5:
                moved_after = end
                break
    until = after[: moved_after or 0]
    return {
        "disturbance": name,
        "calm_ms": statistics.median(map(ms, before)),
        "settled_ms": settled_ms,
        "filled_part_before": was,
        "filled_part_settled": became,
        "moved_after": moved_after,
        "lost_ms": sum(ms(step) - settled_ms for step in until),
        "worst_over_settled": max(map(ms, after)) / settled_ms,
        "news": [
            {key: value for key, value in record.items() if key != "at_ns"}
            for record in records
            if record["kind"] in ("drift", "lag", "arm") and record["at_ns"] > at_ns
        ][:8],
    }
