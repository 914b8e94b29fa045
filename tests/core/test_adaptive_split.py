"""The parts of the split together: what is learned moves q, what is stated stays."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from orchestrator.core.adaptive_split import AdaptiveSplit, Decision
from orchestrator.core.directory import ExpertDirectory
from orchestrator.core.events import ArmTaken, CoreConfig, Drifted
from orchestrator.core.fixed_costs import WINDOW, FixedCosts
from orchestrator.core.floor_rule import MIN_INTERVAL, PROBE_STEPS
from orchestrator.core.fluid_split import BranchCosts
from orchestrator.core.policies import make_policy
from protocol.messages import ExpertId, ExpertKey, LayerId

MB = 1_000_000
COSTS = BranchCosts(10 * MB, 10e9, 10e9, 30e9, 20e9)
CONFIG = CoreConfig(
    num_layers=2,
    top_k=4,
    num_experts=16,
    expert_bytes=10 * MB,
    num_slots=8,
    max_rows=8,
    max_sequence_tokens=64,
    planner="fluid",
    costs=COSTS,
)


def key(layer: int, expert: int) -> ExpertKey:
    return LayerId(layer), ExpertId(expert)


MISSES = [key(0, expert) for expert in (3, 5, 7, 9)]


class Bench:
    """One split over an empty directory; every layer-step misses four."""

    def __init__(self, **changes: Any) -> None:
        config = msgspec.structs.replace(CONFIG, **changes)
        policy = make_policy(config.policy)
        self.directory = ExpertDirectory(config.num_slots, policy)
        self.split = AdaptiveSplit(config, policy, lambda key: 0.0, 30e9, 10e9)
        self.now_ns = 1000
        self.news: list[Drifted | ArmTaken] = []

    def decide(self, misses: list[ExpertKey] = MISSES, **more: Any) -> Decision:
        return self.split.decide(
            self.directory, misses, [], more.pop("rows", None),
            has_cpu=True, has_link=True, **more,
        )  # fmt: skip

    def layer_step(self, link_bytes_per_s: float, cpu_bytes_per_s: float) -> Decision:
        """A decision, carried out one branch after the other, so that neither disturbs the other,
        and learned from."""
        decision = self.decide()
        start_ns = self.now_ns
        for _ in decision.fills:
            end_ns = self.now_ns + round(10 * MB / link_bytes_per_s * 1e9)
            self.split.filled(10 * MB, self.now_ns, end_ns)
            self.now_ns = end_ns
        if decision.cpu:
            count = len(decision.cpu)
            end_ns = self.now_ns + round(count * 10 * MB / cpu_bytes_per_s * 1e9)
            self.split.executed(count, [1] * count, self.now_ns, end_ns)
            self.now_ns = end_ns
        self.split.joined(4, self.now_ns - start_ns)
        self.news += self.split.settle()
        return decision


def test_a_decision_names_every_miss_once_in_router_order() -> None:
    bench = Bench()
    decision = bench.decide()
    assert 1 <= decision.split.num_fills < 4
    assert len(decision.fills) == decision.split.num_fills
    assert sorted(decision.fills + decision.cpu) == MISSES
    assert decision.fills == sorted(decision.fills)
    assert decision.cpu == sorted(decision.cpu)
    assert decision.behind == []


def test_what_is_on_its_way_goes_to_the_cpu_when_the_link_is_slow() -> None:
    assert not Bench().split.adopts(has_cpu=True)  # 10 GB/s: half a copy takes longer than 30 GB/s
    assert Bench().split.adopts(has_cpu=False)
    quick = msgspec.structs.replace(COSTS, link_bytes_per_s=20e9)
    assert Bench(costs=quick).split.adopts(has_cpu=True)
    bench = Bench()
    decision = bench.split.decide(
        bench.directory, MISSES[:2], MISSES[2:], None, has_cpu=True, has_link=True
    )
    assert decision.cpu[-2:] == MISSES[2:]


def test_copies_behind_are_those_that_the_cpu_runs() -> None:
    decision = Bench(fill_behind="on").decide()
    assert decision.behind
    assert {copy.key for copy in decision.behind} <= set(decision.cpu)
    full = Bench(fill_behind="on").decide(num_in_flight=2)
    assert full.behind == []
    assert Bench(fill_behind="on", fill_mode="none").decide().behind == []


def test_a_drift_moves_the_split_and_is_said_once() -> None:
    bench = Bench()
    before = bench.layer_step(10e9, 30e9).split.num_fills
    for _ in range(10):
        bench.layer_step(10e9, 30e9)
    assert bench.news == []
    for _ in range(30):
        after = bench.layer_step(10e9, 1e9).split.num_fills
    assert after == 4 > before
    drifts = [news.drift for news in bench.news if isinstance(news, Drifted)]
    assert [drift.branch for drift in drifts] == ["cpu"]
    assert drifts[0].old_bytes_per_s == 30e9
    assert drifts[0].new_bytes_per_s == pytest.approx(1e9, rel=0.05)
    assert "30.00 GB/s, now 1.00 GB/s" in str(bench.news[0])


def test_rates_that_a_person_stated_stay() -> None:
    bench = Bench(host_bytes_per_s=30e9)
    for _ in range(30):
        bench.layer_step(10e9, 1e9)
    assert bench.news == []
    assert bench.split.costs == COSTS


def test_another_worker_is_another_rate() -> None:
    bench = Bench(costs=None)
    assert bench.split.costs.cpu_bytes_per_s == 30e9
    bench.split.set_rates(60e9, 10e9)
    assert bench.split.costs.cpu_bytes_per_s == 60e9
    bench.split.set_rates(60e9, 0.0)
    assert bench.decide().split.num_fills == 0


def test_rows_weigh_on_the_cpu() -> None:
    part = msgspec.structs.replace(COSTS, cpu_row_part=1.0)
    one = Bench(costs=part).decide().split.num_fills
    many = Bench(costs=part).decide(rows=dict.fromkeys(MISSES, 16)).split.num_fills
    assert many > one


def test_a_branch_that_is_measured_better_is_taken_and_given_back() -> None:
    """The split is slow for reasons that no rate shows."""
    bench = Bench()
    arms: list[str] = []

    def step(slow_split: float) -> None:
        decision = bench.decide()
        is_alone = decision.split.rule == "floor"
        arm = "split" if not is_alone else "fill" if decision.fills else "cpu"
        arms.append(arm)
        took_s = {"split": slow_split, "fill": 4e-3, "cpu": 1.3e-3}[arm]
        bench.split.joined(4, round(took_s * 1e9))
        bench.news += bench.split.settle()

    for _ in range(2 * MIN_INTERVAL):
        step(slow_split=2e-3)
    assert [news.arm for news in bench.news if isinstance(news, ArmTaken)] == ["cpu"]
    assert arms[-PROBE_STEPS:].count("split") == 0
    assert "run on the CPU" in str(bench.news[0])
    for _ in range(4 * MIN_INTERVAL):
        step(slow_split=1e-3)
    assert isinstance(bench.news[-1], ArmTaken)
    assert bench.news[-1].arm == "split"


def test_fixed_costs_are_medians_and_noise_changes_nothing() -> None:
    fixed = FixedCosts()
    for _ in range(WINDOW - 1):
        fixed.took("link_fixed_s", 500_000)
    assert fixed.improve(COSTS) == (COSTS, [])  # too few
    fixed.took("link_fixed_s", 400_000_000)
    fixed.took("cpu_fixed_s", -5)
    improved, lags = fixed.improve(COSTS)
    assert lags == []  # the first is no news
    assert improved.link_fixed_s == pytest.approx(500e-6)
    assert improved.cpu_fixed_s == 0.0
    for _ in range(WINDOW):
        fixed.took("link_fixed_s", 510_000)
    assert fixed.improve(improved) == (improved, [])
    for _ in range(WINDOW):
        fixed.took("link_fixed_s", 1_500_000)
    _, lags = fixed.improve(improved)
    assert [str(lag) for lag in lags] == ["link, until its first byte: 500 us, now 1500 us"]
    assert fixed.improve(improved)[1] == []


def test_a_link_that_is_slow_to_begin_gets_nothing_small() -> None:
    tiny = BranchCosts(10_000, 10e9, 10e9, 10e9, 10e9)
    bench = Bench(costs=tiny, expert_bytes=10_000)
    assert bench.decide().split.num_fills > 0
    for _ in range(WINDOW):
        bench.split.took("link_fixed_s", 900_000)
        bench.split.took("cpu_fixed_s", 100_000)
    bench.split.settle()
    assert bench.decide().split.num_fills == 0


def test_a_branch_in_use_alone_that_becomes_slow_is_left_within_a_few_layer_steps() -> None:
    """The split was measured slower than the CPU alone, and then the CPU is slowed 20 times."""
    bench = Bench()
    for _ in range(2 * MIN_INTERVAL):
        decision = bench.decide()
        bench.split.joined(4, 2_000_000 if decision.fills else 1_300_000)
        bench.news += bench.split.settle()
    assert [news.arm for news in bench.news if isinstance(news, ArmTaken)] == ["cpu"]
    fills = [len(bench.layer_step(10e9, 1.5e9).fills) for _ in range(40)]
    assert fills[-20:] == [4] * 20
    assert [news.arm for news in bench.news if isinstance(news, ArmTaken)] == ["cpu", "split"]
