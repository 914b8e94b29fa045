"""The directory with every policy there is: its invariants, and that the victim is the policy's."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.core.directory import ExpertDirectory
from orchestrator.core.policies import (
    POLICY_NAMES,
    DemandShape,
    LruLayer,
    WorthPolicy,
    make_policy,
)

LAYERS, EXPERTS, TOP_K = 3, 6, 2
SHAPES = [DemandShape(LAYERS, EXPERTS, TOP_K), DemandShape(0, 0, 0)]


@pytest.mark.parametrize("policy", POLICY_NAMES)
@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    num_slots=st.integers(1, 9),
    shape=st.sampled_from(SHAPES),
    choices=st.lists(
        st.tuples(
            st.lists(st.integers(0, EXPERTS - 1), min_size=1, max_size=3, unique=True),
            st.integers(0, 3),
        ),
        min_size=12,
        max_size=40,
    ),
)
def test_layer_steps_keep_every_invariant(
    policy: str, num_slots: int, shape: DemandShape, choices: list[tuple[list[int], int]]
) -> None:
    eviction = make_policy(policy, shape)
    directory = ExpertDirectory(num_slots, eviction)
    late = []
    for step, (experts, twist) in enumerate(choices):
        layer = step % LAYERS
        directory.layer_step(layer, experts)
        pinned = []
        for expert in experts:
            key = (layer, expert)
            slot = directory.slot_of(key)
            if slot is not None:
                directory.pin(slot)
                directory.refresh(key)
                pinned.append(slot)
            elif directory.is_filling(key):
                directory.refresh(key)
            else:
                free = directory.num_free
                expected = next(directory.evictable(key), None)
                before = {key: directory.slot_of(key) for key in directory.evictable(key)}
                reservation = directory.reserve(key)
                if reservation is None:
                    assert free == 0
                    assert expected is None
                    continue
                assert reservation.evicted == (None if free else expected)
                if isinstance(eviction, WorthPolicy) and reservation.evicted is not None:
                    least = min(before, key=eviction.worth)
                    assert eviction.worth(reservation.evicted) == eviction.worth(least)
                late.append(reservation)
            directory.check()
        while late and twist != 3:
            reservation = late.pop()
            end = directory.abort if twist == 2 else directory.commit
            assert end(reservation.slot, reservation.generation)
            directory.check()
        for slot in pinned:
            directory.unpin(slot)
        if twist == 1 and step % 7 == 6:
            directory.clear()
            late.clear()
        directory.check()


def test_lru_layer_keeps_layers_even_and_each_by_recency() -> None:
    policy = LruLayer()
    for key in [(0, 1), (0, 2), (1, 1), (1, 2), (0, 3)]:
        policy.admitted(key)
    policy.refreshed((0, 1))
    # Layer 0 has the most, so it gives, even to layer 1.
    assert list(policy.victims((1, 9))) == [(0, 2), (0, 3), (0, 1), (1, 1), (1, 2)]
    policy.removed((0, 2))
    # Even now: the incoming expert's own layer gives.
    assert next(policy.victims((1, 9))) == (1, 1)
    assert next(policy.victims((0, 9))) == (0, 3)
    policy.cleared()
    assert list(policy.victims(None)) == []
