"""Set C divided among cpu_workers on a machine with two NUMA nodes."""

from __future__ import annotations

import itertools

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.core.events import CoreConfig, Submit, WorkerFault, WorkerJoined, WorkerLost
from orchestrator.core.near_division import CpuRates, divide_near
from protocol.messages import (
    Arena,
    Epoch,
    Execute,
    ExpertId,
    LayerId,
    RequestId,
    Routed,
    StepId,
)
from tests.core.step_core import StepCore

ON_0, ON_1 = CpuRates(0, 10.0, 6.0), CpuRates(1, 10.0, 6.0)


def divide(
    nodes: list[int], workers: list[CpuRates], rows: list[int] | None = None
) -> list[list[int]]:
    return divide_near(range(len(nodes)), nodes, rows or [1] * len(nodes), workers)


def test_experts_stay_on_their_node() -> None:
    assert divide([0, 1, 0, 1], [ON_0, ON_1]) == [[0, 2], [1, 3]]
    assert divide([1, 1, 0, 0], [ON_0, ON_1]) == [[2, 3], [0, 1]]
    # Greedy by who would end first would send the second to node 1 and then pay twice.
    assert divide([0, 0, 1, 1], [ON_0, ON_1]) == [[0, 1], [2, 3]]


def test_a_far_node_helps_only_where_the_step_gets_shorter() -> None:
    # Two on their own node take 0.2 s; one of them over there ends after 0.17.
    assert divide([0, 0], [ON_0, ON_1]) == [[1], [0]]
    # With reading as slow as that it would end after 0.25.
    slow_link = [CpuRates(0, 10.0, 4.0), CpuRates(1, 10.0, 4.0)]
    assert divide([0, 0], slow_link) == [[0, 1], []]
    assert divide([0, 0, 0], slow_link) == [[1, 2], [0]]  # 0.25 s against 0.3
    # One that is needed here alone never moves: 0.1 s against 0.17.
    assert divide([0], [ON_0, ON_1]) == [[0], []]


def test_rates_and_rows_even_it_out() -> None:
    fast = CpuRates(0, 30.0, 20.0)
    assert divide([1, 1, 1, 1], [fast, ON_1]) == [[0, 1, 2], [3]]
    # The heavy one stays, the light one goes.
    assert divide([0, 0], [ON_0, ON_1], rows=[8, 2]) == [[0], [1]]


def test_workers_of_one_node_share_it() -> None:
    assert divide([0, 0, 1, 0], [ON_0, ON_0, ON_1]) == [[0, 3], [1], [2]]


def test_a_node_without_a_worker_is_everybodys() -> None:
    assert divide([2, 2], [ON_0, ON_1]) == [[0], [1]]
    assert divide([0, 1], [ON_0]) == [[0, 1]]
    unbound = CpuRates(None, 10.0, 10.0)
    assert divide([0, 0, 1], [unbound]) == [[0, 1, 2]]


def test_nothing_and_nobody() -> None:
    assert divide([], [ON_0, ON_1]) == [[], []]
    assert divide([], []) == []
    with pytest.raises(ValueError, match="no cpu worker"):
        divide([0], [])


@settings(max_examples=150, derandomize=True)
@given(
    experts=st.lists(st.tuples(st.integers(0, 1), st.integers(1, 9)), min_size=1, max_size=7),
    rates=st.lists(
        st.tuples(st.integers(0, 1), st.floats(1, 20), st.floats(0.2, 1)), min_size=1, max_size=3
    ),
)
def test_division_is_complete_and_never_worse_than_staying_home(
    experts: list[tuple[int, int]], rates: list[tuple[int, float, float]]
) -> None:
    nodes, rows = [node for node, _ in experts], [num for _, num in experts]
    workers = [CpuRates(node, rate, rate * share) for node, rate, share in rates]
    divided = divide(nodes, workers, rows)
    assert divided == divide(nodes, workers, rows)
    assert sorted(itertools.chain(*divided)) == list(range(len(nodes)))
    assert all(part == sorted(part) for part in divided)

    def end(owners: tuple[int, ...]) -> float:
        ends = [0.0] * len(workers)
        for node, num, owner in zip(nodes, rows, owners, strict=True):
            worker = workers[owner]
            ends[owner] += num / (worker.near if node == worker.node else worker.far)
        return max(ends)

    owners = {expert: owner for owner, part in enumerate(divided) for expert in part}
    found = end(tuple(owners[expert] for expert in range(len(nodes))))
    everywhere = list(itertools.product(range(len(workers)), repeat=len(nodes)))
    assert found <= 2 * min(map(end, everywhere))

    def is_at_home(division: tuple[int, ...]) -> bool:
        return all(
            workers[owner].node == node or all(worker.node != node for worker in workers)
            for node, owner in zip(nodes, division, strict=True)
        )

    if len(workers) == 2:  # at most one worker per node: staying at home leaves no choice
        homes = [end(division) for division in everywhere if is_at_home(division)]
        if len({worker.node for worker in workers}) == 2:
            assert found <= min(homes)


