"""One MoE layer of one step, from the router's choice to the join: where each of its experts is.

Each expert of a layer-step is one part, and a part is in one place at a time:

    hit ------------------------------------------> Run sent --> Ran
    miss --> unfilled --> copying --> Copied -----> Run sent --> Ran       (fill, kept in its slot)
    miss --> executing --> Executed                                        (CPU, in place)
    miss --> unplaced      no branch exists; placed as soon as one does

A part is in when its `Run` is sent (the gpu_worker works in order, so the join comes after it) or
its `Executed` is here, and the part that comes last carries the join. A gpu_worker that joins by
itself sees fills and CPU parts finished in shared memory; it is sent `Run` for the others alone,
and never to join.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from orchestrator.core.directory import InvariantBroken
from orchestrator.core.events import Planned

if TYPE_CHECKING:
    from orchestrator.core.directory import Reservation
    from orchestrator.core.events import Passed
    from orchestrator.core.planner import Split
    from orchestrator.core.scheduler import Flight
    from orchestrator.core.workers import Roster
    from protocol.messages import CopyId, Epoch, Executed, ExpertId, LayerId, Routed, StepId


class LayerStep:
    """Where the parts of the layer-step in progress are. Experts are listed in router order."""

    __slots__ = (
        "adopted",
        "behind",
        "copying",
        "ended_ns",
        "executing",
        "gpu_epoch",
        "is_decided",
        "is_ran_wanted",
        "is_self_joining",
        "layer",
        "num_executed",
        "num_hits",
        "num_missing",
        "num_parts",
        "routed",
        "step",
        "unfilled",
        "unplaced",
        "was_link_idle",
    )

    def __init__(self, routed: Routed, num_hits: int, num_computed: int = 0) -> None:
        """`num_computed` of the hits are in already."""
        self.routed = routed
        self.gpu_epoch = routed.epoch
        self.step = routed.step
        self.layer = routed.layer
        self.num_parts = len(routed.experts)
        self.num_hits = num_hits
        self.num_executed = 0
        #: Parts that are not in yet; the join goes out with the one that makes it 0.
        self.num_missing = len(routed.experts) - num_computed
        self.unfilled: list[ExpertId] = []
        self.copying: dict[CopyId, tuple[ExpertId, Reservation]] = {}
        #: Those of `copying` that were begun for nobody: no word tells of their end.
        self.adopted: set[CopyId] = set()
        self.is_self_joining = routed.is_self_joining
        #: Whether every part was told what to do; before, the gpu_worker surely waits.
        self.is_decided = False
        #: Whether the gpu_worker knows that slots are short.
        self.is_ran_wanted = False
        self.executing: dict[ExpertId, Epoch] = {}
        self.unplaced: list[ExpertId] = []
        #: Experts that the CPU runs and that are to be copied too, once it works no more.
        self.behind: list[ExpertId] = []
        #: Whether the copy that lands first had nothing on the link before it.
        self.was_link_idle = False
        #: When the last part so far ended; 0 if none has.
        self.ended_ns = 0

    def rows_of(self, experts: list[ExpertId]) -> list[int]:
        """How many rows chose each of `experts`."""
        rows = dict(zip(self.routed.experts, self.routed.num_rows, strict=True))
        return [rows[expert] for expert in experts]

    def check(self, roster: Roster) -> None:
        """Recount the parts against each other and against who is here."""
        places = [
            *self.unfilled,
            *(expert for expert, _ in self.copying.values()),
            *self.executing,
            *self.unplaced,
        ]
        hold(len(set(places)) == len(places), "an expert is in two places at once")
        hold(self.num_missing == len(places) > 0, "the missing parts are not those in progress")
        hold(self.gpu_epoch == roster.gpu_epoch, "the layer-step belongs to a lost gpu_worker")
        hold(
            all(epoch in roster.cpu_epochs for epoch in self.executing.values()),
            "an expert is executed by a cpu_worker that left",
        )
        has_link = roster.link_epoch is not None
        hold(has_link or not (self.copying or self.unfilled), "fills wait for a lost link")
        hold(
            not self.unplaced or not (has_link or roster.cpu_epochs),
            "experts wait for a branch that exists",
        )


class Unanswered:
    """What cpu_workers were told to execute for layer-steps that are void, and have not answered.

    Until they do, they may write rows over those of another layer-step.
    """

    __slots__ = ("_parts",)

    def __init__(self) -> None:
        self._parts: set[tuple[Epoch, StepId, LayerId, ExpertId]] = set()

    @property
    def is_waited_for(self) -> bool:
        return bool(self._parts)

    def add(self, work: LayerStep) -> None:
        """`work` is void."""
        for expert, epoch in work.executing.items():
            self._parts.add((epoch, work.step, work.layer, expert))

    def answer(self, executed: Executed) -> bool:
        """False if nothing of it was waited for."""
        num_parts = len(self._parts)
        for expert in executed.experts:
            self._parts.discard((executed.epoch, executed.step, executed.layer, expert))
        return len(self._parts) < num_parts

    def forget(self, epoch: Epoch) -> None:
        """This cpu_worker is gone and writes nothing any more."""
        self._parts = {part for part in self._parts if part[0] != epoch}

    def check(self, roster: Roster) -> None:
        """Whoever is waited for is here."""
        hold(
            all(part[0] in roster.cpu_epochs for part in self._parts),
            "an answer is awaited from a cpu_worker that left",
        )


def planned(
    flight: Flight,
    event: Routed | Passed,
    hits: list[ExpertId],
    fills: list[ExpertId],
    cpu: list[ExpertId],
    split: Split,
) -> Planned:
    """What was decided for the layer-step that `event` is about."""
    requests, num_rows = flight.requests, flight.num_rows
    return Planned(requests, event.step, event.layer, num_rows, hits, fills, cpu, split)


def hold(condition: bool, sentence: str) -> None:
    """InvariantBroken with `sentence` unless `condition`."""
    if not condition:
        raise InvariantBroken(sentence)
