"""Simulated workers and the memory they share, with every touch of that memory checked.

Time only passes between events: a worker does something now, or asks to be called back later. What
a real machine would get wrong in silence (a torn read, rows written over another layer's) raises
`Violation` here, at the moment it happens.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import msgspec

from protocol.completions import Completion
from protocol.messages import (
    Arena,
    AttachArena,
    Copied,
    Copy,
    DetachArena,
    DropSequence,
    Epoch,
    Execute,
    Executed,
    ExpertId,
    LayerId,
    Message,
    Ran,
    Ready,
    Role,
    Routed,
    Run,
    Sampled,
    SlotId,
    StartStep,
    StepDone,
    StepPart,
)
from protocol.residency import NO_SLOT
from tests.sim.model import Cache, SyntheticModel

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

    from protocol.completions import Completions
    from protocol.residency import ResidencyReader

EXPERT_BYTES = 1000
TORN = (-1, -1)


class Violation(AssertionError):
    """Something happened that must never happen."""


@dataclass
class Slot:
    """What lies in one slot; `version` tells whether it was touched between two looks."""

    content: tuple[int, int] | None = None
    version: int = 0


@dataclass
class Segment:
    """The activation segment: the rows of one layer-step, written over by the next."""

    step: int = 0
    layer: int = 0
    experts: list[int] = field(default_factory=list)
    #: By position of the expert in the routing: who wrote the result rows there.
    results: dict[int, tuple[int, int, int]] = field(default_factory=dict)


class World(Protocol):
    """What a worker sees of the world."""

    rng: Random
    now: int
    model: SyntheticModel
    segment: Segment
    max_num_seqs: int
    max_rows: int

    completions: Completions
    writes_words: bool
    is_self_joining: bool
    starts_hits: bool
    poison: int | None

    def new_reader(self) -> ResidencyReader: ...
    def finished(self, step: int, layer: int, experts: list[int], done: Completion) -> None: ...
    def after(self, delay: int, action: Callable[[], None]) -> None: ...
    def from_worker(self, worker: SimWorker, message: Message) -> None: ...
    def poisoned(self, worker: SimWorker) -> None: ...
    def slots_behind(self, arena: Arena) -> list[Slot]: ...
    def latency(self, usual: int) -> int: ...


class SimWorker:
    """One incarnation of one worker."""

    role: Role

    def __init__(self, world: World, epoch: Epoch, bytes_per_s: float) -> None:
        self.world = world
        self.epoch = epoch
        self.bytes_per_s = bytes_per_s
        self.is_alive = True
        self.last_sent_arrives = 0
        self.last_command_arrives = 0
        #: Set at its death: nothing of it is heard from then on, or nothing until then.
        self.silent_from: int | None = None
        self.held_until = 0

    def ready(self) -> Ready:
        return Ready(self.epoch, self.bytes_per_s)

    def receive(self, command: Message) -> None:
        raise Violation(f"the {self.role} was sent a {type(command).__name__}")

    def send(self, message: Message) -> None:
        self.world.from_worker(self, message)

    def later(self, usual: int, action: Callable[[], None]) -> None:
        """Call back after about `usual` ns, if still alive then."""
        self.world.after(self.world.latency(usual), lambda: action() if self.is_alive else None)

    def require(self, condition: bool, sentence: str) -> None:
        if not condition:
            raise Violation(f"{self.role} {self.epoch} at {self.world.now}: {sentence}")


class Copier:
    """Copies one expert after the other into slots; a slot is torn while it is written."""

    def __init__(self, worker: SimWorker) -> None:
        self._worker = worker
        self._slots: list[Slot] | None = None
        self._queue: deque[Copy] = deque()
        self._round = 0  # an arena that goes takes its copies with it

    def attach(self, slots: list[Slot]) -> None:
        self._worker.require(self._slots is None, "two arenas without a detach between them")
        self._slots = slots

    def detach(self) -> None:
        self._worker.require(self._slots is not None, "there is no arena to detach")
        self._slots = None
        self._queue.clear()
        self._round += 1

    def copy(self, command: Copy) -> None:
        self._worker.require(self._slots is not None, "a Copy before the arena")
        self._queue.append(command)
        if len(self._queue) == 1:
            self._begin()

    def _begin(self) -> None:
        worker, command, slots = self._worker, self._queue[0], self._slots
        assert slots is not None
        slot, started, this_round = slots[command.slot], worker.world.now, self._round
        slot.content, slot.version = TORN, slot.version + 1

        def end() -> None:
            if this_round != self._round:
                return
            slot.content, slot.version = (command.layer, command.expert), slot.version + 1
            now = worker.world.now
            if command.step and worker.role == "dma_worker":
                done = Completion(command.slot, worker.epoch, started, now)
                worker.world.finished(command.step, command.layer, [command.expert], done)
            worker.send(Copied(worker.epoch, command.copy, started, now, EXPERT_BYTES))
            self._queue.popleft()
            if self._queue:
                self._begin()

        worker.later(80, end)


class SimDma(SimWorker):
    role: Role = "dma_worker"

    def __init__(self, world: World, epoch: Epoch, bytes_per_s: float) -> None:
        super().__init__(world, epoch, bytes_per_s)
        self._copier = Copier(self)

    def receive(self, command: Message) -> None:
        match command:
            case AttachArena():
                self._copier.attach(self.world.slots_behind(command.arena))
            case DetachArena():
                self._copier.detach()
            case Copy():
                self._copier.copy(command)
            case _:
                super().receive(command)


class SimCpu(SimWorker):
    role: Role = "cpu_worker"

    def __init__(self, world: World, epoch: Epoch, bytes_per_s: float, execute_ns: int) -> None:
        super().__init__(world, epoch, bytes_per_s)
        self._execute_ns = execute_ns
        self._queue: deque[Execute] = deque()

    def receive(self, command: Message) -> None:
        if not isinstance(command, Execute):
            super().receive(command)
            return
        self._queue.append(command)
        if len(self._queue) == 1:
            self._begin(command, 0, [])

    def _begin(self, command: Execute, index: int, unsaid: list[ExpertId]) -> None:
        segment, started = self.world.segment, self.world.now
        self._check_rows(command)

        def end() -> None:
            self._check_rows(command)
            expert = command.experts[index]
            position = segment.experts.index(expert)
            segment.results[position] = (command.step, command.layer, expert)
            unsaid.append(expert)
            is_last = index + 1 == len(command.experts)
            if is_last or self.world.rng.random() < 0.3:  # now and then in several answers
                self._say(command, list(unsaid), started)
                unsaid.clear()
            if not is_last:
                self._begin(command, index + 1, unsaid)
                return
            self._queue.popleft()
            if self._queue:
                self._begin(self._queue[0], 0, [])

        self.later(self._execute_ns, end)

    def _say(self, command: Execute, experts: list[ExpertId], started: int) -> None:
        num_bytes = EXPERT_BYTES * len(experts)
        done = Completion(-1, self.epoch, started, self.world.now)
        self.world.finished(command.step, command.layer, list(experts), done)
        self.send(
            Executed(
                self.epoch,
                command.step,
                command.layer,
                experts,
                started,
                self.world.now,
                num_bytes,
            )
        )

    def _check_rows(self, command: Execute) -> None:
        segment = self.world.segment
        self.require(
            (segment.step, segment.layer) == (command.step, command.layer),
            f"rows of step {segment.step} layer {segment.layer} lie where those of step "
            f"{command.step} layer {command.layer} are computed",
        )
        self.require(set(command.experts) <= set(segment.experts), "nobody chose this expert")


class SimGpu(SimWorker):
    role: Role = "gpu_worker"

    def __init__(
        self, world: World, epoch: Epoch, bytes_per_s: float, arena: Arena, ran_lag: int
    ) -> None:
        super().__init__(world, epoch, bytes_per_s)
        self._arena = arena
        self._ran_lag = ran_lag
        self._slots = world.slots_behind(arena)
        self._copier = Copier(self)
        if arena.kind == "in_process":
            self._copier.attach(self._slots)
        self._caches: dict[int, Cache] = {}
        self._step: StartStep | None = None
        #: Position and digest of every row of the step, and the caches after it.
        self._rows: list[tuple[int, int]] = []
        self._next_caches: dict[int, Cache] = {}
        self._layer = 0
        self._is_routed = False
        self._computed: set[int] = set()
        self._table: ResidencyReader | None = None
        self._runs: deque[Run] = deque()
        #: Parts of the layer-step that joins by itself which are not in.
        self._missing: dict[int, None] = {}
        self._is_ran_wanted = False
        #: What runs from slots seen in the table.
        self._seen: Run | None = None

    def ready(self) -> Ready:
        return Ready(self.epoch, self.bytes_per_s, self._arena)

    def receive(self, command: Message) -> None:
        match command:
            case StartStep():
                self._start(command)
            case Run():
                self._run(command)
            case DropSequence():
                running = [] if self._step is None else self._step.parts
                in_use = any(part.sequence == command.sequence for part in running)
                self.require(not in_use, "the sequence of the step in flight is dropped")
                self.require(command.sequence in self._caches, "an unknown sequence is dropped")
                del self._caches[command.sequence]
            case Copy() if self._arena.kind == "in_process":
                self._copier.copy(command)
            case _:
                super().receive(command)

    def _start(self, command: StartStep) -> None:
        self.require(self._step is None, "a second step while one is in flight")
        self.require(bool(command.parts), "a step over nothing")
        self._rows, self._next_caches = [], {}
        for part in command.parts:
            self._begin_part(part, is_alone=len(command.parts) == 1)
        self.require(len(self._rows) <= self.world.max_rows, "more rows than there is room for")
        self._step, self._layer = command, 0
        if self._table is None:
            self._table = self.world.new_reader()
        self.require(self._table.epoch == self.epoch, "a step before the table is mine")
        self.require(len(self._caches) <= self.world.max_num_seqs, "too many caches")
        if any(self.world.poison in part.tokens for part in command.parts):
            self.later(self.world.latency(100), lambda: self.world.poisoned(self))
        self.later(50, self._route)

    def _begin_part(self, part: StepPart, *, is_alone: bool) -> None:
        sequence = part.sequence
        self.require(sequence not in self._next_caches, "a sequence is in a step twice")
        self.require(bool(part.tokens), "a part over no tokens")
        self.require(is_alone or len(part.tokens) == 1, "a prompt in a step with others")
        cache = self._caches.get(sequence, Cache())
        self.require(
            cache.num_tokens == part.start,
            f"the cache holds {cache.num_tokens} positions, the step starts at {part.start}",
        )
        self._caches[sequence] = cache
        self._next_caches[sequence], rows = cache.extended(part.tokens)
        self._rows += [(part.start + offset, row) for offset, row in enumerate(rows)]

    def _route(self) -> None:
        step = self._step
        assert step is not None
        num_rows: dict[int, int] = {}
        for position, row in self._rows:
            for expert in self.world.model.route(self._layer, position, row):
                num_rows[expert] = num_rows.get(expert, 0) + 1
        segment = self.world.segment
        segment.step, segment.layer, segment.experts = step.step, self._layer, list(num_rows)
        self._computed = set()
        self.later(20, lambda: self._look(num_rows))

    def _look(self, num_rows: dict[int, int]) -> None:
        """See what the table says; some time passes before anything is done about it."""
        table = self._table
        assert table is not None
        seen = self.look(table, self._layer, list(num_rows))
        if seen is not None and NO_SLOT not in seen:
            slots, routed = seen, self.world.now
            self.later(60, lambda: self._pass(table, num_rows, slots, routed))
            return
        found = dict(zip(num_rows, seen or [], strict=False))
        started = {expert: slot for expert, slot in found.items() if slot != NO_SLOT}
        if started and not self.world.starts_hits:
            table.leave()
            started = {}
        self.later(20, lambda: self._ask(num_rows, started))

    def look(self, table: ResidencyReader, layer: int, experts: list[int]) -> list[int] | None:
        return table.look(layer, experts)

    def _pass(
        self, table: ResidencyReader, num_rows: dict[int, int], numbers: list[int], routed: int
    ) -> None:
        """Every expert has a slot: compute, join and go on."""
        step, started, experts = self._step, self.world.now, list(num_rows)
        assert step is not None
        slots = [self._slots[number] for number in numbers]
        for expert, slot in zip(experts, slots, strict=True):
            self.require(
                slot.content == (self._layer, expert),
                f"layer {self._layer} expert {expert} is seen in a slot with {slot.content}",
            )
        versions = [slot.version for slot in slots]

        def end() -> None:
            self.require(versions == [slot.version for slot in slots], "a slot changed in use")
            times = (routed, started, self.world.now, 0)
            rows = list(num_rows.values())
            table.report(self.epoch, step.step, self._layer, experts, rows, times)
            self._go_on()

        self.later(20 * len(experts), end)

    def _ask(self, num_rows: dict[int, int], started: dict[int, int]) -> None:
        step = self._step
        assert step is not None
        self._is_routed = True
        self._missing = dict.fromkeys(expert for expert in num_rows if expert not in started)
        self._is_ran_wanted = not self.world.is_self_joining
        self.send(
            Routed(
                self.epoch,
                step.step,
                LayerId(self._layer),
                [ExpertId(expert) for expert in num_rows],
                list(num_rows.values()),
                self.world.now,
                num_reports=self._num_reports,
                is_self_joining=self.world.is_self_joining,
                started=[ExpertId(expert) for expert in started],
            )
        )
        if started:
            experts = [ExpertId(expert) for expert in started]
            slots = [SlotId(slot) for slot in started.values()]
            self._seen = Run(self.epoch, step.step, LayerId(self._layer), experts, slots, False)
            self._queue(self._seen)

    def woken(self) -> None:
        """Look for words, as far as any are waited for."""
        step = self._step
        if step is None or not self._is_routed or not self.world.is_self_joining:
            return
        landed = self.landed(self.world.completions, step.step, self._layer, self._missing)
        for number, slot in landed:
            del self._missing[number]
            if slot >= 0:
                expert = ExpertId(number)
                layer = LayerId(self._layer)
                self._queue(Run(self.epoch, step.step, layer, [expert], [SlotId(slot)], False))
        self._join_if_all_is_in()

    def landed(
        self, completions: Completions, step: int, layer: int, experts: dict[int, None]
    ) -> list[tuple[int, int]]:
        return completions.landed(step, layer, experts)

    def _join_if_all_is_in(self) -> None:
        if self.world.is_self_joining and not self._missing and not self._runs:
            self._join()

    @property
    def _num_reports(self) -> int:
        return 0 if self._table is None else self._table.num_reports

    def _run(self, command: Run) -> None:
        step = self._step
        is_current = step is not None and (command.step, command.layer) == (step.step, self._layer)
        if command.is_ran_wanted and not command.experts and not is_current:
            return  # words may overtake it
        self.require(
            step is not None
            and self._is_routed
            and (command.step, command.layer) == (step.step, self._layer),
            f"Run for step {command.step} layer {command.layer}, which is not in progress",
        )
        self.require(len(command.experts) == len(command.slots), "experts without slots")
        if self.world.is_self_joining:
            self.require(not command.join, "told to join, but joins by itself")
            if command.is_ran_wanted and not self._is_ran_wanted:
                self._is_ran_wanted = True
                self._say_ran(Ran(self.epoch, command.step, command.layer, [], 0, 0))
            for expert in command.experts:
                self.require(expert in self._missing, f"expert {expert} is in already")
                del self._missing[expert]
        self._queue(command)

    def _queue(self, command: Run) -> None:
        self._runs.append(command)
        if len(self._runs) == 1:
            self._begin_run()

    def _begin_run(self) -> None:
        command, started = self._runs[0], self.world.now
        slots = [self._slots[slot] for slot in command.slots]
        for expert, slot in zip(command.experts, slots, strict=True):
            self.require(
                slot.content == (command.layer, expert),
                f"layer {command.layer} expert {expert} is run from a slot with {slot.content}",
            )
            self.require(expert in self.world.segment.experts, "nobody chose this expert")
            self.require(expert not in self._computed, f"expert {expert} is run twice")
            self._computed.add(expert)
        versions = [slot.version for slot in slots]

        def end() -> None:
            now = self.world.now
            self.require(versions == [slot.version for slot in slots], "a slot changed in a run")
            if command.experts:
                self._has_run(command, started, now)
            if command is self._seen:
                assert self._table is not None
                self._seen = None
                self._table.leave()
            self._runs.popleft()
            if command.join:
                self._join()
            elif self._runs:
                self._begin_run()
            else:
                self._join_if_all_is_in()

        self.later(20 * len(command.experts), end)

    def _has_run(self, command: Run, started: int, now: int) -> None:
        step, layer, experts = command.step, command.layer, command.experts
        if not self._is_ran_wanted:
            assert self._table is not None
            if self._table.ran(self.epoch, step, layer, experts, started, now):
                return
        ran = Ran(self.epoch, step, layer, experts, started, now)
        self.later(self._ran_lag, lambda: self._say_ran(ran))

    def _join(self) -> None:
        step, segment = self._step, self.world.segment
        assert step is not None
        self.require(not self._runs, "a Run after the join")
        for position, expert in enumerate(segment.experts):
            rows = (step.step, self._layer, expert)
            self.require(
                expert in self._computed or segment.results.get(position) == rows,
                f"layer {self._layer} is joined without expert {expert}",
            )
        self._is_routed = False
        self._go_on()

    def _say_ran(self, ran: Ran) -> None:
        self.send(msgspec.structs.replace(ran, num_reports=self._num_reports))

    def _go_on(self) -> None:
        self._layer += 1
        if self._layer < self.world.model.num_layers:
            self.later(50, self._route)
        else:
            self.later(50, self._finish)

    def _finish(self) -> None:
        step = self._step
        assert step is not None
        self._step = None
        self._caches |= self._next_caches
        sampled: list[Sampled | None] = []
        for part in step.parts:
            digest, answer = self._caches[part.sequence].digest, None
            if part.sampling is not None:
                token = self.world.model.sample(digest, part.sampling.seed)
                answer = Sampled(token, f"{digest:x}")
            sampled.append(answer)
        now, num_reports = self.world.now, self._num_reports
        self.send(StepDone(self.epoch, step.step, sampled, 0, now, num_reports))
