"""ROUTER and DEALER: what is delivered, what is dropped and counted, how every wait ends."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from typing import TYPE_CHECKING

import pytest
import zmq

from protocol.channel import DealerChannel, RouterChannel
from protocol.codec import encode, to_orchestrator, to_worker
from protocol.errors import OrchestratorGone
from protocol.messages import (
    MAX_MESSAGE_BYTES,
    ClientRequest,
    Epoch,
    Failed,
    GetStatus,
    Message,
    Progress,
    Shutdown,
    WorkerCommand,
    WorkerEvent,
)
from protocol.run_dir import LockedRunDir

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

WAIT_S = 20.0


class Orchestrator:
    """A ROUTER in a loop of its own, driven by the test."""

    def __init__(self, run_dir: LockedRunDir) -> None:
        self.loop = asyncio.new_event_loop()
        self.heard: list[tuple[bytes, Message]] = []
        self.router: RouterChannel[WorkerEvent | ClientRequest] = RouterChannel(
            run_dir, to_orchestrator(), lambda *pair: self.heard.append(pair)
        )
        self.router.start(self.loop)

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < deadline, "waited in vain"
            self.loop.run_until_complete(asyncio.sleep(0.002))

    def close(self) -> None:
        self.router.close()
        self.loop.close()


@pytest.fixture
def run_dir(tmp_path: Path) -> Iterator[LockedRunDir]:
    run_dir = LockedRunDir(tmp_path / "run")
    yield run_dir
    run_dir.close()


@pytest.fixture
def orchestrator(run_dir: LockedRunDir) -> Iterator[Orchestrator]:
    orchestrator = Orchestrator(run_dir)
    yield orchestrator
    orchestrator.close()


@pytest.fixture
def line() -> Iterator[tuple[int, int]]:
    """(read end, write end) of a pipe in place of the life line."""
    read_fd, write_fd = os.pipe()
    yield read_fd, write_fd
    os.close(read_fd)
    with contextlib.suppress(OSError):  # unless the test closed it
        os.close(write_fd)


@pytest.fixture
def dealer(
    run_dir: LockedRunDir, orchestrator: Orchestrator, line: tuple[int, int]
) -> Iterator[DealerChannel[WorkerCommand]]:
    dealer = DealerChannel(run_dir, to_worker(), line[0])
    yield dealer
    dealer.close()


@pytest.fixture
def raw(run_dir: LockedRunDir, orchestrator: Orchestrator) -> Iterator[zmq.Socket[bytes]]:
    """A peer that sends whatever it likes."""
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.set(zmq.LINGER, 0)
    socket.connect(run_dir.control_endpoint)
    yield socket
    socket.close()
    context.term()


def greet(orchestrator: Orchestrator, dealer: DealerChannel[WorkerCommand]) -> bytes:
    """Let the ROUTER know the peer; its identity."""
    dealer.send(GetStatus())
    orchestrator.until(lambda: bool(orchestrator.heard))
    identity, message = orchestrator.heard.pop()
    assert message == GetStatus()
    return identity


def test_messages_keep_their_order_both_ways(
    orchestrator: Orchestrator, dealer: DealerChannel[WorkerCommand]
) -> None:
    identity = greet(orchestrator, dealer)
    events = [Progress(Epoch(1), n, 1000, "") for n in range(1000)]  # more than one drain takes
    for event in events:
        dealer.send(event)
    orchestrator.until(lambda: len(orchestrator.heard) == 1000)
    assert orchestrator.heard == [(identity, event) for event in events]
    commands = [Shutdown(Epoch(n), "") for n in range(100)]
    for command in commands:
        assert orchestrator.router.send(identity, command)
    assert [dealer.receive(WAIT_S) for _ in commands] == commands
    assert dealer.receive(0.0) is None


def test_a_reply_that_arrives_while_sending_is_not_forgotten(
    orchestrator: Orchestrator, dealer: DealerChannel[WorkerCommand]
) -> None:
    """A send can use up the edge that announced a message: it must be looked for afterwards."""
    identity = greet(orchestrator, dealer)
    for number in range(50):
        dealer.send(Progress(Epoch(1), number, 50, ""))
        time.sleep(0.001)
        assert orchestrator.router.send(identity, Shutdown(Epoch(number), ""))
        orchestrator.until(lambda number=number: len(orchestrator.heard) == number + 1)


def test_rubbish_is_dropped_counted_and_explained(
    orchestrator: Orchestrator, raw: zmq.Socket[bytes]
) -> None:
    good = encode(Failed(Epoch(1), "sentence"))
    rubbish: list[tuple[list[bytes], str]] = [
        ([b""], "not a valid message"),
        ([os.urandom(64)], "not a valid message"),
        ([good[:-3]], "not a valid message"),
        ([encode(Shutdown(Epoch(1), ""))], "not a valid message"),  # a command is no event
        ([b"\x81\xa4type\xa4Nope"], "not a valid message"),
        ([bytes(MAX_MESSAGE_BYTES + 1)], f"is over {MAX_MESSAGE_BYTES}"),
        ([good, good], "2 frames where one was expected"),
        ([b"", good], "2 frames where one was expected"),
    ]
    for number, (frames, reason) in enumerate(rubbish, start=1):
        raw.send_multipart(frames)
        orchestrator.until(lambda number=number: orchestrator.router.num_dropped == number)
        assert reason in orchestrator.router.last_drop_reason
    raw.send(good)
    orchestrator.until(lambda: bool(orchestrator.heard))
    assert orchestrator.heard[0][1] == Failed(Epoch(1), "sentence")
    assert orchestrator.router.num_dropped == len(rubbish)
    orchestrator.router.count_drop("not allowed")
    assert orchestrator.router.num_dropped == len(rubbish) + 1


def test_a_frame_beyond_the_transports_limit_ends_only_its_sender(
    orchestrator: Orchestrator, raw: zmq.Socket[bytes], dealer: DealerChannel[WorkerCommand]
) -> None:
    raw.send(bytes(64 * 1024 * 1024 + 1))
    greet(orchestrator, dealer)
    assert orchestrator.router.num_dropped == 0
    assert orchestrator.heard == []


def test_sending_to_nobody_is_false(orchestrator: Orchestrator) -> None:
    assert not orchestrator.router.send(b"nobody", Shutdown(Epoch(1), ""))


def test_a_worker_drops_rubbish_and_goes_on(
    orchestrator: Orchestrator, dealer: DealerChannel[WorkerCommand]
) -> None:
    identity = greet(orchestrator, dealer)
    for frame in (b"", b"\xc1", os.urandom(50), encode(GetStatus()), bytes(MAX_MESSAGE_BYTES + 1)):
        orchestrator.router._socket.send_multipart((identity, frame))
    assert orchestrator.router.send(identity, Shutdown(Epoch(1), "after"))
    assert dealer.receive(WAIT_S) == Shutdown(Epoch(1), "after")
    assert dealer.num_dropped == 5


def test_receive_ends_after_its_time(dealer: DealerChannel[WorkerCommand]) -> None:
    started = time.monotonic()
    assert dealer.receive(0.0) is None
    assert dealer.receive(0.05) is None
    # ZeroMQ counts in whole milliseconds.
    assert 0.048 <= time.monotonic() - started < WAIT_S


def test_a_flood_of_rubbish_does_not_keep_a_receive_from_ending(
    orchestrator: Orchestrator, dealer: DealerChannel[WorkerCommand]
) -> None:
    identity = greet(orchestrator, dealer)
    stop = threading.Event()

    def flood() -> None:
        while not stop.is_set():
            try:
                orchestrator.router._socket.send_multipart((identity, b"\xc1"), zmq.NOBLOCK)
            except zmq.ZMQError:
                time.sleep(0.001)

    thread = threading.Thread(target=flood)
    thread.start()
    answers: list[object] = []
    receiver = threading.Thread(target=lambda: answers.append(dealer.receive(0.2)))
    receiver.start()
    receiver.join(5.0)
    stop.set()
    thread.join()
    receiver.join(WAIT_S)
    assert answers == [None]
    assert dealer.num_dropped > 0


def test_the_end_of_the_life_line_ends_a_receive(
    orchestrator: Orchestrator, dealer: DealerChannel[WorkerCommand], line: tuple[int, int]
) -> None:
    identity = greet(orchestrator, dealer)
    assert orchestrator.router.send(identity, Shutdown(Epoch(1), "last words"))
    time.sleep(0.1)
    os.close(line[1])
    assert dealer.receive() == Shutdown(Epoch(1), "last words")
    with pytest.raises(OrchestratorGone, match="closed the life line"):
        dealer.receive()


def test_sending_to_an_orchestrator_that_is_gone_ends(
    run_dir: LockedRunDir, line: tuple[int, int]
) -> None:
    dealer: DealerChannel[WorkerCommand] = DealerChannel(run_dir, to_worker(), line[0])
    with pytest.raises(OrchestratorGone, match="does not take messages"):
        dealer.send(GetStatus())
    dealer.close()