# ---- through the core ----

GPU, DMA, CPU, CPU2 = (Epoch(number) for number in (1, 2, 3, 4))
CONFIG = CoreConfig(
    num_layers=1,
    top_k=4,
    expert_bytes=100,
    num_slots=4,
    max_rows=8,
    max_sequence_tokens=64,
    fill_mode="none",
    expert_nodes=((0, 0, 0, 0, 1, 1, 1, 1),),
)


def told(core: StepCore, *experts: int) -> dict[Epoch, list[int]]:
    core.handle(Submit(RequestId("a"), [5], 5, frozenset()))
    chosen = [ExpertId(expert) for expert in experts]
    commands = core.handle(Routed(GPU, StepId(1), LayerId(0), chosen, [1] * len(chosen), 0))
    core.check()
    return {
        command.epoch: list(command.experts) for command in commands if isinstance(command, Execute)
    }


def core_with(*cpus: WorkerJoined, config: CoreConfig = CONFIG) -> StepCore:
    core = StepCore(config)
    arena = Arena(kind="cuda_ipc", num_slots=4, slot_bytes=100)
    core.handle(WorkerJoined(GPU, "gpu_worker", 0.0, arena))
    for event in cpus:
        core.handle(event)
    return core


NODE_0 = WorkerJoined(CPU, "cpu_worker", 30.0, None, 0, 18.0)
NODE_1 = WorkerJoined(CPU2, "cpu_worker", 30.0, None, 1, 18.0)


def test_each_worker_is_told_of_the_experts_on_its_node() -> None:
    assert told(core_with(NODE_0, NODE_1), 6, 0, 5, 3) == {CPU: [0, 3], CPU2: [6, 5]}
    assert told(core_with(NODE_1, NODE_0), 6, 0, 5, 3) == {CPU: [0, 3], CPU2: [6, 5]}


def test_what_one_node_has_too_much_of_goes_over_if_that_is_quicker() -> None:
    assert told(core_with(NODE_0, NODE_1), 0, 1, 2, 3) == {CPU: [1, 2, 3], CPU2: [0]}
    slow = [msgspec.structs.replace(event, far_bytes_per_s=8.0) for event in (NODE_0, NODE_1)]
    assert told(core_with(*slow), 0, 1, 2) == {CPU: [0, 1, 2]}


def test_without_measured_far_rates_nodes_break_ties_only() -> None:
    near = [msgspec.structs.replace(event, far_bytes_per_s=0.0) for event in (NODE_0, NODE_1)]
    assert told(core_with(*near), 4, 0, 5, 1) == {CPU: [0, 1], CPU2: [4, 5]}
    assert told(core_with(*near), 0, 1, 2, 3) == {CPU: [2, 3], CPU2: [0, 1]}


def test_the_other_takes_over_what_a_lost_worker_had() -> None:
    core = core_with(NODE_0, NODE_1)
    assert told(core, 6, 0, 5, 3) == {CPU: [0, 3], CPU2: [6, 5]}
    commands = core.handle(WorkerLost(CPU2))
    assert [command.experts for command in commands if isinstance(command, Execute)] == [[6, 5]]
    core.check()


def test_where_nobody_is_bound_rates_alone_divide() -> None:
    free = [msgspec.structs.replace(event, numa_node=None) for event in (NODE_0, NODE_1)]
    assert told(core_with(*free), 0, 1, 2, 3) == {CPU: [0, 2], CPU2: [1, 3]}
    unplaced = msgspec.structs.replace(CONFIG, expert_nodes=())
    assert told(core_with(NODE_0, NODE_1, config=unplaced), 0, 1, 2, 3) == {
        CPU: [0, 2],
        CPU2: [1, 3],
    }


def test_a_far_rate_that_is_no_rate_is_a_fault() -> None:
    with pytest.raises(WorkerFault, match="rate of -1"):
        core_with(msgspec.structs.replace(NODE_0, far_bytes_per_s=-1.0))
