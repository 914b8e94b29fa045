"""The floor rule on made-up machines: it must leave a bad split, come back, and probe little."""

from __future__ import annotations

import random

import pytest

from orchestrator.core.floor_rule import (
    LOOK_PART,
    MAX_INTERVAL,
    MIN_INTERVAL,
    PROBE_STEPS,
    Arm,
    FloorRule,
)

EVEN: dict[Arm, float] = {"split": 1.0, "fill": 1.0, "cpu": 1.0}


def drive(
    rule: FloorRule, truth: dict[Arm, float], steps: int, predicted: dict[Arm, float] = EVEN
) -> list[Arm]:
    used = []
    for _ in range(steps):
        arm = rule.next_arm(predicted)
        used.append(arm)
        rule.measured(truth[arm])
    return used


def test_a_good_split_is_kept_and_probed_ever_less() -> None:
    rule = FloorRule()
    used = drive(rule, {"split": 1.0, "fill": 2.0, "cpu": 1.5}, 20_000)
    assert rule.held == "split"
    probes = [index for index, arm in enumerate(used) if arm != "split"]
    assert 10 < len(probes) < 20_000 * 0.01
    assert sum(index < 2000 for index in probes) > sum(index >= 18_000 for index in probes)
    assert {"fill", "cpu"} <= set(used)


def test_a_split_worse_than_one_branch_is_left_soon() -> None:
    for best in ("fill", "cpu"):
        rule = FloorRule()
        truth: dict[Arm, float] = {"split": 1.2, "fill": 2.0, "cpu": 2.0}
        truth[best] = 1.0
        used = drive(rule, truth, 3 * MIN_INTERVAL)
        assert rule.held == best
        assert used[-1] == best


def test_it_comes_back_when_the_split_is_good_again() -> None:
    rule = FloorRule()
    drive(rule, {"split": 1.5, "fill": 2.0, "cpu": 1.0}, 300)
    assert rule.held == "cpu"
    drive(rule, {"split": 0.9, "fill": 2.0, "cpu": 1.0}, MAX_INTERVAL + 100)
    assert rule.held == "split"


def test_a_gain_within_the_margin_is_no_reason() -> None:
    rule = FloorRule()
    drive(rule, {"split": 1.0, "fill": 2.0, "cpu": 0.98}, 1000)
    assert rule.held == "split"


def test_one_slow_step_in_a_probe_decides_nothing() -> None:
    rule = FloorRule()
    for index in range(2000):
        arm = rule.next_arm(EVEN)
        rule.measured({"split": 1.0, "fill": 2.0, "cpu": 1.2}[arm] * (9.0 if index % 7 == 0 else 1))
    assert rule.held == "split"


def test_hopeless_and_absent_arms_are_not_tried() -> None:
    rule = FloorRule()
    predicted: dict[Arm, float] = {"split": 1.0, "fill": 20.0}
    used = drive(rule, {"split": 1.0, "fill": 0.1, "cpu": 0.1}, 2000, predicted)
    assert set(used) == {"split"}


def test_an_arm_that_goes_away_is_left_at_once() -> None:
    rule = FloorRule()
    drive(rule, {"split": 1.5, "fill": 2.0, "cpu": 1.0}, 300)
    assert rule.held == "cpu"
    assert rule.next_arm({"split": 1.0, "fill": 1.0}) == "split"
    assert rule.held == "split"


def test_changed_rates_make_probes_soon_again() -> None:
    rule = FloorRule()
    drive(rule, {"split": 1.0, "fill": 2.0, "cpu": 1.5}, 20_000)
    rule.rates_changed()
    used = drive(rule, {"split": 1.0, "fill": 2.0, "cpu": 1.5}, 2 * MIN_INTERVAL)
    assert used.count("cpu") == used.count("fill") == PROBE_STEPS


def test_the_change_is_told_to_whoever_measured() -> None:
    rule = FloorRule()
    told = []
    for _ in range(200):
        arm = rule.next_arm(EVEN)
        told.append(rule.measured(2.0 if arm == "split" else 1.0))
    assert [arm for arm in told if arm] == ["cpu"]


