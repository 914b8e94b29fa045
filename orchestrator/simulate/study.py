"""One question answered in full: a trace on a machine with so many slots, and what to hold it
against."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from orchestrator.simulate.baselines import BASELINES, Contender, replay, replay_static
from orchestrator.simulate.bounds import Bounds, belady_misses, bounds_of, forced_fill_misses
from protocol.errors import UserError

if TYPE_CHECKING:
    from orchestrator.simulate.profiles import MachineProfile
    from orchestrator.simulate.replay import ReplayResult
    from orchestrator.simulate.trace import RoutingTrace


class Study(msgspec.Struct, frozen=True):
    """The answer. A step is a token through all layers; rates are parts of 1; counts are experts.

    `lru_hit_rate` is the better of global and per-layer LRU with every miss filled, and
    `belady_hit_rate` the offline optimum; `gap_closed` is how far `hit_rate` is from the one to
    the other (None where they are equal). What runs on the CPU is not kept, so `hit_rate` also
    depends on how much was filled; `policy_hit_rate` and `policy_gap_closed` are of the same policy
    with every miss sent over the link. `fills` counts all copies, `fills_behind` those of them
    that nobody waited for. `link_idle` and `cpu_idle` are parts of the time.
    """

    model: str
    profile: str
    policy: str
    planner: str
    fill_behind: str
    num_steps: int
    num_slots: int
    expert_bytes: int
    hit_rate: float
    lru_hit_rate: float
    belady_hit_rate: float
    gap_closed: float | None
    policy_hit_rate: float
    policy_gap_closed: float | None
    step_us: float
    tokens_per_s: float
    fills: int
    fills_behind: int
    cpu_experts: int
    copied_gb: float
    link_idle: float
    cpu_idle: float
    link_busy_us: float
    cpu_busy_us: float
    bounds_us: dict[str, float]
    baselines_us: dict[str, float]


def parse_slots(text: str, total_experts: int) -> int:
    """`25%` of `total_experts`, rounded down, or a number. UserError if it is neither, or none."""
    try:
        if not text.isascii():
            raise ValueError
        if text.endswith("%"):
            share = float(text[:-1])
            if not 0 < share <= 100:
                raise ValueError
            slots = int(total_experts * share / 100)
        else:
            slots = int(text)
    except ValueError:
        raise UserError(
            f"--slots is a number of experts or a part of them such as 25%, not {text[:40]!r}."
        ) from None
    if slots < 1:
        raise UserError(f"--slots {text[:40]} is less than one of {total_experts} experts.")
    return min(slots, total_experts)


def gap_closed(hit_rate: float, lru: float, best: float) -> float | None:
    """(hit - LRU*) / (Belady - LRU*); None where there is no gap."""
    return (hit_rate - lru) / (best - lru) if best - lru > 1e-9 else None


def study(
    trace: RoutingTrace,
    profile: MachineProfile,
    expert_bytes: int,
    num_slots: int,
    way: Contender,
    *,
    has_baselines: bool,
) -> Study:
    """Replay `way`, LRU, the optimum and, if wanted, the baselines.

    ValueError for an unknown policy or planner.
    """
    costs, dense_s = profile.costs(expert_bytes), profile.dense_us * 1e-6
    result = replay(trace, costs, num_slots, dense_s, way)
    num_accesses = result.num_accesses
    lru = max(
        1 - sum(forced_fill_misses(trace, policy, num_slots)) / num_accesses
        for policy in ("lru", "lru-layer")
    )
    belady = belady_misses(trace, num_slots)
    best = 1 - sum(belady) / num_accesses
    fill_all = Contender(way.policy, "fill-only", "off")
    forced = replay(trace, costs, num_slots, dense_s, fill_all)
    baselines: dict[str, float] = {}
    if has_baselines:
        for name, other in BASELINES.items():
            baselines[name] = replay(trace, costs, num_slots, dense_s, other).step_s * 1e6
        baselines["static"] = replay_static(trace, costs, num_slots, dense_s).step_s * 1e6
    return Study(
        model=trace.model,
        profile=profile.name,
        policy=way.policy,
        planner=way.planner,
        fill_behind=way.fill_behind,
        num_steps=trace.num_steps,
        num_slots=num_slots,
        expert_bytes=expert_bytes,
        hit_rate=result.hit_rate,
        lru_hit_rate=lru,
        belady_hit_rate=best,
        gap_closed=gap_closed(result.hit_rate, lru, best),
        policy_hit_rate=forced.hit_rate,
        policy_gap_closed=gap_closed(forced.hit_rate, lru, best),
        step_us=result.step_s * 1e6,
        tokens_per_s=1 / result.step_s,
        fills=result.fills + result.fills_behind,
        fills_behind=result.fills_behind,
        cpu_experts=result.cpu_experts,
        copied_gb=result.copied_bytes / 1e9,
        link_idle=result.link_idle,
        cpu_idle=result.cpu_idle,
        link_busy_us=_per_step_us(result, result.link_busy_s),
        cpu_busy_us=_per_step_us(result, result.cpu_busy_s),
        bounds_us=_in_us(bounds_of(belady, trace.num_steps, costs, dense_s)),
        baselines_us=baselines,
    )


def _per_step_us(result: ReplayResult, seconds: float) -> float:
    return seconds / result.num_steps * 1e6


def _in_us(bounds: Bounds) -> dict[str, float]:
    return {
        "all resident": bounds.all_resident_s * 1e6,
        "Belady, best split": bounds.belady_best_split_s * 1e6,
        "DRAM floor": bounds.dram_floor_s * 1e6,
        "link floor": bounds.link_floor_s * 1e6,
    }
