"""Which misses are filled, and how set C is divided."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.core.planner import DemandMemory, choose_fills, divide_among

Key = tuple[int, int]
A, B, C, D = misses = [(0, 4), (0, 1), (0, 3), (0, 2)]


def test_the_most_recently_demanded_are_filled() -> None:
    memory = DemandMemory(10)
    for key in (B, A, D):
        memory.demanded([key])
    assert choose_fills(misses, 1, memory.last_demand) == ([D], [A, B, C])
    assert choose_fills(misses, 2, memory.last_demand) == ([A, D], [B, C])
    assert choose_fills(misses, 3, memory.last_demand) == ([A, B, D], [C])


def test_ties_go_by_router_order() -> None:
    memory = DemandMemory(10)
    assert choose_fills(misses, 2, memory.last_demand) == ([A, B], [C, D])  # nothing is known
    memory.demanded([C, B])  # one layer-step: no order between them
    assert choose_fills(misses, 1, memory.last_demand) == ([B], [A, C, D])
    assert choose_fills(misses, 3, memory.last_demand) == ([A, B, C], [D])


def test_none_and_all() -> None:
    memory = DemandMemory(10)
    assert choose_fills(misses, 0, memory.last_demand) == ([], misses)
    assert choose_fills(misses, 4, memory.last_demand) == (misses, [])
    assert choose_fills([], 0, memory.last_demand) == ([], [])


def test_the_answer_is_not_the_callers_list() -> None:
    for num_fills in (0, 4):
        for part in choose_fills(misses, num_fills, DemandMemory(1).last_demand):
            assert part is not misses


@pytest.mark.parametrize("num_fills", [-1, 5])
def test_impossible_fills_are_refused(num_fills: int) -> None:
    with pytest.raises(ValueError, match=f"cannot fill {num_fills} of 4 misses"):
        choose_fills(misses, num_fills, DemandMemory(1).last_demand)


def test_memory_keeps_the_last_demanded_and_no_more() -> None:
    memory = DemandMemory(2)
    memory.demanded([A])
    memory.demanded([B])
    memory.demanded([A])  # again: B is the oldest now
    memory.demanded([C])
    assert len(memory) == 2
    assert [memory.last_demand(key) for key in (A, B, C, D)] == [3, 0, 4, 0]


def test_memory_of_nothing_remembers_nothing() -> None:
    memory = DemandMemory(0)
    memory.demanded([A, B])
    assert len(memory) == 0
    assert memory.last_demand(A) == 0
    with pytest.raises(ValueError, match="memory of -1"):
        DemandMemory(-1)


# ---- several CPU workers ----


def test_division_follows_the_rates() -> None:
    assert divide_among(list("abcdef"), [2.0, 1.0]) == [["a", "b", "d", "e"], ["c", "f"]]
    assert divide_among(list("abcd"), [1.0, 1.0]) == [["a", "c"], ["b", "d"]]
    # Two on the fast one still end before one on a worker slower by more than two.
    assert divide_among(list("ab"), [10.0, 1.0]) == [["a", "b"], []]


def test_division_of_unequal_rows() -> None:
    # 9 alone on one worker, the rest on the other, each list in the order given.
    assert divide_among(list("abcd"), [1.0, 1.0], rows=[1, 9, 4, 2]) == [["b"], ["a", "c", "d"]]


def test_division_edges() -> None:
    assert divide_among([], []) == []
    assert divide_among([], [1.0, 0.0]) == [[], []]
    assert divide_among([1, 2], [0.0, 3.0]) == [[], [1, 2]]
    assert divide_among([1, 2, 3], [0.0, 3.0, 0.0, 3.0]) == [[], [1, 3], [], [2]]
    assert divide_among([1, 2], [1.0, 1.0], rows=[0, 0]) == [[1, 2], []]
    # So slow that the end overflows: still given to somebody.
    assert divide_among([1], [5e-324, 5e-324], rows=[10**6]) == [[1], []]


@pytest.mark.parametrize(
    ("rates", "rows", "sentence"),
    [
        ([], None, "2 experts to run, but no cpu worker"),
        ([0.0, 0.0], None, "2 experts to run, but no cpu worker"),
        ([-1.0, 1.0], None, "rate must be 0 or more"),
        ([math.nan], None, "rate must be 0 or more"),
        ([math.inf], None, "rate must be 0 or more"),
        ([1.0, 1.0], [1], "do not suit 2 experts"),
        ([1.0], [1, 1, 1], "do not suit 2 experts"),
        ([1.0, 1.0], [1, -1], "do not suit 2 experts"),
    ],
)
def test_division_refuses(rates: list[float], rows: list[int] | None, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        divide_among(["a", "b"], rates, rows)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    rows=st.lists(st.integers(1, 50), min_size=1, max_size=7),
    rates=st.lists(st.floats(0.5, 20), min_size=1, max_size=3),
)
def test_division_is_complete_ordered_and_close_to_the_best(
    rows: list[int], rates: list[float]
) -> None:
    experts = list(range(len(rows)))
    divided = divide_among(experts, rates, rows)
    assert divided == divide_among(experts, rates, rows)
    assert sorted(itertools.chain(*divided)) == experts
    assert all(part == sorted(part) for part in divided)

    def end(owners: tuple[int, ...]) -> float:
        loads = [0] * len(rates)
        for expert, owner in enumerate(owners):
            loads[owner] += rows[expert]
        return max(load / rate for load, rate in zip(loads, rates, strict=True))

    owners = tuple(
        next(worker for worker, part in enumerate(divided) if expert in part) for expert in experts
    )
    best = min(end(choice) for choice in itertools.product(range(len(rates)), repeat=len(rows)))
    # Longest-first on machines of unequal speed ends within twice the best (Gonzalez, Ibarra and
    # Sahni 1977).
    assert end(owners) <= 2 * best * (1 + 1e-9)
