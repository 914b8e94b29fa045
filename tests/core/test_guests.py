"""A long prompt beside a running stream does not cost the stream its experts."""

from __future__ import annotations

import random

import pytest

from orchestrator.core.core import Core
from orchestrator.core.directory import ExpertDirectory
from orchestrator.core.events import (
    CoreConfig,
    Passed,
    Publish,
    RequestDone,
    Submit,
    Unpublish,
    WorkerJoined,
)
from orchestrator.core.policies import POLICY_NAMES, Lru
from orchestrator.core.scheduler import Flight
from protocol.messages import (
    Arena,
    Copied,
    Copy,
    Epoch,
    Execute,
    Executed,
    ExpertId,
    LayerId,
    Ran,
    RequestId,
    Routed,
    Run,
    Sampled,
    StartStep,
    StepDone,
)

GPU, DMA, CPU = Epoch(1), Epoch(2), Epoch(3)
NUM_LAYERS, NUM_EXPERTS, TOP_K = 6, 32, 4
CHUNK = 64
STREAM, LONG = 1, 2


def key(layer: int, expert: int) -> tuple[LayerId, ExpertId]:
    return LayerId(layer), ExpertId(expert)


def filled(directory: ExpertDirectory, *experts: int, is_guest: bool = False) -> list[object]:
    """Fill these, pinned by nobody: who was evicted for each."""
    evicted = []
    for expert in experts:
        reservation = directory.reserve(key(0, expert), is_guest=is_guest)
        assert reservation is not None
        assert directory.commit(reservation.slot, reservation.generation)
        evicted.append(reservation.evicted)
        directory.check()
    return evicted


def test_guests_displace_few_and_then_each_other() -> None:
    directory = ExpertDirectory(64, Lru())
    filled(directory, *range(64))
    assert directory.max_guests == 2
    assert filled(directory, 70, 71, is_guest=True) == [key(0, 0), key(0, 70)]
    directory.demand([key(0, 71)], is_guest=True)  # pinned: the next one needs another slot
    assert filled(directory, 72, 73, is_guest=True) == [key(0, 1), key(0, 72)]


def test_guests_take_what_is_free_and_leave_first() -> None:
    directory = ExpertDirectory(4, Lru())
    filled(directory, 0)
    assert filled(directory, 40, 41, 42, is_guest=True) == [None] * 3
    assert directory.residents()[:3] == [key(0, 40), key(0, 41), key(0, 42)]
    assert filled(directory, 1, 2) == [key(0, 40), key(0, 41)]


def test_a_guest_that_somebody_else_demands_stays() -> None:
    directory = ExpertDirectory(2, Lru())
    filled(directory, 0, 1)
    filled(directory, 40, is_guest=True)
    directory.demand([key(0, 40)], is_guest=True)
    directory.unpin(directory.slot_of(key(0, 40)))  # type: ignore[arg-type]
    assert directory.residents() == [key(0, 40), key(0, 1)]
    directory.refresh(key(0, 40))
    directory.check()
    assert directory.residents() == [key(0, 1), key(0, 40)]


def test_a_guests_demand_refreshes_nothing() -> None:
    directory = ExpertDirectory(3, Lru())
    filled(directory, 0, 1, 2)
    experts, slots, misses = directory.demand([key(0, 0), key(0, 9)], is_guest=True)
    assert (experts, misses) == ([0], [key(0, 9)])
    assert directory.num_pins(slots[0]) == 1
    assert directory.residents() == [key(0, number) for number in range(3)]


def test_a_guest_waits_where_it_may_have_nothing() -> None:
    directory = ExpertDirectory(2, Lru())
    filled(directory, 0, 1)
    reservation = directory.reserve(key(0, 40), is_guest=True)
    assert reservation is not None
    directory.pin(reservation.slot)
    assert not directory.can_host
    assert directory.reserve(key(0, 41), is_guest=True) is None
    assert directory.num_reservable == 1, "another could"
    directory.unpin(reservation.slot)
    assert directory.abort(reservation.slot, reservation.generation)
    directory.check()
    assert directory.can_host


