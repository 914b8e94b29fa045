"""Estimates from samples: overlap, outliers, drift; every stamp is made up here."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.core.fluid_split import BranchCosts
from orchestrator.core.rate_estimates import WINDOW, RateEstimates, _Sample, overlap_ns

MB = 1_000_000
COSTS = BranchCosts(4 * MB, 10e9, 8e9, 40e9, 30e9)


def span_ns(num_bytes: int, rate: float) -> int:
    return int(num_bytes / rate * 1e9)


class Feed:
    """Layer-steps, one after the other."""

    def __init__(self, costs: BranchCosts = COSTS) -> None:
        self.estimates = RateEstimates(costs)
        self.now_ns = 0

    def alone(self, branch: str, rate: float, num_bytes: int = 4 * MB) -> list:
        end = self.now_ns + span_ns(num_bytes, rate)
        add = self.estimates.filled if branch == "link" else self.estimates.executed
        add(num_bytes, self.now_ns, end)
        self.now_ns = end + 1000
        return self.estimates.settle()

    def beside(self, link: float, cpu: float) -> list:
        """Both for the same millisecond."""
        end = self.now_ns + 1_000_000
        self.estimates.executed(int(cpu / 1000), self.now_ns, end)
        self.estimates.filled(int(link / 1000), self.now_ns, end)
        self.now_ns = end + 1000
        return self.estimates.settle()


def test_nothing_moves_while_the_rates_are_what_they_were() -> None:
    feed = Feed()
    for _ in range(20):
        assert feed.alone("link", 10.2e9) == []
        assert feed.alone("cpu", 39e9) == []
        assert feed.beside(8.1e9, 30.5e9) == []
    assert feed.estimates.costs is COSTS


def test_a_drift_is_said_once_with_both_numbers() -> None:
    feed = Feed()
    said = [drift for _ in range(30) for drift in feed.alone("link", 1e9)]
    assert len(said) == 1
    assert (said[0].branch, said[0].is_beside) == ("link", False)
    assert said[0].old_bytes_per_s == 10e9
    assert said[0].new_bytes_per_s == pytest.approx(1e9, rel=1e-3)
    assert str(said[0]) == "link alone: 10.00 GB/s, now 1.00 GB/s"
    assert feed.estimates.costs.link_bytes_per_s == pytest.approx(1e9, rel=1e-3)
    # And again when it is over.
    back = [drift for _ in range(30) for drift in feed.alone("link", 10e9)]
    assert [round(drift.new_bytes_per_s / 1e9) for drift in back] == [10]


def test_a_rate_without_news_moves_with_the_other_of_its_branch() -> None:
    feed = Feed()
    for _ in range(WINDOW):
        feed.beside(8e9, 30e9 / 20)
    costs = feed.estimates.costs
    assert costs.cpu_beside_link_bytes_per_s == pytest.approx(1.5e9, rel=0.01)
    assert costs.cpu_bytes_per_s == pytest.approx(2e9, rel=0.01)
    assert costs.link_beside_cpu_bytes_per_s == 8e9


def test_a_rate_that_recovers_beside_the_other_lifts_no_rate_that_was_right() -> None:
    feed = Feed()
    for _ in range(12):  # slow beside the CPU only
        feed.beside(2e9, 30e9)
        feed.alone("link", 10e9)
        assert feed.estimates.costs.link_bytes_per_s == pytest.approx(10e9, rel=0.01)
    assert feed.estimates.costs.link_beside_cpu_bytes_per_s == pytest.approx(2e9, rel=0.01)
    for _ in range(12):
        feed.beside(8e9, 30e9)
    costs = feed.estimates.costs
    assert costs.link_beside_cpu_bytes_per_s == pytest.approx(8e9, rel=0.01)
    assert costs.link_bytes_per_s == pytest.approx(10e9, rel=0.01)


@given(seed=st.integers(0, 1000), wild=st.floats(1.0, 100))
def test_samples_too_good_to_be_true_change_nothing(seed: int, wild: float) -> None:
    """Every third is, so never half of a window."""
    chance = random.Random(seed)
    feed = Feed()
    for index in range(8 * WINDOW):
        factor = wild if index % 3 == 1 else chance.uniform(0.97, 1.03)
        feed.alone("cpu", 40e9 * factor)
        assert feed.estimates.costs.cpu_bytes_per_s == pytest.approx(40e9, rel=0.06)


@given(seed=st.integers(0, 1000), slow=st.floats(0.01, 1.0), first=st.integers(0, 40))
def test_a_hiccup_changes_nothing(seed: int, slow: float, first: int) -> None:
    """Three slow samples in a row, once."""
    chance = random.Random(seed)
    feed = Feed()
    for index in range(12 * WINDOW):
        factor = slow if first <= index < first + 3 else chance.uniform(0.97, 1.03)
        feed.alone("cpu", 40e9 * factor)
        assert feed.estimates.costs.cpu_bytes_per_s == pytest.approx(40e9, rel=0.06)


@pytest.mark.parametrize("every", [3, 5, 6])
def test_standstills_that_come_back_are_lost_time(every: int) -> None:
    """Every so many samples one takes 100 times as long: half of the samples never see it, and
    yet the branch is that much slower."""
    feed = Feed()
    said = []
    for index in range(5 * WINDOW):
        said += feed.alone("cpu", 40e9 / (100 if index % every == 0 else 1))
    truth = 40e9 / ((100 + every - 1) / every)
    assert feed.estimates.costs.cpu_bytes_per_s == pytest.approx(truth, rel=0.6)
    assert 1 <= len(said) <= 3
    for _ in range(5 * WINDOW):  # and it is over
        feed.alone("cpu", 40e9)
    assert feed.estimates.costs.cpu_bytes_per_s == pytest.approx(40e9, rel=0.06)


@pytest.mark.parametrize("num_steps", [1, 40, 200])
def test_how_often_it_settles_does_not_decide_what_was_beside_what(num_steps: int) -> None:
    """Each layer-step has a CPU batch beside two fills; 200 of them are many more samples than are
    remembered once they are settled."""
    estimates = RateEstimates(COSTS)
    begin = 0
    for number in range(200):
        estimates.executed(24 * MB, begin, begin + 1_000_000)
        estimates.filled(4 * MB, begin, begin + 500_000)
        estimates.filled(4 * MB, begin + 500_000, begin + 1_000_000)
        begin += 1_100_000
        if number % num_steps == num_steps - 1:
            estimates.settle()
    costs = estimates.costs
    assert costs.cpu_beside_link_bytes_per_s == pytest.approx(24e9, rel=1e-3)
    assert costs.cpu_bytes_per_s == 40e9


def test_tiny_empty_and_backward_samples_are_ignored() -> None:
    estimates = RateEstimates(COSTS)
    for _ in range(20):
        estimates.filled(1000, 0, 1_000_000_000)
        estimates.filled(4 * MB, 5, 5)
        estimates.executed(4 * MB, 9, 3)
        estimates.executed(0, 0, 10)
        assert estimates.settle() == []
    assert estimates.costs is COSTS


def test_a_half_overlapped_sample_tells_nothing_and_a_mostly_overlapped_one_is_solved() -> None:
    half, mostly = Feed(), Feed()
    for _ in range(20):
        for feed, cpu_ns in ((half, 500_000), (mostly, 800_000)):
            begin = feed.now_ns
            end = begin + 1_000_000
            feed.estimates.executed(30 * cpu_ns, begin, begin + cpu_ns)
            moved = 5 * MB * cpu_ns // 1_000_000 + 10 * (1_000_000 - cpu_ns)
            feed.estimates.filled(moved, begin, end)
            feed.now_ns = end
            feed.estimates.settle()
    assert half.estimates.costs.link_beside_cpu_bytes_per_s == 8e9
    assert mostly.estimates.costs.link_beside_cpu_bytes_per_s == pytest.approx(5e9, rel=0.01)


@given(
    spans=st.lists(st.tuples(st.integers(0, 60), st.integers(1, 20)), max_size=6),
    start=st.integers(0, 40),
    length=st.integers(1, 40),
)
def test_overlap_counts_every_nanosecond_once(
    spans: list[tuple[int, int]], start: int, length: int
) -> None:
    others = [_Sample(1, begin, begin + size) for begin, size in spans]
    covered = {ns for begin, size in spans for ns in range(begin, begin + size)}
    expected = len(covered & set(range(start, start + length)))
    assert overlap_ns(start, start + length, others) == expected
