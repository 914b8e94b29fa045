"""What is measured, in which order; see the package.

warm-up                     clocks rise, pages are touched, nothing counts
sweep                       the CPU on working sets that double, until its rate is flat
rounds of three             CPU alone | link alone | both     (interleaved: a machine that
                            changes meanwhile shows as scatter, not as a false difference)
rows                        the CPU with 1, 2, 4, 8 rows per expert
"""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

import msgspec

from orchestrator.calibrate.bench import MAX_ROWS
from orchestrator.calibrate.fits import Line, first_flat, fit_line, row_part

if TYPE_CHECKING:
    from collections.abc import Callable

    from expert_store.layout import StoreLayout
    from orchestrator.calibrate.driver import Driver, Sample

_CPU_SIZES = (1, 2, 3, 4, 6, 8)
_LINK_SIZES = (1, 2, 3, 4)
_ROWS = (1, 2, 4, MAX_ROWS)
_SMALLEST_SET_BYTES = 16 << 20


class Plan(msgspec.Struct, frozen=True):
    """How long each part takes, seconds."""

    warm_up_s: float
    sweep_s: float
    round_s: float
    num_rounds: int
    rows_s: float

    def total_s(self, num_sets: int) -> float:
        return (
            2 * self.warm_up_s
            + num_sets * self.sweep_s
            + 3 * self.num_rounds * self.round_s
            + len(_ROWS) * self.rows_s
        )


THOROUGH = Plan(0.3, 0.5, 1.0, 3, 0.5)
QUICK = Plan(0.1, 0.1, 0.25, 2, 0.1)


class Measured(msgspec.Struct, frozen=True):
    """The outcome. Rates in bytes/s, durations in seconds. `working_sets` and `rows` are the points
    that were measured: (bytes, bytes/s) and (rows, seconds per expert)."""

    link: Line
    cpu: Line
    link_beside_bytes_per_s: float
    cpu_beside_bytes_per_s: float
    link_way_s: float
    cpu_way_s: float
    cpu_row_part: float
    flat_from_bytes: int | None
    working_sets: list[tuple[int, float]]
    rows: list[tuple[int, float]]


async def measure(
    bench: Driver, layout: StoreLayout, plan: Plan, report: Callable[[float, str], None]
) -> Measured:
    """Run the course; `report(part of it done, what is next)`."""
    sets = working_sets(layout)
    total_s = plan.total_s(len(sets))
    done_s = 0.0

    def next_part(seconds: float, text: str) -> None:
        nonlocal done_s
        report(done_s / total_s, text)
        done_s += seconds

    next_part(2 * plan.warm_up_s, "warming up")
    await bench.run_cpu(plan.warm_up_s, sizes=(layout.top_k,))
    await bench.run_link(plan.warm_up_s)
    points: list[tuple[int, float]] = []
    for num_experts in sets:
        set_bytes = num_experts * layout.block_bytes
        next_part(plan.sweep_s, f"CPU, working set of {set_bytes / 1e6:.0f} MB")
        samples = await bench.run_cpu(plan.sweep_s, sizes=(layout.top_k,), num_experts=num_experts)
        points.append((set_bytes, median_rate(samples, layout.expert_bytes)))
    cpu: list[Sample] = []
    link: list[Sample] = []
    link_beside: list[Sample] = []
    cpu_beside: list[Sample] = []
    for number in range(plan.num_rounds):
        name = f"round {number + 1} of {plan.num_rounds}"
        next_part(plan.round_s, f"{name}: CPU alone")
        cpu += await bench.run_cpu(plan.round_s, sizes=_CPU_SIZES)
        next_part(plan.round_s, f"{name}: link alone")
        link += await bench.run_link(plan.round_s, sizes=_LINK_SIZES)
        next_part(plan.round_s, f"{name}: both")
        copies, batches = await bench.run_both(plan.round_s)
        link_beside += copies
        cpu_beside += batches
    rows: list[tuple[int, float]] = []
    for num_rows in _ROWS:
        next_part(plan.rows_s, f"CPU, {num_rows} rows per expert")
        samples = await bench.run_cpu(plan.rows_s, sizes=(layout.top_k,), num_rows=num_rows)
        rows.append((num_rows, statistics.median(s.work_s / s.num_experts for s in samples)))
    report(1.0, "done")
    return Measured(
        link=line_of(link, layout.expert_bytes),
        cpu=line_of(cpu, layout.expert_bytes),
        link_beside_bytes_per_s=median_rate(link_beside, layout.expert_bytes),
        cpu_beside_bytes_per_s=median_rate(cpu_beside, layout.expert_bytes),
        link_way_s=way_s(link),
        cpu_way_s=way_s(cpu),
        cpu_row_part=row_part(rows),
        flat_from_bytes=first_flat(points),
        working_sets=points,
        rows=rows,
    )


def working_sets(layout: StoreLayout) -> list[int]:
    """Numbers of experts that double, up to the whole store."""
    whole = layout.num_experts[0]
    sets = [whole]
    while sets[-1] // 2 >= 2 * layout.top_k:
        if sets[-1] // 2 * layout.block_bytes < _SMALLEST_SET_BYTES:
            break
        sets.append(sets[-1] // 2)
    return sets[::-1]


def median_rate(samples: list[Sample], expert_bytes: int) -> float:
    """bytes/s of the middle sample."""
    return statistics.median(
        sample.num_experts * expert_bytes / sample.work_s for sample in samples if sample.work_s
    )


def way_s(samples: list[Sample]) -> float:
    """From a command to the first byte, seconds; the middle one."""
    return statistics.median(sample.way_s for sample in samples)


def line_of(samples: list[Sample], expert_bytes: int) -> Line:
    """T = a + bytes / B through the samples; through the origin where they are too few."""
    points = [(float(s.num_experts * expert_bytes), s.work_s) for s in samples]
    try:
        return fit_line(points)
    except ValueError:
        return Line(0.0, median_rate(samples, expert_bytes), 1.0, 1.0)
