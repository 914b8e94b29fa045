"""Dividing set C among cpu_workers when experts lie on NUMA nodes and reading far ones is slower.

Each expert begins with a worker of its own node. Then, as long as somebody else could take an
expert of the worker that ends last and still end sooner than that one does now, the expert moves
whose move helps most; what counts in the end is the division in which the last worker ends first.
So an expert goes to a foreign node only where that shortens the layer-step by the rates.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypeVar

if TYPE_CHECKING:
    from collections.abc import Sequence

T = TypeVar("T")


class CpuRates(NamedTuple):
    """One cpu_worker: its node (None: none in particular), and how fast it computes experts that
    lie there and elsewhere, above 0, in any one unit of work per second."""

    node: int | None
    near: float
    far: float


def divide_near(
    experts: Sequence[T],
    expert_nodes: Sequence[int],
    rows: Sequence[int],
    workers: Sequence[CpuRates],
) -> list[list[T]]:
    """One list per worker, in the order of ``experts``; the same input gives the same answer.

    ``expert_nodes`` and ``rows`` are the node and the weight (1 or more) of each expert. ValueError
    if there is work but no worker.
    """
    if experts and not workers:
        raise ValueError(f"{len(experts)} experts to run, but no cpu worker")
    costs = [
        [row / (worker.near if node == worker.node else worker.far) for worker in workers]
        for node, row in zip(expert_nodes, rows, strict=True)
    ]
    owners = _at_home(expert_nodes, rows, workers, costs)
    best, best_end_s = list(owners), max(_ends(owners, costs, len(workers)), default=0.0)
    for _ in range(len(experts) * len(workers)):
        if not _move_one(owners, costs, len(workers)):
            break
        end_s = max(_ends(owners, costs, len(workers)))
        if end_s < best_end_s:
            best, best_end_s = list(owners), end_s
    divided: list[list[T]] = [[] for _ in workers]
    for expert, owner in zip(experts, best, strict=True):
        divided[owner].append(expert)
    return divided


def _at_home(
    expert_nodes: Sequence[int],
    rows: Sequence[int],
    workers: Sequence[CpuRates],
    costs: list[list[float]],
) -> list[int]:
    """A worker for each expert: of its node where there is one, the one that would end it first;
    the heaviest expert first."""
    everybody = range(len(workers))
    ends = [0.0] * len(workers)
    owners = [0] * len(rows)
    for index in sorted(range(len(rows)), key=rows.__getitem__, reverse=True):
        near = [worker for worker in everybody if workers[worker].node == expert_nodes[index]]
        owner = min(near or everybody, key=lambda worker: ends[worker] + costs[index][worker])
        ends[owner] += costs[index][owner]
        owners[index] = owner
    return owners


def _ends(owners: list[int], costs: list[list[float]], num_workers: int) -> list[float]:
    ends = [0.0] * num_workers
    for index, owner in enumerate(owners):
        ends[owner] += costs[index][owner]
    return ends


def _move_one(owners: list[int], costs: list[list[float]], num_workers: int) -> bool:
    """Move the expert that helps most away from the worker that ends last; False if none helps."""
    ends = _ends(owners, costs, num_workers)
    last = max(range(num_workers), key=ends.__getitem__)
    chosen, chosen_end = None, ends[last]
    for index, owner in enumerate(owners):
        if owner != last:
            continue
        left = ends[last] - costs[index][last]
        for worker in range(num_workers):
            end = max(left, ends[worker] + costs[index][worker])
            if worker != last and end < chosen_end:
                chosen, chosen_end = (index, worker), end
    if chosen is None:
        return False
    owners[chosen[0]] = chosen[1]
    return True