class Replay:
    """One core and workers as fast as can be; the stream's experts mostly stay, the prompt's are
    any."""

    def __init__(self, policy: str, num_slots: int, fill_mode: str) -> None:
        self.chance = random.Random(5)
        self.routing = [self._draw() for _ in range(NUM_LAYERS)]
        self.table: dict[tuple[int, int], int] = {}
        self.inbox: list[object] = []
        self.hits = self.demands = 0
        self.step: StartStep | None = None
        self.done: list[str] = []
        config = CoreConfig(
            num_layers=NUM_LAYERS,
            num_experts=NUM_EXPERTS,
            top_k=TOP_K,
            expert_bytes=100,
            num_slots=num_slots,
            max_rows=CHUNK,
            max_sequence_tokens=100_000,
            max_num_seqs=2,
            fill_mode=fill_mode,
            policy=policy,
            host_bytes_per_s=60.0,
            link_bytes_per_s=25.0,
        )
        self.core = Core(config)
        self.tell(WorkerJoined(GPU, "gpu_worker", 0.0, Arena("shared", num_slots, 100)))
        self.tell(WorkerJoined(DMA, "dma_worker", 25.0))
        self.tell(WorkerJoined(CPU, "cpu_worker", 60.0))

    def _draw(self) -> list[int]:
        return self.chance.sample(range(NUM_EXPERTS), TOP_K)

    def tell(self, event: object) -> None:
        commands = self.core.handle(event)  # type: ignore[arg-type]
        for command in commands:
            match command:
                case Publish():
                    self.table[command.layer, command.expert] = command.slot
                case Unpublish():
                    del self.table[command.layer, command.expert]
                case StartStep():
                    self.step = command
                case RequestDone():
                    self.done.append(command.request)
        self.inbox += commands

    def submit(self, name: str, num_prompt: int, max_tokens: int) -> None:
        prompt = list(range(num_prompt))
        self.tell(Submit(RequestId(name), prompt, max_tokens, frozenset()))

    def run_step(self) -> list[int]:
        """One step to its end; the sequences that were in it."""
        step = self.step
        assert step is not None
        self.step = None
        sequences = [int(part.sequence) for part in step.parts]
        for layer in range(NUM_LAYERS):
            rows = []
            for part in step.parts:
                if part.sequence == STREAM:
                    current = self.routing[layer]
                    for choice in range(TOP_K):
                        if self.chance.random() < 0.08:
                            others = sorted(set(range(NUM_EXPERTS)) - set(current))
                            current[choice] = self.chance.choice(others)
                    rows.append(list(current))
                else:
                    rows += [self._draw() for _ in part.tokens]
            self._layer(step, layer, rows, is_counted=sequences == [STREAM])
        answers = [None if part.sampling is None else Sampled(5) for part in step.parts]
        self.tell(StepDone(GPU, step.step, answers, 0, 0))  # type: ignore[arg-type]
        self.core.check()
        return sequences

    def _layer(
        self, step: StartStep, layer: int, rows: list[list[int]], *, is_counted: bool
    ) -> None:
        num_rows: dict[int, int] = {}
        for row in rows:
            for expert in row:
                num_rows[expert] = num_rows.get(expert, 0) + 1
        experts, counts = [ExpertId(expert) for expert in num_rows], list(num_rows.values())
        if is_counted:
            self.demands += len(experts)
            self.hits += sum((layer, expert) in self.table for expert in experts)
        if all((layer, expert) in self.table for expert in experts):
            self.tell(Passed(GPU, step.step, LayerId(layer), experts, counts, 0, 0, 0, 0))
            return
        self.inbox.clear()
        self.tell(Routed(GPU, step.step, LayerId(layer), experts, counts, 0))
        while self.inbox:
            match self.inbox.pop(0):
                case Copy() as copy:
                    self.tell(Copied(DMA, copy.copy, 0, 4_000_000_000, 100))
                case Execute() as execute:
                    end = 1_700_000_000 * len(execute.experts)
                    num_bytes = 100 * len(execute.experts)
                    self.tell(
                        Executed(CPU, step.step, LayerId(layer), execute.experts, 0, end, num_bytes)
                    )
                case Run(experts=run) if run:
                    self.tell(Ran(GPU, step.step, LayerId(layer), run, 0, 1))

    def hit_rate(self) -> float:
        """Of the stream's own steps since the last call."""
        rate = self.hits / self.demands
        self.hits = self.demands = 0
        return rate


def rates(policy: str, num_slots: int, fill_mode: str) -> tuple[float, float]:
    """The stream's hit rate before and during another request's prompt of 4096 tokens."""
    replay = Replay(policy, num_slots, fill_mode)
    replay.submit("stream", 3, 10_000)
    for _ in range(60):
        replay.run_step()
    replay.hit_rate()
    for _ in range(64):
        replay.run_step()
    before = replay.hit_rate()
    replay.submit("long", 64 * CHUNK, 1)
    num_chunks = num_steps = 0
    while "long" not in replay.done:
        num_chunks += replay.run_step() == [LONG]
        num_steps += 1
    assert num_chunks == 64, "the prompt came in other chunks than it was meant to"
    assert num_steps <= 129, "the stream had more than a step between two chunks"
    return before, replay.hit_rate()


@pytest.mark.parametrize("fill_mode", ["auto", "all"])
@pytest.mark.parametrize("num_slots", [TOP_K, 48])
@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_a_long_prompt_leaves_a_stream_its_hit_rate(
    policy: str, num_slots: int, fill_mode: str
) -> None:
    before, during = rates(policy, num_slots, fill_mode)
    assert during > before - 0.05
    assert before > 0.6 or num_slots == TOP_K, "the stream has no experts to lose"


def test_without_such_care_the_stream_loses_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        Flight, "is_guest", property(lambda self: False, lambda self, value: None), raising=True
    )
    before, during = rates("lru", 48, "auto")
    assert during < before - 0.3
