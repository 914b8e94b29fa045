"""The whole system under a virtual clock: one seed, one story.

A heap of (time, number, action) is all there is of time. Messages are real frames of the real
codec; those between one worker and the core stay in order, those of different workers race. Workers
die at random moments, several at once if it so happens, and others take their place some time
later. What a dead worker had sent may still arrive, even after its death is known, or may not.
Every event is now and then told twice, or told of a worker that never was.
"""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from orchestrator.core.core import Core
from orchestrator.core.events import (
    CoreConfig,
    Foreseen,
    Passed,
    ResetTable,
    Resize,
    Retired,
    Submit,
    Withdraw,
    WorkerJoined,
    WorkerLost,
)
from orchestrator.finished_parts import FinishedParts
from orchestrator.residency import HERALDS, TABLE_COMMANDS, ResidencyBoard
from protocol.codec import encode, to_orchestrator, to_worker
from protocol.completions import Completion, Completions, completions_grant
from protocol.membarrier import MemoryBarrier
from protocol.messages import (
    Arena,
    Copied,
    Copy,
    Epoch,
    Execute,
    Executed,
    ExpertId,
    LayerId,
    Message,
    Ran,
    Ready,
    RequestId,
    SamplingParams,
)
from protocol.residency import ResidencyReader, residency_grant
from tests.sim.machine import (
    EXPERT_BYTES,
    Segment,
    SimCpu,
    SimDma,
    SimGpu,
    SimWorker,
    Slot,
    Violation,
)
from tests.sim.model import SyntheticModel, undisturbed
from tests.sim.watch import Onlooker, request_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from orchestrator.core.events import CoreCommand, CoreEvent

NOBODY = Epoch(0)
MAX_EVENTS = 60_000
_from_worker = to_orchestrator()
_to_worker = to_worker()


@dataclass(frozen=True)
class Scenario:
    """What a story is made of; everything else follows from `seed`."""

    seed: int
    config: CoreConfig
    num_experts: int
    arena_kind: str
    cpu_rates: tuple[float, ...]
    link_rate: float
    #: ns by which `Ran` may come late.
    ran_lag: int
    #: ns that a cpu_worker needs for an expert.
    execute_ns: int
    #: ns that a message is on its way.
    message_ns: int
    prompts: tuple[tuple[int, ...], ...]
    max_tokens: tuple[int, ...]
    #: Which requests are withdrawn, and how long after their coming.
    withdrawals: dict[int, int]
    #: When workers die: at this time, those of these roles.
    crashes: tuple[tuple[int, tuple[str, ...]], ...]
    repeat_chance: float
    #: Layers that fit into the ring of reports.
    num_reports: int = 64
    #: Whether the kernel has memory barriers between processes.
    has_barrier: bool = True
    #: Whether the gpu_worker joins by itself, and whether workers write words for it.
    is_self_joining: bool = False
    #: Every gpu_worker dies of a step over this token.
    poison: int | None = None
    #: What is resident in a layer that has to be asked for is run from the table.
    starts_hits: bool = False
    writes_words: bool = True
    #: ns by which messages about finished parts come later than their words.
    late_ns: int = 0
    #: Mean ns between two experts foreseen by somebody; 0: nobody foresees any.
    foreseen_every: int = 0
    #: When somebody says how many slots to use.
    resizes: tuple[tuple[int, int], ...] = ()


@dataclass
class Seat:
    """A place that one worker after the other takes."""

    role: str
    bytes_per_s: float
    worker: SimWorker | None = None


@dataclass
class Story:
    """What happened, for comparing two runs."""

    lines: list[str] = field(default_factory=list)
    events: list[CoreEvent] = field(default_factory=list)
    decisions: list[list[CoreCommand]] = field(default_factory=list)
    #: Whether the core was let learn after each of them.
    learnt: list[bool] = field(default_factory=list)
    num_deaths: int = 0
    num_stale: int = 0
    num_waits: int = 0
    num_given_up: int = 0
    num_guest_steps: int = 0
    num_joint_steps: int = 0
    num_layer_steps: int = 0
    num_passed: int = 0
    num_early: int = 0
    num_retired: int = 0
    num_learned: int = 0
    num_behind: int = 0
    num_preloaded: int = 0
    num_foreseen: int = 0
    num_full: int = 0
    #: Layer-steps with experts run from the table, and those decided only when they had run.
    num_started: int = 0
    num_deferred: int = 0
    #: Parts seen finished in shared memory before their worker's message.
    num_seen: int = 0


class SimBarrier(MemoryBarrier):
    """Time only passes between events here, so every store is seen at once."""

    def __init__(self, is_there: bool) -> None:
        self.is_there = is_there

    def run(self) -> bool:
        return self.is_there


