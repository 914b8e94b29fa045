"""An onlooker who hears every event and every command and knows what must never be among them.

It keeps its own books, by other means than the core, and compares. Timing plays no part: a command
that would go wrong in some order of events is a `Violation` even when this order was kind.
"""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from orchestrator.core.events import (
    AllIn,
    Foreseen,
    Passed,
    Planned,
    Publish,
    RequestDone,
    Resize,
    Retire,
    Stalled,
    Submit,
    TokenOut,
    Unpublish,
    Withdraw,
    WorkerJoined,
    WorkerLost,
)
from orchestrator.core.scheduler import MAX_LOSSES, SUSPECT_LOSSES
from protocol.messages import (
    AttachArena,
    Copied,
    Copy,
    DetachArena,
    Execute,
    Executed,
    Message,
    Ran,
    Routed,
    Run,
    StartStep,
    StepDone,
    StepPart,
)
from tests.sim.machine import EXPERT_BYTES, Violation

if TYPE_CHECKING:
    from collections.abc import Sequence

    from orchestrator.core.events import CoreCommand, CoreConfig, CoreEvent
    from protocol.residency import ResidencyReader
    from tests.sim.model import Answer


@dataclass
class Books:
    """What one request has got and cost, counted from outside."""

    answer: Answer
    sequence: int | None = None
    num_prompt: int = 0
    #: Positions that its cache holds, or will at the end of the step.
    num_cached: int = 0
    num_tokens: int = 0
    is_withdrawn: bool = False
    #: Gpu_workers lost in its steps since its last token; whether it is the one who ends them.
    num_losses: int = 0
    is_poisoned: bool = False
    done: RequestDone | None = None
    costs: Counter[str] = field(default_factory=Counter)


