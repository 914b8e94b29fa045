"""The split formulas at their edges, the fill modes, and the credit over long runs."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.core.planner import (
    MAX_CREDIT,
    FillMode,
    SplitPlanner,
    balanced_fill_count,
    predicted_step_s,
    residual_bandwidth,
)

GB = 1e9
RATES = st.floats(0, 1e12, allow_nan=False)


def test_residual_bandwidth() -> None:
    assert residual_bandwidth(56 * GB, 25 * GB) == 31 * GB
    assert residual_bandwidth(25 * GB, 25 * GB) == 0
    assert residual_bandwidth(10 * GB, 25 * GB) == 0
    assert residual_bandwidth(10 * GB, 0) == 10 * GB
    assert residual_bandwidth(0, 0) == 0


@pytest.mark.parametrize(
    ("num_misses", "host", "link", "expected"),
    [
        (7, 56 * GB, 16 * GB, 2.0),
        (8, 40 * GB, 25 * GB, 5.0),
        (1, 40 * GB, 10 * GB, 0.25),
        (7, 25 * GB, 25 * GB, 7.0),  # B_H = B_P
        (7, 10 * GB, 25 * GB, 7.0),  # B_H < B_P
        (7, 0, 25 * GB, 7.0),  # B_H = 0
        (7, 40 * GB, 0, 0.0),  # B_P = 0
        (7, 0, 0, 7.0),
        (0, 40 * GB, 25 * GB, 0.0),
        (0, 10 * GB, 25 * GB, 0.0),
    ],
)
def test_balanced_fill_count(num_misses: int, host: float, link: float, expected: float) -> None:
    assert balanced_fill_count(num_misses, host, link) == expected


@pytest.mark.parametrize(
    ("num_fills", "num_misses", "host", "link", "expected"),
    [
        (2, 7, 56 * GB, 16 * GB, 0.125),  # 2 GB at 16 GB/s beside 5 GB at 40 GB/s
        (4, 7, 56 * GB, 16 * GB, 0.25),  # the link is the longer
        (1, 7, 56 * GB, 16 * GB, 0.15),  # the CPU is
        (0, 7, 56 * GB, 0, 0.125),  # no link needed: its rate does not matter
        (1, 7, 56 * GB, 0, math.inf),
        (7, 7, 10 * GB, 14 * GB, 0.5),  # nothing left for the CPU, nothing asked of it
        (6, 7, 10 * GB, 14 * GB, math.inf),
        (0, 0, 0, 0, 0.0),
        (0, 0, 56 * GB, 16 * GB, 0.0),
    ],
)
def test_predicted_step_s(
    num_fills: float, num_misses: int, host: float, link: float, expected: float
) -> None:
    assert predicted_step_s(num_fills, num_misses, 1_000_000_000, host, link) == pytest.approx(
        expected, rel=1e-12
    )


@pytest.mark.parametrize("num_fills", [-1, 7.5, math.nan])
def test_predicted_step_refuses_impossible_fills(num_fills: float) -> None:
    with pytest.raises(ValueError, match="of 7 misses"):
        predicted_step_s(num_fills, 7, 1, GB, GB)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    num_misses=st.integers(1, 64),
    host=st.floats(1e6, 1e12),
    ratio=st.floats(1e-3, 0.999),
    elsewhere=st.floats(0, 1),
)
def test_the_balance_is_the_best_split_and_both_branches_end_together(
    num_misses: int, host: float, ratio: float, elsewhere: float
) -> None:
    link = host * ratio
    balanced = balanced_fill_count(num_misses, host, link)
    best = predicted_step_s(balanced, num_misses, 10**6, host, link)
    assert best == pytest.approx(balanced * 10**6 / link, rel=1e-9)
    assert best == pytest.approx(
        (num_misses - balanced) * 10**6 / residual_bandwidth(host, link), rel=1e-6
    )
    other = predicted_step_s(elsewhere * num_misses, num_misses, 10**6, host, link)
    assert best <= other * (1 + 1e-6)


# ---- fill modes ----


@pytest.mark.parametrize("text", ["auto", "all", "none", "0", "1", "17"])
def test_fill_mode_reads_and_writes_the_command_line(text: str) -> None:
    mode = FillMode.parse(text)
    assert str(mode) == text
    assert FillMode.parse(str(mode)) == mode


def test_fill_mode_numbers() -> None:
    assert FillMode.parse("3") == FillMode("at_most", 3)
    assert FillMode.parse("007") == FillMode("at_most", 7)


@pytest.mark.parametrize(
    "text", ["", "Auto", "-1", "+1", "1.5", "1_0", " 1", "٣", "²", "nan", "9" * 5000, "at_most"]
)
def test_fill_mode_refuses_with_one_short_sentence(text: str) -> None:
    with pytest.raises(ValueError, match="auto, all, none or a whole number") as caught:
        FillMode.parse(text)
    assert len(str(caught.value)) < 160
    assert "\n" not in str(caught.value)


def planner(mode: str, host: float = 56 * GB, link: float = 16 * GB) -> SplitPlanner:
    return SplitPlanner(FillMode.parse(mode), host, link)


@pytest.mark.parametrize(
    ("mode", "num_fillable", "has_cpu", "has_link", "expected"),
    [
        ("auto", 9, True, True, (2, 5)),
        ("auto", 1, True, True, (1, 6)),
        ("auto", 0, True, True, (0, 7)),
        ("all", 9, True, True, (7, 0)),
        ("all", 0, True, True, (7, 0)),  # in waves
        ("none", 9, True, True, (0, 7)),
        ("3", 9, True, True, (3, 4)),
        ("3", 2, True, True, (2, 5)),
        ("9", 9, True, True, (7, 0)),
        ("0", 9, True, True, (0, 7)),
        # No CPU branch: all are filled, whatever the mode and the slots say.
        ("auto", 0, False, True, (7, 0)),
        ("none", 9, False, True, (7, 0)),
        ("3", 9, False, True, (7, 0)),
        # No link: none is.
        ("auto", 9, True, False, (0, 7)),
        ("all", 9, True, False, (0, 7)),
        ("3", 9, True, False, (0, 7)),
    ],
)
def test_modes_branches_and_slots(
    mode: str, num_fillable: int, has_cpu: bool, has_link: bool, expected: tuple[int, int]
) -> None:
    split = planner(mode).plan(7, num_fillable, has_cpu=has_cpu, has_link=has_link)
    assert (split.num_fills, split.num_cpu) == expected
    assert split.num_misses == 7
    assert not split.must_wait


@pytest.mark.parametrize("mode", ["auto", "all", "none", "2"])
def test_without_any_branch_the_misses_wait(mode: str) -> None:
    subject = planner(mode)
    split = subject.plan(7, 9, has_cpu=False, has_link=False)
    assert split.must_wait
    assert (split.num_fills, split.num_cpu) == (0, 0)
    assert split.reason() == "7 misses wait: no dma worker and no cpu worker"
    assert subject.credit == 0


@pytest.mark.parametrize("mode", ["auto", "all", "none", "2"])
@pytest.mark.parametrize("has_cpu", [True, False])
@pytest.mark.parametrize("has_link", [True, False])
def test_no_misses_need_nothing_and_never_wait(mode: str, has_cpu: bool, has_link: bool) -> None:
    split = planner(mode).plan(0, 9, has_cpu=has_cpu, has_link=has_link)
    assert (split.num_fills, split.num_cpu, split.must_wait) == (0, 0, False)


@pytest.mark.parametrize(
    ("host", "link", "expected"),
    [
        (25 * GB, 25 * GB, 7),
        (10 * GB, 25 * GB, 7),
        (0, 25 * GB, 7),
        (40 * GB, 0, 0),
        (0, 0, 7),
    ],
)
def test_auto_at_the_edges_of_the_rates(host: float, link: float, expected: int) -> None:
    subject = planner("auto", host, link)
    for _ in range(5):
        split = subject.plan(7, 9, has_cpu=True, has_link=True)
        assert (split.num_fills, split.num_cpu) == (expected, 7 - expected)
    assert subject.credit == 0


@pytest.mark.parametrize("counts", [(-1, 3), (3, -1)])
def test_negative_counts_are_refused(counts: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="cannot split"):
        planner("auto").plan(*counts, has_cpu=True, has_link=True)


@pytest.mark.parametrize("rate", [-1.0, math.nan, math.inf])
def test_bad_rates_are_refused_and_change_nothing(rate: float) -> None:
    subject = planner("auto")
    with pytest.raises(ValueError, match="host rate"):
        subject.set_rates(rate, GB)
    with pytest.raises(ValueError, match="link rate"):
        subject.set_rates(GB, rate)
    assert subject.plan(7, 9, has_cpu=True, has_link=True).num_fills == 2


# ---- the credit ----


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    steps=st.lists(st.tuples(st.integers(0, 16), RATES, RATES), min_size=1, max_size=60),
)
def test_with_slots_enough_fills_follow_the_balance_within_one(
    steps: list[tuple[int, float, float]],
) -> None:
    subject = planner("auto")
    num_fills, balance = 0, 0.0
    for num_misses, host, link in steps:
        subject.set_rates(host, link)
        split = subject.plan(num_misses, 99, has_cpu=True, has_link=True)
        assert 0 <= split.num_fills <= num_misses
        assert split.num_fills + split.num_cpu == num_misses
        num_fills += split.num_fills
        if balanced := balanced_fill_count(num_misses, host, link):
            balance += balanced
        else:
            # Where nothing passes the link, what was owed waits or lapses with it.
            balance = num_fills + subject.credit
        assert -1e-6 < balance - num_fills < 1 + 1e-6


@pytest.mark.parametrize("ratio", [0.001, 0.1, 0.3, 1 / 3, 0.5, 0.7, 0.999, 1.0])
def test_credit_neither_loses_nor_invents_over_10_000_layer_steps(ratio: float) -> None:
    rng = random.Random(3)
    subject = planner("auto", 10 * GB, 10 * GB * ratio)
    num_fills, balance = 0, 0.0
    for _ in range(10_000):
        num_misses = rng.choice([0, 0, 1, 1, 2, 3, 8])
        split = subject.plan(num_misses, 99, has_cpu=True, has_link=True)
        num_fills += split.num_fills
        balance += balanced_fill_count(num_misses, 10 * GB, 10 * GB * ratio)
        assert abs(num_fills - balance) < 1 + 1e-6
    assert num_fills > 0


def test_one_miss_at_a_time_still_warms_the_cache() -> None:
    subject = planner("auto", 10 * GB, 1 * GB)
    fills = [subject.plan(1, 9, has_cpu=True, has_link=True).num_fills for _ in range(30)]
    assert fills == ([0] * 9 + [1]) * 3  # on the tenth, though 0.1 ten times is a little under 1


def test_slots_that_were_missing_do_not_come_back_as_a_burst() -> None:
    subject = planner("auto", 20 * GB, 10 * GB)
    for _ in range(50):
        assert subject.plan(8, 1, has_cpu=True, has_link=True).num_fills == 1
        assert subject.credit <= MAX_CREDIT
    after = [subject.plan(8, 99, has_cpu=True, has_link=True).num_fills for _ in range(3)]
    assert after == [5, 4, 4]  # q* is 4; one is paid back, and the rest is let go


def test_never_more_than_one_beyond_the_balance_and_never_more_than_the_misses() -> None:
    rng = random.Random(5)
    subject = planner("auto")
    for _ in range(2_000):
        host, link = rng.uniform(1, 10), rng.uniform(1, 10)
        subject.set_rates(host, link)
        num_misses, num_fillable = rng.randrange(9), rng.randrange(4)
        split = subject.plan(num_misses, num_fillable, has_cpu=True, has_link=True)
        balanced = balanced_fill_count(num_misses, host, link)
        assert split.num_fills <= min(num_misses, num_fillable, math.floor(balanced + 1e-9) + 1)
        assert -1e-9 <= subject.credit <= MAX_CREDIT


def test_a_debt_is_not_paid_over_a_link_that_carries_nothing() -> None:
    subject = planner("auto", 20 * GB, 10 * GB)
    subject.plan(8, 0, has_cpu=True, has_link=True)
    assert subject.credit == MAX_CREDIT
    subject.set_rates(20 * GB, 0)
    assert subject.plan(8, 9, has_cpu=True, has_link=True).num_fills == 0


def test_steps_that_the_balance_does_not_decide_leave_the_credit_alone() -> None:
    subject = planner("auto", 10 * GB, 3 * GB)
    subject.plan(2, 9, has_cpu=True, has_link=True)
    owed = subject.credit
    assert owed == pytest.approx(0.6)
    subject.plan(0, 9, has_cpu=True, has_link=True)
    subject.plan(5, 9, has_cpu=False, has_link=True)
    subject.plan(5, 9, has_cpu=True, has_link=False)
    subject.plan(5, 9, has_cpu=False, has_link=False)
    subject.set_rates(11 * GB, 3 * GB)
    assert subject.credit == owed


# ---- the sentence ----


@pytest.mark.parametrize(
    ("mode", "arguments", "sentence"),
    [
        (
            "auto",
            (7, 9, True, True),
            "q=2 of 7: link 16.0 GB/s, cpu beside it 40.0 GB/s, q*=2.00, credit 0.00",
        ),
        (
            "auto",
            (7, 1, True, True),
            "q=1 of 7: link 16.0 GB/s, cpu beside it 40.0 GB/s, q*=2.00, credit 1.00, "
            "no more slots can be filled",
        ),
        (
            "auto",
            (7, 2, True, True),  # just enough
            "q=2 of 7: link 16.0 GB/s, cpu beside it 40.0 GB/s, q*=2.00, credit 0.00",
        ),
        ("all", (7, 1, True, True), "q=7 of 7: fill mode all"),
        ("none", (7, 0, True, True), "q=0 of 7: fill mode none"),
        ("3", (7, 9, True, True), "q=3 of 7: fill mode 3"),
        ("3", (7, 2, True, True), "q=2 of 7: fill mode 3, no more slots can be filled"),
        ("3", (2, 2, True, True), "q=2 of 2: fill mode 3"),
        ("none", (7, 9, False, True), "q=7 of 7: no cpu worker"),
        ("all", (7, 9, True, False), "q=0 of 7: no dma worker"),
        ("auto", (0, 9, True, True), "q=0 of 0: every expert is resident"),
    ],
)
def test_reason(mode: str, arguments: tuple[int, int, bool, bool], sentence: str) -> None:
    num_misses, num_fillable, has_cpu, has_link = arguments
    split = planner(mode).plan(num_misses, num_fillable, has_cpu=has_cpu, has_link=has_link)
    assert split.reason() == sentence


def test_reason_does_not_blame_the_slots_when_every_miss_is_filled() -> None:
    subject = planner("auto")
    subject.plan(7, 0, has_cpu=True, has_link=True)  # leaves a full credit
    subject.set_rates(10 * GB, 16 * GB)
    split = subject.plan(3, 3, has_cpu=True, has_link=True)
    assert split.reason() == (
        "q=3 of 3: link 16.0 GB/s, cpu beside it 0.0 GB/s, q*=3.00, credit 1.00"
    )


def test_a_split_tells_of_its_own_step_even_later() -> None:
    subject = planner("auto")
    split = subject.plan(7, 9, has_cpu=True, has_link=True)
    sentence = split.reason()
    subject.set_rates(1 * GB, 2 * GB)
    subject.plan(3, 9, has_cpu=True, has_link=True)
    assert split.reason() == sentence
