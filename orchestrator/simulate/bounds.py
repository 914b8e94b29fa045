"""What no cache can beat, and what a cache is measured by: forced-fill replays and lower bounds.

*Forced fill*: every miss is filled, so the hit rate depends on the eviction alone. `lru_hits` runs
global and per-layer LRU; `belady` evicts what is needed furthest in the future. A layer-step is
handled as a batch: hits are what was resident when it began, and its own experts never leave.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

import msgspec

from orchestrator.core.directory import ExpertDirectory
from orchestrator.core.fluid_split import predicted_s
from orchestrator.core.policies import DemandShape, make_policy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from orchestrator.core.fluid_split import BranchCosts
    from orchestrator.simulate.trace import RoutingTrace


def shape_of(trace: RoutingTrace) -> DemandShape:
    return DemandShape(trace.num_layers, trace.num_experts, trace.top_k)


def forced_fill_misses(trace: RoutingTrace, policy: str, num_slots: int) -> list[int]:
    """Misses of each layer-step when every miss is filled."""
    directory = ExpertDirectory(num_slots, make_policy(policy, shape_of(trace)))
    counts: list[int] = []
    for step in trace.ids.tolist():
        for layer, experts in enumerate(step):
            directory.layer_step(layer, experts)  # type: ignore[arg-type]
            pinned, misses = [], []
            for expert in experts:
                slot = directory.slot_of((layer, expert))  # type: ignore[arg-type]
                if slot is None:
                    misses.append((layer, expert))
                else:
                    directory.pin(slot)
                    directory.refresh((layer, expert))  # type: ignore[arg-type]
                    pinned.append(slot)
            for key in misses:
                reservation = directory.reserve(key)  # type: ignore[arg-type]
                if reservation is not None:  # more experts than slots: it passes through
                    directory.commit(reservation.slot, reservation.generation)
                    directory.pin(reservation.slot)
                    pinned.append(reservation.slot)
            for slot in pinned:
                directory.unpin(slot)
            counts.append(len(misses))
    return counts


def belady_misses(trace: RoutingTrace, num_slots: int) -> list[int]:
    """Misses of each layer-step of the offline optimum: evict what is needed last."""
    num_layers, num_experts = trace.num_layers, trace.num_experts
    steps: list[list[list[int]]] = trace.ids.tolist()
    never = len(steps) * num_layers
    # Next use of each access, from the end backwards.
    following = [never] * (num_layers * num_experts)
    next_uses: list[list[int]] = [[] for _ in range(never)]
    for time in range(never - 1, -1, -1):
        layer = time % num_layers
        row = []
        for expert in steps[time // num_layers][layer]:
            index = layer * num_experts + expert
            row.append(following[index])
            following[index] = time
        next_uses[time] = row
    resident: dict[int, int] = {}  # index -> next use
    heap: list[tuple[int, int]] = []  # (-next use, index); stale entries are skipped
    counts: list[int] = []
    for time in range(never):
        layer = time % num_layers
        experts = [layer * num_experts + expert for expert in steps[time // num_layers][layer]]
        current = set(experts)
        num_misses = 0
        for index, next_use in zip(experts, next_uses[time], strict=True):
            if index not in resident:
                num_misses += 1
                is_full = len(resident) >= num_slots
                if is_full and not _evict_furthest(heap, resident, current):
                    continue
            resident[index] = next_use
            heapq.heappush(heap, (-next_use, index))
        counts.append(num_misses)
    return counts


def _evict_furthest(
    heap: list[tuple[int, int]], resident: dict[int, int], current: set[int]
) -> bool:
    """False if everything resident belongs to the layer-step in progress."""
    kept: list[tuple[int, int]] = []
    found = False
    while heap:
        negative, index = heapq.heappop(heap)
        if resident.get(index) != -negative:
            continue
        if index in current:
            kept.append((negative, index))
            continue
        del resident[index]
        found = True
        break
    for entry in kept:
        heapq.heappush(heap, entry)
    return found


class Bounds(msgspec.Struct, frozen=True):
    """Seconds per token that no policy and no split can beat, each under its own assumption."""

    all_resident_s: float
    belady_best_split_s: float
    dram_floor_s: float
    link_floor_s: float


def bounds_of(belady: Sequence[int], num_steps: int, costs: BranchCosts, dense_s: float) -> Bounds:
    """From the misses per layer-step of `belady_misses`.

    - all resident: the dense part (and the GPU's expert time) alone;
    - Belady with the best split: each layer-step's misses at the least T(q), although what runs on
      the CPU would not become resident: so it is below what can be reached;
    - DRAM floor: those misses' bytes at the best rate at which host memory is read at all;
    - link floor: all those misses over the link at its full rate, what a fill-only engine is up
      against.
    """
    dense_total_s = (dense_s + costs.gpu_expert_s) * len(belady)
    best_s: dict[int, float] = {0: 0.0}
    for misses in set(belady) - {0}:
        best_s[misses] = min(
            predicted_s(costs, fills, misses - fills) for fills in range(misses + 1)
        )
    total_bytes = sum(belady) * costs.expert_bytes
    both = costs.link_beside_cpu_bytes_per_s + costs.cpu_beside_link_bytes_per_s
    fastest = max(costs.cpu_bytes_per_s, costs.link_bytes_per_s, both)
    return Bounds(
        dense_total_s / num_steps,
        (dense_total_s + sum(best_s[misses] for misses in belady)) / num_steps,
        (dense_total_s + total_bytes / fastest) / num_steps,
        (dense_total_s + total_bytes / costs.link_bytes_per_s) / num_steps,
    )
