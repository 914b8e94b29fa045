"""The planners by name: the fluid model, the closed form, and plain rules to compare them with.

`closed-form`, `fill-only` and `cpu-only` are modes of `SplitPlanner`; `fixed-fraction` is here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from orchestrator.core.fluid_split import FluidSplit
from orchestrator.core.planner import FillMode, Split, SplitPlanner

if TYPE_CHECKING:
    from orchestrator.core.fluid_split import BranchCosts
    from orchestrator.core.planner import Rule

PLANNER_NAMES = ("fluid", "closed-form", "fixed-fraction", "fill-only", "cpu-only")
_AUTO = FillMode("auto")


class Planner(Protocol):
    """What a layer-step is split by."""

    def plan(
        self, num_misses: int, num_fillable: int, *, has_cpu: bool, has_link: bool
    ) -> Split: ...

    def set_costs(self, costs: BranchCosts) -> None: ...


class FixedFraction:
    """The fixed-fraction rule, for comparison: f = P_ov / (P_ov + C_ov) of the misses are filled,
    rounded plainly (halves to even), with both rates measured while both branches run.

    It carries nothing, so with f m < 0.5 in every layer-step it never fills.
    """

    __slots__ = ("_costs", "_fraction")

    def __init__(self, costs: BranchCosts) -> None:
        self.set_costs(costs)

    def set_costs(self, costs: BranchCosts) -> None:
        """New rates, from the next layer-step on."""
        self._costs = costs
        link, cpu = costs.link_beside_cpu_bytes_per_s, costs.cpu_beside_link_bytes_per_s
        self._fraction = link / (link + cpu) if link + cpu > 0 else 1.0

    @property
    def fraction(self) -> float:
        return self._fraction

    def plan(self, num_misses: int, num_fillable: int, *, has_cpu: bool, has_link: bool) -> Split:
        """As `SplitPlanner.plan`."""
        if num_misses < 0 or num_fillable < 0:
            raise ValueError(f"cannot split {num_misses} misses over {num_fillable} slots")
        rule: Rule = "balance"
        balanced = self._fraction * num_misses
        if not num_misses:
            rule, num_fills = "nothing", 0
        elif not has_cpu:
            rule, num_fills = ("no_cpu", num_misses) if has_link else ("wait", 0)
        elif not has_link:
            rule, num_fills = "no_link", 0
        else:
            num_fills = min(round(balanced), num_fillable)
        must_wait = rule == "wait"
        return Split(
            num_misses,
            num_fills,
            0 if must_wait else num_misses - num_fills,
            must_wait,
            rule,
            _AUTO,
            num_fills < round(balanced) and rule == "balance",
            self._costs.cpu_bytes_per_s,
            self._costs.link_bytes_per_s,
            balanced if rule == "balance" else 0.0,
            0.0,
        )


def make_planner(name: str, costs: BranchCosts) -> Planner:
    """A fresh planner by its command-line name; ValueError names the known ones."""
    host, link = costs.cpu_bytes_per_s, costs.link_bytes_per_s
    match name:
        case "fluid":
            return FluidSplit(costs)
        case "closed-form":
            return SplitPlanner(FillMode("auto"), host, link)
        case "fixed-fraction":
            return FixedFraction(costs)
        case "fill-only":
            return SplitPlanner(FillMode("all"), host, link)
        case "cpu-only":
            return SplitPlanner(FillMode("none"), host, link)
    raise ValueError(f"unknown planner {name!r}; known: {', '.join(PLANNER_NAMES)}")
