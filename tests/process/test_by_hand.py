"""A pipeline started process by process: any order, deaths, hangs, rubbish, and its end.

The orchestrator, the loader and the clients are the real ones; the workers are scripted, so that
they start at once and check for themselves that every expert ran where it was said to be.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgpack
import msgspec
import psutil
import pytest
import zmq

from protocol.lifeline import Lifeline
from protocol.messages import PROTOCOL_VERSION, Status
from protocol.run_dir import RunDir
from tests.process.pipelines import Pipeline, Processes, is_over, wait_until
from tests.process.scripted_worker import BUSY

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterator

pytestmark = pytest.mark.process

ROLES = ("gpu_worker", "dma_worker", "cpu_worker")
#: Long enough that what is done to a run meets it in the middle.
LONG = 400


@pytest.fixture(scope="module")
def pipeline(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pipeline]:
    """One orchestrator for all tests here; every test brings and takes its own workers."""
    path = tmp_path_factory.mktemp("by-hand")
    processes = Processes(path)
    try:
        pipeline = Pipeline(
            processes, tiny_model, path / "run", "--worker-timeout", "2", "--fill", "1"
        )  # both branches at work
        pipeline.wait_until_loaded()
        yield pipeline
    finally:
        processes.end()


@pytest.fixture
def workers(pipeline: Pipeline, processes: Processes) -> Iterator[Workers]:
    workers = Workers(pipeline, processes)
    yield workers
    workers.end()


class Workers:
    """Scripted workers of one test."""

    def __init__(self, pipeline: Pipeline, processes: Processes) -> None:
        self._pipeline = pipeline
        self.processes = processes
        self.by_role: dict[str, list[subprocess.Popen[bytes]]] = {role: [] for role in ROLES}

    def start(self, *roles: str, ill: str = "no") -> None:
        for role in roles:
            process = self.processes.scripted(role, self._pipeline.run_dir, ill)
            self.by_role[role].append(process)

    def wait_until_ready(self, num: int) -> None:
        self._pipeline.wait_for(
            lambda status: sum(worker.is_ready for worker in status.workers) == num
        )

    def wait_until_busy(self) -> None:
        gpu = self.by_role["gpu_worker"][0]
        wait_until(lambda: BUSY in self.processes.said(gpu))

    def kill(self, role: str, how: signal.Signals = signal.SIGKILL) -> None:
        process = self.by_role[role].pop()
        process.send_signal(how)
        process.wait(30)

    def end(self) -> None:
        for role in ROLES:
            while self.by_role[role]:
                self.kill(role)
        self._pipeline.wait_for(lambda status: not status.workers)


@pytest.fixture(scope="module")
def undisturbed(pipeline: Pipeline) -> dict[int, list[int]]:
    """What the scripted model says when nothing happens, by number of tokens."""
    workers = Workers(pipeline, pipeline.processes)
    workers.start(*ROLES)
    workers.wait_until_ready(3)
    results = {num: pipeline.generate(num) for num in (8, LONG)}
    workers.end()
    for num, result in results.items():
        assert result["generated_tokens"] == num
        assert result["hits"] > 0
        assert result["fills"] > 0
        assert result["cpu_experts"] > 0
    return {num: result["token_ids"] for num, result in results.items()}


def test_says_who_is_missing(pipeline: Pipeline, workers: Workers) -> None:
    done = pipeline.processes.call("status", "--run-dir", pipeline.run_dir, "--json")
    assert done.returncode == 1
    status = msgspec.json.decode(done.stdout, type=Status)
    assert not status.is_ready
    assert status.missing_roles == ["gpu_worker", "dma_worker", "cpu_worker"]
    workers.start("gpu_worker", "cpu_worker")
    workers.wait_until_ready(2)
    status = pipeline.status()
    assert status.is_ready  # by hand, one branch is enough
    assert status.missing_roles == ["dma_worker"]


@pytest.mark.parametrize("order", list(itertools.permutations(ROLES)), ids="-".join)
def test_workers_join_in_any_order(
    pipeline: Pipeline,
    workers: Workers,
    undisturbed: dict[int, list[int]],
    order: tuple[str, ...],
) -> None:
    for num, role in enumerate(order, start=1):
        workers.start(role)
        workers.wait_until_ready(num)
    assert pipeline.generate(8)["token_ids"] == undisturbed[8]


@pytest.mark.parametrize("branch", ["dma_worker", "cpu_worker"])
def test_one_branch_is_enough(
    pipeline: Pipeline, workers: Workers, undisturbed: dict[int, list[int]], branch: str
) -> None:
    workers.start("gpu_worker", branch)
    workers.wait_until_ready(2)
    result = pipeline.generate(8)
    assert result["token_ids"] == undisturbed[8]
    assert (result["fills"] > 0, result["cpu_experts"] > 0) == (
        branch == "dma_worker",
        branch == "cpu_worker",
    )


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize("role", ROLES)
def test_replaced_in_the_middle(
    pipeline: Pipeline,
    workers: Workers,
    undisturbed: dict[int, list[int]],
    role: str,
    how: signal.Signals,
) -> None:
    workers.start(*ROLES)
    workers.wait_until_ready(3)
    generate = pipeline.begin_generate(LONG)
    workers.wait_until_busy()
    workers.kill(role, how)
    workers.start(role)
    result = pipeline.finish(generate)
    assert result["token_ids"] == undisturbed[LONG]
    if role == "gpu_worker":  # nothing goes on without it, so it came in time to be counted
        assert result["worker_restarts"] == 1


def test_two_cpu_workers_and_one_dies(
    pipeline: Pipeline, workers: Workers, undisturbed: dict[int, list[int]]
) -> None:
    workers.start(*ROLES, "cpu_worker")
    workers.wait_until_ready(4)
    generate = pipeline.begin_generate(LONG)
    workers.wait_until_busy()
    workers.kill("cpu_worker")
    assert pipeline.finish(generate)["token_ids"] == undisturbed[LONG]


@pytest.mark.parametrize("role", ROLES)
def test_a_hung_worker_is_killed(
    pipeline: Pipeline, workers: Workers, undisturbed: dict[int, list[int]], role: str
) -> None:
    workers.start(*(other for other in ROLES if other != role))
    workers.start(role, ill="hangs")
    workers.wait_until_ready(3)
    generate = pipeline.begin_generate(8)
    hung = workers.by_role[role].pop()
    assert hung.wait(60) == -signal.SIGKILL
    workers.start(role)
    assert pipeline.finish(generate)["token_ids"] == undisturbed[8]


def test_a_second_gpu_worker_is_sent_away(pipeline: Pipeline, workers: Workers) -> None:
    workers.start("gpu_worker")
    workers.wait_until_ready(1)
    second = workers.processes.scripted("gpu_worker", pipeline.run_dir)
    assert second.wait(30) == 2
    first = workers.by_role["gpu_worker"][0]
    assert f"process {first.pid}" in workers.processes.said(second)
    workers.wait_until_ready(1)


def test_another_protocol_version_is_told(pipeline: Pipeline) -> None:
    with _Stranger(pipeline.run_dir) as stranger:
        stranger.say(
            {
                "type": "Hello",
                "protocol_version": PROTOCOL_VERSION + 1,
                "role": "cpu_worker",
                "pid": os.getpid(),
                "token": stranger.token,
            }
        )
        answer = stranger.hear()
    assert answer["type"] == "Refused"
    assert f"version {PROTOCOL_VERSION + 1}" in answer["sentence"]


class _Stranger:
    """Someone on the socket who follows no rule."""

    def __init__(self, run_dir: Path) -> None:
        self._lifeline = Lifeline.connect(RunDir(run_dir), 10)
        self.token = self._lifeline.token
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.set(zmq.LINGER, 1000)
        self._socket.connect(RunDir(run_dir).control_endpoint)

    def __enter__(self) -> _Stranger:
        return self

    def __exit__(self, *error: object) -> None:
        self._socket.close()
        self._context.term()
        self._lifeline.close()

    def say(self, message: object) -> None:
        self._socket.send(msgpack.packb(message))

    def say_bytes(self, *frames: bytes) -> None:
        self._socket.send_multipart(frames)

    def hear(self) -> dict[str, object]:
        assert self._socket.poll(20_000)
        return msgpack.unpackb(self._socket.recv())


def test_rubbish_is_dropped_and_counted(
    pipeline: Pipeline, workers: Workers, undisturbed: dict[int, list[int]]
) -> None:
    workers.start("gpu_worker", ill="babbles")
    workers.start("dma_worker", "cpu_worker")
    workers.wait_until_ready(3)
    before = pipeline.status().num_dropped_messages
    generate = pipeline.begin_generate(LONG)
    routed = {"type": "Routed", "epoch": 1, "step": 1, "layer": 0, "experts": [0]}
    whole = msgpack.packb({**routed, "num_rows": [1], "routed_ns": 1})
    rubbish: list[tuple[bytes, ...]] = [
        (b"",),
        (b"\x00" * 7,),
        (os.urandom(100),),
        (os.urandom(100_000),),
        (b"x" * (5 << 20),),  # over the size of a message, below that of the transport
        (whole[:-3],),
        (whole, b"and another frame"),
        (whole,),  # well-formed, from nobody
        (msgpack.packb({**routed, "num_rows": "one", "routed_ns": 1}),),
        (msgpack.packb({"type": "Routed"}),),
        (msgpack.packb({"type": "Shutdown", "epoch": 1, "reason": "mine"}),),  # not theirs to say
        (msgpack.packb({"type": "Nonsense"}),),
        (msgpack.packb([1, 2, 3]),),
        (b"\xdf\xff\xff\xff\xff",),  # a map of four thousand million entries
        (b"\x81" * 100_000,),  # nested without end
        (msgpack.packb({"type": "Executed", "epoch": 2**64 - 1, "step": 1}),),
    ]
    with _Stranger(pipeline.run_dir) as stranger:
        for frames in rubbish:
            stranger.say_bytes(*frames)
        # An answer to what comes after them all says that they were seen.
        stranger.say({"type": "GetStatus"})
        answer = stranger.hear()
    # A frame over the transport's own limit costs its sender the connection.
    with _Stranger(pipeline.run_dir) as stranger:
        stranger.say_bytes(b"x" * (65 << 20))
    num_dropped = answer["num_dropped_messages"] - before  # type: ignore[operator]
    # The babbling worker adds up to three of its own.
    assert len(rubbish) <= num_dropped <= len(rubbish) + 3
    assert pipeline.finish(generate)["token_ids"] == undisturbed[LONG]
    assert pipeline.status().num_dropped_messages - before == len(rubbish) + 3


def test_a_client_that_goes_away_is_forgotten(
    pipeline: Pipeline, workers: Workers, undisturbed: dict[int, list[int]]
) -> None:
    workers.start(*ROLES)
    workers.wait_until_ready(3)
    generate = pipeline.begin_generate(100_000)
    workers.wait_until_busy()
    generate.kill()
    generate.wait(30)
    assert pipeline.generate(8)["token_ids"] == undisturbed[8]


def test_clients_wait_for_their_turn(
    pipeline: Pipeline, workers: Workers, undisturbed: dict[int, list[int]]
) -> None:
    workers.start(*ROLES)
    workers.wait_until_ready(3)
    all_of_them = [pipeline.begin_generate(8) for _ in range(3)]
    for generate in all_of_them:
        assert pipeline.finish(generate)["token_ids"] == undisturbed[8]


def test_rejections(pipeline: Pipeline, workers: Workers) -> None:
    workers.start(*ROLES)
    workers.wait_until_ready(3)
    for prompt, says in (("", "empty"), ("x" * 600, "600 tokens and the context holds 512")):
        done = pipeline.processes.call(*pipeline.generate_arguments(8, prompt))
        assert done.returncode == 2
        assert done.stdout == ""
        assert says in done.stderr
        assert done.stderr.count("\n") == 1


def test_idle_costs_nothing(pipeline: Pipeline, workers: Workers) -> None:
    workers.start(*ROLES)
    workers.wait_until_ready(3)
    pipeline.generate(8)
    time.sleep(0.5)
    everyone = [psutil.Process(pipeline.orchestrator.pid)]
    everyone += [psutil.Process(process[0].pid) for process in workers.by_role.values()]
    seconds = 4.0
    before = [sum(process.cpu_times()[:2]) for process in everyone]
    time.sleep(seconds)
    after = [sum(process.cpu_times()[:2]) for process in everyone]
    for process, start_s, end_s in zip(everyone, before, after, strict=True):
        assert end_s - start_s <= 0.01 * seconds + 0.01, process  # +: the clock's own tick


def test_run_directory_in_use(pipeline: Pipeline, tiny_model: Path) -> None:
    done = pipeline.processes.call(
        "orchestrator", "--model", tiny_model, "--run-dir", pipeline.run_dir
    )
    assert done.returncode == 2
    assert f"in use by process {pipeline.orchestrator.pid}" in done.stderr
    assert pipeline.orchestrator.poll() is None


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_the_orchestrators_end_is_everyones_end(
    tiny_model: Path, tmp_path: Path, processes: Processes, how: signal.Signals
) -> None:
    run_dir = tmp_path / "run"
    # Workers may be there before the orchestrator listens, and while it loads.
    early = processes.scripted("cpu_worker", run_dir)
    pipeline = Pipeline(processes, tiny_model, run_dir)
    workers = [early, *(processes.scripted(role, run_dir) for role in ROLES)]
    pipeline.wait_for(
        lambda status: sum(worker.is_ready for worker in status.workers) == len(workers)
    )
    generate = pipeline.begin_generate(100_000)
    wait_until(lambda: BUSY in processes.said(workers[1]))
    segments = _segments(workers[1].pid)
    # weights, slots, activations, residency, completions, and its own mailbox
    assert len(segments) == 6
    pipeline.orchestrator.send_signal(how)
    deadline = time.monotonic() + 5
    for worker in workers:
        assert worker.wait(max(deadline - time.monotonic(), 0.1)) == 0
    assert generate.wait(30) == 1
    said = processes.said(generate)
    assert said.count("headrace: ") == 1
    assert pipeline.orchestrator.wait(30) == (-signal.SIGKILL if how == signal.SIGKILL else 0)
    assert not list(run_dir.glob("*")), "sockets were left behind"
    assert not _holders(segments)


def _segments(pid: int) -> set[int]:
    """Inodes of the pipeline's memfds that a process holds."""
    inodes = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            if "memfd:headrace" in os.readlink(link):
                inodes.add(link.stat().st_ino)
    return inodes


def _holders(inodes: set[int]) -> list[int]:
    """Living processes that hold one of these memfds."""

    def holds(pid: int) -> bool:
        try:
            return not inodes.isdisjoint(_segments(pid))
        except OSError:
            return False

    return [pid for pid in psutil.pids() if holds(pid) and not is_over(pid)]
