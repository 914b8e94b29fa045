"""Life lines over real sockets, with real processes at the other ends."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from orchestrator import lifelines
from orchestrator.lifelines import Lifelines
from protocol.lifeline import SegmentGrant
from protocol.run_dir import LockedRunDir

if TYPE_CHECKING:
    from collections.abc import Callable

#: Joins, says its token, then does as told by its arguments.
PEER = """
import sys, time
from pathlib import Path
from protocol.lifeline import Lifeline
from protocol.run_dir import RunDir
line = Lifeline.connect(RunDir(Path(sys.argv[1])), 5)
print(line.token, sorted(line.segments), flush=True)
if sys.argv[2] == "close":
    line._connection.close()
if sys.argv[2] == "write":
    line._connection.send(b"x")
time.sleep(60)
"""


class Peers:
    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._processes: list[subprocess.Popen[str]] = []

    def start(self, then: str = "stay") -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", PEER, str(self._run_dir), then],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])},
        )
        self._processes.append(process)
        return process

    def end(self) -> None:
        for process in self._processes:
            process.kill()
            process.communicate(timeout=10)


async def said(process: subprocess.Popen[str]) -> tuple[str, str]:
    """Token and segments that a peer got."""
    assert process.stdout is not None
    line = await asyncio.wait_for(asyncio.to_thread(process.stdout.readline), 20)
    token, segments = line.strip().split(" ", 1)
    return token, segments


async def until(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - nobody sets an event for it
            await asyncio.sleep(0.01)


class Scene:
    def __init__(self, tmp_path: Path) -> None:
        self.run_dir = LockedRunDir(tmp_path / "run")
        self.ended: list[str] = []
        self.lifelines = Lifelines(self.run_dir, asyncio.get_running_loop(), self.ended.append)
        self.peers = Peers(self.run_dir.path)
        self._fd = os.memfd_create("test")

    def open(self) -> None:
        os.truncate(self._fd, 4096)
        self.lifelines.open([SegmentGrant("weights", 4096)], [self._fd])

    def close(self) -> None:
        self.lifelines.close()
        self.peers.end()
        self.run_dir.close()
        os.close(self._fd)


def run(tmp_path: Path, story: Callable[[Scene], asyncio.Future[None] | object]) -> None:
    async def play() -> None:
        scene = Scene(tmp_path)
        try:
            await story(scene)  # type: ignore[misc]
        finally:
            scene.close()

    asyncio.run(play())


def test_waits_for_the_grant_and_sees_a_kill(tmp_path: Path) -> None:
    async def story(scene: Scene) -> None:
        early = scene.peers.start()
        assert scene.lifelines.waiting == []
        await until(lambda: scene.lifelines.waiting == [early.pid])
        scene.open()
        assert scene.lifelines.waiting is None
        token, segments = await said(early)
        assert segments == "['weights']"
        late = scene.peers.start()
        other, _ = await said(late)
        assert other != token
        line = scene.lifelines.find(token)
        assert line is not None
        assert line.pid == early.pid
        line.is_worker = True
        early.send_signal(signal.SIGKILL)
        await until(lambda: scene.ended == [token])
        assert scene.lifelines.find(token) is None
        assert scene.lifelines.find(other) is not None

    run(tmp_path, story)


def test_kill_reaches_the_process_of_the_line(tmp_path: Path) -> None:
    async def story(scene: Scene) -> None:
        scene.open()
        peer = scene.peers.start()
        token, _ = await said(peer)
        line = scene.lifelines.find(token)
        assert line is not None
        line.is_worker = True
        line.kill()
        await until(lambda: scene.ended == [token])
        assert await asyncio.to_thread(peer.wait, 10) == -signal.SIGKILL

    run(tmp_path, story)


@pytest.mark.parametrize("then", ["close", "write"])
def test_a_worker_without_its_line_is_made_to_end(
    tmp_path: Path, then: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lifelines, "_LEAVE_S", 0.2)

    async def story(scene: Scene) -> None:
        # Before it has said HELLO it is nobody: it may go where it likes.
        scene.open()
        stranger = scene.peers.start(then)
        token, _ = await said(stranger)
        await until(lambda: scene.ended == [token])
        assert stranger.poll() is None
        # A worker could still write shared memory: it is over before it is called lost.
        worker = scene.peers.start("stay")
        token, _ = await said(worker)
        line = scene.lifelines.find(token)
        assert line is not None
        line.is_worker = True
        scene.lifelines._ended(line)
        assert scene.lifelines.find(token) is None
        assert token not in scene.ended
        await until(lambda: token in scene.ended)
        assert await asyncio.to_thread(worker.wait, 10) == -signal.SIGKILL

    run(tmp_path, story)


def test_too_many_are_sent_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifelines, "_MAX_LINES", 1)

    async def story(scene: Scene) -> None:
        first = scene.peers.start()
        await until(lambda: len(scene.lifelines._lines) == 1)
        second = scene.peers.start()
        assert await asyncio.to_thread(second.wait, 20) != 0
        assert first.poll() is None
        assert len(scene.lifelines._lines) == 1

    run(tmp_path, story)


def test_own_process_is_never_killed() -> None:
    ours, theirs = socket.socketpair()
    line = lifelines.Line("t", ours)
    assert line.pid == os.getpid()
    line.kill()
    line.close()
    theirs.close()


def test_without_descriptors_it_tries_again_later_and_does_not_spin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(lifelines, "_FULL_S", 0.2)

    async def story(scene: Scene) -> None:
        with socket.socket(socket.AF_UNIX) as peer:
            limits = resource.getrlimit(resource.RLIMIT_NOFILE)
            lowest_free = os.dup(0)
            os.close(lowest_free)
            resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, limits[1]))
            try:
                peer.connect(scene.run_dir.lifeline_path)
                await until(lambda: "cannot join now" in caplog.text)
                for _ in range(20):
                    await asyncio.sleep(0)
                assert caplog.text.count("cannot join now") == 1
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, limits)
            await until(lambda: len(scene.lifelines._lines) == 1)

    run(tmp_path, story)
