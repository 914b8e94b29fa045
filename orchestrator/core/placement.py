"""The hands of the dispatch: what the parts of a layer-step are told, and what is kept of it.

    _fill         reserve slots and have experts copied into them
    _adopt        wait for a copy that is on its way
    _fill_behind  copy what the CPU runs, too
    _execute      divide set C among the cpu_workers
    _run          have the gpu_worker compute, and join with the last part
    _place        give experts that lost their branch another one

Nothing here decides how many; see `dispatch` for the rules of waves and pins.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from orchestrator.core.adaptive_split import MAX_SAMPLE_ROWS
from orchestrator.core.background import BackgroundFills
from orchestrator.core.directory import SlotState
from orchestrator.core.events import AllIn, RequestCounters, Unpublish
from orchestrator.core.fill_choice import DEFAULT_MAX_BEHIND
from orchestrator.core.near_division import divide_near
from orchestrator.core.planner import divide_among
from orchestrator.core.preload import Preload
from protocol.messages import Copy, CopyId, Execute, Run, StepId

if TYPE_CHECKING:
    from orchestrator.core.adaptive_split import AdaptiveSplit
    from orchestrator.core.directory import ExpertDirectory
    from orchestrator.core.events import CoreCommand, CoreConfig, Foreseen, Retired
    from orchestrator.core.fluid_split import BranchCosts
    from orchestrator.core.layer_step import LayerStep
    from orchestrator.core.scheduler import Flight
    from orchestrator.core.workers import Roster
    from protocol.messages import Copied, Epoch, ExpertId, ExpertKey, LayerId, Ran, SlotId


class ExpertPlacement:
    """Owns the directory. `work` is the layer-step in progress, None between a join and the next
    `Routed`; `num_joined` counts the layers of the step that are through."""

    __slots__ = (
        "_background",
        "_counters",
        "_expert_nodes",
        "_flight",
        "_last_copy",
        "_preload",
        "_roster",
        "_running",
        "_split",
        "directory",
        "num_joined",
        "totals",
        "work",
    )

    def __init__(
        self,
        roster: Roster,
        directory: ExpertDirectory,
        split: AdaptiveSplit,
        config: CoreConfig,
    ) -> None:
        self._roster = roster
        self._expert_nodes = config.expert_nodes
        self._split = split
        self.directory = directory
        self._background = BackgroundFills(directory)
        self._preload = Preload(directory, config.preload)
        self._last_copy = 0
        self._flight: Flight | None = None
        #: Of the step in flight, and of all steps that are over.
        self._counters = RequestCounters()
        self.totals = RequestCounters()
        self.work: LayerStep | None = None
        self.num_joined = 0
        #: Slots that the gpu_worker may still read, by what it was told to run from them.
        self._running: dict[tuple[StepId, LayerId], dict[ExpertId, SlotId]] = {}

    @property
    def _is_guest(self) -> bool:
        """Whether the step in flight must not cost others their experts."""
        return self._flight is not None and self._flight.is_guest

    def measured(self, costs: BranchCosts) -> None:
        """Reckon with `costs` from now on."""
        self._split.measured(costs)

    def learn_from(self, ran: Ran) -> None:
        """What the device takes for an expert, hit or fill, of few rows."""
        if self._flight is not None and self._flight.num_rows <= MAX_SAMPLE_ROWS:
            self._split.took("gpu_expert_s", (ran.ended_ns - ran.started_ns) // len(ran.experts))

    # ---- fills that nobody waits for ----

    def foreseen(self, foreseen: Foreseen, commands: list[CoreCommand]) -> bool:
        """Fill an expert that nobody waits for. False if it has a slot or none is to be had."""
        key, link = (foreseen.layer, foreseen.expert), self._roster.link_epoch
        if link is None or self.directory.state_of(key) is not None:
            return False
        work = self.work
        if work is not None and (work.unfilled or foreseen.layer == work.layer):
            return False  # demand goes first
        return self._begin_behind(key, link, commands)

    @property
    def is_preloading(self) -> bool:
        """Whether a first request does well to wait: experts are being copied for it."""
        return self._preload.is_awaited and self._roster.link_epoch is not None

    def preload(self, commands: list[CoreCommand]) -> None:
        """No step is in flight: copy what has no slot yet into those that are free."""
        link = self._roster.link_epoch
        if link is None:
            return
        while len(self._background) < DEFAULT_MAX_BEHIND:
            key = self._preload.next_key()
            if key is None:
                break
            self._begin_behind(key, link, commands)
        if not len(self._background):
            self._preload.is_awaited = False

    def retired(self, retired: Retired, commands: list[CoreCommand]) -> bool:
        """No use of the slot's last expert goes on. False if that was known."""
        link = self._roster.link_epoch
        return link is not None and self._background.retired(retired.copy, link, commands)

    # ---- the number of slots ----

    def resize(self, num_slots: int, commands: list[CoreCommand]) -> bool:
        """Use so many slots from now on. False if there are not so many."""
        if not 1 <= num_slots <= self.directory.num_slots:
            return False
        self._gave_up(self.directory.resize(num_slots), commands)
        self._preload.restart()
        if self.work is not None:
            self._fill(self.work, commands)  # there may be more room now
        return True

    def shrink(self, commands: list[CoreCommand]) -> None:
        """Give up slots beyond the limit, as far as they are not in use."""
        self._gave_up(self.directory.shrink(), commands)

    def _gave_up(self, evicted: list[ExpertKey], commands: list[CoreCommand]) -> None:
        """These have no slot any more. They may be read until the gpu_worker rests, and what is
        copied into their slots waits for that, as any copy does."""
        for key in evicted:
            commands.append(Unpublish(*key))
            if self._flight is not None:
                self._counters.evictions += 1
                self._background.evicted.add(key)

    # ---- a branch that is gone ----

    def _slots_gone(self) -> None:
        """With the gpu_worker; what is copied for nobody goes with them."""
        self._background.gpu_lost()
        self.directory.clear()
        self._preload.restart()

    def link_lost(self, commands: list[CoreCommand]) -> None:
        """No slot will be filled any more: its copies are void, their experts go elsewhere."""
        self._background.link_lost()
        self._preload.restart()
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

    # ---- its verbs ----

    def _adopt(self, work: LayerStep, key: ExpertKey) -> None:
        """A fill in the background turns out to be one that is waited for."""
        copy, reservation = self._background.adopt(key)
        self.directory.pin(reservation.slot)
        if not self._is_guest:
            self.directory.refresh(key)
        work.copying[copy] = (key[1], reservation)
        work.adopted.add(copy)

    def _fill(self, work: LayerStep, commands: list[CoreCommand]) -> None:
        """Reserve slots for `unfilled`, as many as there are, and have them copied into."""
        link = self._roster.link_epoch
        if link is None or not work.unfilled:
            return
        num_reserved = 0
        step = work.step if work.is_self_joining else StepId(0)
        for expert in work.unfilled:
            reservation = self.directory.reserve((work.layer, expert), is_guest=self._is_guest)
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
            commands.append(Copy(link, copy, work.layer, expert, reservation.slot, step=step))
        del work.unfilled[:num_reserved]
        if work.unfilled and work.is_self_joining and not work.is_ran_wanted:
            work.is_ran_wanted = True
            commands.append(Run(work.gpu_epoch, work.step, work.layer, [], [], False, True))

    @property
    def _is_resting(self) -> bool:
        """Whether the gpu_worker is known to use nothing that it looked up by itself. One that
        joins by itself may be at the next layers already, unless it has only just asked."""
        work = self.work
        if work is not None and work.is_self_joining and work.is_decided:
            return False
        return self._flight is None or work is not None

    def _fill_behind(
        self, work: LayerStep, experts: list[ExpertId], commands: list[CoreCommand]
    ) -> None:
        """Copy experts that the CPU runs too, as far as there are slots."""
        link = self._roster.link_epoch
        if link is not None and not work.unfilled:
            for expert in experts:
                if self.directory.state_of((work.layer, expert)) is None:
                    self._begin_behind((work.layer, expert), link, commands)
        if experts is work.behind:
            work.behind = []

    def _begin_behind(self, key: ExpertKey, link: Epoch, commands: list[CoreCommand]) -> bool:
        self._last_copy += 1
        reservation = self._background.begin(
            key, CopyId(self._last_copy), link, commands, is_resting=self._is_resting
        )
        if reservation is None:
            return False
        if reservation.evicted is not None and self._flight is not None:
            self._counters.evictions += 1
        return True

    def _note_bytes(self, copied: Copied) -> None:
        self._counters.fill_bytes += copied.num_bytes
        self._counters.fill_busy_ns += copied.ended_ns - copied.started_ns

    def _execute(
        self, work: LayerStep, experts: list[ExpertId], commands: list[CoreCommand]
    ) -> None:
        """Divide `experts` among the cpu_workers, by rates and nodes and the experts' rows."""
        if not experts:
            return
        epochs, rates = self._roster.cpu_epochs, self._roster.cpu_rates
        if len(epochs) == 1:
            parts = [experts]
        elif self._expert_nodes and rates:
            nodes = self._expert_nodes[work.layer]
            homes = [nodes[expert] for expert in experts]
            parts = divide_near(experts, homes, work.rows_of(experts), rates)
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
        *,
        is_told: bool = False,
    ) -> None:
        """Have the gpu_worker compute `experts`, unless it is told by others; join if no part is
        missing after these."""
        work.num_missing -= len(experts)
        is_last = not work.num_missing
        if experts:
            running = self._running.setdefault((work.step, work.layer), {})
            running.update(zip(experts, slots, strict=True))
            started = work.routed.started
            if started and not is_told:
                pairs = zip(experts, slots, strict=True)
                told = [(expert, slot) for expert, slot in pairs if expert not in started]
                experts = [expert for expert, _ in told]
                slots = [slot for _, slot in told]
        if is_last and work.behind:  # before the gpu_worker goes on
            self._fill_behind(work, work.behind, commands)
        if not work.is_self_joining:
            if experts or is_last:
                commands.append(Run(work.gpu_epoch, work.step, work.layer, experts, slots, is_last))
        elif experts and not is_told:
            commands.append(Run(work.gpu_epoch, work.step, work.layer, experts, slots, False))
        if is_last:
            if work.is_self_joining:
                commands.append(AllIn(work.gpu_epoch, work.step, work.layer))
            counters = self._counters
            counters.layer_steps += 1
            counters.hits += work.num_hits
            counters.cpu_experts += work.num_executed
            counters.fills += work.num_parts - work.num_hits - work.num_executed
            if work.ended_ns:
                num_misses = work.num_parts - work.num_hits
                self._split.joined(num_misses, work.ended_ns - work.routed.routed_ns)
            self.work = None
            self.num_joined += 1

    def _place(
        self, work: LayerStep, stranded: list[ExpertId], commands: list[CoreCommand]
    ) -> None:
        """Give experts that lost their branch another one."""
        landed: list[ExpertId] = []
        for key in [(work.layer, expert) for expert in stranded]:
            state = self.directory.state_of(key)  # it may have been filled behind
            if state is not None:
                stranded.remove(key[1])
                if state is SlotState.FILLING:
                    self._adopt(work, key)
                else:
                    landed.append(key[1])
        # Pinned before room is made for the others: they might leave for it.
        _, slots, _ = self.directory.demand(
            [(work.layer, expert) for expert in landed], is_guest=self._is_guest
        )
        if self._roster.cpu_epochs:
            self._execute(work, stranded, commands)
        elif self._roster.link_epoch is not None:
            work.unfilled += stranded
            self._fill(work, commands)
        else:
            work.unplaced += stranded
        if landed:
            self._run(work, landed, slots, commands)
