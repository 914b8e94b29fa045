"""Does a server stay what it was? Many short requests, rude clients, and workers that die.

    python -m benchmarks.soak [--requests 2000] [--json] [--quick]

Clients come several at once. Some go away early, some send rubbish, and every 200 requests a worker
is killed with signal 9, each role in turn. Checked are: every text that was not broken off by its
client is the text that the same prompt had at the beginning, and complete; rubbish is answered 400;
nothing is ever answered 500. At the end: no request is left in the pipeline; the server's memory
over the second half has a slope that is shown, with descriptors, processes and shared memory before
and after. Exit code 1 if something is wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console

from benchmarks.server_process import ROOT, Server, call, server

PROMPTS = ("def main():", "import os\n", "class Reader:", "The list of")
_NUM_CLIENTS = 4
_SAMPLE_EVERY = 50
_ROLES = ("cpu_worker", "dma_worker", "gpu_worker")
_RUBBISH = (b"", b"{", b"[]", b'{"prompt": 7}', b'{"prompt": "x", "n": 0}', b"\xff\xfe\x00")
#: MB per 1000 requests beyond which memory counts as growing.
MAX_SLOPE_MB = 2.0


class Soak:
    """One run against one server."""

    def __init__(self, started: Server, num_requests: int, kill_every: int, seed: int) -> None:
        self._started = started
        self._kill_every = kill_every
        self._num_requests = num_requests
        self._chance = random.Random(seed)
        self._process = psutil.Process(started.process.pid)
        self._expected: dict[str, str] = {}
        self._next = 0
        self.faults: list[str] = []
        self.counts = {"complete": 0, "aborted": 0, "rubbish": 0, "busy": 0, "killed": 0}
        #: (requests so far, resident bytes, descriptors)
        self.samples: list[tuple[int, int, int]] = []

    async def run(self) -> None:
        for prompt in PROMPTS:
            answer = await call(self._started.port, "POST", "/v1/completions", _body(prompt))
            self._expected[prompt] = answer.text()
        await asyncio.gather(*(self._client() for _ in range(_NUM_CLIENTS)))
        await self._check_idle()

    async def _client(self) -> None:
        while self._next < self._num_requests:
            self._next += 1
            number = self._next
            if number % _SAMPLE_EVERY == 0:
                self._sample(number)
            if number % self._kill_every == 0:
                await self._kill(_ROLES[number // self._kill_every % len(_ROLES)])
            await self._one()

    async def _one(self) -> None:
        chance, port = self._chance, self._started.port
        kind = chance.random()
        if kind < 0.1:
            answer = await call(port, "POST", "/v1/completions", raw=chance.choice(_RUBBISH))
            self.counts["rubbish"] += 1
            if answer.status != 400:
                self.faults.append(f"rubbish was answered {answer.status}: {answer.body[:200]!r}")
            return
        prompt = chance.choice(PROMPTS)
        body = _body(prompt, stream=chance.random() < 0.5)
        if kind < 0.3:
            body["max_tokens"] = 500
            # A stream is left after some parts, a whole answer after a moment.
            num_parts, wait_s = chance.randrange(4), chance.random()
            asked = call(port, "POST", "/v1/completions", body, abort_after=num_parts)
            with contextlib.suppress(TimeoutError):
                await (asked if body["stream"] else asyncio.wait_for(asked, wait_s))
            self.counts["aborted"] += 1
            return
        answer = await call(port, "POST", "/v1/completions", body)
        if answer.status == 429:
            self.counts["busy"] += 1
            await asyncio.sleep(0.1)
        elif answer.status != 200 or not answer.is_complete:
            self.faults.append(f"answered {answer.status}: {answer.body[-200:]!r}")
        elif answer.text() != self._expected[prompt]:
            self.faults.append(f"{prompt!r} had another text: {answer.text()!r}")
        else:
            self.counts["complete"] += 1

    async def _kill(self, role: str) -> None:
        stats = (await call(self._started.port, "GET", "/v1/stats")).json()
        for worker in stats["workers"]:
            if worker["role"] == role:
                psutil.Process(worker["pid"]).kill()
                self.counts["killed"] += 1
                return

    def _sample(self, number: int) -> None:
        self.samples.append((number, self._process.memory_info().rss, self._process.num_fds()))

    async def _check_idle(self) -> None:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            health = await call(self._started.port, "GET", "/health")
            stats = (await call(self._started.port, "GET", "/v1/stats")).json()
            requests = stats["requests"]
            if health.status == 200 and not requests["running"] and not requests["waiting"]:
                return
            await asyncio.sleep(0.2)
        self.faults.append(f"not idle a minute after the last request: {requests}, {health.body!r}")

    def num_descriptors(self) -> int:
        return self._process.num_fds()

    def num_children(self) -> int:
        return len(self._process.children(recursive=True))

    def slope_mb_per_1000(self) -> float:
        """Least squares over the second half of the run."""
        half = [(n, rss) for n, rss, _ in self.samples if n >= self._num_requests / 2]
        if len(half) < 2:
            return 0.0
        mean_n = sum(n for n, _ in half) / len(half)
        mean_rss = sum(rss for _, rss in half) / len(half)
        spread = sum((n - mean_n) ** 2 for n, _ in half)
        return sum((n - mean_n) * (rss - mean_rss) for n, rss in half) / spread * 1000 / 1e6


def _body(prompt: str, stream: bool = False) -> dict[str, Any]:
    return {
        "prompt": prompt,
        "max_tokens": 12,
        "temperature": 0,
        "ignore_eos": True,
        "stream": stream,
    }


def _shared_memory() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir()}


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.soak",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "demo", metavar="DIR")
    parser.add_argument("--requests", type=int, default=2000, metavar="N")
    parser.add_argument(
        "--kill-every", type=int, default=200, metavar="N", help="requests between two deaths"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--quick", action="store_true", help="few requests, to see that it runs")
    args = parser.parse_args()
    num_requests = 60 if args.quick else args.requests
    shared_before = _shared_memory()
    started_s = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        with server(args.model, Path(folder), "--slots", "50%") as started:
            soak = Soak(started, num_requests, args.kill_every, args.seed)
            descriptors_before, children_before = soak.num_descriptors(), soak.num_children()
            asyncio.run(soak.run())
            descriptors, children = soak.num_descriptors(), soak.num_children()
            family = psutil.Process(started.process.pid).children(recursive=True)
        left = [process.pid for process in family if process.is_running()]
    faults = list(soak.faults)
    if descriptors > descriptors_before + 8:
        faults.append(f"{descriptors - descriptors_before} descriptors more than before")
    if children != children_before:
        faults.append(f"{children} processes, before {children_before}")
    if left:
        faults.append(f"processes {left} outlive the server")
    if _shared_memory() - shared_before:
        faults.append(f"left in shared memory: {_shared_memory() - shared_before}")
    slope = soak.slope_mb_per_1000()
    if num_requests >= 1000 and slope > MAX_SLOPE_MB:
        faults.append(f"memory grows by {slope:.2f} MB per 1000 requests")
    result = {
        "requests": num_requests,
        "elapsed_s": time.monotonic() - started_s,
        **soak.counts,
        "rss_mb": [round(rss / 1e6, 1) for _, rss, _ in soak.samples],
        "slope_mb_per_1000_requests": slope,
        "descriptors": [descriptors_before, descriptors],
        "processes": [children_before, children],
        "faults": faults,
    }
    if args.json:
        print(json.dumps(result, indent=2))
    else:
        console = Console()
        for name, value in result.items():
            console.print(f"{name.replace('_', ' ')}: {value}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
