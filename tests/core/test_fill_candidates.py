"""Rank, admission, and what is copied behind the CPU's back."""

from __future__ import annotations

import math

import pytest

from orchestrator.core.directory import ExpertDirectory
from orchestrator.core.fill_choice import BehindCopy, Candidates, FillBehind, FillChoice
from orchestrator.core.fluid_split import BranchCosts
from orchestrator.core.policies import Lru

SHARED = BranchCosts.residual(1_000_000, 10e9, 40e9)


class Scored(Lru):
    """Worths as they are written down."""

    def __init__(self, worths: dict) -> None:
        super().__init__()
        self.worths = worths

    def worth(self, key) -> float:
        return self.worths[key]

    def victims(self, incoming):
        return iter(sorted(super().victims(incoming), key=self.worth))


def filled(directory: ExpertDirectory, *keys: tuple[int, int]) -> ExpertDirectory:
    for key in keys:
        reservation = directory.reserve(key)
        assert directory.commit(reservation.slot, reservation.generation)
    return directory


def test_without_worths_the_most_recent_first_and_all_that_find_a_slot() -> None:
    demand = {(0, 1): 5, (0, 2): 9, (0, 3): 0}
    policy = Lru()
    directory = filled(ExpertDirectory(2, policy), (1, 0), (1, 1))
    directory.pin(directory.slot_of((1, 0)))
    candidates = FillChoice(policy, demand.__getitem__).candidates(directory, sorted(demand))
    assert candidates.ranked == [(0, 2), (0, 1), (0, 3)]
    assert candidates.num_admitted == 1
    assert candidates.gains == [0.0]


def test_best_misses_are_held_against_worst_victims() -> None:
    policy = Scored({(1, 0): 1.0, (1, 1): 2.0, (1, 2): 6.0, (0, 1): 9.0, (0, 2): 2.5, (0, 3): 5.0})
    directory = filled(ExpertDirectory(3, policy), (1, 0), (1, 1), (1, 2))
    candidates = FillChoice(policy, lambda key: 0.0).candidates(directory, [(0, 1), (0, 2), (0, 3)])
    # 9 against 1 and 5 against 2; but 2.5 against 6 is declined.
    assert candidates.ranked == [(0, 1), (0, 3), (0, 2)]
    assert candidates.gains == [8.0, 3.0]


def test_a_free_slot_admits_anything_and_a_tie_is_declined() -> None:
    policy = Scored({(1, 0): 1.0, (0, 1): 1.0, (0, 2): -5.0})
    directory = filled(ExpertDirectory(2, policy), (1, 0))
    choice = FillChoice(policy, lambda key: 0.0)
    assert choice.candidates(directory, [(0, 2)]).gains == [math.inf]
    filled(directory, (0, 2))
    assert choice.candidates(directory, [(0, 1)]).gains == [6.0]
    directory.pin(directory.slot_of((0, 2)))
    assert choice.candidates(directory, [(0, 1)]).gains == []
    directory.pin(directory.slot_of((1, 0)))
    assert choice.candidates(directory, [(0, 1)]).num_admitted == 0


CANDIDATES = Candidates([(0, 1), (0, 2), (0, 3), (0, 4)], [math.inf, 2.0, 0.5])


def test_behind_go_the_admitted_that_are_not_filled_and_pay_for_the_cpu_they_slow() -> None:
    behind = FillBehind("auto", SHARED)
    assert behind.price == 1.0
    assert behind.choose(CANDIDATES, 1, 0) == [
        BehindCopy((0, 2), True),
        BehindCopy((0, 3), False),
    ]
    assert behind.choose(CANDIDATES, 0, 1) == [BehindCopy((0, 1), True)]
    assert behind.choose(CANDIDATES, 0, 2) == []
    assert behind.choose(CANDIDATES, 3, 0) == []


def test_the_price_follows_the_rates() -> None:
    behind = FillBehind("auto", SHARED)
    behind.set_costs(BranchCosts(1, 10e9, 10e9, 40e9, 40e9))
    assert behind.price == 0.0
    behind.set_costs(BranchCosts(1, 10e9, 0.0, 40e9, 10e9))
    assert behind.price == math.inf


def test_modes_on_and_off() -> None:
    assert FillBehind("off", SHARED).choose(CANDIDATES, 0, 0) == []
    copies = FillBehind("on", SHARED, max_in_flight=3).choose(CANDIDATES, 0, 0)
    assert [copy.is_beside_cpu for copy in copies] == [True] * 3
    with pytest.raises(ValueError, match="unknown fill-behind mode 'always'; known: auto"):
        FillBehind("always", SHARED)
    with pytest.raises(ValueError, match="at least 1 copy"):
        FillBehind("on", SHARED, max_in_flight=0)
