"""The life of a worker, the same for all three: join, set up, work, leave; every end is handled.

    connect     life line gives the segments and a token
    HELLO       -> Welcome (an epoch and a setup), or Refused (exit 2); then on by the mailbox
    set-up      load, map, probe; `Progress` as it goes
    Ready       from here on commands come
    ...
    Shutdown, or the life line ends: leave with 0; a fault: `Failed` says why, exit 1

`run_worker` is the whole `main` of a worker program: it turns each way to end into an exit code,
and a thread ends the process a few seconds after the orchestrator, even out of a computation that
does not come back.
"""

from __future__ import annotations

import logging
import mmap
import os
import signal
import sys
import threading
import time
from typing import TYPE_CHECKING

from protocol.channel import DealerChannel
from protocol.codec import to_worker
from protocol.errors import (
    EXIT_FAULT,
    EXIT_OK,
    EXIT_USER_ERROR,
    OrchestratorGone,
    UserError,
    WorkFault,
)
from protocol.lifeline import Lifeline, SegmentGrant
from protocol.mailbox import BELL, MAILBOX, MAILBOX_WAKE, MailboxChannel, ordering_barrier
from protocol.messages import (
    PROTOCOL_VERSION,
    Arena,
    Capabilities,
    Epoch,
    Failed,
    Hello,
    Progress,
    Ready,
    Refused,
    Role,
    Shutdown,
    Welcome,
    WorkerCommand,
    WorkerEvent,
    WorkerSetup,
)
from protocol.run_dir import RunDir

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

log = logging.getLogger("headrace")

#: A worker that cannot leave by itself after the orchestrator's end is ended after this long.
_GRACE_S = 3.0
#: The kernel closes a dead orchestrator's life lines and its lock within microseconds.
_LOCK_GRACE_S = 0.05
_ANSWER_TIMEOUT_S = 30.0


class WorkerLink:
    """A joined worker's connection: commands in, events out, segments by name."""

    def __init__(
        self,
        lifeline: Lifeline,
        channel: DealerChannel[WorkerCommand] | MailboxChannel[WorkerCommand],
        epoch: Epoch,
        setup: WorkerSetup,
    ) -> None:
        self.epoch = epoch
        self.setup = setup
        self._lifeline = lifeline
        self._channel = channel

    @classmethod
    def join(
        cls, run_dir: RunDir, role: Role, capabilities: Capabilities, wait_s: float = 10.0
    ) -> WorkerLink:
        """Connect, say HELLO, wait for the Welcome.

        Raises:
            UserError: no orchestrator, or it refused this worker (its sentence).
            OrchestratorGone: it went away meanwhile.
        """
        lifeline = Lifeline.connect(run_dir, wait_s)
        threading.Thread(target=_end_with, args=(lifeline,), daemon=True, name="lifeline").start()
        channel = DealerChannel(run_dir, to_worker(), lifeline.fileno())
        mailbox = _mailbox_of(lifeline)
        if mailbox is not None:
            mailbox.use()
        channel.send(Hello(PROTOCOL_VERSION, role, os.getpid(), lifeline.token, capabilities))
        answer = channel.receive(_ANSWER_TIMEOUT_S)
        if isinstance(answer, Refused):
            channel.close()
            raise UserError(answer.sentence)
        if not isinstance(answer, Welcome):
            channel.close()
            raise OrchestratorGone("the orchestrator did not answer the HELLO")
        if mailbox is None:
            return cls(lifeline, channel, answer.epoch, answer.setup)
        channel.close()
        return cls(lifeline, mailbox, answer.epoch, answer.setup)

    def segment(self, name: str) -> tuple[int, SegmentGrant]:
        """Descriptor and layout of a shared segment.

        Raises:
            KeyError: the orchestrator granted no such segment.
        """
        return self._lifeline.segments[name]

    def map_segment(self, name: str, *, is_writable: bool) -> tuple[mmap.mmap, SegmentGrant]:
        """The segment mapped MAP_SHARED, whole."""
        fd, grant = self.segment(name)
        access = mmap.PROT_READ | (mmap.PROT_WRITE if is_writable else 0)
        return mmap.mmap(fd, grant.num_bytes, mmap.MAP_SHARED, access), grant

    def progress(self, done: int, total: int, text: str) -> None:
        self.send(Progress(self.epoch, done, total, text))

    def ready(
        self,
        bytes_per_s: float = 0.0,
        arena: Arena | None = None,
        far_bytes_per_s: float = 0.0,
    ) -> None:
        self.send(Ready(self.epoch, bytes_per_s, arena, far_bytes_per_s))

    def send(self, event: WorkerEvent) -> None:
        self._channel.send(event)

    def receive(self, timeout_s: float | None = None, wake_fd: int = -1) -> WorkerCommand | None:
        """The next command; None after `timeout_s`, or when `wake_fd` can be read and no command
        is there.

        Raises:
            OrchestratorGone: it is gone, or told this worker to leave.
        """
        command = self._channel.receive(timeout_s, wake_fd)
        if isinstance(command, Shutdown):
            raise OrchestratorGone(command.reason)
        return command

    def close(self) -> None:
        self._channel.close()


