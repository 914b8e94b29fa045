"""What a layer-step costs beside bytes: how long until each branch begins, and the GPU's time.

    routed --(message, decision, message)--> first byte over the link      link_fixed_s
           --(message, decision, message)--> the CPU's first byte          cpu_fixed_s
    a fill has landed --> computed on the device                           gpu_expert_s

On small experts these decide more than bandwidth does. Each is the usual time (see `usual_time`) of
its samples, by the median of the last `WINDOW` and the lasting mean; one that differs from what is
reckoned with by less than a quarter, or by less than `LEAST_CHANGE_S`, is noise. One that is twice
or half of what was last said, and `LEAST_LAG_S` away from it, is said: a worker that is kept from
running is late before it is slow, and late now and then before it is late each time.

Pure: durations are differences of the workers' own stamps.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Literal

import msgspec

from orchestrator.core.usual_time import REMEMBERED, usual_time

if TYPE_CHECKING:
    from orchestrator.core.fluid_split import BranchCosts

FixedCost = Literal["link_fixed_s", "cpu_fixed_s", "gpu_expert_s"]

WINDOW = 15
CHANGE_PART = 0.25
LEAST_CHANGE_S = 20e-6
LAG_FACTOR = 2.0
LEAST_LAG_S = 200e-6
#: Longer than this something went wrong, or somebody stood in a debugger.
MAX_SAMPLE_S = 1.0


class Lag(msgspec.Struct, frozen=True):
    """A fixed cost is not what it was last said to be; seconds."""

    cost: FixedCost
    old_s: float
    new_s: float

    def __str__(self) -> str:
        what = {
            "link_fixed_s": "link, until its first byte",
            "cpu_fixed_s": "cpu, until its first byte",
            "gpu_expert_s": "device, for a filled expert",
        }[self.cost]
        return f"{what}: {self.old_s * 1e6:.0f} us, now {self.new_s * 1e6:.0f} us"


class FixedCosts:
    """Collects samples; `improve` puts what they say into costs."""

    __slots__ = ("_said", "_samples")

    def __init__(self) -> None:
        names: tuple[FixedCost, ...] = ("link_fixed_s", "cpu_fixed_s", "gpu_expert_s")
        self._samples: dict[FixedCost, deque[float]] = {
            name: deque(maxlen=REMEMBERED) for name in names
        }
        self._said: dict[FixedCost, float] = {}

    def took(self, cost: FixedCost, duration_ns: int) -> None:
        """One sample; what cannot be is left out."""
        if 0 <= duration_ns <= MAX_SAMPLE_S * 1e9:
            self._samples[cost].append(duration_ns * 1e-9)

    def improve(self, costs: BranchCosts) -> tuple[BranchCosts, list[Lag]]:
        """`costs` with the fixed costs of now (the same object where nothing has changed), and what
        there is to say. The first figure of a cost is no news."""
        changes: dict[str, float] = {}
        lags: list[Lag] = []
        for name, samples in self._samples.items():
            if len(samples) < WINDOW:
                continue
            old, new = getattr(costs, name), usual_time(samples, WINDOW)
            if abs(new - old) > max(CHANGE_PART * old, LEAST_CHANGE_S):
                changes[name] = new
            said = self._said.setdefault(name, new)
            is_far = max(new, said) > LAG_FACTOR * min(new, said)
            if is_far and abs(new - said) > LEAST_LAG_S:
                lags.append(Lag(name, said, new))
                self._said[name] = new
        return (msgspec.structs.replace(costs, **changes) if changes else costs), lags
