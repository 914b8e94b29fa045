"""Who computes which expert: layer-step after layer-step, look up, split, fill, execute, run, join.

*Waves.* A layer-step may have more fills than slots can be reserved. What finds no slot waits for
one to be unpinned, so one slot is enough for any number of misses, one after the other.

*Pins.* A slot is pinned from its look-up or reservation until `Ran` names its expert. `Ran` may
come after the join, even after the step, so these pins live beside the layer-step and not in it. A
fill on demand never outlives its layer-step, for the join waits for it; a fill in the background
(see `background`) that is demanded meanwhile is adopted by the layer-step.

*The table.* What is resident is published, so that the gpu_worker may pass layers by itself, and an
expert is unpublished before the copy over it. `passed` then does what `routed` would have done.

*Workers that leave.* What the link had not brought and what a cpu_worker had not finished is placed
anew: on the CPU, else by a fill, else it waits. When the gpu_worker leaves, the layer-step is void.
But a cpu_worker may still be at work for it and would write its rows into the segment later, over
those of another layer-step; `is_draining` says so, and no step starts until all is answered.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from orchestrator.core.background import BackgroundFills
from orchestrator.core.directory import ExpertDirectory, InvariantBroken
from orchestrator.core.events import (
    Publish,
    RequestCounters,
    Unpublish,
    WorkerFault,
)
from orchestrator.core.layer_step import LayerStep, Unanswered, planned
from orchestrator.core.planner import (
    DemandMemory,
    FillMode,
    SplitPlanner,
    choose_fills,
    divide_among,
)
from orchestrator.core.policies import make_policy
from orchestrator.core.recount import recount
from protocol.messages import Copy, CopyId, Execute, Run

if TYPE_CHECKING:
    from orchestrator.core.events import (
        CoreCommand,
        CoreConfig,
        Foreseen,
        Passed,
        Retired,
    )
    from orchestrator.core.scheduler import Flight
    from orchestrator.core.workers import Roster
    from protocol.messages import (
        Copied,
        Epoch,
        Executed,
        ExpertId,
        ExpertKey,
        LayerId,
        Ran,
        Routed,
        SlotId,
        StepId,
    )

#: Demand is remembered this many tokens beyond what the slots hold (see DemandMemory).
_REMEMBERED_TOKENS = 8


class ExpertDispatch:
    """Places the experts of layer-step after layer-step; owns the directory and the planner.

    `work` is the layer-step in progress, None between a join and the next `Routed`; `num_joined`
    counts the layers of the step that are through.
    """

    __slots__ = (
        "_background",
        "_counters",
        "_flight",
        "_last_copy",
        "_memory",
        "_num_layers",
        "_planner",
        "_report_plans",
        "_roster",
        "_running",
        "_unanswered",
        "directory",
        "num_joined",
        "work",
    )

    def __init__(self, config: CoreConfig, roster: Roster) -> None:
        """ValueError if the policy or the fill mode is unknown, or a number is out of range."""
        self._roster = roster
        self._num_layers = config.num_layers
        self._report_plans = config.report_plans
        self.directory = ExpertDirectory(config.num_slots, make_policy(config.policy))
        self._planner = SplitPlanner(
            FillMode.parse(config.fill_mode), roster.host_bytes_per_s, roster.link_bytes_per_s
        )
        self._memory = DemandMemory(
            config.num_slots + _REMEMBERED_TOKENS * config.num_layers * config.top_k
        )
        self._background = BackgroundFills(self.directory)
        self._last_copy = 0
        self._flight: Flight | None = None
        self._counters = RequestCounters()
        self.work: LayerStep | None = None
        self.num_joined = 0
        #: Slots that the gpu_worker may still read, by what it was told to run from them.
        self._running: dict[tuple[StepId, LayerId], dict[ExpertId, SlotId]] = {}
        self._unanswered = Unanswered()

    @property
    def is_draining(self) -> bool:
        """Whether a cpu_worker may still write rows of a void layer-step."""
        return self._unanswered.is_waited_for

    @property
    def is_through(self) -> bool:
        """Whether every layer of the step is joined."""
        return self.work is None and self.num_joined == self._num_layers

    def begin_step(self, flight: Flight) -> None:
        """The layers of this step come next, from 0."""
        self._flight = flight
        self._counters = flight.live.counters
        self.num_joined = 0
        self._background.evicted.clear()

    def end_step(self, commands: list[CoreCommand]) -> None:
        """All layers of the step are through, and reported."""
        self._flight = None
        self._background.rest(self._roster.link_epoch, commands)

    # ---- the layer-step ----

    def routed(self, routed: Routed, commands: list[CoreCommand]) -> bool:
        """Look up, split, fill, execute, run the hits: the decision for one layer-step.

        False if this is not the layer that is expected.

        Raises:
            WorkerFault: an expert is named twice, or not every one has its number of rows.
        """
        flight = self._flight
        if (
            flight is None
            or routed.step != flight.step
            or routed.layer != self.num_joined
            or self.work is not None
            or self.is_through
        ):
            return False
        if not len(set(routed.experts)) == len(routed.experts) == len(routed.num_rows):
            raise WorkerFault(routed.epoch, f"routed layer {routed.layer} to experts it confuses")

        keys = [(routed.layer, expert) for expert in routed.experts]
        self.directory.layer_step(routed.layer, routed.experts)
        hits, hit_slots, misses = self.directory.demand(keys)
        self._background.rest(self._roster.link_epoch, commands)
        arriving: list[ExpertKey] = []
        if misses and self._background.copying:
            arriving = [key for key in misses if self.directory.is_filling(key)]
            misses = [key for key in misses if key not in arriving]
        split = self._planner.plan(
            len(misses),
            self.directory.num_reservable,
            has_cpu=bool(self._roster.cpu_epochs),
            has_link=self._roster.link_epoch is not None,
        )
        fills, rest = choose_fills(misses, split.num_fills, self._memory.last_demand)
        self._memory.demanded(keys)

        self.work = work = LayerStep(routed, len(hits))
        for key in arriving:
            self._adopt(work, key)
        work.unfilled = [expert for _, expert in fills]
        on_cpu = [expert for _, expert in rest]
        if split.must_wait:
            work.unplaced, on_cpu = on_cpu, []
        if self._report_plans:
            filled = [*(expert for _, expert in arriving), *work.unfilled]
            commands.append(planned(flight, routed, hits, filled, on_cpu, split))
        self._fill(work, commands)
        self._execute(work, on_cpu, commands)
        self._run(work, hits, hit_slots, commands)
        return True

    def passed(self, passed: Passed, commands: list[CoreCommand]) -> bool:
        """The gpu_worker was through with this layer by itself: all hits, nothing to decide.

        False if this is not the layer that is expected.

        Raises:
            WorkerFault: an expert was computed that had no slot.
        """
        flight = self._flight
        layer = passed.layer
        if flight is None or passed.step != flight.step or layer != self.num_joined or self.work:
            return False
        directory = self.directory
        keys = [(layer, expert) for expert in passed.experts]
        if not len(set(keys)) == len(keys) == len(passed.num_rows):
            raise WorkerFault(passed.epoch, f"passed layer {layer} with experts it confuses")
        for key in keys:
            if directory.slot_of(key) is None and key not in self._background.evicted:
                raise WorkerFault(
                    passed.epoch, f"ran expert {key[1]} of layer {layer}, which has no slot"
                )
        directory.layer_step(layer, passed.experts)
        for key in keys:
            if directory.state_of(key) is not None:
                directory.refresh(key)
        self._memory.demanded(keys)
        if self._report_plans:
            split = self._planner.plan(0, 0, has_cpu=False, has_link=False)
            commands.append(planned(flight, passed, passed.experts, [], [], split))
        self._counters.layer_steps += 1
        self._counters.hits += len(keys)
        self.num_joined += 1
        return True

    def foreseen(self, foreseen: Foreseen, commands: list[CoreCommand]) -> bool:
        """Fill an expert that nobody waits for. False if it has a slot or none is to be had."""
        key, link = (foreseen.layer, foreseen.expert), self._roster.link_epoch
        if link is None or self.directory.state_of(key) is not None:
            return False
        work = self.work
        if work is not None and (work.unfilled or foreseen.layer == work.layer):
            return False  # demand goes first
        self._last_copy += 1
        is_resting = self._flight is None or work is not None
        return self._background.begin(
            key, CopyId(self._last_copy), link, commands, is_resting=is_resting
        )

    def retired(self, retired: Retired, commands: list[CoreCommand]) -> bool:
        """No use of the slot's last expert goes on. False if that was known."""
        link = self._roster.link_epoch
        return link is not None and self._background.retired(retired.copy, link, commands)

    def copied(self, copied: Copied, commands: list[CoreCommand]) -> bool:
        """A fill has landed: run its expert. False if nobody waits for this copy."""
        if copied.epoch != self._roster.link_epoch:
            return False
        work = self.work
        entry = None if work is None else work.copying.pop(copied.copy, None)
        if work is None or entry is None:
            if not self._background.copied(copied, commands):
                return False
            if work is not None:
                self._fill(work, commands)  # that one may leave again
            return True
        expert, reservation = entry
        if not self.directory.commit(reservation.slot, reservation.generation):
            raise InvariantBroken(f"slot {reservation.slot} was taken from the copy into it")
        self._counters.fill_bytes += copied.num_bytes
        self._counters.fill_busy_ns += copied.ended_ns - copied.started_ns
        commands.append(Publish(work.layer, expert, reservation.slot))
        self._run(work, [expert], [reservation.slot], commands)
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
        self._counters.cpu_bytes += executed.num_bytes
        self._counters.cpu_busy_ns += executed.ended_ns - executed.started_ns
        if not work.num_missing:
            self._run(work, [], [], commands)
        return True

    def ran(self, ran: Ran, commands: list[CoreCommand]) -> bool:
        """The gpu_worker reads these slots no more. False if that was known."""
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

    # ---- its verbs ----

    def _adopt(self, work: LayerStep, key: ExpertKey) -> None:
        """A fill in the background turns out to be one that is waited for."""
        copy, reservation = self._background.adopt(key)
        self.directory.pin(reservation.slot)
        self.directory.refresh(key)
        work.copying[copy] = (key[1], reservation)

    def _fill(self, work: LayerStep, commands: list[CoreCommand]) -> None:
        """Reserve slots for `unfilled`, as many as there are, and have them copied into."""
        link = self._roster.link_epoch
        if link is None or not work.unfilled:
            return
        num_reserved = 0
        for expert in work.unfilled:
            reservation = self.directory.reserve((work.layer, expert))
            if reservation is None:
                break
            num_reserved += 1
            if reservation.evicted is not None:
                self._counters.evictions += 1
                commands.append(Unpublish(*reservation.evicted))
            self.directory.pin(reservation.slot)
            self._last_copy += 1
            copy = CopyId(self._last_copy)
            work.copying[copy] = (expert, reservation)
            commands.append(Copy(link, copy, work.layer, expert, reservation.slot))
        del work.unfilled[:num_reserved]

    def _execute(
        self, work: LayerStep, experts: list[ExpertId], commands: list[CoreCommand]
    ) -> None:
        """Divide `experts` among the cpu_workers, by their rates and the experts' rows."""
        if not experts:
            return
        epochs = self._roster.cpu_epochs
        if len(epochs) == 1:
            parts = [experts]
        else:
            parts = divide_among(experts, self._roster.cpu_shares, work.rows_of(experts))
        for epoch, part in zip(epochs, parts, strict=True):
            if part:
                for expert in part:
                    work.executing[expert] = epoch
                commands.append(Execute(epoch, work.step, work.layer, part))

    def _run(
        self,
        work: LayerStep,
        experts: list[ExpertId],
        slots: list[SlotId],
        commands: list[CoreCommand],
    ) -> None:
        """Have the gpu_worker compute `experts`; join if no part is missing after these."""
        work.num_missing -= len(experts)
        is_last = not work.num_missing
        if experts:
            running = self._running.setdefault((work.step, work.layer), {})
            running.update(zip(experts, slots, strict=True))
        if experts or is_last:
            commands.append(Run(work.gpu_epoch, work.step, work.layer, experts, slots, is_last))
        if is_last:
            counters = self._counters
            counters.layer_steps += 1
            counters.hits += work.num_hits
            counters.cpu_experts += work.num_executed
            counters.fills += work.num_parts - work.num_hits - work.num_executed
            self.work = None
            self.num_joined += 1

    # ---- workers that come and go ----

    def roster_changed(self, commands: list[CoreCommand]) -> None:
        """Plan with the rates of who is here, and place what no branch was there for."""
        self._planner.set_rates(self._roster.host_bytes_per_s, self._roster.link_bytes_per_s)
        work = self.work
        if work is not None and work.unplaced:
            stranded, work.unplaced = work.unplaced, []
            self._place(work, stranded, commands)

    def link_lost(self, commands: list[CoreCommand]) -> None:
        """No slot will be filled any more: its copies are void, their experts go elsewhere."""
        self._background.link_lost()
        work = self.work
        if work is None:
            return
        stranded: list[ExpertId] = []
        for expert, reservation in work.copying.values():
            self.directory.unpin(reservation.slot)
            self.directory.abort(reservation.slot, reservation.generation)
            stranded.append(expert)
        work.copying.clear()
        stranded += work.unfilled
        work.unfilled = []
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
        self.work = None
        self._flight = None
        self.num_joined = 0
        self._running.clear()
        self._background.gpu_lost()
        self.directory.clear()

    def _place(
        self, work: LayerStep, stranded: list[ExpertId], commands: list[CoreCommand]
    ) -> None:
        """Give experts that lost their branch another one."""
        if self._roster.cpu_epochs:
            self._execute(work, stranded, commands)
        elif self._roster.link_epoch is not None:
            work.unfilled += stranded
            self._fill(work, commands)
        else:
            work.unplaced += stranded

    def check(self) -> None:
        """Recount; InvariantBroken says what disagrees, or that nothing would ever happen again."""
        is_at_rest = self.work is not None or self._flight is None
        recount(
            self.directory, self.work, self._roster, self._running, self._background, is_at_rest
        )
        self._unanswered.check(self._roster)
