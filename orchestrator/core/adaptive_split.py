"""How the misses of a layer-step are treated, by rates that are kept true while serving.

Here the parts meet that each know one thing:

    FillChoice      which misses may be filled, best first
    planner         how many of them are
    FillBehind      which of those on the CPU are copied too
    RateEstimates   what the branches really do     -> new costs for the planner, and drifts
    FloorRule       split, or one branch alone?     -> now and then another arm

Rates that a person stated are kept as they are, and then nothing is learned. Learning happens in
`settle`, once the commands of a decision are out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from orchestrator.core.events import ArmTaken, Drifted
from orchestrator.core.fill_choice import BehindCopy, Candidates, FillBehind, FillChoice
from orchestrator.core.fixed_costs import FixedCosts
from orchestrator.core.floor_rule import FloorRule
from orchestrator.core.fluid_split import BranchCosts, FluidPlan, FluidSplit
from orchestrator.core.planner import FillMode, Split, SplitPlanner
from orchestrator.core.rate_estimates import MIN_SAMPLE_BYTES, WINDOW, RateEstimates
from orchestrator.core.split_rules import make_planner
from protocol.messages import ExpertKey

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from orchestrator.core.directory import ExpertDirectory
    from orchestrator.core.events import CoreConfig
    from orchestrator.core.fixed_costs import FixedCost
    from orchestrator.core.floor_rule import Arm
    from orchestrator.core.policies import EvictionPolicy
    from orchestrator.core.split_rules import Planner

#: Cost of one more row of an expert on the CPU, as a part of its first row's, until calibrated.
DEFAULT_CPU_ROW_PART = 0.15
#: Samples that an estimate is the middle of, at most.
_MAX_WINDOW = 31
#: A batch of more rows than this computes more than it reads and says nothing about a rate.
MAX_SAMPLE_ROWS = 8


class Decision(msgspec.Struct, frozen=True, gc=False):
    """Where the misses of a layer-step go; `fills` and `cpu` in router order."""

    fills: list[ExpertKey]
    cpu: list[ExpertKey]
    behind: list[BehindCopy]
    split: Split


class AdaptiveSplit:
    """Decides layer-step after layer-step, and learns from what they took."""

    __slots__ = (
        "_arm",
        "_base",
        "_behind",
        "_choice",
        "_config",
        "_estimates",
        "_fixed",
        "_floor",
        "_fluid",
        "_invested_s",
        "_is_auto",
        "_is_learning",
        "_planner",
        "_taken",
        "_yardstick",
    )

    def __init__(
        self,
        config: CoreConfig,
        policy: EvictionPolicy,
        last_demand: Callable[[ExpertKey], float],
        host_bytes_per_s: float,
        link_bytes_per_s: float,
    ) -> None:
        """ValueError if the fill mode, the planner or the fill-behind mode is unknown."""
        mode = FillMode.parse(config.fill_mode)
        self._config = config
        self._choice = FillChoice(policy, last_demand)
        self._is_auto = mode.kind == "auto" and config.planner not in ("fill-only", "cpu-only")
        is_stated = config.host_bytes_per_s is not None or config.link_bytes_per_s is not None
        self._is_learning = self._is_auto and not is_stated
        self._base = base = self._costs(host_bytes_per_s, link_bytes_per_s)
        self._planner: Planner
        if mode.kind == "auto":
            self._planner = make_planner(config.planner, base)
        else:
            self._planner = SplitPlanner(mode, host_bytes_per_s, link_bytes_per_s)
        self._fluid = self._planner if isinstance(self._planner, FluidSplit) else None
        self._behind = FillBehind(config.fill_behind if self._is_auto else "off", base)
        self._estimates: RateEstimates
        self._fixed: FixedCosts
        self._yardstick: FluidSplit
        self._floor = FloorRule() if self._fluid is not None and self._is_learning else None
        #: What the floor rule wants for the layer-step in progress; None where it has no say.
        self._arm: Arm | None = None
        #: What the layer-step in progress is expected to cost for the sake of later ones, seconds.
        self._invested_s = 0.0
        self._taken: list[ArmTaken] = []
        self._begin(base)

    @property
    def needs_last_demand(self) -> bool:
        """Whether anybody asks when an expert was last demanded."""
        return self._choice.needs_last_demand

    @property
    def costs(self) -> BranchCosts:
        """What the planner reckons with now."""
        return self._estimates.costs

    def set_rates(self, host_bytes_per_s: float, link_bytes_per_s: float) -> None:
        """B_H and B_P of who is here now; what was learned of others is forgotten."""
        costs = self._costs(host_bytes_per_s, link_bytes_per_s)
        if costs != self._base:
            self._base = costs
            self._begin(costs)

    def measured(self, costs: BranchCosts) -> None:
        """What both branches were measured at, whoever was here; learning goes on from there."""
        self._config = msgspec.structs.replace(self._config, costs=costs)
        self._base = costs
        self._begin(costs)

    def _costs(self, host_bytes_per_s: float, link_bytes_per_s: float) -> BranchCosts:
        config = self._config
        if config.costs is not None:
            return config.costs
        return BranchCosts.residual(
            config.expert_bytes,
            link_bytes_per_s,
            host_bytes_per_s,
            cpu_row_part=DEFAULT_CPU_ROW_PART,
        )

    def _begin(self, costs: BranchCosts) -> None:
        smallest = min(MIN_SAMPLE_BYTES, self._config.expert_bytes)
        # Times of small experts scatter, and there are many of them.
        window = min(WINDOW * (MIN_SAMPLE_BYTES // smallest) | 1, _MAX_WINDOW)
        self._estimates = RateEstimates(costs, min_bytes=smallest, window=window)
        self._fixed = FixedCosts()
        self._yardstick = FluidSplit(costs)
        if self._floor is not None:
            self._floor.rates_changed()
        self._arm = None
        self._follow(costs)

    def _follow(self, costs: BranchCosts) -> None:
        """Plan by these costs from now on."""
        self._behind.set_costs(costs)
        self._planner.set_costs(costs)

    # ---- the decision ----

    def adopts(self, *, has_cpu: bool) -> bool:
        """Whether a miss that is on its way is waited for; else the CPU runs it. About half of
        such a copy is still to come."""
        costs = self._estimates.costs
        return (
            not has_cpu or not self._is_auto or 2 * costs.link_bytes_per_s >= costs.cpu_bytes_per_s
        )

    def decide(
        self,
        directory: ExpertDirectory,
        misses: list[ExpertKey],
        arriving: list[ExpertKey],
        rows: dict[ExpertKey, int] | None,
        *,
        has_cpu: bool,
        has_link: bool,
        num_adopted: int = 0,
        num_in_flight: int = 0,
        is_guest: bool = False,
    ) -> Decision:
        """After `directory.layer_step` and after the hits were pinned.

        `misses` have no slot, `arriving` are on their way and the CPU runs them all the same;
        `rows` of each of both, None for one row each. `num_adopted` more are on their way and
        waited for, `num_in_flight` copies are on their way in all. The fills of a guest go through
        few slots, one after the other, and nothing is copied behind for it.
        """
        self._arm = None
        self._invested_s = 0.0
        num_misses = len(misses) + len(arriving)
        if not num_misses:
            split = self._planner.plan(0, 0, has_cpu=has_cpu, has_link=has_link)
            return Decision([], [], [], split)
        if not is_guest and rows is None and not num_adopted and has_cpu and has_link:
            alone = self._floor_plan(directory, num_misses, may_fill=not arriving)
            if alone is not None:  # all on one branch: which is best to fill is not asked
                if alone.num_fills:
                    return Decision(misses, [], [], alone)
                return Decision([], misses + arriving, [], alone)
        if is_guest:
            candidates = _of_guest(directory, misses, rows)
            rows = rows or dict.fromkeys([*misses, *arriving], 1)
        else:
            candidates = self._choice.candidates(directory, misses)
        split = self._split(
            candidates, arriving, rows, num_adopted, has_cpu=has_cpu, has_link=has_link
        )
        num_fills = split.num_fills
        if num_fills == 0:
            fills, on_cpu = [], misses
        elif num_fills == len(misses):
            fills, on_cpu = misses, []
        else:
            chosen = set(candidates.ranked[:num_fills])
            fills = [key for key in misses if key in chosen]
            on_cpu = [key for key in misses if key not in chosen]
        behind: list[BehindCopy] = []
        if split.rule == "balance" and split.num_cpu and not is_guest:
            behind = self._behind.choose(candidates, num_fills, num_in_flight)
        if self._floor is not None:
            self._invested_s = self._investment_s(split, behind)
        return Decision(fills, on_cpu + arriving if arriving else on_cpu, behind, split)

    def _floor_plan(
        self, directory: ExpertDirectory, num_misses: int, *, may_fill: bool
    ) -> Split | None:
        """All of them on one branch, if the floor rule wants that now."""
        fluid, floor = self._fluid, self._floor
        if fluid is None or floor is None:
            return None
        times_s = fluid.times_s(num_misses)
        predicted_s: dict[Arm, float] = {"split": min(times_s), "cpu": times_s[0]}
        if may_fill and directory.num_reservable >= num_misses:
            predicted_s["fill"] = times_s[-1]
        held = floor.held
        self._arm = arm = floor.next_arm(predicted_s)
        if floor.held != held:
            self._taken.append(ArmTaken(floor.held))
        if arm == "split":
            return None
        return fluid.alone(num_misses, num_misses if arm == "fill" else 0)

    def _investment_s(self, split: Split, behind: list[BehindCopy]) -> float:
        """A credited fill, and what copies beside the CPU take from it: no fault of the split, for
        they pay later, in hits that a comparison by misses does not see."""
        costs = self._estimates.costs
        num_beside = sum(copy.is_beside_cpu for copy in behind)
        lost_s = 0.0
        if num_beside and costs.cpu_bytes_per_s:
            lost_s = num_beside * self._behind.price * costs.expert_bytes / costs.cpu_bytes_per_s
        if isinstance(split, FluidPlan):
            lost_s += split.predicted_s - split.least_s
        return lost_s

    def _split(
        self,
        candidates: Candidates,
        arriving: Sequence[ExpertKey],
        rows: dict[ExpertKey, int] | None,
        num_adopted: int,
        *,
        has_cpu: bool,
        has_link: bool,
    ) -> Split:
        num_misses = len(candidates.ranked) + len(arriving)
        num_admitted = candidates.num_admitted
        fluid = self._fluid
        if fluid is None or (rows is None and not num_adopted):
            return self._planner.plan(num_misses, num_admitted, has_cpu=has_cpu, has_link=has_link)
        weights = None
        if rows is not None:
            weights = [rows[key] for key in (*candidates.ranked, *arriving)]
        return fluid.plan(
            num_misses,
            num_admitted,
            has_cpu=has_cpu,
            has_link=has_link,
            rows=weights,
            link_ahead_bytes=0.5 * num_adopted * self._config.expert_bytes,
        )

    # ---- what it took ----

    def filled(self, num_bytes: int, started_ns: int, ended_ns: int) -> None:
        """A copy has landed."""
        if self._is_learning:
            self._estimates.filled(num_bytes, started_ns, ended_ns)

    def executed(
        self, num_experts: int, rows: Sequence[int], started_ns: int, ended_ns: int
    ) -> None:
        """A cpu_worker has computed `num_experts` of `rows` rows each."""
        if not self._is_learning or max(rows, default=0) > MAX_SAMPLE_ROWS:
            return
        costs = self._base
        weight = num_experts + costs.cpu_row_part * (sum(rows) - num_experts)
        self._estimates.executed(round(weight * costs.expert_bytes), started_ns, ended_ns)

    def took(self, cost: FixedCost, duration_ns: int) -> None:
        """One sample of a fixed cost."""
        if self._is_learning:
            self._fixed.took(cost, duration_ns)

    def joined(self, num_misses: int, took_ns: int) -> None:
        """The layer-step took so long from its routing to the end of its last branch."""
        if self._arm is None or self._floor is None or took_ns <= 0:
            return
        self._arm = None
        least_s = min(self._yardstick.times_s(num_misses))
        if not 0 < least_s < float("inf"):
            return
        taken = self._floor.measured(max(took_ns * 1e-9 - self._invested_s, 0.0) / least_s)
        if taken is not None:
            self._taken.append(ArmTaken(taken))

    def settle(self) -> list[Drifted | ArmTaken]:
        """Learn from what was reported since; what there is to say about it."""
        news: list[Drifted | ArmTaken] = []
        if self._is_learning:
            before = self._estimates.costs
            news += [Drifted(drift) for drift in self._estimates.settle()]
            costs, lags = self._fixed.improve(self._estimates.costs)
            news += [Drifted(lag) for lag in lags]
            if costs is not before:
                self._estimates.set_fixed(costs)
                self._follow(costs)
            if news and self._floor is not None:
                self._floor.rates_changed()
        if self._taken:
            news += self._taken
            self._taken = []
        return news


def _of_guest(
    directory: ExpertDirectory, misses: list[ExpertKey], rows: dict[ExpertKey, int] | None
) -> Candidates:
    """A guest's misses, those of most rows first: they are where the device gains most. With two
    slots one is copied into while the other is read, so any number may follow each other."""
    ranked = misses if rows is None else sorted(misses, key=lambda key: -rows[key])
    num_at_once = len(misses) if directory.max_guests > 1 else int(directory.can_host)
    return Candidates(ranked, [0.0] * min(num_at_once, len(misses)))
