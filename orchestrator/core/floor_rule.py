"""Never stay in a split that is measured slower than the better single branch.

A prediction may be wrong in ways that no rate shows (a scheduler, a driver, a governor). So the
three *arms* are measured against each other: `split` (what the planner says), `fill` (every miss
over the link) and `cpu` (every miss on the CPU). Layer-steps differ in their misses, so what is
compared is measured time over a yardstick of the caller for that number of misses; any fixed one
serves, such as the least time by the calibrated costs.

    HOLD split --(every interval)--> PROBE cpu, fill --(one is better)--> HOLD that arm
    HOLD arm   --(every interval)--> PROBE split      --(it is no worse)--> HOLD split

A probe is `PROBE_STEPS` layer-steps of an arm, judged by the median; the arm in use is judged by
its usual time (see `usual_time`). A better arm is taken when it is better by more than `MARGIN`,
and the split is left only for what chance hardly shows: with one branch alone the cache stands
still, and a mistake costs more than the layer-steps that it was judged by.
Where results scatter widely, or either of the two has been seen to lose its time in standstills
that come now and then, a short probe says little: it goes on for `LONG_PROBE_STEPS`, and means are
compared. Each lost probe doubles its interval, up to `MAX_INTERVAL`; a change of the rates
(`rates_changed`) makes all of them short again. An arm whose latest results are `WORSE` than when
it was last judged is held against the others at once. What probes lose is bounded: none begins
while they have lost more than `PROBE_PART` of all layer-steps, and a long probe.

An arm whose predicted time is more than `HOPELESS` times the split's is only *looked at*: one
layer-step, whenever what it is predicted to lose fits into an allowance of `LOOK_PART` of all
predicted time. Nobody would find out otherwise that a branch is itself again which the planner
avoids. A look that took less than `HOPELESS` times the arm in use becomes a long probe. An arm in
use that is predicted hopeless is left, unless a long run of its own results says otherwise.

Pure: it counts layer-steps that have misses, and is told what they took.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Literal

from orchestrator.core.usual_time import REMEMBERED, median, usual_time

Arm = Literal["split", "fill", "cpu"]

PROBE_STEPS = 3
LONG_PROBE_STEPS = 24
MARGIN = 0.03
#: The split is left for a gain that is by so many standard errors more than that.
AWAY_ERRORS = 2.0
MIN_INTERVAL = 64
MAX_INTERVAL = 4096
HOPELESS = 3.0
LOOK_PART = 0.005
PROBE_PART = 0.01
WORSE = 1.7
#: Latest results that show it.
_NUM_LATEST = 16
#: Results scatter when half of them lie within more than this part of their median.
_SCATTER_PART = 0.3
#: An arm loses time now and then when its usual time is so much more than its median.
_LUMPY_FACTOR = 1.25


class FloorRule:
    """`next_arm()` before a layer-step with misses, `measured()` after it."""

    __slots__ = (
        "_allowance_s",
        "_budget",
        "_clock",
        "_due",
        "_held",
        "_intervals",
        "_is_long",
        "_is_look",
        "_lumpy",
        "_num_proofs",
        "_probing",
        "_reference",
        "_results",
        "_used",
    )

    def __init__(self) -> None:
        self._held: Arm = "split"
        self._probing: Arm | None = None
        #: Whether the probe is of an arm that is predicted to be hopeless, and was not looked at.
        self._is_look = False
        #: Whether it needs LONG_PROBE_STEPS in any case.
        self._is_long = False
        #: Results of the arm in use that are no older than the rates.
        self._num_proofs = 0
        #: Arms that lost time now and then when they were last seen for long.
        self._lumpy: set[Arm] = set()
        self._allowance_s = 0.0
        self._clock = 0
        self._intervals: dict[Arm, int] = {}
        self._due: dict[Arm, int] = {}
        self._results: dict[Arm, deque[float]] = {
            arm: deque(maxlen=REMEMBERED) for arm in ("split", "fill", "cpu")
        }
        #: The median of the arm in use when it was last judged; 0.0: it never was.
        self._reference = 0.0
        #: Layer-steps that probes may still lose.
        self._budget = float(LONG_PROBE_STEPS)
        self._used: Arm = "split"
        self.rates_changed()

    @property
    def held(self) -> Arm:
        """The arm in use, probes aside."""
        return self._held

    def rates_changed(self) -> None:
        """Forget lost probes; the arm in use stays, and is held against the split next. Probes that
        are due before long stay due: rates that change all the time put nothing off. A probe in
        progress goes on: it is most likely what the news came from."""
        self._intervals = {"split": MIN_INTERVAL, "fill": MIN_INTERVAL, "cpu": MIN_INTERVAL}
        soon: dict[Arm, int] = {
            "split": self._clock + MIN_INTERVAL,
            "cpu": self._clock + MIN_INTERVAL,
            "fill": self._clock + MIN_INTERVAL + MIN_INTERVAL // 2,
        }
        self._due = {arm: min(due, self._due.get(arm, due)) for arm, due in soon.items()}
        if self._held != "split":
            self._due["split"] = self._clock
        self._num_proofs = 0

    def next_arm(self, predicted_s: dict[Arm, float]) -> Arm:
        """What the next layer-step is to use.

        `predicted_s`: its predicted time by arm; an arm that cannot be used now is left out, and
        `split` is always there.
        """
        held_s = predicted_s.get(self._held, float("inf"))
        is_proven = self._num_proofs >= LONG_PROBE_STEPS and held_s < float("inf")
        if held_s > HOPELESS * predicted_s["split"] and not is_proven:
            self._held, self._probing = "split", None
        self._allowance_s += LOOK_PART * min(predicted_s.values())
        if self._probing is None or self._probing not in predicted_s:
            self._probing = self._due_probe(predicted_s)
        self._used = self._probing or self._held
        return self._used

    def measured(self, relative: float) -> Arm | None:
        """The layer-step took `relative` times its yardstick. The arm that is held from now on if
        that has changed, else None."""
        self._clock += 1
        self._num_proofs += self._used == self._held
        self._budget = min(self._budget + PROBE_PART, LONG_PROBE_STEPS)
        results = self._results[self._used]
        results.append(relative)
        held = self._results[self._held]
        if self._probing is None:
            if relative > WORSE * self._reference:
                self._watch(held)
            return None
        if not (self._is_look or len(results) >= PROBE_STEPS):
            return None
        mine, middle = usual_time(held, REMEMBERED), median(held)
        if self._is_look:
            self._is_look = False
            if relative >= HOPELESS * mine:
                self._lose(self._probing)
            return None
        self._reference = middle
        self._see(self._held, mine, middle, len(held) >= LONG_PROBE_STEPS)
        other = median(results)
        if self._is_long or self._lumpy & {self._held, self._probing} or _scatters(held):
            mine, other = sum(held) / len(held), sum(results) / len(results)
            is_lost = sum(results) > LONG_PROBE_STEPS * mine
            if len(results) < LONG_PROBE_STEPS and not is_lost:
                return None
            self._see(self._probing, other, median(results), len(results) >= LONG_PROBE_STEPS)
        self._budget -= max(sum(results) / mine - len(results), 0.0)
        # Back to the split as soon as it is no worse; away from it only for a clear gain.
        least = mine if self._probing == "split" else mine * (1 - MARGIN)
        if self._held == "split":
            least -= AWAY_ERRORS * math.hypot(_error(held), _error(results))
        if other > least or (other == least and self._probing != "split"):
            self._lose(self._probing)
            return None
        self._held, self._probing = self._probing, None
        self._num_proofs = len(results)
        self._reference = median(results)
        for arm in self._intervals:
            self._intervals[arm] = MIN_INTERVAL
            self._postpone(arm)
        return self._held

    # ---- inside ----

    def _watch(self, held: deque[float]) -> None:
        """Whether the arm in use has become worse; then only what shows it counts."""
        if len(held) < _NUM_LATEST or not self._reference:
            return
        latest = list(held)[-_NUM_LATEST:]
        now = median(latest)
        if now > WORSE * self._reference:
            self._reference, self._budget = now, max(self._budget, 1.0)
            held.clear()
            held.extend(latest[_NUM_LATEST // 2 :])
            self._due = dict.fromkeys(self._due, self._clock)
            self._intervals = dict.fromkeys(self._intervals, MIN_INTERVAL)

    def _see(self, arm: Arm, usual: float, middle: float, is_long: bool) -> None:
        """Whether `arm` loses time now and then; a few results that do not show it say nothing."""
        if usual > _LUMPY_FACTOR * middle:
            self._lumpy.add(arm)
        elif is_long:
            self._lumpy.discard(arm)

    def _lose(self, probed: Arm) -> None:
        self._probing = None
        self._intervals[probed] = min(2 * self._intervals[probed], MAX_INTERVAL)
        self._postpone(probed)

    def _postpone(self, arm: Arm) -> None:
        self._due[arm] = self._clock + self._intervals[arm]

    def _is_known(self) -> bool:
        """Whether there are results of the arm in use to compare with."""
        held = self._results[self._held]
        if len(held) < PROBE_STEPS:
            return False
        is_vague = self._held in self._lumpy or _scatters(held)
        return not is_vague or len(held) >= LONG_PROBE_STEPS

    def _due_probe(self, predicted_s: dict[Arm, float]) -> Arm | None:
        due_arms = [
            arm
            for arm, due in self._due.items()
            if due <= self._clock and arm != self._held and arm in predicted_s
        ]
        if not due_arms or self._budget < 0 or not self._is_known():
            return None
        least_s = min(predicted_s.values())
        for arm in due_arms:
            self._is_look = self._is_long = predicted_s[arm] > HOPELESS * predicted_s["split"]
            if self._is_look:
                loss_s = predicted_s[arm] - least_s
                if not loss_s <= self._allowance_s:
                    continue
                self._allowance_s -= loss_s
            # A probe is judged by its own results, not by those of another time.
            self._results[arm].clear()
            return arm
        return None


def _error(results: deque[float]) -> float:
    """The standard error of their mean; 0.0 of a single one, of which nothing is known."""
    count = len(results)
    mean = sum(results) / count
    variance = sum((result - mean) ** 2 for result in results) / max(count - 1, 1)
    return math.sqrt(variance / count)


def _scatters(results: deque[float]) -> bool:
    ordered = sorted(results)
    quarter = len(ordered) // 4
    return ordered[-1 - quarter] - ordered[quarter] > _SCATTER_PART * ordered[len(ordered) // 2]
