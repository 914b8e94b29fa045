"""What a layer-step costs beside bytes: how long until each branch begins, and the GPU's time.

    routed --(message, decision, message)--> first byte over the link      link_fixed_s
           --(message, decision, message)--> the CPU's first byte          cpu_fixed_s
    a fill has landed --> computed on the device                           gpu_expert_s

On small experts these decide more than bandwidth does. Each is the median of the last `WINDOW`
samples; a median that differs from what is reckoned with by less than a quarter, or by less than
`LEAST_CHANGE_S`, is noise.

Pure: durations are differences of the workers' own stamps.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Literal

import msgspec

from orchestrator.core.rate_estimates import median

if TYPE_CHECKING:
    from orchestrator.core.fluid_split import BranchCosts

FixedCost = Literal["link_fixed_s", "cpu_fixed_s", "gpu_expert_s"]

WINDOW = 15
CHANGE_PART = 0.25
LEAST_CHANGE_S = 20e-6
#: Longer than this something went wrong, or somebody stood in a debugger.
MAX_SAMPLE_S = 1.0


class FixedCosts:
    """Collects samples; `improve` puts what they say into costs."""

    __slots__ = ("_samples",)

    def __init__(self) -> None:
        names: tuple[FixedCost, ...] = ("link_fixed_s", "cpu_fixed_s", "gpu_expert_s")
        self._samples: dict[FixedCost, deque[float]] = {
            name: deque(maxlen=WINDOW) for name in names
        }

    def took(self, cost: FixedCost, duration_ns: int) -> None:
        """One sample; what cannot be is left out."""
        if 0 <= duration_ns <= MAX_SAMPLE_S * 1e9:
            self._samples[cost].append(duration_ns * 1e-9)

    def improve(self, costs: BranchCosts) -> BranchCosts:
        """`costs` with the fixed costs of now; the same object where nothing has changed."""
        changes: dict[str, float] = {}
        for name, samples in self._samples.items():
            if len(samples) < WINDOW:
                continue
            old, new = getattr(costs, name), median(samples)
            if abs(new - old) > max(CHANGE_PART * old, LEAST_CHANGE_S):
                changes[name] = new
        return msgspec.structs.replace(costs, **changes) if changes else costs
