"""The life line: grants with descriptors, and every way in which a grant can be wrong."""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from typing import TYPE_CHECKING

import msgspec
import pytest

from protocol.errors import OrchestratorGone, ProtocolError, UserError
from protocol.lifeline import (
    FieldLayout,
    Grant,
    Lifeline,
    SegmentGrant,
    listen,
    peer_pid,
    send_grant,
)
from protocol.run_dir import LockedRunDir, RunDir

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

GRANT = Grant(
    "secret",
    [
        SegmentGrant("weights", 4096),
        SegmentGrant("activations", 64, {"header": FieldLayout("int64", [8], 0)}),
    ],
)


@pytest.fixture
def run_dir(tmp_path: Path) -> Iterator[LockedRunDir]:
    run_dir = LockedRunDir(tmp_path / "run")
    yield run_dir
    run_dir.close()


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def connect_to(run_dir: LockedRunDir, answer: Callable[[socket.socket], None]) -> Lifeline:
    """Connect while `answer` plays the orchestrator, which then closes its end."""
    listener = listen(run_dir)
    listener.setblocking(True)

    def serve() -> None:
        connection, _ = listener.accept()
        with connection:
            answer(connection)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        return Lifeline.connect(RunDir(run_dir.path), wait_s=2.0)
    finally:
        thread.join()
        listener.close()
        os.unlink(run_dir.lifeline_path)


def test_descriptors_arrive_with_their_segments(run_dir: LockedRunDir) -> None:
    fds = [os.memfd_create(name) for name in ("a", "b")]
    os.write(fds[0], b"first")
    os.write(fds[1], b"second")
    line = connect_to(run_dir, lambda connection: send_grant(connection, GRANT, fds))
    assert line.token == "secret"
    assert [grant for _, grant in line.segments.values()] == GRANT.segments
    assert os.pread(line.segments["weights"][0], 9, 0) == b"first"
    assert os.pread(line.segments["activations"][0], 9, 0) == b"second"
    line.wait_for_end()  # returns, since the other end is closed
    line.close()
    for fd in fds:
        os.close(fd)


def test_a_grant_in_pieces_is_put_together(run_dir: LockedRunDir) -> None:
    payload = msgspec.msgpack.encode(Grant("t", [SegmentGrant("weights", 1)]))
    frame = struct.pack("<I", len(payload)) + payload
    fd = os.memfd_create("a")

    def answer(connection: socket.socket) -> None:
        socket.send_fds(connection, [frame[:1]], [fd])
        for index in range(1, len(frame)):
            connection.sendall(frame[index : index + 1])

    line = connect_to(run_dir, answer)
    assert list(line.segments) == ["weights"]
    line.close()
    os.close(fd)


def frame_of(payload: bytes) -> bytes:
    return struct.pack("<I", len(payload)) + payload


@pytest.mark.parametrize(
    ("data", "num_fds", "error"),
    [
        (b"", 0, OrchestratorGone),
        (frame_of(msgspec.msgpack.encode(GRANT))[:-1], 2, OrchestratorGone),
        (b"\x01\x02", 0, OrchestratorGone),
        (struct.pack("<I", 64 * 1024 + 1) + b"x", 1, ProtocolError),
        (frame_of(b"\xc1\xc1"), 1, ProtocolError),
        (frame_of(msgspec.msgpack.encode({"token": 1, "segments": []})), 0, ProtocolError),
        (frame_of(msgspec.msgpack.encode(GRANT)), 1, ProtocolError),
        (frame_of(msgspec.msgpack.encode(GRANT)), 3, ProtocolError),
        (frame_of(msgspec.msgpack.encode(GRANT)) + b"more", 2, ProtocolError),
    ],
    ids=["nothing", "truncated", "half a length", "oversized", "no MessagePack", "wrong type",
         "too few descriptors", "too many descriptors", "more than a grant"],
)  # fmt: skip
def test_a_wrong_grant_is_an_error_and_leaks_nothing(
    data: bytes, num_fds: int, error: type[Exception], run_dir: LockedRunDir
) -> None:
    fds = [os.memfd_create("a") for _ in range(num_fds)]
    before = num_descriptors()

    def answer(connection: socket.socket) -> None:
        if data:
            socket.send_fds(connection, [data], fds)

    with pytest.raises(error):
        connect_to(run_dir, answer)
    assert num_descriptors() == before
    for fd in fds:
        os.close(fd)


def test_peer_is_named_by_the_kernel(run_dir: LockedRunDir) -> None:
    pids: list[int] = []
    with pytest.raises(OrchestratorGone):
        connect_to(run_dir, lambda connection: pids.append(peer_pid(connection)))
    assert pids == [os.getpid()]


def test_a_worker_that_does_not_read_is_an_error_not_a_hang() -> None:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    grant = Grant("t" * 60_000, [])

    def fill() -> None:
        for _ in range(10_000):
            send_grant(ours, grant, [])

    with pytest.raises(OSError):  # noqa: PT011  which one depends on how full the buffer was
        fill()
    ours.close()
    theirs.close()


def test_waits_for_an_orchestrator_only_so_long(tmp_path: Path, run_dir: LockedRunDir) -> None:
    started = time.monotonic()
    with pytest.raises(UserError, match="No orchestrator listens in"):
        Lifeline.connect(RunDir(run_dir.path), wait_s=0.2)
    with pytest.raises(UserError, match="There is no run directory"):
        Lifeline.connect(RunDir(tmp_path / "none"), wait_s=0.0)
    assert 0.2 <= time.monotonic() - started < 30


def test_finds_an_orchestrator_that_comes_late(run_dir: LockedRunDir) -> None:
    listeners: list[socket.socket] = []
    lines: list[Lifeline] = []
    thread = threading.Thread(
        target=lambda: lines.append(Lifeline.connect(RunDir(run_dir.path), wait_s=20.0))
    )
    thread.start()
    time.sleep(0.2)
    listeners.append(listen(run_dir))
    listeners[0].setblocking(True)
    connection, _ = listeners[0].accept()
    send_grant(connection, Grant("late", []), [])
    thread.join()
    assert lines[0].token == "late"
    connection.close()
    lines[0].close()
    listeners[0].close()
