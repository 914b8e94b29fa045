"""Percentiles in bounded memory."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from orchestrator import stage_times
from orchestrator.stage_times import Series, StageTimes, percentile


@given(st.lists(st.integers(0, 10**9), min_size=1), st.integers(1, 100))
def test_percentile_is_the_nearest_rank(values: list[int], percent: int) -> None:
    ordered = sorted(values)
    found = percentile(ordered, percent)
    assert sum(value <= found for value in ordered) * 100 >= percent * len(ordered)
    assert sum(value < found for value in ordered) * 100 < percent * len(ordered)


def test_small_series_are_exact() -> None:
    times = StageTimes()
    for duration_us in range(1, 101):
        times.add("cpu", duration_us * 1000)
        times.add("step", duration_us * 2000)
    cpu = times.stats("step")["cpu"]
    assert (cpu.p50_us, cpu.p95_us, cpu.p99_us, cpu.max_us) == (50, 95, 99, 100)
    assert (cpu.share, cpu.num_samples) == (0.5, 100)
    assert list(times.stats("step")) == ["cpu", "step"]


def test_nothing_to_share() -> None:
    times = StageTimes()
    times.add("cpu", 5)
    assert times.stats("step")["cpu"].share == 0.0


def test_long_series_are_thinned_evenly() -> None:
    series = Series()
    num = 5 * stage_times._MAX_SAMPLES
    for value in range(num):
        series.add(value)
    assert series.num == num
    assert series.max_ns == num - 1
    assert series.sum_ns == num * (num - 1) // 2
    assert len(series._samples) < stage_times._MAX_SAMPLES
    stats = series.stats(0)
    for percent, found_us in ((50, stats.p50_us), (95, stats.p95_us), (99, stats.p99_us)):
        assert abs(found_us * 1e3 - num * percent / 100) < num / 1000
