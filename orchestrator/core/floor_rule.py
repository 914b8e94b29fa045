"""Never stay in a split that is measured slower than the better single branch.

A prediction may be wrong in ways that no rate shows (a scheduler, a driver, a governor). So the
three *arms* are measured against each other: `split` (what the planner says), `fill` (every miss
over the link) and `cpu` (every miss on the CPU). Layer-steps differ in their misses, so what is
compared is measured time over a yardstick of the caller for that number of misses; any fixed one
serves, such as the least time by the calibrated costs.

    HOLD split --(every interval)--> PROBE cpu, fill --(one is better)--> HOLD that arm
    HOLD arm   --(every interval)--> PROBE split      --(it is no worse)--> HOLD split

A probe is `PROBE_STEPS` layer-steps of an arm, and an arm is judged by the median of its last
`PROBE_STEPS` results. A better arm is taken when it is better by more than `MARGIN`. Probing an arm
that loses costs time: each lost probe doubles its interval, up to `MAX_INTERVAL`; a change of the
rates (`rates_changed`) makes all of them short again, for old results mean nothing then. An arm
whose predicted time is more than `HOPELESS` times the split's is not tried.

Pure: it counts layer-steps that have misses, and is told what they took.
"""

from __future__ import annotations

from collections import deque
from typing import Literal

from orchestrator.core.rate_estimates import median

Arm = Literal["split", "fill", "cpu"]

PROBE_STEPS = 3
MARGIN = 0.03
MIN_INTERVAL = 64
MAX_INTERVAL = 4096
HOPELESS = 3.0


class FloorRule:
    """`next_arm()` before a layer-step with misses, `measured()` after it."""

    __slots__ = ("_clock", "_due", "_held", "_intervals", "_probing", "_results", "_used")

    def __init__(self) -> None:
        self._held: Arm = "split"
        self._probing: Arm | None = None
        self._clock = 0
        self._intervals: dict[Arm, int] = {}
        self._due: dict[Arm, int] = {}
        self._results: dict[Arm, deque[float]] = {}
        self._used: Arm = "split"
        self.rates_changed()

    @property
    def held(self) -> Arm:
        """The arm in use, probes aside."""
        return self._held

    def rates_changed(self) -> None:
        """Forget results and lost probes; the arm in use stays."""
        self._intervals = {"split": MIN_INTERVAL, "fill": MIN_INTERVAL, "cpu": MIN_INTERVAL}
        self._due = {
            "split": self._clock + MIN_INTERVAL,
            "cpu": self._clock + MIN_INTERVAL,
            "fill": self._clock + MIN_INTERVAL + MIN_INTERVAL // 2,
        }
        self._results = {arm: deque(maxlen=PROBE_STEPS) for arm in self._intervals}
        self._probing = None

    def next_arm(self, predicted_s: dict[Arm, float]) -> Arm:
        """What the next layer-step is to use.

        `predicted_s`: its predicted time by arm; an arm that cannot be used now is left out, and
        `split` is always there.
        """
        if self._held not in predicted_s:
            self._held, self._probing = "split", None
        if self._probing is None or self._probing not in predicted_s:
            self._probing = self._due_probe(predicted_s)
        self._used = self._probing or self._held
        return self._used

    def measured(self, relative: float) -> Arm | None:
        """The layer-step took `relative` times its yardstick. The arm that is held from now on if
        that has changed, else None."""
        self._clock += 1
        results = self._results[self._used]
        results.append(relative)
        if self._probing is None or len(results) < PROBE_STEPS:
            return None
        probed, self._probing = self._probing, None
        held = self._results[self._held]
        if len(held) < PROBE_STEPS:
            self._postpone(probed)
            return None
        mine, other = median(held), median(results)
        # Back to the split as soon as it is no worse; away from it only for a clear gain.
        wins = other <= mine if probed == "split" else other < mine * (1 - MARGIN)
        if not wins:
            self._intervals[probed] = min(2 * self._intervals[probed], MAX_INTERVAL)
            self._postpone(probed)
            return None
        self._held = probed
        for arm in self._intervals:
            self._intervals[arm] = MIN_INTERVAL
            self._postpone(arm)
        return probed

    # ---- inside ----

    def _postpone(self, arm: Arm) -> None:
        self._due[arm] = self._clock + self._intervals[arm]

    def _due_probe(self, predicted_s: dict[Arm, float]) -> Arm | None:
        limit_s = HOPELESS * predicted_s["split"]
        for arm, due in self._due.items():
            if arm == self._held or due > self._clock or arm not in predicted_s:
                continue
            if predicted_s[arm] > limit_s:
                self._postpone(arm)
                continue
            # A probe is judged by its own results, not by those of another time.
            self._results[arm].clear()
            return arm
        return None
