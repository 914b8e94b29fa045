"""Numbers out of samples. Pure; durations in seconds, sizes in bytes."""

from __future__ import annotations

import math
import statistics
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence

#: Two neighbours that differ by less than this are equal: the sweep is flat there.
FLAT_PART = 0.05


class Line(msgspec.Struct, frozen=True):
    """T = fixed_s + bytes / bytes_per_s. `error_part` is the standard error of the rate as a part
    of it; `residual_part` the usual distance of a sample from the line, as a part of it."""

    fixed_s: float
    bytes_per_s: float
    error_part: float
    residual_part: float


def fit_line(samples: Sequence[tuple[float, float]]) -> Line:
    """Least squares through (bytes, seconds), after samples that were interrupted are left out:
    those more than half as long again as the median of their size. A negative fixed cost is noise
    and becomes 0.

    Raises:
        ValueError: fewer than three samples, or all of one size.
    """
    by_size: dict[float, list[float]] = {}
    for size, seconds in samples:
        by_size.setdefault(size, []).append(seconds)
    kept = [
        (size, seconds)
        for size, seconds in samples
        if seconds <= 1.5 * statistics.median(by_size[size])
    ]
    if len(kept) < 3 or len(by_size) < 2:
        raise ValueError("a line needs three samples of two sizes")
    mean_size = statistics.fmean(size for size, _ in kept)
    mean_s = statistics.fmean(seconds for _, seconds in kept)
    spread = sum((size - mean_size) ** 2 for size, _ in kept)
    slope = sum((size - mean_size) * (seconds - mean_s) for size, seconds in kept) / spread
    fixed_s = mean_s - slope * mean_size
    if fixed_s < 0 or slope <= 0:
        # Through the origin: what is left when the samples say nothing about a fixed cost.
        fixed_s = 0.0
        slope = sum(size * seconds for size, seconds in kept) / sum(size**2 for size, _ in kept)
    residuals = [seconds - fixed_s - slope * size for size, seconds in kept]
    variance = sum(residual**2 for residual in residuals) / (len(kept) - 2)
    return Line(
        fixed_s,
        1 / slope,
        math.sqrt(variance / spread) / slope,
        math.sqrt(variance) / mean_s,
    )


def first_flat(points: Sequence[tuple[int, float]]) -> int | None:
    """The size in `points` (size, rate), ascending, from which on the rate does not fall any more;
    None where it still falls at the end."""
    for index in range(len(points) - 1):
        rates = [rate for _, rate in points[index:]]
        if min(rates) >= rates[0] * (1 - FLAT_PART):
            return points[index][0]
    return None


def row_part(points: Sequence[tuple[int, float]]) -> float:
    """What one more row costs, as a part of the first: least squares through (rows, seconds per
    expert), held to the point of one row. At least 0."""
    first_s = next((seconds for rows, seconds in points if rows == 1), 0.0)
    if first_s <= 0:
        return 0.0
    above = sum((rows - 1) * (seconds - first_s) for rows, seconds in points)
    squares = sum((rows - 1) ** 2 for rows, _ in points)
    return max(above / squares / first_s, 0.0) if squares else 0.0
