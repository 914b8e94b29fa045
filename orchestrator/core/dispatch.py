"""Who computes which expert: layer-step after layer-step, look up, split, fill, execute, run, join.

*Waves.* A layer-step may have more fills than slots can be reserved. What finds no slot waits for
one to be unpinned, so one slot is enough for any number of misses, one after the other.

*Pins.* A slot is pinned from its look-up or reservation until `Ran` names its expert. `Ran` may
come after the join, even after the step, so these pins live beside the layer-step and not in it. A
fill on demand never outlives its layer-step, for the join waits for it; a fill in the background
(see `background`) that is demanded meanwhile is adopted by the layer-step.

*The table.* What is resident is published, so that the gpu_worker may pass layers by itself, and an
expert is unpublished before the copy over it. `passed` then does what `routed` would have done. Of
a layer that it has to ask for it computes what it sees there as well, `started`. If any of that has
left in the background meanwhile, its slot holds nothing pinned: the decision is deferred until the
gpu_worker has said that it reads it no more.

*Workers that leave.* What the link had not brought and what a cpu_worker had not finished is placed
anew: on the CPU, else by a fill, else it waits. When the gpu_worker leaves, the layer-step is void.
But a cpu_worker may still be at work for it and would write its rows into the segment later, over
those of another layer-step; `is_draining` says so, and no step starts until all is answered.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from orchestrator.core.adaptive_split import AdaptiveSplit
from orchestrator.core.directory import ExpertDirectory, InvariantBroken
from orchestrator.core.events import (
    Foreseen,
    Publish,
    RequestCounters,
)
from orchestrator.core.fill_choice import DEFAULT_MAX_BEHIND
from orchestrator.core.layer_step import LayerStep, Unanswered, planned
from orchestrator.core.placement import ExpertPlacement
from orchestrator.core.planner import DemandMemory
from orchestrator.core.policies import (
    UNKNOWN_SHAPE,
    DeferringPolicy,
    DemandShape,
    make_foresight,
    make_policy,
)
from orchestrator.core.recount import recount
from orchestrator.core.table_reads import check_passed, check_routed, have_left
from protocol.messages import Run

if TYPE_CHECKING:
    from collections.abc import Sequence

    from orchestrator.core.events import (
        CoreCommand,
        CoreConfig,
        Passed,
    )
    from orchestrator.core.fluid_split import BranchCosts
    from orchestrator.core.reuse import LearnKernel
    from orchestrator.core.scheduler import Flight
    from orchestrator.core.workers import Roster
    from protocol.messages import Copied, Epoch, Executed, ExpertId, ExpertKey, Ran, Routed

#: Demand is remembered this many tokens beyond what the slots hold (see DemandMemory).
_REMEMBERED_TOKENS = 8


class ExpertDispatch(ExpertPlacement):
    """Hears of layer-step after layer-step and decides; `ExpertPlacement` carries out."""

    __slots__ = (
        "_deferred",
        "_foresight",
        "_is_news",
        "_latest",
        "_memory",
        "_num_layers",
        "_policy",
        "_report_plans",
        "_unanswered",
    )

    def __init__(
        self, config: CoreConfig, roster: Roster, kernel: LearnKernel | None = None
    ) -> None:
        """ValueError if a policy, planner or mode is unknown, or a number is out of range."""
        shape = DemandShape(config.num_layers, config.num_experts, config.top_k)
        known = shape if config.num_experts else UNKNOWN_SHAPE
        policy = make_policy(config.policy, known, kernel)
        memory = DemandMemory(
            config.num_slots + _REMEMBERED_TOKENS * config.num_layers * config.top_k
        )
        rates = roster.host_bytes_per_s, roster.link_bytes_per_s
        super().__init__(
            roster,
            ExpertDirectory(config.num_slots, policy),
            AdaptiveSplit(config, policy, memory.last_demand, *rates),
            config,
        )
        self._num_layers = config.num_layers
        self._report_plans = config.report_plans
        self._memory = memory
        self._policy = policy if isinstance(policy, DeferringPolicy) else None
        self._foresight = make_foresight(shape, config.prefetch) if config.prefetch else None
        #: The layer-steps whose experts are known and from which nothing was guessed yet.
        self._latest: list[Routed | Passed] = []
        #: Whether there is something to learn.
        self._is_news = False
        self._unanswered = Unanswered()
        #: A layer-step that is decided once the gpu_worker reads nothing from the table any more.
        self._deferred: Routed | None = None

    @property
    def costs(self) -> BranchCosts:
        """What is reckoned with now."""
        return self._split.costs

    @property
    def is_draining(self) -> bool:
        """Whether a cpu_worker may still write rows of a void layer-step."""
        return self._unanswered.is_waited_for

    @property
    def is_through(self) -> bool:
        """Whether every layer of the step is joined."""
        return self.work is None and self.num_joined == self._num_layers

    @property
    def is_between_layers(self) -> bool:
        """Whether no layer of the step is open."""
        return self.work is None and self._deferred is None

    def begin_step(self, flight: Flight) -> None:
        """The layers of this step come next, from 0."""
        self._flight = flight
        self._counters = RequestCounters()
        self.num_joined = 0
        self._background.evicted.clear()
        self._preload.is_awaited = False

    def end_step(self, commands: list[CoreCommand]) -> None:
        """All layers of the step are through, and reported."""
        self._end_flight()
        self._background.rest(self._roster.link_epoch, commands)

    def _end_flight(self) -> None:
        """The step is over, one way or another: whoever was in it bears what it cost."""
        flight, self._flight = self._flight, None
        if flight is not None:
            self.totals.add(self._counters)
            for part in flight.parts:
                part.live.counters.add(self._counters)

    # ---- the layer-step ----

    def routed(self, routed: Routed, commands: list[CoreCommand]) -> bool:
        """Look up, split, fill, execute, run the hits: the decision for one layer-step.

        False if this is not the layer that is expected.

        Raises:
            WorkerFault: an expert is named twice, or not every one has its number of rows; or one
                is computed from the table that cannot have been seen there.
        """
        flight = self._flight
        if (
            flight is None
            or routed.step != flight.step
            or routed.layer != self.num_joined
            or not self.is_between_layers
            or self.is_through
        ):
            return False
        check_routed(routed)
        if routed.started and self._have_left(routed, routed.started):
            self._deferred = routed
            commands.append(Run(routed.epoch, routed.step, routed.layer, [], [], False, True))
            return True
        self._decide(flight, routed, commands)
        return True

    def _have_left(self, event: Routed | Passed, experts: Sequence[ExpertId]) -> bool:
        evicted = self._background.evicted
        return have_left(event.epoch, event.layer, experts, self.directory, evicted)

    def _decide(
        self,
        flight: Flight,
        routed: Routed,
        commands: list[CoreCommand],
        computed: Sequence[ExpertId] = (),
    ) -> None:
        """The decision. What the gpu_worker has `computed` is a hit and is read no more."""
        keys = [(routed.layer, expert) for expert in routed.experts]
        if not (is_guest := flight.is_guest):
            self.directory.layer_step(routed.layer, routed.experts)
        asked = [key for key in keys if key[1] not in computed]
        hits, hit_slots, misses = self.directory.demand(asked, is_guest=is_guest)
        # What it reads from the table now is pinned: it uses nothing else that it looked up.
        self._background.rest(self._roster.link_epoch, commands)
        self._is_news = True
        if self._foresight is not None and not is_guest:
            self._latest.append(routed)
        roster, split = self._roster, self._split
        has_cpu, has_link = bool(roster.cpu_epochs), roster.link_epoch is not None
        arriving: list[ExpertKey] = []
        adopted: list[ExpertKey] = []
        if misses and self._background.copying:
            arriving = [key for key in misses if self.directory.is_filling(key)]
            misses = [key for key in misses if key not in arriving]
            if split.adopts(has_cpu=has_cpu):
                arriving, adopted = [], arriving
        rows: dict[ExpertKey, int] | None = None
        if misses and max(routed.num_rows) > 1:
            rows = dict(zip(keys, routed.num_rows, strict=True))
        decision = split.decide(
            self.directory,
            misses,
            arriving,
            rows,
            has_cpu=has_cpu,
            has_link=has_link,
            num_adopted=len(adopted),
            num_in_flight=len(self._background),
            is_guest=is_guest,
        )
        if split.needs_last_demand and not is_guest:
            self._memory.demanded(keys)

        self.work = work = LayerStep(routed, len(hits) + len(computed), len(computed))
        work.is_ran_wanted = bool(computed)  # that is how this is known
        for key in adopted:
            self._adopt(work, key)
        work.unfilled = [expert for _, expert in decision.fills]
        on_cpu = [expert for _, expert in decision.cpu]
        if arriving:  # these stand last
            on_cpu = [expert for expert in routed.experts if expert in on_cpu]
        if decision.split.must_wait:
            work.unplaced, on_cpu = on_cpu, []
        if self._report_plans:
            filled = [*(expert for _, expert in adopted), *work.unfilled]
            known = (*computed, *hits)
            resident = [expert for expert in routed.experts if expert in known]
            commands.append(planned(flight, routed, resident, filled, on_cpu, decision.split))
        work.was_link_idle = not len(self._background) and not work.copying
        self._fill(work, commands)
        self._execute(work, on_cpu, commands)
        if decision.behind:
            work.behind = [copy.key[1] for copy in decision.behind if not copy.is_beside_cpu]
            beside = [copy.key[1] for copy in decision.behind if copy.is_beside_cpu]
            self._fill_behind(work, beside, commands)
        self._run(work, hits, hit_slots, commands)
        work.is_decided = True

    def passed(self, passed: Passed, commands: list[CoreCommand]) -> bool:
        """The gpu_worker was through with this layer by itself: all hits, nothing to decide.

        False if this is not the layer that is expected.

        Raises:
            WorkerFault: an expert was computed that had no slot.
        """
        flight = self._flight
        layer = passed.layer
        if flight is None or passed.step != flight.step or layer != self.num_joined:
            return False
        if not self.is_between_layers:
            return False
        directory = self.directory
        keys = [(layer, expert) for expert in passed.experts]
        check_passed(passed)
        self._have_left(passed, passed.experts)
        if not flight.is_guest:
            directory.layer_step(layer, passed.experts)
            self._refresh(keys)
            if self._split.needs_last_demand:
                self._memory.demanded(keys)
        self._is_news = True
        if self._foresight is not None and not flight.is_guest:
            self._latest.append(passed)
        if self._report_plans:
            decision = self._split.decide(directory, [], [], None, has_cpu=False, has_link=False)
            commands.append(planned(flight, passed, passed.experts, [], [], decision.split))
        self._counters.layer_steps += 1
        self._counters.hits += len(keys)
        self.num_joined += 1
        return True

    def _refresh(self, keys: Sequence[ExpertKey]) -> None:
        """These were computed without asking; some may have left meanwhile."""
        for key in keys:
            if self.directory.state_of(key) is not None:
                self.directory.refresh(key)

    def copied(self, copied: Copied, commands: list[CoreCommand]) -> bool:
        """A fill has landed: run its expert. False if nobody waits for this copy."""
        if copied.epoch != self._roster.link_epoch:
            return False
        work = self.work
        entry = None if work is None else work.copying.pop(copied.copy, None)
        if work is None or entry is None:
            if not self._background.copied(copied, commands):
                return False
            self._split.filled(copied.num_bytes, copied.started_ns, copied.ended_ns)
            self._is_news = True
            if self._flight is not None:
                self._counters.fills_behind += 1
                self._note_bytes(copied)
            if work is not None:
                self._fill(work, commands)  # that one may leave again
            return True
        expert, reservation = entry
        is_told = work.is_self_joining and copied.copy not in work.adopted
        if not self.directory.commit(reservation.slot, reservation.generation):
            raise InvariantBroken(f"slot {reservation.slot} was taken from the copy into it")
        self._note_bytes(copied)
        self._split.filled(copied.num_bytes, copied.started_ns, copied.ended_ns)
        work.ended_ns = max(work.ended_ns, copied.ended_ns)
        if work.was_link_idle:
            self._split.took("link_fixed_s", copied.started_ns - work.routed.routed_ns)
        work.was_link_idle = False
        commands.append(Publish(work.layer, expert, reservation.slot))
        self._run(work, [expert], [reservation.slot], commands, is_told=is_told)
        return True

    def executed(self, executed: Executed, commands: list[CoreCommand]) -> bool:
        """A cpu_worker has written its rows. False if none of them was waited for."""
        work = self.work
        if work is None or executed.step != work.step or executed.layer != work.layer:
            return self._unanswered.answer(executed)
        num_done = 0
        for expert in executed.experts:
            if work.executing.get(expert) == executed.epoch:
                del work.executing[expert]
                num_done += 1
        if not num_done:
            return False
        work.num_executed += num_done
        work.num_missing -= num_done
        work.ended_ns = max(work.ended_ns, executed.ended_ns)
        self._split.took("cpu_fixed_s", executed.started_ns - work.routed.routed_ns)
        self._counters.cpu_bytes += executed.num_bytes
        self._counters.cpu_busy_ns += executed.ended_ns - executed.started_ns
        self._split.executed(
            len(executed.experts),
            work.rows_of(executed.experts),
            executed.started_ns,
            executed.ended_ns,
        )
        if work.behind and not (work.executing or work.unfilled):
            self._fill_behind(work, work.behind, commands)
        if not work.num_missing:
            self._run(work, [], [], commands)
        return True

    def ran(self, ran: Ran, commands: list[CoreCommand]) -> bool:
        """The gpu_worker reads these slots no more. False if that was known."""
        deferred = self._deferred
        if deferred is not None and (ran.step, ran.layer) == (deferred.step, deferred.layer):
            if self._flight is None or not set(deferred.started) <= set(ran.experts):
                return False
            self._deferred = None
            if not self._flight.is_guest:
                self._refresh([(ran.layer, expert) for expert in deferred.started])
            self._decide(self._flight, deferred, commands, deferred.started)
            return True
        running = self._running.get((ran.step, ran.layer), {})
        is_news = False
        for expert in ran.experts:
            slot = running.pop(expert, None)
            if slot is not None:
                self.directory.unpin(slot)
                is_news = True
        if is_news and not running:
            del self._running[ran.step, ran.layer]
        if is_news and self.work is not None and self.work.unfilled:
            self._fill(self.work, commands)
        return is_news

    # ---- workers that come and go ----

    def roster_changed(self, commands: list[CoreCommand]) -> None:
        """Plan with the rates of who is here, and place what no branch was there for."""
        self._split.set_rates(self._roster.host_bytes_per_s, self._roster.link_bytes_per_s)
        work = self.work
        if work is not None and work.unplaced:
            stranded, work.unplaced = work.unplaced, []
            self._place(work, stranded, commands)

    def cpu_lost(self, epoch: Epoch, commands: list[CoreCommand]) -> None:
        """A cpu_worker will answer nothing any more: its experts go elsewhere."""
        self._unanswered.forget(epoch)
        work = self.work
        if work is None:
            return
        stranded = [expert for expert, owner in work.executing.items() if owner == epoch]
        for expert in stranded:
            del work.executing[expert]
        self._place(work, stranded, commands)

    def gpu_lost(self) -> None:
        """The slots are gone, and with them the step; late answers to it find nothing."""
        if self.work is not None:
            self._unanswered.add(self.work)
        self.work = self._deferred = None
        self._end_flight()
        self.num_joined = 0
        self._running.clear()
        self._slots_gone()

    def settle(self) -> list[CoreCommand]:
        """Learn from what has happened; what there is to say about it."""
        if not self._is_news:
            return []
        self._is_news = False
        if self._policy is not None:
            self._policy.settle()
        return list(self._split.settle())

    def foresee(self) -> list[Foreseen]:
        """What the next layers will ask for, as far as it has no slot; to be told as events."""
        if self._foresight is None or not self._latest:
            return []
        for event in self._latest:
            self._foresight.chose(event.layer, event.experts)
        layer = self._latest[-1].layer
        self._latest.clear()
        room = DEFAULT_MAX_BEHIND - len(self._background)
        if room < 1:
            return []
        missing = [
            key for key in self._foresight.expected(layer) if self.directory.state_of(key) is None
        ]
        return [Foreseen(*key) for key in missing[:room]]

    def check(self) -> None:
        """Recount; InvariantBroken says what disagrees, or that nothing would ever happen again."""
        recount(
            self.directory,
            self.work,
            self._roster,
            self._running,
            self._background,
            self._is_resting,
            self._is_guest,
        )
        self._unanswered.check(self._roster)
