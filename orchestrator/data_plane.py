"""The orchestrator's side of what passes through shared memory instead of messages.

    residency     table of slots out, reports of the gpu_worker back    orchestrator.residency
    completions   finished parts, workers to gpu_worker                 orchestrator.finished_parts

What was said there before a message goes to the core before that message.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from orchestrator.core.events import ResetTable, WorkerLost
from orchestrator.finished_parts import FinishedParts
from orchestrator.residency import HERALDS, TABLE_COMMANDS, ResidencyBoard
from protocol.messages import Copied, Copy, Execute, Executed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from orchestrator.core.events import CoreCommand, CoreEvent, Retired
    from protocol.lifeline import SegmentGrant


class DataPlane:
    """`later(seconds, action)` calls back once; `deliver` takes events for the core."""

    def __init__(
        self,
        segments: list[SegmentGrant],
        fds: list[int],
        expert_bytes: int,
        later: Callable[[float, Callable[[], None]], object],
        deliver: Callable[[Retired], None],
    ) -> None:
        self.later = later
        self._board = ResidencyBoard.open(segments, fds, later, deliver)
        self._finished = FinishedParts.open(segments, fds, expert_bytes)
        #: Whether the gpu_worker left reports since this was last asked: it makes progress.
        self.has_moved = self._board.has_moved
        #: Reports of whole layers that no message has announced yet.
        self.early = self._board.early

    def before(self, event: CoreEvent) -> Sequence[CoreEvent]:
        """What the core is to hear before `event`.

        Raises:
            ProtocolError: the gpu_worker says it reported what is not there.
        """
        if isinstance(event, (Copied, Executed)):
            self._finished.heard(event)
        elif isinstance(event, HERALDS):
            return [*self._finished.look(), *self._board.before(event)]
        return ()

    def carry(self, commands: Sequence[CoreCommand]) -> None:
        """Do what the core's answer to one event means here, before any of it is sent: the last
        thing that a gpu_worker waits for may be done at once, and then it looks at the table."""
        for command in commands:
            if isinstance(command, (Copy, Execute)):
                self._finished.asked(command)
            elif isinstance(command, TABLE_COMMANDS):
                self._board.carry(command)
                if isinstance(command, ResetTable):
                    self._finished.copies_are_void()

    def after(self, event: CoreEvent) -> None:
        """The core has heard `event`."""
        if isinstance(event, WorkerLost):
            self._finished.lost(event.epoch)
