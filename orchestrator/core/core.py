"""The core: facts in, wishes out. `Core.handle(event) -> list[CoreCommand]` is its one door, and
`settle` lets it learn once the wishes are out.

    Submit ... --> Scheduler ------ StartStep -->             gpu_worker
                                    <-- Passed | Routed           |  once per layer
                   ExpertDispatch - Copy, Execute, Run -->        |
                                    <-- Copied, Executed, Ran     |
                   Scheduler <----- StepDone                  ... and the token goes out

`Roster` knows who is here. The three never call each other; this file is where they meet.

Events may be late, repeated or from a worker that is gone: those are counted and dropped. A live
worker that contradicts the protocol raises `WorkerFault`, and nothing has changed.
`InvariantBroken` is the core's own fault. The same events give the same commands, always: there is
no clock, no chance and no order by hash in here, so a recorded story replays.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, assert_never

import msgspec

from orchestrator.core.directory import InvariantBroken
from orchestrator.core.dispatch import ExpertDispatch
from orchestrator.core.events import (
    CoreSnapshot,
    Foreseen,
    Passed,
    RatesMeasured,
    ResetTable,
    Resize,
    Retired,
    Stalled,
    Submit,
    Withdraw,
    WorkerJoined,
    WorkerLost,
)
from orchestrator.core.scheduler import Scheduler
from orchestrator.core.workers import Roster
from protocol.messages import (
    AttachArena,
    Copied,
    DetachArena,
    Executed,
    Ran,
    Routed,
    StepDone,
)

if TYPE_CHECKING:
    from orchestrator.core.events import CoreCommand, CoreConfig, CoreEvent
    from orchestrator.core.reuse import LearnKernel
    from protocol.messages import RequestId, Role, SequenceId


class Core:
    """Decides everything, does nothing.

    Raises (all methods that take an event):
        WorkerFault: a live worker broke the protocol; replace it (kill, then `WorkerLost`).
        InvariantBroken: a bug in here.
    """

    def __init__(self, config: CoreConfig, kernel: LearnKernel | None = None) -> None:
        """`kernel`: for policies that learn quicker with one. ValueError with one sentence if the
        configuration makes no sense."""
        self._roster = Roster(config.num_slots, config.host_bytes_per_s, config.link_bytes_per_s)
        self._scheduler = Scheduler(
            config.max_rows, config.max_sequence_tokens, config.max_num_seqs
        )
        self._dispatch = ExpertDispatch(config, self._roster, kernel)
        self._missing_role: Role | None = None
        self._num_ignored = 0

    @property
    def is_idle(self) -> bool:
        """Whether no request is waiting or active."""
        return self._scheduler.is_idle

    @property
    def is_preloading(self) -> bool:
        """Whether experts are being copied before the first request, which does well to wait."""
        return self._dispatch.is_preloading

    @property
    def is_in_step(self) -> bool:
        """Whether a step is in flight."""
        return self._scheduler.flight is not None

    @property
    def is_between_layers(self) -> bool:
        """Whether a step is in flight and none of its layers waits for anybody."""
        return self.is_in_step and self._dispatch.is_between_layers

    def request_of(self, sequence: SequenceId) -> RequestId | None:
        """Whose sequence this is; None if it is over. Changes nothing."""
        return self._scheduler.request_of(sequence)

    def handle(self, event: CoreEvent) -> list[CoreCommand]:
        """What is to be done now that `event` has happened, in this order."""
        commands = self._handle(event)
        if self._dispatch.directory.has_excess:
            self._dispatch.shrink(commands)
        return commands

    def _handle(self, event: CoreEvent) -> list[CoreCommand]:
        # The first five come once or more per layer, the rest per step or less.
        match event:
            case Passed():
                return self._passed(event)
            case Routed():
                return self._routed(event)
            case Ran():
                return self._ran(event)
            case Copied():
                return self._copied(event)
            case Executed():
                return self._executed(event)
            case StepDone():
                return self._step_done(event)
            case Submit():
                return self._submit(event)
            case Withdraw():
                return self._withdraw(event)
            case WorkerJoined():
                return self._worker_joined(event)
            case WorkerLost():
                return self._worker_lost(event)
            case Foreseen():
                return self._foreseen(event)
            case Retired():
                return self._retired(event)
            case Resize():
                return self._resize(event)
            case RatesMeasured():
                self._dispatch.measured(event.costs)
                return []
            case _:
                assert_never(event)

    def settle(self) -> list[CoreCommand]:
        """What can wait until the commands are out: learning. Between two events, at any time or
        never; only things to say come out, nothing to do."""
        return self._dispatch.settle()

    def foresee(self) -> list[Foreseen]:
        """What is likely to be demanded soon, to be handed back as events; also between two events,
        at any time or never."""
        return self._dispatch.foresee()

    # ---- within a step ----

    def _passed(self, event: Passed) -> list[CoreCommand]:
        commands: list[CoreCommand] = []
        if event.epoch != self._roster.gpu_epoch or not self._dispatch.passed(event, commands):
            return self._ignored()
        return commands

    def _foreseen(self, event: Foreseen) -> list[CoreCommand]:
        commands: list[CoreCommand] = []
        self._dispatch.foreseen(event, commands)
        return commands

    def _retired(self, event: Retired) -> list[CoreCommand]:
        commands: list[CoreCommand] = []
        return commands if self._dispatch.retired(event, commands) else self._ignored()

    def _resize(self, event: Resize) -> list[CoreCommand]:
        commands: list[CoreCommand] = []
        if not self._dispatch.resize(event.num_slots, commands):
            return self._ignored()
        if self._scheduler.flight is None:
            self._dispatch.preload(commands)
        return commands

    def _routed(self, event: Routed) -> list[CoreCommand]:
        commands: list[CoreCommand] = []
        if event.epoch != self._roster.gpu_epoch or not self._dispatch.routed(event, commands):
            return self._ignored()
        if self._dispatch.work is not None and self._dispatch.work.unplaced:
            self._report_stall(commands)
        return commands

    def _copied(self, event: Copied) -> list[CoreCommand]:
        commands: list[CoreCommand] = []
        if not self._dispatch.copied(event, commands):
            return self._ignored()
        if self._scheduler.flight is None:
            self._dispatch.preload(commands)
        return commands

    def _executed(self, event: Executed) -> list[CoreCommand]:
        commands: list[CoreCommand] = []
        if not self._dispatch.executed(event, commands):
            return self._ignored()
        if self._scheduler.flight is None:
            return self._went_on(commands)  # that may have been the last to drain
        return commands

    def _ran(self, event: Ran) -> list[CoreCommand]:
        commands: list[CoreCommand] = []
        if event.epoch != self._roster.gpu_epoch or not self._dispatch.ran(event, commands):
            return self._ignored()
        self._dispatch.learn_from(event)
        if self._dispatch.work is not None and self._dispatch.work.unplaced:
            self._report_stall(commands)  # that may have been what a decision waited for
        return commands

    def _step_done(self, event: StepDone) -> list[CoreCommand]:
        flight = self._scheduler.flight
        if (
            flight is None
            or event.epoch != self._roster.gpu_epoch
            or event.step != flight.step
            or not self._dispatch.is_through
        ):
            return self._ignored()
        commands: list[CoreCommand] = []
        self._scheduler.check_done(event)
        self._dispatch.end_step(commands)
        self._scheduler.step_done(event, commands)
        return self._went_on(commands)

    # ---- requests ----

    def _submit(self, event: Submit) -> list[CoreCommand]:
        commands: list[CoreCommand] = []
        if not self._scheduler.submit(event, commands):
            return self._ignored()
        return self._went_on(commands)

    def _withdraw(self, event: Withdraw) -> list[CoreCommand]:
        commands: list[CoreCommand] = []
        if not self._scheduler.withdraw(event, self._roster.gpu_epoch, commands):
            return self._ignored()
        return self._went_on(commands)

    # ---- workers ----

    def _worker_joined(self, event: WorkerJoined) -> list[CoreCommand]:
        roster = self._roster
        if not roster.join(event):
            return self._ignored()
        commands: list[CoreCommand] = []
        if event.role == "gpu_worker":
            commands.append(ResetTable(event.epoch))
        if event.role != "cpu_worker" and roster.attached_dma is not None:
            assert roster.arena is not None  # attached_dma says so
            commands.append(AttachArena(roster.attached_dma, roster.arena))
        self._dispatch.roster_changed(commands)
        return self._went_on(commands)

    def _worker_lost(self, event: WorkerLost) -> list[CoreCommand]:
        commands: list[CoreCommand] = []
        roster = self._roster
        attached_dma = roster.attached_dma
        match roster.lose(event.epoch):
            case "gpu_worker":
                if attached_dma is not None:
                    commands.append(DetachArena(attached_dma))
                commands.append(ResetTable(None))
                self._dispatch.gpu_lost()
                self._scheduler.gpu_lost(commands)
            case "dma_worker":
                if roster.link_epoch is None:
                    self._dispatch.link_lost(commands)
            case "cpu_worker":
                self._dispatch.cpu_lost(event.epoch, commands)
            case None:
                return self._ignored()
        self._dispatch.roster_changed(commands)
        return self._went_on(commands)

    # ---- what follows ----

    def _went_on(self, commands: list[CoreCommand]) -> list[CoreCommand]:
        """Start the next step if one can start, and say it if work waits for a worker."""
        gpu_epoch = self._roster.gpu_epoch
        if gpu_epoch is not None and not self._dispatch.is_draining:
            flight = self._scheduler.start_next(gpu_epoch, commands)
            if flight is not None:
                self._dispatch.begin_step(flight)
        if self._scheduler.flight is None:
            self._dispatch.preload(commands)
        self._report_stall(commands)
        return commands

    def _report_stall(self, commands: list[CoreCommand]) -> None:
        missing, text = self._stall()
        if missing is not None and missing != self._missing_role:
            commands.append(Stalled(missing, text))
        self._missing_role = missing

    def _stall(self) -> tuple[Role | None, str]:
        work = self._dispatch.work
        if self._roster.gpu_epoch is None and not self.is_idle:
            return "gpu_worker", "requests wait for a gpu_worker"
        if work is not None and work.unplaced:
            text = (
                f"{len(work.unplaced)} experts of layer {work.layer} wait: "
                "there is no dma_worker to fill them and no cpu_worker to run them"
            )
            return "dma_worker", text
        return None, ""

    def _ignored(self) -> list[CoreCommand]:
        self._num_ignored += 1
        return []

    # ---- views ----

    def snapshot(self) -> CoreSnapshot:
        """The state in numbers, for status pages."""
        roster, flight = self._roster, self._scheduler.flight
        directory, costs = self._dispatch.directory, self._dispatch.costs
        return CoreSnapshot(
            num_waiting=self._scheduler.num_waiting,
            num_active=self._scheduler.num_active,
            step=None if flight is None else flight.step,
            num_layers_joined=self._dispatch.num_joined,
            gpu_epoch=roster.gpu_epoch,
            dma_epoch=roster.dma_epoch,
            cpu_epochs=list(roster.cpu_epochs),
            num_resident=directory.num_resident,
            num_filling=directory.num_filling,
            num_slots=directory.limit,
            max_slots=directory.num_slots,
            host_bytes_per_s=costs.cpu_bytes_per_s,
            link_bytes_per_s=costs.link_bytes_per_s,
            missing_role=self._missing_role,
            num_ignored_events=self._num_ignored,
            totals=msgspec.structs.replace(self._dispatch.totals),
        )

    def check(self) -> None:
        """Recount every invariant from scratch, O(slots + requests); InvariantBroken says which."""
        roster, scheduler, dispatch = self._roster, self._scheduler, self._dispatch
        scheduler.check(roster.gpu_epoch)
        dispatch.check()
        if scheduler.flight is None:
            if dispatch.work is not None:
                raise InvariantBroken("a layer-step is in progress without a step")
            can_start = roster.gpu_epoch is not None and not dispatch.is_draining
            if can_start and not self.is_idle:
                raise InvariantBroken("requests wait though a step could start")
        if self._stall()[0] != self._missing_role:
            raise InvariantBroken("a stall began or ended without being noticed")
