"""Rates of the two branches, kept true while serving: every fill and every CPU batch is a sample.

*Samples* are (bytes, start, end) with the workers' own stamps. A branch has two rates, alone and
beside the other, so the intervals of both branches are laid over each other first: o is the part of
a sample during which the other branch worked. A sample of d seconds moved

    bytes = d (1 - o) R_alone + d o R_beside

bytes, and is solved for the rate that had the larger part, with the present estimate of the other.
For that, both branches of a layer-step must be known: samples wait until `settle`, which is called
between two layer-steps, though not after each; until then no interval is forgotten.

*Robust.* Samples below `min_bytes` or of no duration say nothing and are dropped. An estimate is
the median of the last `WINDOW` samples of its kind, the calibrated rate standing in for those that
have not come yet: up to half of them may be too good to be true, and a change shows as soon as more
than half of them are new. It is less where standstills that come back cost more time than that
(see `usual_time`); now and then one changes nothing.

*Hysteresis.* `costs` follows an estimate once it is off by more than `FOLLOW_PART`, so that noise
does not rebuild the planner's tables; and a departure by more than `DRIFT_PART` from what was last
said is reported once, with both numbers, when three quarters of the samples have departed: samples
that scatter as widely as that have only become noisy. (Half of them do for a change by more than
`TWIN_PART`: a branch that slow may not be used again.) A rate that had no sample while most of the
window of the branch's other rate came moves with that when it has changed by more than `TWIN_PART`,
to less than half or more than twice: what cripples a CPU beside the link cripples it alone as well,
and nobody would find out while the planner avoids it. Smaller changes may well concern one of the
two alone; and a branch that recovers beside the other lifts what it does alone no higher than the
calibrated ratio of the two.

Pure: no clock; times are the stamps that came with the samples.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from typing import TYPE_CHECKING, Literal

import msgspec

from orchestrator.core.usual_time import REMEMBERED, lasting_mean, median

if TYPE_CHECKING:
    from collections.abc import Sequence

    from orchestrator.core.fluid_split import BranchCosts

Branch = Literal["link", "cpu"]

WINDOW = 7
FOLLOW_PART = 0.05
DRIFT_PART = 0.25
TWIN_PART = 1.0
MIN_SAMPLE_BYTES = 1 << 20
#: Intervals of a branch that were settled and may still overlap a later sample of the other.
_REMEMBERED_INTERVALS = 64
#: A sample is solved for a rate that had at least this part of it.
_CLEAR_PART = 0.7

_FIELDS: dict[tuple[Branch, bool], str] = {
    ("link", False): "link_bytes_per_s",
    ("link", True): "link_beside_cpu_bytes_per_s",
    ("cpu", False): "cpu_bytes_per_s",
    ("cpu", True): "cpu_beside_link_bytes_per_s",
}


class Drift(msgspec.Struct, frozen=True):
    """A rate is not what it was last said to be; bytes/s."""

    branch: Branch
    is_beside: bool
    old_bytes_per_s: float
    new_bytes_per_s: float

    def __str__(self) -> str:
        where = "beside the other branch" if self.is_beside else "alone"
        return (
            f"{self.branch} {where}: {self.old_bytes_per_s / 1e9:.2f} GB/s, "
            f"now {self.new_bytes_per_s / 1e9:.2f} GB/s"
        )


class _Sample(msgspec.Struct, frozen=True, gc=False):
    num_bytes: int
    start_ns: int
    end_ns: int


class RateEstimates:
    """Estimates of all four rates; `costs` is what the planner is to use now."""

    __slots__ = (
        "_calibrated",
        "_costs",
        "_intervals",
        "_min_bytes",
        "_said",
        "_silence",
        "_times",
        "_waiting",
        "_windows",
    )

    def __init__(
        self, costs: BranchCosts, *, min_bytes: int = MIN_SAMPLE_BYTES, window: int = WINDOW
    ) -> None:
        """`costs` as calibrated. Experts smaller than `min_bytes` count when they come in batches;
        for models of small experts state less, and a longer `window`."""
        self._costs = self._calibrated = costs
        self._min_bytes = min_bytes
        self._waiting: dict[Branch, list[_Sample]] = {"link": [], "cpu": []}
        self._intervals: dict[Branch, list[_Sample]] = {"link": [], "cpu": []}
        self._windows: dict[tuple[Branch, bool], deque[float]] = {}
        #: Seconds per byte of the same samples and of older ones, in the order they came.
        self._times: dict[tuple[Branch, bool], deque[float]] = {}
        #: Samples of a branch's other rate since the last one of this.
        self._silence: dict[tuple[Branch, bool], int] = {}
        self._said: dict[tuple[Branch, bool], float] = {}
        for kind, field in _FIELDS.items():
            rate = getattr(costs, field)
            self._windows[kind] = deque([rate] * window, maxlen=window)
            self._times[kind] = deque(maxlen=REMEMBERED)
            self._silence[kind] = 0
            self._said[kind] = rate

    @property
    def costs(self) -> BranchCosts:
        """The calibrated costs with the rates of now; a new object only when one has moved."""
        return self._costs

    def filled(self, num_bytes: int, start_ns: int, end_ns: int) -> None:
        """A copy over the link, from its first to its last byte."""
        self._take("link", _Sample(num_bytes, start_ns, end_ns))

    def executed(self, num_bytes: int, start_ns: int, end_ns: int) -> None:
        """A CPU batch: bytes of the experts it read."""
        self._take("cpu", _Sample(num_bytes, start_ns, end_ns))

    def set_fixed(self, costs: BranchCosts) -> None:
        """Take the fixed costs of `costs`, which has the present rates."""
        self._costs = costs

    def settle(self) -> list[Drift]:
        """Take in what has come since the last call; what has drifted, each drift once."""
        touched: set[tuple[Branch, bool]] = set()
        for branch, samples in self._waiting.items():
            if not samples:
                continue
            others = sorted(self._intervals["cpu" if branch == "link" else "link"], key=_start_ns)
            first = reached_ns = 0
            for sample in samples:
                # They come in the order of their starts, mostly: no need to look at all others.
                if sample.start_ns < reached_ns:
                    first = 0
                reached_ns = sample.start_ns
                while first < len(others) and others[first].end_ns <= sample.start_ns:
                    first += 1
                last = bisect_left(others, sample.end_ns, first, key=_start_ns)
                kind = self._learn(branch, sample, others[first:last])
                if kind is not None:
                    touched.add(kind)
            samples.clear()
        for intervals in self._intervals.values():
            del intervals[:-_REMEMBERED_INTERVALS]
        return self._follow(touched) if touched else []

    # ---- inside ----

    def _take(self, branch: Branch, sample: _Sample) -> None:
        if sample.end_ns <= sample.start_ns or sample.num_bytes <= 0:
            return
        self._intervals[branch].append(sample)
        if sample.num_bytes >= self._min_bytes:
            self._waiting[branch].append(sample)

    def _learn(
        self, branch: Branch, sample: _Sample, others: Sequence[_Sample]
    ) -> tuple[Branch, bool] | None:
        """Put one sample into its window; None if neither rate had a clear part of it."""
        span_ns = sample.end_ns - sample.start_ns
        beside = overlap_ns(sample.start_ns, sample.end_ns, others) / span_ns
        is_beside = beside >= _CLEAR_PART
        if not is_beside and 1 - beside < _CLEAR_PART:
            return None
        part = beside if is_beside else 1 - beside
        other_rate = getattr(self._costs, _FIELDS[branch, not is_beside])
        rate = sample.num_bytes / (span_ns * 1e-9)
        # Never below what the whole sample would say if the rest of it had moved at that rate too.
        solved = max((rate - (1 - part) * other_rate) / part, rate * part)
        self._windows[branch, is_beside].append(solved)
        self._times[branch, is_beside].append(1 / solved)
        self._silence[branch, is_beside] = 0
        self._silence[branch, not is_beside] += 1
        return branch, is_beside

    def _most_alone(self, kind: tuple[Branch, bool], beside: float) -> float:
        """What a branch does alone at most, now that it is known to recover beside the other: no
        less than was reckoned with, and no more than it had over `beside` when calibrated."""
        alone = getattr(self._calibrated, _FIELDS[kind])
        was_beside = getattr(self._calibrated, _FIELDS[kind[0], True])
        most = beside * alone / was_beside if was_beside > 0 else beside
        return max(getattr(self._costs, _FIELDS[kind]), most)

    def _estimate(self, kind: tuple[Branch, bool]) -> float:
        rate = median(self._windows[kind])
        lasting_s = lasting_mean(self._times[kind])
        return min(rate, 1 / lasting_s) if lasting_s else rate

    def _follow(self, touched: set[tuple[Branch, bool]]) -> list[Drift]:
        changes: dict[str, float] = {}
        for kind in touched:
            used = getattr(self._costs, _FIELDS[kind])
            estimate = self._estimate(kind)
            if not _is_off(estimate, used, FOLLOW_PART):
                continue
            changes[_FIELDS[kind]] = estimate
            twin = (kind[0], not kind[1])
            is_silent = self._silence[twin] > len(self._windows[kind]) // 2
            if is_silent and used > 0 and _is_off(estimate, used, TWIN_PART):
                other = getattr(self._costs, _FIELDS[twin]) * estimate / used
                if kind[1] and estimate > used:
                    other = min(other, self._most_alone(twin, estimate))
                changes[_FIELDS[twin]] = other
                window = self._windows[twin]
                window.extend([other] * len(window))
                self._times[twin].clear()
        if changes:
            self._costs = msgspec.structs.replace(self._costs, **changes)
        drifts: list[Drift] = []
        for kind in sorted(touched):
            said, results = self._said[kind], sorted(self._windows[kind])
            least, most = results[len(results) // 4], results[-1 - len(results) // 4]
            now = getattr(self._costs, _FIELDS[kind])
            has_departed = least > said * (1 + DRIFT_PART) or most * (1 + DRIFT_PART) < said
            if now > said and _is_off(now, median(results), DRIFT_PART):
                continue  # on its way back: said when it has arrived
            if (has_departed and _is_off(now, said, FOLLOW_PART)) or _is_off(now, said, TWIN_PART):
                drifts.append(Drift(kind[0], kind[1], said, now))
                self._said[kind] = now
        return drifts


def overlap_ns(start_ns: int, end_ns: int, others: Sequence[_Sample]) -> int:
    """How much of [start, end) is covered by the union of `others`."""
    covered_ns, reached_ns = 0, start_ns
    near = [other for other in others if other.end_ns > start_ns and other.start_ns < end_ns]
    for other in sorted(near, key=_start_ns):
        begin_ns, finish_ns = max(other.start_ns, reached_ns), min(other.end_ns, end_ns)
        if finish_ns > begin_ns:
            covered_ns += finish_ns - begin_ns
            reached_ns = finish_ns
    return covered_ns


def _start_ns(sample: _Sample) -> int:
    return sample.start_ns


def _is_off(rate: float, reference: float, part: float) -> bool:
    """Whether two rates differ by more than `part` of the smaller one."""
    low, high = min(rate, reference), max(rate, reference)
    return high > low * (1 + part)
