"""The scored policies against their formulas, worked out slowly in plain floats."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.core.policies import DemandShape, WorthPolicy, make_policy
from orchestrator.core.reuse import Reuse
from orchestrator.core.scored_policy import DecayedLfu
from orchestrator.native_reuse import load_kernel
from tests.core.reference_reuse import ReferenceReuse


def steps_of(seed: int, num_tokens: int, layers: int, experts: int, top_k: int) -> list:
    """Choices with habits, so that tables have something to learn."""
    chance = random.Random(seed)
    habits = [[chance.sample(range(experts), top_k) for _ in range(layers)] for _ in range(3)]
    steps = []
    for _ in range(num_tokens):
        topic = chance.choice(habits)
        for layer in range(layers):
            wild = chance.sample(range(experts), top_k)
            steps.append((layer, topic[layer] if chance.random() < 0.7 else wild))
    return steps


KERNELS = {"numpy": None} | ({"native": load_kernel()} if load_kernel() else {})


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("num_tables", [0, 1, 2, 4])
@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 10**6),
    layers=st.integers(1, 5),
    experts=st.integers(3, 9),
    top_k=st.integers(1, 2),
)
def test_worths_are_those_of_the_formulas(
    num_tables: int, kernel: str, seed: int, layers: int, experts: int, top_k: int
) -> None:
    if num_tables > layers:
        return  # a layer would be its own source twice
    real = Reuse(layers, experts, top_k, num_tables=num_tables, kernel=KERNELS[kernel])
    reference = ReferenceReuse(layers, experts, top_k, num_tables)
    for layer, chosen in steps_of(seed, 12, layers, experts, top_k):
        real.layer_step(layer, chosen)
        real.settle()
        reference.layer_step(layer, chosen)
        for expert in range(experts):
            expected = reference.worth[layer, expert]
            assert real.worth((layer, expert)) == pytest.approx(expected, abs=2e-4)


def test_learning_waits_until_it_is_settled_or_the_next_layer_step() -> None:
    prompt, late = Reuse(2, 8, 2), Reuse(2, 8, 2)
    for layer, chosen in steps_of(1, 5, 2, 8, 2):
        before = late.worth((layer, chosen[0]))
        prompt.layer_step(layer, chosen)
        prompt.settle()
        prompt.settle()  # once is enough
        late.layer_step(layer, chosen)
        assert late.worth((layer, chosen[0])) == before
    late.settle()
    for layer in range(2):
        for expert in range(8):
            assert late.worth((layer, expert)) == prompt.worth((layer, expert))


def test_a_batch_counts_but_teaches_no_pairs() -> None:
    real = Reuse(2, 8, 1, num_tables=2)
    reference = ReferenceReuse(2, 8, 1, 2)
    one, batch = [(0, [1]), (1, [2])], [(0, [0, 1, 2, 3]), (1, list(range(8)))]
    for layer, chosen in (one + batch + one) * 3:
        real.layer_step(layer, chosen)
        real.settle()
        reference.layer_step(layer, chosen)
        for expert in range(8):
            expected = reference.worth[layer, expert]
            assert real.worth((layer, expert)) == pytest.approx(expected, abs=2e-4)


def test_worths_keep_their_differences_after_very_long() -> None:
    policy = Reuse(4, 8, 2)
    policy._tick = 4 * 10**8
    policy.layer_step(0, [0, 1])
    policy.layer_step(1, [0, 1])
    policy.settle()
    # A layer that ran one layer-step earlier comes back a quarter of a token sooner.
    assert policy.worth((0, 5)) - policy.worth((1, 5)) == pytest.approx(0.25 / 1.5, abs=1e-6)


def test_tables_foretell_what_follows() -> None:
    """Expert 0 is always followed, a token later, by 1, and 1 by 0: frequency cannot know."""
    plain, tables = Reuse(1, 8, 1), Reuse(1, 8, 1, num_tables=1)
    for step in range(41):
        plain.layer_step(0, [step % 2])
        tables.layer_step(0, [step % 2])
    plain.settle()
    tables.settle()
    # 0 was the last, so 1 comes next.
    assert plain.worth((0, 0)) > plain.worth((0, 1))
    assert tables.worth((0, 1)) > tables.worth((0, 0)) > tables.worth((0, 5))


@settings(max_examples=40, deadline=None, derandomize=True)
@given(visits=st.lists(st.sets(st.integers(0, 5), min_size=1, max_size=3), max_size=60))
def test_lfu_halves_every_sixteen_visits(visits: list[set[int]]) -> None:
    policy = DecayedLfu(1, 6, 3)
    for chosen in visits:
        policy.layer_step(0, sorted(chosen))
    now = len(visits)
    for expert in range(6):
        score = sum(
            2 ** ((visit + 1 - now) / 16) for visit, chosen in enumerate(visits) if expert in chosen
        )
        worth = policy.worth((0, expert)) - now / 16
        assert 2**worth == pytest.approx(score, rel=1e-9)


@pytest.mark.parametrize("name", ["lfu", "reuse", "reuse-tables"])
@settings(max_examples=25, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10**6), pulls=st.integers(0, 9))
def test_victims_come_in_rising_worth_whatever_was_looked_at(
    name: str, seed: int, pulls: int
) -> None:
    chance = random.Random(seed)
    policy = make_policy(name, DemandShape(3, 6, 2))
    assert isinstance(policy, WorthPolicy)
    placed: set[tuple[int, int]] = set()
    for layer, chosen in steps_of(seed, 6, 3, 6, 2):
        policy.layer_step(layer, chosen)
        for _ in range(2):
            key = (layer, chance.randrange(6))
            if key in placed:
                policy.removed(key)
                placed.remove(key)
            else:
                policy.admitted(key)
                placed.add(key)
        # An iterator that is dropped half-way leaves nothing behind.
        for _, _key in zip(range(pulls), policy.victims(None), strict=False):
            pass
        victims = list(policy.victims(None))
        assert sorted(victims) == sorted(placed)
        worths = [policy.worth(key) for key in victims]
        assert worths == sorted(worths)
    policy.cleared()
    assert list(policy.victims(None)) == []


@pytest.mark.parametrize("name", ["lfu", "reuse", "reuse-tables"])
def test_a_policy_without_a_shape_grows_with_what_it_sees(name: str) -> None:
    shaped, growing = make_policy(name, DemandShape(3, 8, 4)), make_policy(name)
    growing.admitted((1, 2))
    growing.removed((1, 2))
    for layer, chosen in steps_of(5, 30, 3, 8, 4):
        shaped.layer_step(layer, chosen)
        growing.layer_step(layer, chosen)
    for expert in range(8):
        growing.admitted((2, expert))
        shaped.admitted((2, expert))
    # Learned from another start, so not the same numbers; but who is best and worst is clear.
    ends = [
        (next(policy.victims(None)), list(policy.victims(None))[-1]) for policy in (shaped, growing)
    ]
    assert ends[0] == ends[1]


def test_growth_keeps_what_was_learned() -> None:
    policy = Reuse(1, 4, 1, num_tables=1)
    for _ in range(50):
        policy.layer_step(0, [2])
    policy.admitted((0, 1))
    policy.admitted((0, 2))
    policy.admitted((3, 9))
    assert sorted(policy.victims(None)) == [(0, 1), (0, 2), (3, 9)]
    policy.layer_step(0, [2])
    policy.settle()
    assert policy.worth((0, 2)) > policy.worth((0, 1)) + 1.5


@pytest.mark.parametrize("shape", [(-1, 4, 1), (2, 4, 5), (2, 4, -1)])
def test_impossible_shapes_are_refused(shape: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match=r"no model has .* layers"):
        Reuse(*shape)


def test_tables_of_negative_number_are_refused() -> None:
    with pytest.raises(ValueError, match="-1 tables"):
        Reuse(1, 4, 1, num_tables=-1)


def test_never_chosen_is_worth_least_to_lfu() -> None:
    policy = DecayedLfu(1, 4, 1)
    policy.layer_step(0, [1])
    assert policy.worth((0, 0)) == -math.inf < policy.worth((0, 1))