class Onlooker:
    """See the module. `answers` holds the undisturbed answer of every request."""

    def __init__(self, config: CoreConfig, answers: dict[str, Answer]) -> None:
        self._config = config
        self.books = {name: Books(answer) for name, answer in answers.items()}
        self._roles: dict[int, str] = {}
        self._attached: int | None = None
        self._step: StartStep | None = None
        #: Whose rows are in the step, and what kind of step it is.
        self._owners: list[str] = []
        self._is_chunk = False
        #: How many steps in a row each active request had no part in.
        self._passed_over: Counter[str] = Counter()
        #: A chunk while others decode, and what was copied for such steps alone.
        self._is_guest = False
        self._guests: set[tuple[int, int]] = set()
        self.num_guest_steps = self.num_joint_steps = 0
        self._last_step = 0
        self._layers_joined = 0
        #: Where each expert of the layer-step in progress is: "miss" or how it was placed.
        self._parts: dict[int, str] = {}
        self._executing: dict[int, int] = {}
        self._copying: dict[int, Copy] = {}
        self._slots: dict[int, tuple[int, int]] = {}
        self._reads: Counter[int] = Counter()
        self._unran: dict[tuple[int, int, int], int] = {}
        #: What every cpu_worker was told and has not answered: epoch, step, layer, expert.
        self._owed: set[tuple[int, int, int, int]] = set()
        self._live: dict[str, None] = {}  # in the order of their coming
        self._is_in_process = False
        self._is_self_joining = False
        #: Decided only once what it runs from the table has run.
        self._deferred: Routed | None = None
        self.num_started = self.num_deferred = 0
        self._missing: str | None = None
        self._used_copies: set[int] = set()
        #: Fills that nobody waited for when they began: retiring, then copying.
        self.retiring: dict[int, tuple[int, int]] = {}
        self._foreseen: dict[int, tuple[int, int]] = {}
        self._hears_foreseen: tuple[int, int] | None = None
        self._evicted: set[tuple[int, int]] = set()
        self.totals: Counter[str] = Counter()
        #: Layer-steps whose experts were not all placed at once: for want of a slot or a branch.
        self.num_waits = 0
        #: Slots that may be used, and how many were given up because they were too many.
        self._limit = config.num_slots
        self.num_given_up = 0
        #: Copies of experts that the CPU runs.
        self.num_behind = 0
        self.num_preloaded = 0

    def saw(self, event: CoreEvent, commands: Sequence[CoreCommand], *, is_stale: bool) -> None:
        """Take in one event and what the core made of it."""
        if is_stale:
            _require(not commands, f"the core acted on stale news: {event} -> {commands}")
            return
        self._hears_foreseen = (event.layer, event.expert) if isinstance(event, Foreseen) else None
        self._decided: Routed | None = None
        self._hear(event)
        is_waiting = bool(self._parts)
        for command, follower in itertools.zip_longest(commands, commands[1:]):
            if isinstance(command, Unpublish):
                self._unpublish(command, event, follower)
            self._weigh(command)
        if self._decided is not None:
            self._check_decision(self._decided, commands)
        is_over = self._is_self_joining and is_waiting and self._all_are_in()
        said = [command for command in commands if isinstance(command, AllIn)]
        _require(len(said) == is_over, f"all parts are in: {is_over}, said is {said}")
        if is_over:
            self._joined()
        self._check_stall(commands)
        self._check_limit()

    # ---- events ----

    def _hear(self, event: CoreEvent) -> None:
        match event:
            case WorkerJoined():
                self._roles[event.epoch] = event.role
                if event.arena is not None:
                    self._is_in_process = event.arena.kind == "in_process"
            case WorkerLost():
                self._lost(event.epoch)
            case Withdraw():
                self.books[event.request].is_withdrawn = True
            case Routed():
                _require(self._is_current(event), "a live gpu_worker routed out of turn")
                self._demanded(event)
                self._is_self_joining = event.is_self_joining
                gone = [e for e in event.started if self._slot_of(event.layer, e) is None]
                was_there = all((event.layer, expert) in self._evicted for expert in gone)
                _require(was_there, f"{gone} are run from the table, but have no slot")
                self.num_started += bool(event.started)
                self.num_deferred += bool(gone)
                if gone:
                    self._deferred = event
                else:
                    self._routed(event)
            case Passed():
                self._passed(event)
            case Copied():
                copy = self._copying.pop(event.copy, None)
                if copy is not None:
                    self._slots[copy.slot] = (copy.layer, copy.expert)
                    is_background = self._foreseen.pop(event.copy, None) is not None
                    is_adopted = self._is_arriving(copy)
                    if not is_background or is_adopted or self._step is not None:
                        self._cost("fill_bytes", EXPERT_BYTES)
                    if is_background and not is_adopted and self._step is not None:
                        self._cost("fills_behind", 1)
                    if copy.step and not is_background:
                        self._reads_by(copy.expert, copy.slot)
                        self._parts[copy.expert] = "filled"
            case Executed():
                for expert in event.experts:
                    self._owed.discard((event.epoch, event.step, event.layer, expert))
                    if self._is_current(event) and self._executing.get(expert) == event.epoch:
                        del self._executing[expert]
                        self._parts[expert] = "executed"
                        self._cost("cpu_bytes", EXPERT_BYTES)
            case Ran():
                self._ran(event)
            case StepDone():
                _require(self._step is not None, "a step is done that nobody started")
                self._step = None
                self._evicted.clear()
            case Resize():
                self._limit = event.num_slots
            case Submit():
                self._live[event.request] = None
                self.books[event.request].num_prompt = len(event.prompt_tokens)

    def _routed(self, event: Routed, computed: Sequence[int] = ()) -> None:
        """The parts of a layer-step that is decided now; `computed` has run by the table."""
        coming = [*self.retiring.values(), *self._foreseen.values()]
        self._parts = {
            expert: "arriving" if (event.layer, expert) in coming else "miss"
            for expert in event.experts
        }
        for expert in event.started:
            self._parts[expert] = "hit"
            slot = self._slot_of(event.layer, expert)
            if expert not in computed:
                assert slot is not None
                self._reads_by(expert, slot)
        self._decided = event

    def _ran(self, event: Ran) -> None:
        deferred = self._deferred
        is_of_it = deferred is not None and event.layer == deferred.layer
        if deferred is not None and is_of_it and event.step == deferred.step and event.experts:
            _require(event.experts == deferred.started, f"{event} before the decision")
            self._deferred = None
            self._routed(deferred, event.experts)
            return
        for expert in event.experts:
            slot = self._unran.pop((event.step, event.layer, expert), None)
            if slot is None:
                # It was begun from the table, and the worker died before that was heard.
                _require(not self._parts, f"expert {expert} has run, but nobody said so")
                return
            self._reads[slot] -= 1

    def _slot_of(self, layer: int, expert: int) -> int | None:
        key = (layer, expert)
        return next((slot for slot, other in self._slots.items() if other == key), None)

    def _lost(self, epoch: int) -> None:
        role = self._roles.pop(epoch, None)
        self._owed = {owed for owed in self._owed if owed[0] != epoch}
        if role == "gpu_worker":
            for owner in self._owners if self._step is not None else ():
                self.books[owner].num_losses += 1
            self._step = self._deferred = None
            self._parts, self._executing, self._copying = {}, {}, {}
            self._slots, self._reads, self._unran = {}, Counter(), {}
            self._guests = set()
            for books in self.books.values():
                books.num_cached = 0
            self.retiring, self._foreseen, self._evicted = {}, {}, set()
        for expert in [e for e, owner in self._executing.items() if owner == epoch]:
            del self._executing[expert]
            key = (self._layers_joined, expert)  # may have been copied behind
            is_coming = key in self._foreseen.values() or key in self._slots.values()
            self._parts[expert] = "arriving" if is_coming else "miss"
        for number in [n for n, copy in self._copying.items() if copy.epoch == epoch]:
            copy = self._copying.pop(number)
            if self._foreseen.pop(number, None) is None or self._is_arriving(copy):
                self._parts[copy.expert] = "miss"
        if not self._has_link():
            self.retiring = {}
        if epoch == self._attached:
            self._attached = None

    # ---- commands ----

    def _weigh(self, command: CoreCommand) -> None:
        if isinstance(command, Message):
            epoch: int = command.epoch
            _require(epoch in self._roles, f"{command} is sent to a worker that is not here")
        match command:
            case StartStep():
                self._start(command)
            case Copy():
                self._copy(command)
            case Execute():
                _require(self._is_current(command), "an Execute for another layer")
                for expert in command.experts:
                    place = self._parts.get(expert)
                    _require(place in ("miss", "arriving"), f"expert {expert} is placed twice")
                    self._parts[expert] = "executing"
                    self._executing[expert] = command.epoch
                    self._owed.add((command.epoch, command.step, command.layer, expert))
            case Run():
                self._run(command)
            case Retire():
                self.retiring[command.copy] = (command.layer, command.expert)
            case Publish():
                _require(
                    self._slots.get(command.slot) == (command.layer, command.expert),
                    f"{command} of what is not there",
                )
            case AttachArena():
                _require(self._attached is None, "an arena is attached twice")
                _require("gpu_worker" in self._roles.values(), "an arena of nobody is attached")
                self._attached = command.epoch
            case DetachArena():
                _require(self._attached == command.epoch, "no arena is there to detach")
                self._attached = None
            case TokenOut():
                self._token(command)
            case RequestDone():
                self._done(command)

    def _start(self, command: StartStep) -> None:
        _require(self._step is None, "two steps are in flight")
        _require(command.step > self._last_step, "a step id is used twice")
        self._last_step = command.step
        _require(self._roles[command.epoch] == "gpu_worker", "a step for another role")
        _require(not self._parts and not self._executing, "a step starts within another")
        _require(not self._owed, "a step starts while a cpu_worker works for a void one")
        self._owners = [self._owner_of(part) for part in command.parts]
        _require(len(set(self._owners)) == len(self._owners), "a request is in a step twice")
        for name in self._owners:
            _require(not self.books[name].is_withdrawn, "a withdrawn request goes on")
        self._check_turn(command)
        self._step, self._layers_joined = command, 0

    def _owner_of(self, part: StepPart) -> str:
        if part.start == 0:
            name = request_of(part.tokens[0])
            self._begun(name)
            self.books[name].sequence = part.sequence
            return name
        return next(n for n, books in self.books.items() if books.sequence == part.sequence)

    def _check_turn(self, command: StartStep) -> None:
        """Chunks of prompts and decode steps alternate, and everybody has a turn in time."""
        config, first = self._config, command.parts[0]
        active = list(self._live)[: config.max_num_seqs]
        decoding = [name for name in active if self._is_decoding(name)]
        is_chunk = first.start < self.books[self._owners[0]].num_prompt
        if is_chunk:
            _require(len(command.parts) == 1, "a prompt is in a step with others")
            _require(not (self._is_chunk and decoding), f"{decoding} wait for two chunks")
        else:
            _require(self._is_chunk or len(decoding) == len(active), "a prompt waits for two steps")
            suspects = {name for name in decoding if self.books[name].num_losses >= SUSPECT_LOSSES}
            together = min(len(decoding) - len(suspects), config.max_rows)
            num_owners = 1 if suspects.intersection(self._owners) else together
            _require(len(self._owners) == num_owners, f"{self._owners} decode, of {decoding}")
        self._is_chunk = is_chunk
        self._is_guest = is_chunk and bool(decoding)
        self.num_guest_steps += self._is_guest
        self.num_joint_steps += len(command.parts) > 1
        for part, name in zip(command.parts, self._owners, strict=True):
            self.books[name].num_cached = part.start + len(part.tokens)
        for name in active:
            self._passed_over[name] = 0 if name in self._owners else self._passed_over[name] + 1
            # Of n others each may go first once, with a step of the other kind before each.
            limit = 2 * config.max_num_seqs
            _require(self._passed_over[name] <= limit, f"{name} is passed over again and again")

    def _is_decoding(self, name: str) -> bool:
        books = self.books[name]
        return books.num_cached >= books.num_prompt

    def _begun(self, name: str) -> None:
        """Requests begin in the order in which they came."""
        for other in self._live:
            if other == name:
                return
            _require(self.books[other].sequence is not None, f"{name} begins before {other}")

    def _copy(self, command: Copy) -> None:
        slot, key = command.slot, (command.layer, command.expert)
        is_link = command.epoch == self._attached or self._roles[command.epoch] == "gpu_worker"
        _require(is_link, "a Copy to a worker without the arena")
        _require(command.copy not in self._used_copies, "a copy id is used twice")
        is_demanded = not self._begins_in_background(command)
        _require(command.is_awaited == is_demanded, f"{command} is awaited, or not")
        if is_demanded:
            _require(self._is_current_layer(command), f"{key} is filled for nobody")
            _require(self._parts.get(command.expert) == "miss", f"{key} is placed twice")
        _require(not self._reads[slot], f"slot {slot} is overwritten while it may be read")
        _require(
            all(copy.slot != slot for copy in self._copying.values()),
            f"slot {slot} is filled twice at once",
        )
        _require(key not in self._slots.values(), f"{key} is filled though it is resident")
        _require(slot not in self._slots, f"slot {slot} is overwritten though it is published")
        self._used_copies.add(command.copy)
        self._copying[command.copy] = command
        if is_demanded:
            self._parts[command.expert] = "copying"
            if self._is_guest:
                self._guests.add(key)

    def _begins_in_background(self, command: Copy) -> bool:
        """Whether this fill was foreseen; it is then on its way for whoever will want it."""
        key = self.retiring.pop(command.copy, None)
        if key is None and self._hears_foreseen == (command.layer, command.expert):
            key = self._hears_foreseen
        if key is None and self._step is None and self._config.preload:
            key = (command.layer, command.expert)
            self.num_preloaded += 1
            _require(len(self._copying) < 2, f"{key} is one of many copies that nobody waits for")
        if key is None and self._parts.get(command.expert) in ("executing", "executed"):
            key = (command.layer, command.expert)  # behind the CPU's back
            _require(self._is_current_layer(command), f"{key} is copied for nobody")
            self.num_behind += 1
        if key is not None:
            _require(key == (command.layer, command.expert), f"{key} became {command}")
            self._foreseen[command.copy] = key
        return key is not None

    def _is_current_layer(self, copy: Copy) -> bool:
        return bool(self._parts) and copy.layer == self._layers_joined

    def _is_arriving(self, copy: Copy) -> bool:
        return self._is_current_layer(copy) and self._parts.get(copy.expert) == "arriving"

    def _unpublish(
        self, command: Unpublish, event: CoreEvent, follower: CoreCommand | None
    ) -> None:
        """A victim leaves; at once comes the copy over it, or the wait until that may be made."""
        key = (command.layer, command.expert)
        slot = next((slot for slot, other in self._slots.items() if other == key), None)
        _require(slot is not None, f"{key} is unpublished, but was not there")
        assert slot is not None
        is_given_up = not isinstance(follower, (Copy, Retire)) or follower.slot != slot
        if is_given_up:
            _require(self._num_used() > self._limit, f"{key} leaves for nothing")
            self.num_given_up += 1
        elif self._is_guest and not isinstance(event, Foreseen):
            most = max(1, min(8, self._limit // 32))
            is_fair = key in self._guests or len(self._guests) < most
            _require(is_fair, f"{key} has to leave for a prompt, which has {self._guests}")
        self._guests.discard(key)
        del self._slots[slot]
        if isinstance(event, Foreseen) or is_given_up:
            self._evicted.add(key)
        if self._step is not None:
            self._cost("evictions", 1)

    def _demanded(self, event: Routed | Passed) -> None:
        if not self._is_guest:
            self._guests -= {(event.layer, expert) for expert in event.experts}

    def _num_used(self) -> int:
        return len(self._slots) + len(self._copying) + len(self.retiring)

    def _check_limit(self) -> None:
        """Beyond the limit there is only what may still be read, or is on its way."""
        idle = [slot for slot in self._slots if not self._reads[slot]]
        is_kept = self._num_used() <= self._limit or not idle
        _require(is_kept, f"{self._num_used()} of {self._limit} slots are used, {idle} for nothing")

    def _passed(self, event: Passed) -> None:
        """A whole layer-step at once, all hits."""
        _require(self._is_current(event), "a layer is passed out of turn")
        self._demanded(event)
        _require(not self._parts, "a layer is passed within another")
        for expert in event.experts:
            key = (event.layer, expert)
            is_there = key in self._slots.values() or key in self._evicted
            _require(is_there, f"{key} is run by the way, but has no slot")
        self._cost("layer_steps", 1)
        self._cost("hits", len(event.experts))
        self._layers_joined += 1

    def check_table(self, table: ResidencyReader) -> None:
        """What is published is what is in the slots."""
        is_there = "gpu_worker" in self._roles.values()
        _require((table.epoch != 0) == is_there, f"the table is for {table.epoch}")
        _require(
            table.published() == {key: slot for slot, key in self._slots.items()},
            f"the table says {table.published()}, the slots hold {self._slots}",
        )

    def _run(self, command: Run) -> None:
        _require(self._is_current(command), "a Run for another layer")
        is_something = bool(command.experts) or command.join or command.is_ran_wanted
        _require(is_something, "a Run of nothing")
        for expert, slot in zip(command.experts, command.slots, strict=True):
            key = (command.layer, expert)
            _require(self._slots.get(slot) == key, f"{key} is run from slot {slot} without it")
            place = self._parts.get(expert)
            _require(place in ("miss", "copying", "arriving"), f"expert {expert} is computed twice")
            self._parts[expert] = "hit" if place == "miss" else "filled"
            self._reads_by(expert, slot)
        if self._is_self_joining:
            _require(not command.join, "a worker that joins by itself is told to join")
            return
        _require(
            command.join == self._all_are_in(), f"join={command.join} with parts {self._parts}"
        )
        if command.join:
            self._joined()

    def _reads_by(self, expert: int, slot: int) -> None:
        """From now on the gpu_worker may read this slot."""
        assert self._step is not None
        self._reads[slot] += 1
        self._unran[self._step.step, self._layers_joined, expert] = slot

    def _all_are_in(self) -> bool:
        return set(self._parts.values()) <= {"hit", "filled", "executed"}

    def _joined(self) -> None:
        places = Counter(self._parts.values())
        self._cost("layer_steps", 1)
        self._cost("hits", places["hit"])
        self._cost("fills", places["filled"])
        self._cost("cpu_experts", places["executed"])
        self._parts = {}
        self._layers_joined += 1

    def _check_decision(self, event: Routed, commands: Sequence[CoreCommand]) -> None:
        """After the decision every resident expert runs; the rest is placed, or has to wait."""
        parts = self._parts
        waiting = [expert for expert, place in parts.items() if place == "miss"]
        for expert in waiting:
            key = (event.layer, expert)
            _require(key not in self._slots.values(), f"{key} is resident and not run")
        self.num_waits += bool(waiting)
        if "cpu_worker" in self._roles.values():
            mode = self._config.fill_mode
            _require(mode == "all" or not waiting, "a miss waits though the CPU could run it")
            _require(mode != "none" or "copying" not in parts.values(), "a fill in mode none")
            if mode == "all" and self._has_link():
                _require("executing" not in parts.values(), "the CPU runs an expert in mode all")
        plans = [command for command in commands if isinstance(command, Planned)]
        _require(len(plans) == self._config.report_plans, f"{len(plans)} plans are reported")
        for plan in plans:
            for said, place in ((plan.hits, "hit"), (plan.cpu, "executing")):
                seen = [expert for expert in event.experts if parts.get(expert, "hit") == place]
                _require(said == seen, f"planned {place} are {said}, seen were {seen}")

    def _check_stall(self, commands: Sequence[CoreCommand]) -> None:
        """A stall is said when it begins, and then no more."""
        said = [command.missing_role for command in commands if isinstance(command, Stalled)]
        before, self._missing = self._missing, None
        roles = self._roles.values()
        if "gpu_worker" not in roles:
            self._missing = "gpu_worker" if self._live else None
        elif "miss" in self._parts.values() and "cpu_worker" not in roles and not self._has_link():
            self._missing = "dma_worker"
        is_new = self._missing is not None and self._missing != before
        _require(said == [self._missing] * is_new, f"stalls {said}, but {self._missing} is missing")

    def _has_link(self) -> bool:
        roles = self._roles.values()
        return "gpu_worker" in roles and (self._is_in_process or "dma_worker" in roles)

    def _token(self, command: TokenOut) -> None:
        books = self.books[command.request]
        answer = books.answer
        _require(books.done is None, f"a token after the end of {command.request}")
        _require(not books.is_withdrawn, f"a token for the withdrawn {command.request}")
        expected = answer.tokens[books.num_tokens : books.num_tokens + 1]
        _require(
            expected == [command.token],
            f"token {books.num_tokens} of {command.request} is {command.token}, not {expected}",
        )
        books.num_tokens += 1
        books.num_losses = 0

    def _done(self, command: RequestDone) -> None:
        books = self.books[command.request]
        _require(books.done is None, f"{command.request} ends twice")
        books.done = command
        self._live.pop(command.request, None)
        answer = books.answer
        if books.is_withdrawn and command.reason == "cancelled":
            pass
        elif books.is_poisoned or books.num_losses >= MAX_LOSSES:
            _require(command.reason == "error" and bool(command.sentence), "it goes on for ever")
        elif books.is_withdrawn:
            _require(command.reason == "cancelled", f"a withdrawn request ends as {command.reason}")
        else:
            _require(command.reason == answer.reason, f"{command.request} is {command.reason}")
            _require(books.num_tokens == len(answer.tokens), f"{command.request} is cut short")
        counted = {
            name: getattr(command.counters, name)
            for name in (
                "layer_steps",
                "hits",
                "fills",
                "cpu_experts",
                "evictions",
                "fills_behind",
                "fill_bytes",
                "cpu_bytes",
            )
        }
        own = {name: books.costs[name] for name in counted}
        _require(counted == own, f"{command.request} is said to cost {counted}, seen was {own}")

    def _cost(self, name: str, amount: int) -> None:
        """Whoever is in the step bears all of it; `totals` counts it once."""
        self.totals[name] += amount
        for owner in self._owners:
            self.books[owner].costs[name] += amount

    def _is_current(self, message: Routed | Passed | Executed | Execute | Run) -> bool:
        return (
            self._step is not None
            and message.step == self._step.step
            and message.layer == self._layers_joined
        )


def request_of(first_token: int) -> str:
    """Every prompt begins with a token of its own."""
    return f"r{first_token}"


def _require(condition: bool, sentence: str) -> None:
    if not condition:
        raise Violation(sentence)
