"""The orchestrator's ends of all life lines: hands out segments, sees every death at once.

Whoever connects before the segments exist waits for them. A line is known by its token, which a
worker repeats in its HELLO. When a line ends, its process is made certain to be over (its pidfd
says so; a process that only closed the line is given a moment and then killed) before anyone is
told, because a worker that still runs could still write shared memory.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import signal
from typing import TYPE_CHECKING

from protocol.lifeline import Grant, SegmentGrant, listen, peer_pid, send_grant

if TYPE_CHECKING:
    import asyncio
    import socket
    from collections.abc import Callable

    from orchestrator.mailroom import Mailbox, Mailroom
    from protocol.run_dir import RunDir

log = logging.getLogger("headrace")

#: Without descriptors nobody can be let in: so long until the next attempt, as whoever waits at the
#: door would otherwise wake the loop without end.
_FULL_S = 1.0
#: From the end of a line to SIGKILL: a worker that leaves in order needs less.
_LEAVE_S = 2.0
#: From SIGKILL to taking a process for over all the same (it hangs inside the kernel).
_DIE_S = 10.0
_MAX_LINES = 256


class Line:
    """One life line. `pidfd` is -1 where the kernel cannot say which process it is."""

    def __init__(self, token: str, connection: socket.socket) -> None:
        self.token = token
        self.connection = connection
        self.is_granted = False
        #: Set when a worker said HELLO with this line's token: from then on its process may write
        #: shared memory, so it must be over before it is called lost.
        self.is_worker = False
        #: What its worker may use in place of the socket.
        self.mailbox: Mailbox | None = None
        self.pid = peer_pid(connection)
        self.pidfd = -1
        if self.pid > 0:
            with contextlib.suppress(OSError):
                self.pidfd = os.pidfd_open(self.pid)

    def kill(self) -> None:
        """SIGKILL this very process, never another that got its number, never ourselves."""
        if self.pidfd >= 0 and self.pid != os.getpid():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)

    def close(self) -> None:
        self.connection.close()
        if self.mailbox is not None:
            self.mailbox.close()
            self.mailbox = None
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1


class Lifelines:
    """Accepts life lines in `loop`. `on_end(token)` is called once the process behind is over."""

    def __init__(
        self, run_dir: RunDir, loop: asyncio.AbstractEventLoop, on_end: Callable[[str], None]
    ) -> None:
        self._loop = loop
        self._on_end = on_end
        self._lines: dict[str, Line] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._segments: list[SegmentGrant] | None = None
        self._fds: list[int] = []
        self._mailroom: Mailroom | None = None
        self._listener = listen(run_dir)
        self._reopening: asyncio.TimerHandle | None = None
        self._listen()

    def _listen(self) -> None:
        self._loop.add_reader(self._listener.fileno(), self._accept)

    def open(
        self, segments: list[SegmentGrant], fds: list[int], mailroom: Mailroom | None = None
    ) -> None:
        """The segments exist: grant them to all who wait and to all who come, each with a mailbox
        of its own if there is a `mailroom`. The descriptors stay the caller's."""
        self._segments, self._fds, self._mailroom = segments, fds, mailroom
        for line in list(self._lines.values()):
            self._grant(line)

    @property
    def waiting(self) -> list[int] | None:
        """The processes that wait for the segments; None once these exist."""
        return None if self._segments is not None else [line.pid for line in self._lines.values()]

    def find(self, token: str) -> Line | None:
        """The living line with that token."""
        line = self._lines.get(token)
        return None if line is None or token in self._timers else line

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError as error:
            log.warning("a process cannot join now: %s; raise `ulimit -n`", error.strerror)
            self._loop.remove_reader(self._listener.fileno())
            self._reopening = self._loop.call_later(_FULL_S, self._listen)
            return
        connection.setblocking(False)
        if len(self._lines) >= _MAX_LINES:
            log.warning("more than %d processes want to join; the latest is sent away", _MAX_LINES)
            connection.close()
            return
        line = Line(secrets.token_hex(16), connection)
        self._lines[line.token] = line
        self._loop.add_reader(connection.fileno(), self._readable, line)
        if self._segments is not None:
            self._grant(line)

    def _grant(self, line: Line) -> None:
        assert self._segments is not None
        if line.is_granted or line.token in self._timers:
            return
        grants, fds = self._segments, self._fds
        try:
            if self._mailroom is not None:
                line.mailbox, mail_grants, mail_fds = self._mailroom.make()
                grants, fds = [*grants, *mail_grants], [*fds, *mail_fds]
            try:
                send_grant(line.connection, Grant(line.token, grants), fds)
            finally:
                for fd in fds[len(self._fds) : len(self._fds) + 1]:
                    os.close(fd)  # of a mailbox, mapped here and on its way to the worker
            line.is_granted = True
        except OSError:
            self._ended(line)

    def _readable(self, line: Line) -> None:
        try:
            if line.connection.recv(64):
                log.warning("process %d writes to its life line; it is closed", line.pid)
        except BlockingIOError:
            return
        except OSError:
            pass
        self._ended(line)

    def _ended(self, line: Line) -> None:
        if line.token in self._timers or line.token not in self._lines:
            return
        self._loop.remove_reader(line.connection.fileno())
        if line.pidfd < 0 or not line.is_worker:
            self._over(line)
            return
        self._timers[line.token] = self._loop.call_later(_LEAVE_S, self._insist, line)
        self._loop.add_reader(line.pidfd, self._over, line)

    def _insist(self, line: Line) -> None:
        log.warning("process %d closed its life line but goes on; it is killed", line.pid)
        line.kill()
        self._timers[line.token] = self._loop.call_later(_DIE_S, self._give_up, line)

    def _give_up(self, line: Line) -> None:
        log.error("process %d does not end even when killed; going on without it", line.pid)
        self._over(line)

    def _over(self, line: Line) -> None:
        timer = self._timers.pop(line.token, None)
        if timer is not None:
            timer.cancel()
        if line.pidfd >= 0:
            self._loop.remove_reader(line.pidfd)
        del self._lines[line.token]
        if line.mailbox is not None:
            line.mailbox.deliver_rest()
        line.close()
        self._on_end(line.token)

    def close(self) -> None:
        """Close all lines: every process at their other ends sees it and leaves."""
        self._loop.remove_reader(self._listener.fileno())
        if self._reopening is not None:
            self._reopening.cancel()
        self._listener.close()
        for line in self._lines.values():
            self._loop.remove_reader(line.connection.fileno())
            if line.pidfd >= 0:
                self._loop.remove_reader(line.pidfd)
            line.close()
        for timer in self._timers.values():
            timer.cancel()
        self._lines.clear()
        self._timers.clear()