def test_standstills_of_the_arm_in_use_are_counted() -> None:
    """The split stands still in every fifth layer-step: its median is better than what a branch
    alone takes, its mean is not."""
    rule = FloorRule()
    used = []
    for index in range(300):
        arm = rule.next_arm(EVEN)
        used.append(arm)
        lump = 100.0 if index % 5 == 0 else 0.0
        rule.measured({"split": 1.0 + lump, "fill": 3.0, "cpu": 1.0 + lump}[arm])
    assert rule.held == "fill"
    assert used[200:].count("fill") > 50


def test_a_hopeless_arm_is_looked_at_and_taken_when_it_is_itself_again() -> None:
    rule = FloorRule()
    predicted: dict[Arm, float] = {"split": 1.0, "fill": 1.0, "cpu": 30.0}
    slow: dict[Arm, float] = {"split": 1.0, "fill": 1.0, "cpu": 30.0}
    used = drive(rule, slow, 50_000, predicted)
    looks = used.count("cpu")
    assert rule.held == "split"
    assert looks >= 3
    assert looks * 29.0 <= LOOK_PART * 50_000 + 1.0
    used = drive(rule, slow | {"cpu": 0.5}, 2 * MAX_INTERVAL + 7000, predicted)
    assert rule.held == "cpu"


def test_rates_that_change_all_the_time_put_no_probe_off() -> None:
    rule = FloorRule()
    used = []
    for _ in range(4):
        used += drive(rule, {"split": 1.0, "fill": 2.0, "cpu": 1.5}, MIN_INTERVAL - 10)
        rule.rates_changed()
    assert {"fill", "cpu"} <= set(used)


def test_an_arm_in_use_whose_branch_fails_is_left_at_once() -> None:
    """By what is predicted, or by its own results."""
    rule = FloorRule()
    drive(rule, {"split": 1.5, "fill": 2.0, "cpu": 1.0}, 300)
    assert rule.held == "cpu"
    rule.rates_changed()
    assert rule.next_arm({"split": 1.0, "fill": 1.0, "cpu": 20.0}) == "split"
    assert rule.held == "split"

    rule = FloorRule()
    drive(rule, {"split": 1.5, "fill": 2.0, "cpu": 1.0}, MAX_INTERVAL)
    drive(rule, {"split": 1.5, "fill": 2.0, "cpu": 4.0}, 16)
    assert rule.held == "split"


@pytest.mark.parametrize("best", ["split", "cpu"])
def test_noise_and_rates_that_change_all_the_time_cost_little(best: Arm) -> None:
    """Results that scatter by half, one in ten of them up to five times as long, and news of rates
    every 30 layer-steps: the best arm is found and kept."""
    truth: dict[Arm, float] = {"split": 1.5, "fill": 2.0, "cpu": 1.5}
    truth[best] = 1.0
    chance = random.Random(3)
    rule = FloorRule()
    cost = 0.0
    for index in range(8000):
        arm = rule.next_arm(EVEN)
        noise = chance.expovariate(1 / 0.3) if chance.random() > 0.1 else 5 * chance.random()
        rule.measured(truth[arm] * (0.7 + noise))
        if chance.random() < 1 / 30:
            rule.rates_changed()
        cost += truth[arm] if index >= 1000 else 0.0
    assert rule.held == best
    assert cost < 1.03 * 7000


@pytest.mark.parametrize("seed", range(4))
def test_chance_is_no_reason_to_leave_a_split_that_is_as_good(seed: int) -> None:
    """With one branch alone the cache stands still, so a coin must not decide."""
    chance = random.Random(seed)
    rule = FloorRule()
    num_alone = 0
    for _ in range(6000):
        arm = rule.next_arm(EVEN)
        num_alone += rule.held != "split"
        rule.measured(chance.lognormvariate(0.0, 0.4) * (2.0 if arm == "fill" else 1.0))
    assert num_alone < 0.2 * 6000
