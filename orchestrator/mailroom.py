"""The orchestrator's side of all mailboxes: makes one per worker, hears them all.

Every worker rings the same bell, an eventfd in the loop; then all mailboxes are looked at, again
and again until each is empty. The gpu_worker's comes first every time: others report what it was
told already by a word in shared memory, and nothing waits for them.
"""

from __future__ import annotations

import mmap
import os
from typing import TYPE_CHECKING

from protocol.codec import to_orchestrator
from protocol.completions import new_wake_fd
from protocol.errors import ProtocolError
from protocol.mailbox import (
    MAILBOX,
    WAKE_GRANTS,
    OrchestratorMailbox,
    mailbox_grant,
    ordering_barrier,
    quiet_eventfd,
)
from protocol.messages import Cancel, Generate, GetStatus

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from protocol.lifeline import SegmentGrant
    from protocol.messages import Message, WorkerEvent

#: Messages heard per ring of the bell before other tasks of the loop get their turn.
_LIMIT = 256


class Mailbox:
    """One worker's, from its life line on; used only after `hear_through`."""

    def __init__(self, ends: OrchestratorMailbox, wake_fd: int, room: Mailroom) -> None:
        self._ends = ends
        self._wake_fd = wake_fd
        self._room = room
        self._on_message: Callable[[WorkerEvent], None] | None = None
        self._on_fault: Callable[[str], None] | None = None
        self._is_closed = False

    @property
    def is_used(self) -> bool:
        """Whether the worker wants what follows its Welcome to come through here."""
        return self._ends.is_used

    def send(self, message: Message) -> bool:
        """False if the worker reads nothing any more."""
        return not self._is_closed and self._ends.send(message)

    def hear_through(
        self,
        on_message: Callable[[WorkerEvent], None],
        on_fault: Callable[[str], None],
        *,
        is_first: bool,
    ) -> None:
        """Hand over what comes from now on. `is_first`: before what is in other mailboxes.
        `on_fault` hears why nothing more will come."""
        self._on_message, self._on_fault = on_message, on_fault
        self._room.add(self, is_first=is_first)

    def deliver_next(self) -> bool:
        """Hand over the next message; False if there is none."""
        if self._on_message is None or self._on_fault is None:
            return False
        try:
            frame = self._ends.take()
        except ProtocolError as error:
            on_fault = self._on_fault
            self._on_message = self._on_fault = None
            on_fault(str(error))
            return False
        if frame is None:
            return False
        message = self._room.decode(frame)
        if message is not None:
            self._on_message(message)
        return True

    def deliver_rest(self) -> None:
        """Hand over what its worker said last; it is gone."""
        while self.deliver_next():
            pass

    def close(self) -> None:
        """Nothing goes in or out any more."""
        self._on_message = self._on_fault = None
        self._room.remove(self)
        os.close(self._wake_fd)
        self._is_closed = True


class Mailroom:
    """All mailboxes. Where the processors' order of memory cannot be had, it makes none."""

    def __init__(self, loop: asyncio.AbstractEventLoop, count_drop: Callable[[str], None]) -> None:
        self._loop = loop
        self._count_drop = count_drop
        self._decoder = to_orchestrator()
        self._grant = mailbox_grant()
        self._is_usable, self._barrier = ordering_barrier()
        self._heard: list[Mailbox] = []
        self._bell_fd = new_wake_fd()
        loop.add_reader(self._bell_fd, self._drain)

    def make(self) -> tuple[Mailbox | None, list[SegmentGrant], list[int]]:
        """A mailbox, and what its worker is granted for it. The first of the descriptors is the
        caller's to close once they are sent.

        Raises:
            OSError: there are no descriptors left.
        """
        if not self._is_usable:
            return None, [], []
        memory_fd = os.memfd_create(f"headrace-{MAILBOX}", os.MFD_CLOEXEC)
        try:
            os.ftruncate(memory_fd, self._grant.num_bytes)
            memory = mmap.mmap(memory_fd, self._grant.num_bytes)
            wake_fd = new_wake_fd()
        except OSError:
            os.close(memory_fd)
            raise
        ends = OrchestratorMailbox(memory, self._grant, wake_fd, self._barrier)
        return (
            Mailbox(ends, wake_fd, self),
            [self._grant, *WAKE_GRANTS],
            [memory_fd, wake_fd, self._bell_fd],
        )

    def add(self, mailbox: Mailbox, *, is_first: bool) -> None:
        self._heard.insert(0 if is_first else len(self._heard), mailbox)

    def remove(self, mailbox: Mailbox) -> None:
        if mailbox in self._heard:
            self._heard.remove(mailbox)

    def decode(self, frame: bytes) -> WorkerEvent | None:
        """What a worker said; None, and counted, if it is nothing that a worker says."""
        try:
            message = self._decoder.decode(frame)
        except ProtocolError as error:
            self._count_drop(str(error))
            return None
        if isinstance(message, (Generate, Cancel, GetStatus)):
            self._count_drop(f"{type(message).__name__} from a worker")
            return None
        return message

    def _drain(self) -> None:
        quiet_eventfd(self._bell_fd)
        for _ in range(_LIMIT):
            for mailbox in self._heard:
                if mailbox.deliver_next():
                    break
            else:
                return
        self._loop.call_soon(self._drain)

    def close(self) -> None:
        self._loop.remove_reader(self._bell_fd)
        os.close(self._bell_fd)
