"""The virtual machine against the planner's own prediction, and its copies behind."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.core.fluid_split import BranchCosts, predicted_s
from orchestrator.simulate.machine import Scatter, VirtualMachine

MB = 1_000_000
COSTS = BranchCosts.residual(10 * MB, 10e9, 40e9)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(
    fills=st.integers(0, 5),
    runs=st.integers(0, 5),
    link=st.sampled_from([4e9, 20e9]),
    host=st.sampled_from([10e9, 50e9]),
    fixed=st.sampled_from([0.0, 2e-5, 4e-4]),
    gpu=st.sampled_from([0.0, 1e-5]),
)
def test_what_is_predicted_happens(
    fills: int, runs: int, link: float, host: float, fixed: float, gpu: float
) -> None:
    costs = BranchCosts(8 * MB, link, 0.8 * link, host, 0.4 * host, fixed, 2e-5, gpu_expert_s=gpu)
    machine: VirtualMachine[int] = VirtualMachine(costs)
    machine.run(fills, runs)
    assert machine.now_s == pytest.approx(predicted_s(costs, fills, runs), abs=1e-9)
    assert machine.num_copied_bytes == pytest.approx(fills * 8 * MB)


def test_a_copy_behind_uses_what_is_left_and_is_not_waited_for() -> None:
    machine: VirtualMachine[str] = VirtualMachine(COSTS)
    machine.copy_behind("a", is_beside_cpu=False)
    assert machine.compute(0.4e-3) == []
    assert machine.run(0, 1) == []  # waits for the CPU
    assert machine.now_s == pytest.approx(0.4e-3 + 0.25e-3)
    assert machine.compute(0.6e-3 - 1e-9) == []
    assert machine.compute(1e-6) == ["a"]
    assert machine.num_behind == 0
    assert machine.link_busy_s == pytest.approx(1e-3)
    assert machine.cpu_busy_s == pytest.approx(0.25e-3)


def test_a_copy_beside_the_cpu_slows_it() -> None:
    machine: VirtualMachine[str] = VirtualMachine(COSTS)
    machine.copy_behind("a", is_beside_cpu=True)
    assert machine.run(0, 1) == []
    assert machine.now_s == pytest.approx(10 * MB / 30e9)
    assert machine.compute(1e-3) == ["a"]


def test_a_demanded_fill_goes_first() -> None:
    machine: VirtualMachine[str] = VirtualMachine(COSTS)
    machine.copy_behind("a", is_beside_cpu=True)
    machine.compute(0.5e-3)
    assert machine.run(1, 0) == []
    assert machine.now_s == pytest.approx(1.5e-3)
    assert machine.compute(0.6e-3) == ["a"]


def test_copies_behind_end_in_order_and_move_their_bytes() -> None:
    machine: VirtualMachine[str] = VirtualMachine(COSTS)
    for label in "abc":
        machine.copy_behind(label, is_beside_cpu=True)
    ended = [label for _ in range(40) for label in machine.compute(1e-4)]
    assert ended == ["a", "b", "c"]
    assert machine.num_copied_bytes == pytest.approx(30 * MB)


def test_the_device_takes_one_expert_after_the_other() -> None:
    """Three hits keep it busy until the first of two fills, of 1 ms each, has landed and longer."""
    costs = BranchCosts(10 * MB, 10e9, 10e9, 40e9, 30e9, gpu_expert_s=0.5e-3)
    machine: VirtualMachine[str] = VirtualMachine(costs)
    machine.run(2, 0, num_hits=3)
    assert machine.now_s == pytest.approx(2.5e-3)
    machine.run(0, 1, num_hits=3)  # the CPU ends before the device
    assert machine.now_s == pytest.approx(4.0e-3)
    machine.run(2, 0, num_hits=1)
    assert machine.now_s == pytest.approx(6.5e-3)


def test_a_branch_that_never_ends_is_said() -> None:
    machine: VirtualMachine[str] = VirtualMachine(BranchCosts(MB, 1e9, 1e9, 0.0, 0.0))
    with pytest.raises(ValueError, match="never ends"):
        machine.run(0, 1)


def test_what_each_branch_did_is_known() -> None:
    costs = BranchCosts(10 * MB, 10e9, 10e9, 40e9, 40e9, cpu_fixed_s=1e-4, link_fixed_s=2e-4)
    machine: VirtualMachine[str] = VirtualMachine(costs)
    machine.compute(1e-3)
    machine.run(2, 1)
    first, second = machine.worked.fills
    assert first == pytest.approx((1.2e-3, 2.2e-3))
    assert second == pytest.approx((2.2e-3, 3.2e-3))
    assert machine.worked.cpu == pytest.approx((1.1e-3, 1.35e-3))
    machine.run(0, 2)
    assert machine.worked.fills == []


def test_times_that_scatter_keep_their_mean_and_are_the_same_for_a_seed() -> None:
    def seconds(seed: int, runs: int, fills: int) -> float:
        scatter = Scatter({"cpu": [5.0, 5.0, 10.0, 20.0], "link": [3.0, 1.0]}, seed)
        machine: VirtualMachine[str] = VirtualMachine(COSTS, scatter)
        for _ in range(2000):
            machine.run(fills, runs)
        return machine.now_s

    assert seconds(1, 2, 0) == seconds(1, 2, 0) != seconds(2, 2, 0)
    plain: VirtualMachine[str] = VirtualMachine(COSTS)
    plain.run(0, 2)
    assert seconds(1, 2, 0) == pytest.approx(2000 * plain.now_s, rel=0.05)


def test_the_mean_of_the_later_branch_is_more_than_the_later_mean() -> None:
    """Each branch takes 1 ms, or by turns of chance 0.5 and 1.5: the later one then takes 1.25."""
    costs = BranchCosts(10 * MB, 10e9, 10e9, 10e9, 10e9)
    machine: VirtualMachine[str] = VirtualMachine(costs, Scatter({"cpu": [1, 3], "link": [1, 3]}))
    for _ in range(2000):
        machine.run(1, 1)
    assert machine.now_s == pytest.approx(2000 * 1.25e-3, rel=0.02)
    with pytest.raises(ValueError, match="a time of cpu"):
        Scatter({"cpu": [1.0, -1.0]})