class Simulation:
    """Runs one scenario to its end; raises `Violation` or `InvariantBroken` if it goes wrong."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.rng = random.Random(scenario.seed)
        self._learns = random.Random(scenario.seed)
        self._looks = random.Random(scenario.seed)
        config = scenario.config
        self.model = SyntheticModel(
            scenario.seed, config.num_layers, scenario.num_experts, config.top_k
        )
        self.core = Core(config)
        self.max_num_seqs = config.max_num_seqs
        self.max_rows = config.max_rows
        self.now = 0
        self.segment = Segment()
        chosen = min(scenario.num_experts, config.max_rows * config.top_k)
        self._grant = residency_grant(
            config.num_layers, scenario.num_experts, chosen, scenario.num_reports
        )
        self._memory = bytearray(self._grant.num_bytes)
        grant = completions_grant(scenario.num_experts)
        self.completions = Completions(bytearray(grant.num_bytes), grant)
        self._finished = FinishedParts(self.completions, EXPERT_BYTES)
        self.is_self_joining = scenario.is_self_joining
        self.poison = scenario.poison
        self.starts_hits = scenario.starts_hits and scenario.is_self_joining
        self.writes_words = scenario.writes_words
        self._readers: list[ResidencyReader] = []
        self._board = ResidencyBoard(
            self._memory,
            self._grant,
            lambda seconds, action: self.after(int(seconds * 1e5), action),
            self._later_told,
            SimBarrier(scenario.has_barrier),
        )
        self.story = Story()
        self._heap: list[tuple[int, int, Callable[[], None]]] = []
        self._num_scheduled = 0
        self._last_epoch = 0
        self._leaving = NOBODY
        self._workers: dict[Epoch, SimWorker] = {}
        self._arenas: dict[bytes, list[Slot]] = {}
        self._requests = self._make_requests()
        self.onlooker = Onlooker(
            config,
            {
                submit.request: undisturbed(
                    self.model,
                    submit.prompt_tokens,
                    submit.max_tokens,
                    submit.eos_tokens,
                    submit.sampling.seed,
                    config.max_rows,
                    config.max_sequence_tokens,
                )
                for submit in self._requests
            },
        )
        self._seats = [Seat("gpu_worker", 0.0), Seat("dma_worker", scenario.link_rate)]
        self._seats += [Seat("cpu_worker", rate) for rate in scenario.cpu_rates]
        if scenario.arena_kind == "in_process":
            self._seats[0].bytes_per_s = scenario.link_rate

    def run(self) -> Story:
        """Until every request is over and nothing is in flight."""
        for seat in self._seats:
            self._start(seat)
        for index, submit in enumerate(self._requests):
            arrives = self.rng.randrange(1, 4000)
            self.after(arrives, lambda submit=submit: self._submit(submit))  # type: ignore[misc]
            if index in self.scenario.withdrawals:
                withdraw = Withdraw(submit.request)
                leaves = arrives + self.scenario.withdrawals[index]
                self.after(leaves, lambda withdraw=withdraw: self._tell(withdraw))  # type: ignore[misc]
        if self.scenario.foreseen_every:
            self.after(self.scenario.foreseen_every, self._foresee)
        for at, num_slots in self.scenario.resizes:
            resize = Resize(num_slots)
            self.after(at, lambda resize=resize: self._tell(resize))  # type: ignore[misc]
        for at, roles in self.scenario.crashes:
            self.after(at, lambda roles=roles: self._crash(roles))  # type: ignore[misc]
        num_events = 0
        while self._heap:
            self.now, _, action = heapq.heappop(self._heap)
            action()
            self._look_early()
            num_events += 1
            if num_events > MAX_EVENTS:
                raise Violation("the story does not end")
        for name, books in self.onlooker.books.items():
            if books.done is None:
                raise Violation(f"{name} waits for ever: {self.core.snapshot()}")
            self.story.num_layer_steps += books.done.counters.layer_steps
        if not self.core.is_idle:
            raise Violation("the core is not idle after the last request")
        totals = self.core.snapshot().totals
        if any(getattr(totals, name) != seen for name, seen in self.onlooker.totals.items()):
            raise Violation(f"all steps cost {self.onlooker.totals}, counted are {totals}")
        self.story.num_waits = self.onlooker.num_waits
        self.story.num_given_up = self.onlooker.num_given_up
        self.story.num_guest_steps = self.onlooker.num_guest_steps
        self.story.num_joint_steps = self.onlooker.num_joint_steps
        self.story.num_behind = self.onlooker.num_behind
        self.story.num_preloaded = self.onlooker.num_preloaded
        self.story.num_started = self.onlooker.num_started
        self.story.num_deferred = self.onlooker.num_deferred
        self.story.num_full = sum(reader.num_full for reader in self._readers)
        return self.story

    # ---- what workers see ----

    def after(self, delay: int, action: Callable[[], None]) -> None:
        self._num_scheduled += 1
        heapq.heappush(self._heap, (self.now + delay, self._num_scheduled, action))

    def latency(self, usual: int) -> int:
        """Mostly about `usual`, now and then far longer."""
        scale = 20.0 if self.rng.random() < 0.02 else 1.0
        return int(usual * self.rng.uniform(0.2, 2.0) * scale)

    def slots_behind(self, arena: Arena) -> list[Slot]:
        return self._arenas[arena.handle]

    def from_worker(self, worker: SimWorker, message: Message) -> None:
        late = self.scenario.late_ns if isinstance(message, (Copied, Executed)) else 0
        latency = self.latency(self.scenario.message_ns + late)
        arrives = max(self.now + latency, worker.last_sent_arrives)
        worker.last_sent_arrives = arrives
        frame = encode(message)

        def arrive() -> None:
            if worker.silent_from is not None and self.now >= worker.silent_from:
                return
            if self.now < worker.held_until:
                self.after(worker.held_until - self.now, arrive)
                return
            is_known = self._workers.get(worker.epoch) is worker
            event = _from_worker.decode(frame)
            if is_known and isinstance(event, (Copied, Executed)):
                self._finished.heard(event)
                self._wake()
            elif is_known and isinstance(event, HERALDS):
                self._take(self._finished.look())
                self._take(self._board.before(event))
            self._tell(event, is_stale=not is_known)  # type: ignore[arg-type]

        self.after(arrives - self.now, arrive)

    def new_reader(self) -> ResidencyReader:
        self._readers.append(ResidencyReader(self._memory, self._grant))
        return self._readers[-1]

    def finished(self, step: int, layer: int, experts: list[int], done: Completion) -> None:
        if self.writes_words:
            for expert in experts:
                self.completions.write(step, layer, expert, done)
            self._wake()

    def _wake(self) -> None:
        worker = self._seats[0].worker
        if isinstance(worker, SimGpu):
            worker.later(5, worker.woken)

    # ---- the shell's part ----

    def _take(self, news: Sequence[Passed | Ran | Copied | Executed]) -> None:
        for event in news:
            self.story.num_passed += isinstance(event, Passed)
            self.story.num_seen += isinstance(event, (Copied, Executed))
            self._tell(event)

    def _look_early(self) -> None:
        """Reports may be heard at any time at which no layer waits."""
        if self.core.is_between_layers and self._looks.random() < 0.3:
            early = self._board.early()
            self.story.num_early += len(early)
            self._take(early)

    def _later_told(self, retired: Retired) -> None:
        """The board answers within the handling of another event; the core hears it afterwards."""

        def tell() -> None:
            is_known = retired.copy in self.onlooker.retiring
            self.story.num_retired += is_known
            self._tell(retired, is_stale=not is_known)

        self.after(0, tell)

    def _foresee(self) -> None:
        """Somebody foresees a demand that may come or not."""
        if self.core.is_idle and not any(b.done is None for b in self.onlooker.books.values()):
            return
        layer = self.rng.randrange(self.scenario.config.num_layers)
        expert = self.rng.randrange(self.scenario.num_experts)
        self._tell(Foreseen(LayerId(layer), ExpertId(expert)))
        self.after(self.latency(self.scenario.foreseen_every), self._foresee)

    def _tell(self, event: CoreEvent, *, is_stale: bool = False) -> None:
        if not is_stale and isinstance(event, Message) and self._has_luck():
            # The same from nobody: right in all but the epoch, and ahead of the true one.
            self._tell(msgspec.structs.replace(event, epoch=NOBODY), is_stale=True)
        commands = self.core.handle(event)
        self.core.check()
        is_learning = self._learns.random() < 0.7
        if is_learning:
            self.story.num_learned += len(self.core.settle())
            self.core.check()
        self.story.learnt.append(is_learning)
        if is_learning:
            for foreseen in self.core.foresee():
                self.story.num_foreseen += 1
                self.after(0, lambda foreseen=foreseen: self._tell(foreseen))  # type: ignore[misc]
        self.story.events.append(event)
        self.story.decisions.append(commands)
        self.story.lines.append(f"{self.now} {event} -> {commands}")
        self.story.num_stale += is_stale
        self.onlooker.saw(event, commands, is_stale=is_stale)
        for command in commands:
            if isinstance(command, (Copy, Execute)):
                self._finished.asked(command)
            elif isinstance(command, TABLE_COMMANDS):
                self._board.carry(command)
                if isinstance(command, ResetTable):
                    self._finished.copies_are_void()
        for command in commands:
            if isinstance(command, Message):
                self._carry(command)
        self.onlooker.check_table(ResidencyReader(self._memory, self._grant))
        if not is_stale and not isinstance(event, Foreseen) and self._has_luck():
            self.after(self.latency(200), lambda: self._repeat(event))

    def _has_luck(self) -> bool:
        return self.rng.random() < self.scenario.repeat_chance

    def _repeat(self, event: CoreEvent) -> None:
        if isinstance(event, Resize):
            return  # said later it would mean something else
        if isinstance(event, Submit) and self.onlooker.books[event.request].done is not None:
            return  # a name may be used again once its request is over
        self._tell(event, is_stale=True)

    def _carry(self, command: Message) -> None:
        epoch: Epoch = command.epoch  # type: ignore[attr-defined]
        if epoch == self._leaving:
            return  # the core is about to hear of its end
        worker = self._workers[epoch]
        arrives = max(
            self.now + self.latency(self.scenario.message_ns), worker.last_command_arrives
        )
        worker.last_command_arrives = arrives
        frame = encode(command)

        def arrive() -> None:
            if worker.is_alive:
                worker.receive(_to_worker.decode(frame))

        self.after(arrives - self.now, arrive)

    def _submit(self, submit: Submit) -> None:
        self._tell(submit)

    # ---- life and death ----

    def _start(self, seat: Seat) -> None:
        self._last_epoch += 1
        epoch = Epoch(self._last_epoch)
        match seat.role:
            case "gpu_worker":
                worker: SimWorker = SimGpu(
                    self, epoch, seat.bytes_per_s, self._new_arena(epoch), self.scenario.ran_lag
                )
            case "dma_worker":
                worker = SimDma(self, epoch, seat.bytes_per_s)
            case _:
                worker = SimCpu(self, epoch, seat.bytes_per_s, self.scenario.execute_ns)
        seat.worker = worker

        def join() -> None:
            ready = _from_worker.decode(encode(worker.ready()))
            assert isinstance(ready, Ready)
            self._workers[epoch] = worker
            self._tell(WorkerJoined(epoch, worker.role, ready.bytes_per_s, ready.arena))

        worker.later(self.rng.choice((10, 100, 2000)), join)

    def _new_arena(self, epoch: Epoch) -> Arena:
        num_slots = self.scenario.config.num_slots
        kind = self.scenario.arena_kind
        # Shared slots outlive the gpu_worker with whatever is in them; a device's do not.
        handle = b"shared" if kind == "shared" else str(epoch).encode()
        slots = self._arenas.setdefault(handle, [Slot() for _ in range(num_slots)])
        for slot in slots:
            slot.content = None if slot.content is None else (-2, -2)
        return Arena(kind=kind, num_slots=num_slots, slot_bytes=1, handle=handle)  # type: ignore[arg-type]

    def _crash(self, roles: tuple[str, ...]) -> None:
        for seat in self._seats:
            if seat.role in roles and seat.worker is not None and self.rng.random() < 0.8:
                self._kill(seat, seat.worker)

    def poisoned(self, worker: SimWorker) -> None:
        """A step that this worker does not survive."""
        for seat in self._seats:
            if seat.worker is worker:
                self._kill(seat, worker)

    def _kill(self, seat: Seat, worker: SimWorker) -> None:
        self.story.num_deaths += 1
        worker.is_alive = False
        seat.worker = None
        worker.silent_from = self.now + self.rng.choice((0, 5, 5000, 5000))
        worker.held_until = self.now + self.rng.choice((0, 0, 500, 3000))

        def lost() -> None:
            if self._workers.pop(worker.epoch, None) is not None:
                self._leaving = worker.epoch
                self._take(self._finished.look())
                self._take(self._board.before(WorkerLost(worker.epoch)))
            self._leaving = NOBODY
            self._tell(WorkerLost(worker.epoch))
            self._finished.lost(worker.epoch)
            if self.rng.random() < 0.2:
                self._tell(
                    WorkerJoined(worker.epoch, worker.role, 1.0, worker.ready().arena),
                    is_stale=True,
                )
            self.after(self.latency(self.rng.choice((5, 1000))), lambda: self._start(seat))

        self.after(self.latency(30), lost)

    def _make_requests(self) -> list[Submit]:
        requests = []
        for index, prompt in enumerate(self.scenario.prompts):
            eos_tokens = frozenset({0, 1}) if index % 3 else frozenset[int]()
            requests.append(
                Submit(
                    RequestId(request_of(prompt[0])),
                    list(prompt),
                    self.scenario.max_tokens[index],
                    eos_tokens,
                    SamplingParams(temperature=1.0, seed=self.rng.randrange(1000)),
                )
            )
        return requests
