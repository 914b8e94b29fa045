"""Durations by stage, in bounded memory: exact for tens of thousands of samples, thinned beyond.

Every series keeps its count, sum and maximum exactly. Of the values it keeps every first, then
every second, every fourth ... as it grows, so that a long run costs no more memory than a short
one and its percentiles come from evenly spaced samples.
"""

from __future__ import annotations

from array import array

from protocol.messages import StageStats

_MAX_SAMPLES = 1 << 15


class Series:
    """Durations of one stage, in ns."""

    __slots__ = ("_countdown", "_samples", "_stride", "max_ns", "num", "sum_ns")

    def __init__(self) -> None:
        self._samples = array("q")
        self._stride = 1
        self._countdown = 1
        self.num = 0
        self.sum_ns = 0
        self.max_ns = 0

    def add(self, duration_ns: int) -> None:
        self.num += 1
        self.sum_ns += duration_ns
        if duration_ns > self.max_ns:
            self.max_ns = duration_ns
        self._countdown -= 1
        if self._countdown:
            return
        self._samples.append(duration_ns)
        if len(self._samples) == _MAX_SAMPLES:
            self._samples = self._samples[::2]
            self._stride *= 2
        self._countdown = self._stride

    def stats(self, whole_ns: int) -> StageStats:
        """Percentiles in us; `share` is the sum over `whole_ns` (0 when nothing is known)."""
        ordered = sorted(self._samples)
        return StageStats(
            p50_us=percentile(ordered, 50) / 1e3,
            p95_us=percentile(ordered, 95) / 1e3,
            p99_us=percentile(ordered, 99) / 1e3,
            max_us=self.max_ns / 1e3,
            share=self.sum_ns / whole_ns if whole_ns else 0.0,
            num_samples=self.num,
        )


class StageTimes:
    """Series by stage name, in order of first use."""

    __slots__ = ("_series",)

    def __init__(self) -> None:
        self._series: dict[str, Series] = {}

    def add(self, stage: str, duration_ns: int) -> None:
        series = self._series.get(stage)
        if series is None:
            series = self._series[stage] = Series()
        series.add(duration_ns)

    def stats(self, whole: str) -> dict[str, StageStats]:
        """Statistics of all stages, shares of the sum of stage `whole`."""
        whole_series = self._series.get(whole)
        whole_ns = whole_series.sum_ns if whole_series else 0
        return {stage: series.stats(whole_ns) for stage, series in self._series.items()}


def percentile(ordered: list[int], percent: int) -> int:
    """The least value that at least `percent` % of `ordered` do not exceed (nearest rank)."""
    if not ordered:
        return 0
    rank = -(-len(ordered) * percent // 100)
    return ordered[max(rank, 1) - 1]
