"""The fluid model against a slow integration, and its split against every other split."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.core.fluid_split import (
    BranchCosts,
    FluidPlan,
    FluidSplit,
    branch_ends_s,
    fractional_optimum,
    predicted_s,
)
from orchestrator.core.planner import balanced_fill_count
from orchestrator.core.split_rules import PLANNER_NAMES, FixedFraction, make_planner

MB = 1_000_000
RATES = st.sampled_from([0.0, 1e9, 5e9, 12e9, 50e9])
TIMES = st.sampled_from([0.0, 2e-5, 3e-4])
COSTS = st.builds(
    BranchCosts,
    expert_bytes=st.sampled_from([1, 2 * MB, 13 * MB]),
    link_bytes_per_s=RATES,
    link_beside_cpu_bytes_per_s=RATES,
    cpu_bytes_per_s=RATES,
    cpu_beside_link_bytes_per_s=RATES,
    fill_fixed_s=TIMES,
    cpu_fixed_s=TIMES,
    gpu_expert_s=TIMES,
    cpu_row_part=st.sampled_from([0.0, 0.3]),
)
LAPTOP = BranchCosts.residual(13_200_000, 11.8e9, 47.5e9, cpu_fixed_s=20e-6)
DESKTOP = BranchCosts.residual(13_200_000, 49.0e9, 53.8e9, cpu_fixed_s=20e-6)


def integrate(
    costs: BranchCosts, link_start: float, link_bytes: float, cpu_start: float, cpu_bytes: float
) -> tuple[float, float]:
    """Both branches in small steps of time."""
    step = 2e-7
    now, ends = 0.0, [0.0, 0.0]
    left = [link_bytes, cpu_bytes]
    starts = [link_start, cpu_start]
    alone = [costs.link_bytes_per_s, costs.cpu_bytes_per_s]
    beside = [costs.link_beside_cpu_bytes_per_s, costs.cpu_beside_link_bytes_per_s]
    while max(left) > 0:
        active = [left[i] > 0 and now >= starts[i] for i in (0, 1)]
        for i in (0, 1):
            if active[i]:
                left[i] -= step * (beside if all(active) else alone)[i]
        now += step
        for i in (0, 1):
            if active[i] and left[i] <= 0:
                ends[i] = now
    return ends[0], ends[1]


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    link_start=st.sampled_from([0.0, 3e-5, 2e-4]),
    cpu_start=st.sampled_from([0.0, 3e-5, 2e-4]),
    link_bytes=st.sampled_from([0.0, 1e6, 6e6]),
    cpu_bytes=st.sampled_from([0.0, 1e6, 6e6]),
    beside=st.sampled_from([(20e9, 20e9), (20e9, 5e9), (8e9, 30e9)]),
)
def test_ends_are_those_of_an_integration(
    link_start: float,
    cpu_start: float,
    link_bytes: float,
    cpu_bytes: float,
    beside: tuple[float, float],
) -> None:
    costs = BranchCosts(MB, 20e9, beside[0], 40e9, beside[1])
    expected = integrate(costs, link_start, link_bytes, cpu_start, cpu_bytes)
    ends = branch_ends_s(costs, link_start, link_bytes, cpu_start, cpu_bytes)
    assert ends == pytest.approx(expected, abs=2e-6)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    costs=COSTS,
    misses=st.integers(1, 9),
    fillable=st.integers(0, 10),
    rows=st.none() | st.lists(st.integers(1, 8), min_size=9, max_size=9),
    ahead=st.sampled_from([0.0, 5e6]),
)
def test_no_other_split_is_faster_and_ties_fill(
    costs: BranchCosts, misses: int, fillable: int, rows: list[int] | None, ahead: float
) -> None:
    counts = None if rows is None else rows[:misses]
    plan = FluidSplit(costs, loss_part=0.0).plan(
        misses, fillable, has_cpu=True, has_link=True, rows=counts, link_ahead_bytes=ahead
    )
    times = []
    for fills in range(min(misses, fillable) + 1):
        weight = sum(
            1 + costs.cpu_row_part * (num_rows - 1) for num_rows in (counts or [1] * misses)[fills:]
        )
        times.append(predicted_s(costs, fills, weight, ahead))
    assert plan.num_fills + plan.num_cpu == misses
    assert plan.num_fills <= fillable
    least = min(times)
    assert times[plan.num_fills] <= least * (1 + 1e-6)
    assert all(time > least for time in times[plan.num_fills + 1 :])


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    link=st.floats(1e9, 60e9),
    cpu=st.floats(1e9, 60e9),
    link_part=st.floats(0.1, 1.0),
    more=st.floats(0.0, 1.0),
    fixed=st.tuples(TIMES, TIMES, TIMES),
    misses=st.integers(1, 8),
)
def test_the_fractional_optimum_is_no_worse_than_any_whole_split(
    link: float,
    cpu: float,
    link_part: float,
    more: float,
    fixed: tuple[float, float, float],
    misses: int,
) -> None:
    """Exactly so where nothing is fixed; fixed costs shift it by less than they are. Only where two
    branches together do at least the work of one: else one after the other may be best, which no
    fraction says."""
    cpu_part = 1 - link_part + more * link_part
    costs = BranchCosts(5 * MB, link, link * link_part, cpu, cpu * cpu_part, *fixed)
    x = fractional_optimum(costs, misses, misses)
    assert 0 <= x <= misses
    slack = costs.cpu_fixed_s + misses * costs.fill_fixed_s + (misses + 1) * costs.gpu_expert_s
    best = min(predicted_s(costs, q, misses - q) for q in range(misses + 1))
    assert predicted_s(costs, x, misses - x) <= best * (1 + 1e-9) + slack


def test_with_residual_bandwidth_and_nothing_fixed_it_is_the_closed_form() -> None:
    for host, link in ((47.5e9, 11.8e9), (178e9, 51.5e9), (40e9, 40e9), (20e9, 50e9)):
        costs = BranchCosts.residual(MB, link, host)
        for misses in range(1, 9):
            expected = balanced_fill_count(misses, host, link)
            assert fractional_optimum(costs, misses, misses) == pytest.approx(expected)


@pytest.mark.parametrize("costs", [LAPTOP, DESKTOP], ids=["laptop", "desktop"])
@pytest.mark.parametrize("loss_part", [0.0, 0.02, 0.3])
@settings(max_examples=20, deadline=None, derandomize=True)
@given(misses=st.lists(st.integers(0, 6), min_size=30, max_size=120))
def test_credit_never_costs_more_than_its_part(
    costs: BranchCosts, loss_part: float, misses: list[int]
) -> None:
    split = FluidSplit(costs, loss_part=loss_part)
    spent = least = 0.0
    owed = filled = 0.0
    for count in misses:
        before = split.credit
        plan = split.plan(count, count, has_cpu=True, has_link=True)
        assert isinstance(plan, FluidPlan)
        best = min(predicted_s(costs, q, count - q) for q in range(count + 1)) if count else 0.0
        spent += plan.predicted_s
        least += best
        assert plan.least_s == pytest.approx(best)
        assert 0 <= split.credit <= 1
        assert spent <= least * (1 + loss_part) + 1e-9
        if plan.predicted_s > plan.least_s * 1.0001:
            assert before + plan.balanced >= plan.num_fills - 1e-6  # never ahead of what is owed
        owed += plan.balanced
        filled += plan.num_fills
    if loss_part == 0.0:
        assert spent == pytest.approx(least)


def test_one_miss_at_a_time_still_warms_the_cache() -> None:
    plain = FluidSplit(LAPTOP, loss_part=0.0)
    credited = FluidSplit(LAPTOP)
    fills = {}
    for name, split in (("plain", plain), ("credited", credited)):
        fills[name] = sum(
            split.plan(1, 1, has_cpu=True, has_link=True).num_fills for _ in range(1000)
        )
    assert fills["plain"] == 0
    assert 3 <= fills["credited"] <= 0.25 * 1000


def test_what_does_not_exist_comes_first() -> None:
    split = FluidSplit(LAPTOP)
    assert split.plan(3, 0, has_cpu=False, has_link=True).num_fills == 3
    assert split.plan(3, 3, has_cpu=True, has_link=False).num_cpu == 3
    assert split.plan(3, 3, has_cpu=False, has_link=False).must_wait
    assert split.plan(0, 3, has_cpu=True, has_link=True).rule == "nothing"
    assert split.plan(3, 0, has_cpu=True, has_link=True).num_fills == 0
    with pytest.raises(ValueError, match="cannot split -1 misses"):
        split.plan(-1, 0, has_cpu=True, has_link=True)
    with pytest.raises(ValueError, match="2 row counts do not suit 3 misses"):
        split.plan(3, 3, has_cpu=True, has_link=True, rows=[1, 1])


def test_new_costs_count_from_the_next_plan_on() -> None:
    split = FluidSplit(LAPTOP)
    assert split.plan(1, 1, has_cpu=True, has_link=True).num_fills == 0
    slow = BranchCosts.residual(13_200_000, 11.8e9, 47.5e9 / 20)
    split.set_costs(slow)
    assert split.costs is slow
    assert split.plan(1, 1, has_cpu=True, has_link=True).num_fills == 1


def test_a_plan_says_why() -> None:
    split = FluidSplit(DESKTOP)
    reason = split.plan(2, 2, has_cpu=True, has_link=True).reason()
    assert reason.startswith("q=")
    assert "link 49.0 GB/s, cpu beside it 4.8 GB/s" in reason
    assert split.plan(2, 2, has_cpu=False, has_link=True).reason() == "q=2 of 2: no cpu worker"
    slow_cpu = FluidSplit(BranchCosts.residual(MB, 50e9, 1e9))
    short = slow_cpu.plan(3, 1, has_cpu=True, has_link=True)
    assert short.is_short_of_slots
    assert short.reason().endswith("no more slots can be filled")
    credited = FluidSplit(LAPTOP, loss_part=5.0)
    reasons = [credited.plan(1, 1, has_cpu=True, has_link=True).reason() for _ in range(8)]
    assert any("one on credit for" in reason for reason in reasons)


def test_a_slow_gpu_counts_for_every_fill_behind_the_first() -> None:
    costs = BranchCosts(MB, 1e9, 1e9, 1e9, 1e9, gpu_expert_s=5e-3)
    assert predicted_s(costs, 3, 0) == pytest.approx(1e-3 + 3 * 5e-3)
    quick = BranchCosts(MB, 1e9, 1e9, 1e9, 1e9, gpu_expert_s=1e-4)
    assert predicted_s(quick, 3, 0) == pytest.approx(3e-3 + 1e-4)


def test_copies_ahead_delay_fills_and_slow_the_cpu_but_nobody_waits_for_them() -> None:
    costs = BranchCosts.residual(MB, 1e9, 2e9)
    assert predicted_s(costs, 1, 0, 3e6) == pytest.approx(4e-3)
    assert predicted_s(costs, 0, 1, 3e6) == pytest.approx(1e-3)
    assert predicted_s(costs, 0, 1) == pytest.approx(0.5e-3)


def test_the_fixed_fraction_rounds_and_carries_nothing() -> None:
    rule = FixedFraction(LAPTOP)
    assert rule.fraction == pytest.approx(11.8 / 47.5)
    counts = [rule.plan(m, m, has_cpu=True, has_link=True).num_fills for m in range(1, 9)]
    assert counts == [0, 0, 1, 1, 1, 1, 2, 2]
    assert [rule.plan(1, 1, has_cpu=True, has_link=True).num_fills for _ in range(50)] == [0] * 50
    assert rule.plan(8, 1, has_cpu=True, has_link=True).is_short_of_slots
    assert rule.plan(2, 2, has_cpu=False, has_link=False).must_wait
    assert rule.plan(2, 2, has_cpu=False, has_link=True).num_fills == 2
    assert rule.plan(2, 2, has_cpu=True, has_link=False).num_cpu == 2
    assert rule.plan(0, 2, has_cpu=True, has_link=True).rule == "nothing"
    with pytest.raises(ValueError, match="cannot split"):
        rule.plan(1, -1, has_cpu=True, has_link=True)


def test_planners_by_name() -> None:
    filled = {
        name: make_planner(name, LAPTOP).plan(4, 4, has_cpu=True, has_link=True).num_fills
        for name in PLANNER_NAMES
    }
    assert filled["fill-only"] == 4
    assert filled["cpu-only"] == 0
    assert {filled["fluid"], filled["fixed-fraction"]} == {1}
    with pytest.raises(ValueError, match="unknown planner 'best'; known: fluid"):
        make_planner("best", LAPTOP)


@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf")])
def test_impossible_costs_are_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="must be finite and at least 0"):
        BranchCosts(MB, 1e9, bad, 1e9, 1e9)
    with pytest.raises(ValueError, match="an expert of 0 bytes"):
        BranchCosts(0, 1e9, 1e9, 1e9, 1e9)
    with pytest.raises(ValueError, match="credit may cost"):
        FluidSplit(LAPTOP, loss_part=bad)
