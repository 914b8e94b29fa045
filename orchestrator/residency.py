"""The orchestrator's hand on the residency segment: the core wishes, this writes and reads.

    Publish, Unpublish, ResetTable   ->  the table, at once and in order
    Routed, Ran, StepDone, a death   <-  first the reports that came before it, as `Passed`
    a step that goes on by itself    <-  the same, now and then, before a message says so
    Retire                           ->  `Retired`, when the fence allows

*Retire.* The victim has left the table. A barrier on every processor that the gpu_worker runs on
makes sure that a look which began before is seen in the fence (protocol.membarrier). An even fence
then means that nothing is in use; an odd one is looked at again until it moves. This polls only
while a fill in the background waits and a layer is being computed, so it ends with the layer. Where
the kernel has no such barrier nothing is answered: the core then waits for the worker's next
message, which says the same.
"""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING

from orchestrator.core.events import (
    Passed,
    Publish,
    ResetTable,
    Retire,
    Retired,
    Unpublish,
    WorkerFault,
    WorkerLost,
)
from protocol.errors import ProtocolError
from protocol.membarrier import MemoryBarrier, is_strongly_ordered
from protocol.messages import Epoch, ExpertId, LayerId, Ran, Routed, StepDone, StepId
from protocol.residency import RESIDENCY, ResidencyWriter

if TYPE_CHECKING:
    from collections.abc import Callable

    from protocol.lifeline import SegmentGrant
    from protocol.messages import CopyId
    from protocol.residency import Report

TableCommand = Publish | Unpublish | ResetTable | Retire
#: The same as a tuple, see orchestrator.hub.ADDRESSED.
TABLE_COMMANDS = (Publish, Unpublish, ResetTable, Retire)
#: Events that reports may have come before.
HERALDS = (Routed, Ran, StepDone, WorkerLost)
Herald = Routed | Ran | StepDone | WorkerLost
#: Between two looks at the fence: about what a layer takes, so that most need one.
_POLL_S = 0.0002


class ResidencyBoard:
    """`later(seconds, action)` calls back once; `deliver` takes events for the core."""

    def __init__(
        self,
        memory: mmap.mmap | bytearray,
        grant: SegmentGrant,
        later: Callable[[float, Callable[[], None]], object],
        deliver: Callable[[Retired], None],
        barrier: MemoryBarrier | None = None,
    ) -> None:
        self._segment = ResidencyWriter(memory, grant)
        self._segment.reset(0)
        self._later = later
        self._deliver = deliver
        self._barrier = barrier or MemoryBarrier()
        self._waiting: dict[CopyId, int] = {}
        self._is_polling = False
        self._is_ordered = is_strongly_ordered()
        self._seen_head = 0

    def carry(self, command: TableCommand) -> None:
        """Carry out one command of the core."""
        match command:
            case Publish():
                self._segment.publish(command.layer, command.expert, command.slot)
            case Unpublish():
                self._segment.unpublish(command.layer, command.expert)
            case ResetTable():
                self._segment.reset(command.epoch or 0)
                self._waiting.clear()
            case Retire():
                self._retire(command.copy)

    @classmethod
    def open(
        cls,
        segments: list[SegmentGrant],
        fds: list[int],
        later: Callable[[float, Callable[[], None]], object],
        deliver: Callable[[Retired], None],
    ) -> ResidencyBoard:
        """Map the segment out of all that were made."""
        index = [grant.name for grant in segments].index(RESIDENCY)
        grant = segments[index]
        return cls(mmap.mmap(fds[index], grant.num_bytes), grant, later, deliver)

    # ---- reports ----

    def before(self, event: Herald) -> list[Passed | Ran]:
        """What the gpu_worker reported before `event`, as far as not heard of yet.

        Raises:
            ProtocolError: the worker says it reported what is not there.
        """
        if isinstance(event, WorkerLost):
            return self._last_reports(event.epoch)
        return self._reports(event.epoch, event.num_reports)

    def _reports(self, epoch: Epoch, num_reports: int) -> list[Passed | Ran]:
        if epoch != self._segment.epoch:
            if num_reports:
                raise ProtocolError(f"has reported {num_reports} layers without a table")
            return []
        return [_event_of(report) for report in self._segment.take(num_reports)]

    def _last_reports(self, epoch: Epoch) -> list[Passed | Ran]:
        """Everything that a gpu_worker has left behind; nothing if `epoch` was none."""
        if epoch != self._segment.epoch:
            return []
        try:
            return self._reports(epoch, self._segment.head)
        except ProtocolError:  # it died of what it wrote there
            return []

    def early(self) -> list[Passed | Ran]:
        """What the gpu_worker reported of layers that needed nobody, before a message says so.

        Raises:
            WorkerFault: it left there what is no report.
        """
        epoch = Epoch(self._segment.epoch)
        if not self._is_ordered or not epoch:
            return []
        try:
            return [_event_of(report) for report in self._segment.take_layers()]
        except ProtocolError as error:
            raise WorkerFault(epoch, str(error)) from None

    def has_moved(self) -> bool:
        """Whether reports were written since this was last asked: the gpu_worker makes progress."""
        before, self._seen_head = self._seen_head, self._segment.head
        return before != self._seen_head

    # ---- grace periods ----

    def _retire(self, copy: CopyId) -> None:
        if not self._barrier.run():
            return
        fence = self._segment.fence
        if fence % 2 == 0:
            self._deliver(Retired(copy))
            return
        self._waiting[copy] = fence
        self._poll_later()

    def _poll_later(self) -> None:
        if not self._is_polling:
            self._is_polling = True
            self._later(_POLL_S, self._poll)

    def _poll(self) -> None:
        self._is_polling = False
        now = self._segment.fence
        over = [copy for copy, fence in self._waiting.items() if fence != now]
        # Once more: what the worker loaded before it moved the fence must be loaded for good.
        if over and self._barrier.run():
            for copy in over:
                del self._waiting[copy]
                self._deliver(Retired(copy))
        if self._waiting:
            self._poll_later()


def _event_of(report: Report) -> Passed | Ran:
    epoch, step, layer = Epoch(report.epoch), StepId(report.step), LayerId(report.layer)
    experts = [ExpertId(expert) for expert in report.experts]
    if not any(report.num_rows):
        return Ran(epoch, step, layer, experts, report.started_ns, report.ended_ns)
    return Passed(
        epoch,
        step,
        layer,
        experts,
        report.num_rows,
        report.routed_ns,
        report.started_ns,
        report.ended_ns,
        report.joined_ns,
    )
