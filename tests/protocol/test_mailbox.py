"""Mailboxes: bytes in and out of a ring, what is refused, and both ends with their eventfds."""

from __future__ import annotations

import os
import random
import socket
import threading
from collections import deque
from typing import TYPE_CHECKING

import pytest

from protocol.codec import encode, to_orchestrator, to_worker
from protocol.completions import new_wake_fd
from protocol.errors import OrchestratorGone, ProtocolError
from protocol.mailbox import (
    BELL,
    MAILBOX_WAKE,
    RING_BYTES,
    SKIP,
    MailboxChannel,
    OrchestratorMailbox,
    RingReader,
    RingWriter,
    mailbox_grant,
)
from protocol.messages import MAX_MESSAGE_BYTES, DetachArena, Epoch, Failed, Shutdown

if TYPE_CHECKING:
    from collections.abc import Iterator

    from protocol.messages import WorkerCommand


def ring(size_bytes: int) -> tuple[RingWriter, RingReader, memoryview, memoryview]:
    words = memoryview(bytearray(8 * 16)).cast("q")
    data = memoryview(bytearray(size_bytes))
    return RingWriter(words, 0, 8, data, None), RingReader(words, 0, 8, data), words, data


@pytest.mark.parametrize("size_bytes", [64, 512, 64 * 1024])
def test_a_ring_gives_what_it_got(size_bytes: int) -> None:
    writer, reader, words, _ = ring(size_bytes)
    rng = random.Random(size_bytes)
    waiting: deque[bytes] = deque()
    num_refused = num_taken = 0
    for _ in range(5000):
        if rng.random() < 0.55:
            frame = rng.randbytes(rng.choice((0, 1, 3, 4, 5, 20, size_bytes // 3)))
            if writer.put(frame):
                waiting.append(frame)
            else:
                num_refused += 1
                assert waiting  # an empty ring takes whatever half of it holds
        else:
            assert reader.is_empty is not bool(waiting)
            assert reader.take() == (waiting.popleft() if waiting else None)
            num_taken += 1
        assert 0 <= words[0] - words[8] <= size_bytes
    assert min(num_refused, num_taken) > 0


def test_the_largest_message_fits_wherever_the_one_before_ended() -> None:
    writer, reader, _, _ = ring(RING_BYTES)
    large = bytes(MAX_MESSAGE_BYTES)
    for _ in range(3):
        assert writer.put(b"x" * 12345)
        assert writer.put(large)
        assert reader.take() == b"x" * 12345
        assert writer.put(b"y")
        assert reader.take() == large
        assert reader.take() == b"y"


def test_an_empty_ring_is_begun_anew() -> None:
    writer, reader, words, data = ring(RING_BYTES)
    for number in range(1000):
        assert writer.put(number.to_bytes(200, "little"))
        assert reader.take() == number.to_bytes(200, "little")
    assert words[0] > RING_BYTES
    assert not any(data[20 * 1024 :: 4096])


@pytest.mark.parametrize(
    ("head", "length"), [(64, 61), (8, 8), (-8, 0), (72, 4), (8, SKIP), (64, SKIP - 1)]
)
def test_a_ring_that_makes_no_sense_is_refused(head: int, length: int) -> None:
    _, reader, words, data = ring(64)
    words[0] = head
    data.cast("I")[0] = length
    with pytest.raises(ProtocolError, match="make no sense"):
        reader.take()


class Ends:
    """Both ends of a mailbox, and a life line."""

    def __init__(self, ring_bytes: int = 4096) -> None:
        grant = mailbox_grant(ring_bytes)
        memory = bytearray(grant.num_bytes)
        self.fds = {MAILBOX_WAKE: new_wake_fd(), BELL: new_wake_fd()}
        self.lifeline, self._other_end = socket.socketpair()
        self.orchestrator = OrchestratorMailbox(memory, grant, self.fds[MAILBOX_WAKE], None)
        self.worker: MailboxChannel[WorkerCommand] = MailboxChannel(
            memory, grant, self.fds, to_worker(), self.lifeline.fileno(), None
        )
        self.memory, self.grant = memory, grant

    def hang_up(self) -> None:
        self._other_end.close()

    def close(self) -> None:
        for fd in self.fds.values():
            os.close(fd)
        self.lifeline.close()
        self._other_end.close()


@pytest.fixture
def ends() -> Iterator[Ends]:
    made = Ends()
    yield made
    made.close()


def test_messages_go_both_ways_and_wake_the_other_side(ends: Ends) -> None:
    assert not ends.orchestrator.is_used
    ends.worker.use()
    assert ends.orchestrator.is_used
    assert ends.worker.receive(0.0) is None
    heard: list[WorkerCommand | None] = []
    thread = threading.Thread(target=lambda: heard.append(ends.worker.receive()))
    thread.start()
    assert ends.orchestrator.send(DetachArena(Epoch(3)))
    thread.join(10)
    assert heard == [DetachArena(Epoch(3))]
    assert ends.worker.receive(0.01) is None

    ends.worker.send(Failed(Epoch(3), "ouch"))
    assert os.read(ends.fds[BELL], 8)
    frame = ends.orchestrator.take()
    assert frame is not None
    assert to_orchestrator().decode(frame) == Failed(Epoch(3), "ouch")
    assert ends.orchestrator.take() is None


def test_another_descriptor_ends_the_wait(ends: Ends) -> None:
    wake_fd = new_wake_fd()
    os.write(wake_fd, (1).to_bytes(8, "little"))
    assert ends.worker.receive(None, wake_fd) is None
    ends.orchestrator.send(DetachArena(Epoch(1)))
    assert ends.worker.receive(None, wake_fd) == DetachArena(Epoch(1))
    assert ends.worker.receive(0.0) is None  # it is watched no longer
    os.close(wake_fd)


def test_what_was_sent_is_read_before_the_end_is_noticed(ends: Ends) -> None:
    ends.orchestrator.send(Shutdown(Epoch(1), "that is all"))
    ends.hang_up()
    assert ends.worker.receive() == Shutdown(Epoch(1), "that is all")
    with pytest.raises(OrchestratorGone):
        ends.worker.receive()


def test_garbage_is_dropped_and_counted(ends: Ends) -> None:
    writer = ends.orchestrator._down
    assert writer.put(b"\xc1")
    assert writer.put(encode(DetachArena(Epoch(9))))
    assert ends.worker.receive() == DetachArena(Epoch(9))
    assert ends.worker.num_dropped == 1


def test_who_reads_nothing_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("protocol.mailbox._SEND_TIMEOUT_S", 0.02)
    ends = Ends(256)
    for _ in range(3):
        ends.worker.send(Failed(Epoch(1), "nobody reads this"))
    with pytest.raises(OrchestratorGone):
        ends.worker.send(Failed(Epoch(1), "nobody reads this"))
    while ends.orchestrator.send(DetachArena(Epoch(1))):
        pass
    assert ends.worker.receive() == DetachArena(Epoch(1))
    assert ends.orchestrator.send(DetachArena(Epoch(1)))
    ends.close()
