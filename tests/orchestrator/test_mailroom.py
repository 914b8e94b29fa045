"""All mailboxes in one loop: who is heard first, what is dropped, and what a dead worker said."""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
from typing import TYPE_CHECKING

import pytest

from orchestrator.mailroom import Mailbox, Mailroom
from protocol.codec import encode, to_worker
from protocol.mailbox import BELL, MAILBOX_WAKE, MailboxChannel, ordering_barrier
from protocol.messages import DetachArena, Epoch, Failed, GetStatus, WorkerCommand, WorkerEvent

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.skipif(
    not ordering_barrier()[0], reason="no mailboxes without an order of memory"
)


class Scene:
    def __init__(self) -> None:
        self.drops: list[str] = []
        self.heard: list[WorkerEvent] = []
        self.faults: list[str] = []
        self.room = Mailroom(asyncio.get_running_loop(), self.drops.append)
        self._stack = contextlib.ExitStack()
        self._stack.callback(self.room.close)

    def join(self, *, is_first: bool = False) -> tuple[Mailbox, MailboxChannel[WorkerCommand]]:
        """A mailbox and its worker's end."""
        mailbox, grants, fds = self.room.make()
        assert mailbox is not None
        names = [grant.name for grant in grants]
        ends = dict(zip(names, fds, strict=True))
        memory = mmap.mmap(fds[0], grants[0].num_bytes)
        os.close(fds[0])
        read_fd, write_fd = os.pipe()
        self._stack.callback(os.close, read_fd)
        self._stack.callback(os.close, write_fd)
        worker = MailboxChannel[WorkerCommand](
            memory,
            grants[0],
            {name: ends[name] for name in (MAILBOX_WAKE, BELL)},
            to_worker(),
            read_fd,
            ordering_barrier()[1],
        )
        worker.use()
        assert mailbox.is_used
        mailbox.hear_through(self.heard.append, self.faults.append, is_first=is_first)
        return mailbox, worker

    def close(self) -> None:
        self._stack.close()


def play(story: Callable[[Scene], object]) -> None:
    async def run() -> None:
        scene = Scene()
        try:
            await story(scene)  # type: ignore[misc]
        finally:
            scene.close()

    asyncio.run(run())


def words(*numbers: int) -> list[WorkerEvent]:
    return [Failed(Epoch(number), "said") for number in numbers]


def test_the_first_mailbox_is_heard_before_the_others() -> None:
    async def story(scene: Scene) -> None:
        other, at_other = scene.join()
        first, at_first = scene.join(is_first=True)
        for event in words(1, 2):
            at_other.send(event)
        for event in words(3, 4):
            at_first.send(event)
        await asyncio.sleep(0.05)
        assert scene.heard == words(3, 4, 1, 2)
        assert other.send(DetachArena(Epoch(9)))
        assert at_other.receive(0.0) == DetachArena(Epoch(9))
        assert at_first.receive(0.0) is None
        for mailbox in (other, first):
            mailbox.close()
            assert not mailbox.send(DetachArena(Epoch(9)))

    play(story)


def test_what_a_worker_does_not_say_is_counted() -> None:
    async def story(scene: Scene) -> None:
        mailbox, worker = scene.join()
        for frame in (b"\xc1", encode(GetStatus()), encode(Failed(Epoch(1), "said"))):
            assert worker._up.put(frame)
        mailbox.deliver_rest()
        assert scene.heard == words(1)
        assert len(scene.drops) == 2
        assert not scene.faults
        mailbox.close()

    play(story)


def test_a_broken_ring_is_told_once_and_heard_no_more() -> None:
    async def story(scene: Scene) -> None:
        mailbox, worker = scene.join()
        worker.send(*words(1))
        await asyncio.sleep(0.05)
        assert scene.heard == words(1)
        worker._words[16] += 3  # the head of `up`
        mailbox.deliver_rest()
        assert len(scene.faults) == 1
        assert "make no sense" in scene.faults[0]
        worker.send(*words(3))
        await asyncio.sleep(0.05)
        assert len(scene.faults) == 1
        mailbox.close()

    play(story)


def test_many_messages_leave_the_loop_its_turns() -> None:
    async def story(scene: Scene) -> None:
        mailbox, worker = scene.join()
        for number in range(1000):
            worker.send(*words(number))
        turns = 0
        while len(scene.heard) < 1000:
            await asyncio.sleep(0)
            turns += 1
            assert turns < 10_000
        assert turns > 2
        assert scene.heard == words(*range(1000))
        mailbox.close()

    play(story)