def _mailbox_of(lifeline: Lifeline) -> MailboxChannel[WorkerCommand] | None:
    """The mailbox that came with the life line; None where there is none, or where this process
    cannot keep the order of memory that it needs."""
    segments = lifeline.segments
    if not {MAILBOX, MAILBOX_WAKE, BELL} <= segments.keys():
        return None
    is_usable, barrier = ordering_barrier()
    if not is_usable:
        return None
    fd, grant = segments[MAILBOX]
    return MailboxChannel(
        mmap.mmap(fd, grant.num_bytes),
        grant,
        {name: segments[name][0] for name in (MAILBOX_WAKE, BELL)},
        to_worker(),
        lifeline.fileno(),
        barrier,
    )


def _end_with(lifeline: Lifeline) -> None:
    lifeline.wait_for_end()
    time.sleep(_GRACE_S)
    os._exit(EXIT_OK)


def run_worker(
    role: Role,
    run_dir: Path,
    wait_s: float,
    capabilities: Callable[[], Capabilities],
    serve: Callable[[WorkerLink], None],
) -> int:
    """Join, `serve` until the end, and return the exit code.

    `serve` sets up, calls `link.ready(...)`, then loops over `link.receive()`; it never returns by
    itself other than through an exception.
    """
    signal.signal(signal.SIGTERM, _leave)
    signal.signal(signal.SIGINT, _leave)
    link: WorkerLink | None = None
    try:
        link = WorkerLink.join(RunDir(run_dir), role, capabilities(), wait_s)
        log.info("joined as %s, epoch %d", role, link.epoch)
        serve(link)
    except OrchestratorGone as gone:
        log.info("leaving: %s", gone)
        time.sleep(_LOCK_GRACE_S)
        RunDir(run_dir).remove_leftovers()
        return EXIT_OK
    except UserError as error:
        _last_words(link, str(error), is_user_error=True)
        print(f"headrace {role.replace('_', '-')}: {error}", file=sys.stderr)  # noqa: T201
        return EXIT_USER_ERROR
    except (KeyboardInterrupt, SystemExit):
        log.info("leaving: told to stop")
        return EXIT_OK
    except WorkFault as error:
        _last_words(link, str(error), is_user_error=False)
        log.error("fault: %s", error)
        return EXIT_FAULT
    except Exception as error:
        _last_words(link, f"{type(error).__name__}: {error}", is_user_error=False)
        log.exception("fault")
        return EXIT_FAULT
    finally:
        if link is not None:
            link.close()
    return EXIT_OK


def _leave(signum: int, frame: object) -> None:
    raise SystemExit(signum)


def _last_words(link: WorkerLink | None, sentence: str, *, is_user_error: bool) -> None:
    if link is None:
        return
    try:
        link.send(Failed(link.epoch, sentence, is_user_error))
    except OrchestratorGone:
        return
