"""Guesses about the next layers: learned from what tokens chose, and named only when likely."""

from __future__ import annotations

import random

import msgspec
import pytest

from orchestrator.core.core import Core
from orchestrator.core.events import CoreConfig, Foreseen, Submit, WorkerJoined
from orchestrator.core.foresight import Foresight
from orchestrator.core.policies import DemandShape
from protocol.messages import Arena, Copy, Epoch, ExpertId, LayerId, RequestId, Routed, StepId

SHAPE = DemandShape(num_layers=3, num_experts=16, top_k=2)
GPU, DMA, CPU = Epoch(1), Epoch(2), Epoch(3)


def token(foresight: Foresight, rng: random.Random) -> list[tuple[list[int], set[int]]]:
    """A token whose later layers follow from its first: (guess, truth) for layers 1 and 2."""
    first = rng.sample(range(8), 2)
    rows = [first, [expert + 8 for expert in first], [15 - expert for expert in first]]
    outcome = []
    guess: list[int] = []
    for layer, row in enumerate(rows):
        if layer:
            outcome.append((guess, set(row)))
        foresight.chose(LayerId(layer), [ExpertId(expert) for expert in row])
        expected = foresight.expected(LayerId(layer))
        assert all(target == layer + 1 for target, _ in expected)
        guess = [expert for _, expert in expected]
    return outcome


def test_what_follows_from_the_layer_before_is_learned() -> None:
    foresight, rng = Foresight(SHAPE, 1), random.Random(5)
    assert token(foresight, rng)[0][0] == []  # nothing is known, so nothing is said
    for _ in range(300):
        token(foresight, rng)
    outcomes = [outcome for _ in range(50) for outcome in token(foresight, rng)]
    named = sum(len(guess) for guess, _ in outcomes)
    right = sum(len(truth & set(guess)) for guess, truth in outcomes)
    assert right > 0.9 * named
    assert right > 0.7 * 2 * len(outcomes)


def test_chance_is_not_mistaken_for_a_habit() -> None:
    foresight, rng = Foresight(SHAPE, 2), random.Random(5)
    named = 0
    for _ in range(300):
        for layer in range(3):
            row = [ExpertId(expert) for expert in rng.sample(range(16), 2)]
            foresight.chose(LayerId(layer), row)
            named += len(foresight.expected(LayerId(layer)))
    assert named < 30


def test_nothing_is_guessed_from_several_rows_or_beyond_the_last_layer() -> None:
    foresight = Foresight(SHAPE, 3)
    for _ in range(40):
        for layer in range(3):
            foresight.chose(LayerId(layer), [ExpertId(1), ExpertId(2)])
    assert foresight.expected(LayerId(2)) == []
    assert {target for target, _ in foresight.expected(LayerId(0))} == {1, 2}
    with pytest.raises(ValueError, match="known shape"):
        Foresight(DemandShape(0, 0, 0), 1)


def test_the_core_foresees_and_copies_only_what_has_no_slot() -> None:
    config = CoreConfig(
        num_layers=2,
        top_k=2,
        num_experts=8,
        expert_bytes=100,
        num_slots=12,
        max_rows=4,
        max_sequence_tokens=10_000,
        fill_mode="none",
        prefetch=1,
    )
    core = Core(config)
    core.handle(WorkerJoined(GPU, "gpu_worker", 0.0, Arena("shared", 12, 100)))
    core.handle(WorkerJoined(DMA, "dma_worker", 10.0))
    core.handle(WorkerJoined(CPU, "cpu_worker", 10.0))
    core.handle(Submit(RequestId("a"), [1], 9, frozenset()))
    learned = core._dispatch._foresight
    assert learned is not None
    for _ in range(60):
        learned.chose(LayerId(0), [ExpertId(1), ExpertId(2)])
        learned.chose(LayerId(1), [ExpertId(3), ExpertId(4)])
    ids = [ExpertId(1), ExpertId(2)]
    core.handle(Routed(GPU, StepId(1), LayerId(0), ids, [1, 1], 0))
    foreseen = core.foresee()
    assert sorted(foreseen, key=lambda event: event.expert) == [
        Foreseen(LayerId(1), ExpertId(3)),
        Foreseen(LayerId(1), ExpertId(4)),
    ]
    assert core.foresee() == []  # said once
    copies = [command for event in foreseen for command in core.handle(event)]
    assert all(isinstance(copy, Copy) and not copy.is_awaited for copy in copies)
    assert len(copies) == 2
    core.check()
    plain = Core(msgspec.structs.replace(config, prefetch=0))
    assert plain.foresee() == []
