from __future__ import annotations

import pytest

from orchestrator.core.policies import POLICY_NAMES, Lru, make_policy


def test_make_policy_gives_a_fresh_one_each_time() -> None:
    first, second = make_policy("lru"), make_policy("lru")
    assert isinstance(first, Lru)
    first.admitted((0, 0))
    assert list(second.victims(None)) == []


def test_an_unknown_policy_is_told_the_known_ones() -> None:
    with pytest.raises(
        ValueError, match=r"unknown eviction policy 'mru'; known: lfu, lru, lru-layer, reuse"
    ):
        make_policy("mru")


def test_every_known_policy_can_be_made() -> None:
    assert "lru" in POLICY_NAMES
    for name in POLICY_NAMES:
        assert list(make_policy(name).victims(None)) == []


def test_lru_orders_by_last_demand() -> None:
    policy = Lru()
    for expert in range(4):
        policy.admitted((0, expert))
    policy.refreshed((0, 1))
    policy.removed((0, 2))
    policy.layer_step(0, [3])  # a choice is not yet a demand of a slot
    assert list(policy.victims(None)) == [(0, 0), (0, 3), (0, 1)]
    assert list(policy.victims((9, 9))) == [(0, 0), (0, 3), (0, 1)]
    policy.cleared()
    assert list(policy.victims(None)) == []
