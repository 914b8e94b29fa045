"""The split of least predicted time: a fluid model of two branches that share the host's memory.

Each branch moves bytes at one of two rates, alone or beside the other one, and has a fixed cost
before its first byte. So q fills of S bytes and a CPU batch of w S bytes (w: experts, weighted by
their rows) end like this:

    link  |-- q a_P --|=====================|...GPU computes the last fill
    cpu   |- a_C -|==============================|
                   alone  both at the rates        alone
                          beside each other

    T(q) = the later of: the link's end plus the GPU's time for what came last; the CPU's end

`FluidSplit` evaluates T for every whole q from 0 to m and takes the least; of equals the largest,
because a fill pays again later. Costs depend on the machine and on m alone, as long as every expert
has one row and the link is idle, so these tables are kept until the rates change.

*Credit.* A whole q of least time may be 0 in every layer-step, and the cache never warms. The
fractional optimum x (T is least where both branches end together, or with one branch alone) says
what was owed:

    owed = credit + x         credit := owed - q, within [0, 1]

When owed reaches the best q plus one, one more miss is filled than is best now. That costs
T(q + 1) - T(q), and is paid from an *allowance* that grows by `loss_part` of every T(q) and never
exceeds the time of one fill. So whatever is credited, the predicted time of any run of layer-steps
is at most (1 + loss_part) x the least possible plus one fill: a bound that does not depend on the
rates.

Plain rules to compare with are in `split_rules`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from orchestrator.core.planner import FillMode, Split

if TYPE_CHECKING:
    from collections.abc import Sequence

    from orchestrator.core.planner import Rule

#: Part of the predicted time that credited fills may cost.
DEFAULT_LOSS_PART = 0.02
MAX_CREDIT = 1.0
# Two predictions this close are equal: rates are not known to nine digits.
_TIE = 1e-9
_ROUNDING = 1e-9
_AUTO = FillMode("auto")


class BranchCosts(msgspec.Struct, frozen=True):
    """What the two branches cost on this machine, each alone and beside the other.

    Rates in bytes/s of expert weights, times in seconds. `cpu_row_part` is the cost of one more row
    of an expert on the CPU, as a part of the cost of its first row.
    """

    expert_bytes: int
    link_bytes_per_s: float
    link_beside_cpu_bytes_per_s: float
    cpu_bytes_per_s: float
    cpu_beside_link_bytes_per_s: float
    fill_fixed_s: float = 0.0
    cpu_fixed_s: float = 0.0
    gpu_expert_s: float = 0.0
    cpu_row_part: float = 0.0
    #: Once per layer-step, before the first fill; `fill_fixed_s` is per fill.
    link_fixed_s: float = 0.0

    def __post_init__(self) -> None:
        if self.expert_bytes < 1:
            raise ValueError(f"an expert of {self.expert_bytes} bytes is not possible")
        for name in self.__struct_fields__[1:]:
            value = getattr(self, name)
            if not 0 <= value < float("inf"):  # also refuses NaN
                raise ValueError(f"{name} must be finite and at least 0, not {value}")

    @classmethod
    def residual(
        cls,
        expert_bytes: int,
        link_bytes_per_s: float,
        host_bytes_per_s: float,
        *,
        fill_fixed_s: float = 0.0,
        cpu_fixed_s: float = 0.0,
        gpu_expert_s: float = 0.0,
        cpu_row_part: float = 0.0,
    ) -> BranchCosts:
        """Where only B_P and B_H are known: the link keeps its rate beside the CPU, and the CPU has
        B_R = max(B_H - B_P, 0) beside the link."""
        return cls(
            expert_bytes,
            link_bytes_per_s,
            link_bytes_per_s,
            host_bytes_per_s,
            max(host_bytes_per_s - link_bytes_per_s, 0.0),
            fill_fixed_s,
            cpu_fixed_s,
            gpu_expert_s,
            cpu_row_part,
        )


def branch_ends_s(
    costs: BranchCosts,
    link_start_s: float,
    link_bytes: float,
    cpu_start_s: float,
    cpu_bytes: float,
) -> tuple[float, float]:
    """When each branch ends, seconds; 0.0 for one without work, inf for one that never ends."""
    link_left, cpu_left = link_bytes, cpu_bytes
    link_alone, cpu_alone = costs.link_bytes_per_s, costs.cpu_bytes_per_s
    if link_left <= 0:
        return 0.0, cpu_start_s + _seconds(cpu_left, cpu_alone) if cpu_left > 0 else 0.0
    if cpu_left <= 0:
        return link_start_s + _seconds(link_left, link_alone), 0.0
    # One branch starts alone.
    now = max(link_start_s, cpu_start_s)
    if link_start_s < now:
        end = link_start_s + _seconds(link_left, link_alone)
        if end <= now:
            return end, now + _seconds(cpu_left, cpu_alone)
        link_left -= (now - link_start_s) * link_alone
    elif cpu_start_s < now:
        end = cpu_start_s + _seconds(cpu_left, cpu_alone)
        if end <= now:
            return now + _seconds(link_left, link_alone), end
        cpu_left -= (now - cpu_start_s) * cpu_alone
    # Both, until one ends; then the other alone.
    link_beside, cpu_beside = costs.link_beside_cpu_bytes_per_s, costs.cpu_beside_link_bytes_per_s
    link_s, cpu_s = _seconds(link_left, link_beside), _seconds(cpu_left, cpu_beside)
    if link_s <= cpu_s:
        if link_s == float("inf"):
            return link_s, cpu_s
        left = max(cpu_left - link_s * cpu_beside, 0.0)
        return now + link_s, now + link_s + (_seconds(left, cpu_alone) if left else 0.0)
    left = max(link_left - cpu_s * link_beside, 0.0)
    return now + cpu_s + (_seconds(left, link_alone) if left else 0.0), now + cpu_s


def predicted_s(
    costs: BranchCosts, num_fills: float, cpu_weight: float, link_ahead_bytes: float = 0.0
) -> float:
    """T: seconds until `num_fills` fills are computed and `cpu_weight` experts' worth of CPU work
    is done. `link_ahead_bytes` pass the link before the first fill; without fills nobody waits for
    them, but the CPU feels them."""
    link_bytes = num_fills * costs.expert_bytes + link_ahead_bytes
    link_start_s = costs.link_fixed_s + num_fills * costs.fill_fixed_s
    link_s, cpu_s = branch_ends_s(
        costs, link_start_s, link_bytes, costs.cpu_fixed_s, cpu_weight * costs.expert_bytes
    )
    if num_fills <= 0:
        return cpu_s
    # The GPU computes a fill while the next one is sent; a slow GPU is what is waited for instead.
    gpu_s = costs.gpu_expert_s
    link_s = max(link_s + gpu_s, link_s / num_fills + num_fills * gpu_s if num_fills > 1 else 0.0)
    return max(link_s, cpu_s)


def fractional_optimum(costs: BranchCosts, cpu_weight: float, num_misses: int) -> float:
    """x in [0, num_misses] of least T if fills could be split: where both branches end together, or
    one branch alone where sharing the memory costs more than it brings. Of equals the largest."""
    if not num_misses:
        return 0.0
    weight = cpu_weight / num_misses
    candidates = [0.0, float(num_misses)]
    link, cpu = costs.link_beside_cpu_bytes_per_s, costs.cpu_beside_link_bytes_per_s
    if link > 0 and cpu > 0:
        # x a_P + x S / P = a_C + (m - x) w S / C, both beside each other from the start
        fill_s = costs.fill_fixed_s + costs.expert_bytes / link
        run_s = weight * costs.expert_bytes / cpu
        ahead_s = costs.cpu_fixed_s - costs.link_fixed_s - costs.gpu_expert_s
        balance = (ahead_s + num_misses * run_s) / (fill_s + run_s)
        candidates.append(min(max(balance, 0.0), float(num_misses)))
    best_x, best_s = 0.0, float("inf")
    for x in sorted(candidates):
        cost_s = predicted_s(costs, x, weight * (num_misses - x))
        if cost_s <= best_s * (1 + _TIE):
            best_x, best_s = x, min(cost_s, best_s)
    return best_x


#: For a number of misses: T(0..m); the best q up to each limit 0..m; the fractional optimum.
_Table = tuple[list[float], list[int], float]


class FluidPlan(Split, frozen=True, gc=False):
    """A split with the prediction behind it."""

    predicted_s: float = 0.0
    least_s: float = 0.0  # of the best whole q that the slots allow
    cpu_beside_link_bytes_per_s: float = 0.0

    def reason(self) -> str:
        """One line for the log; built only when asked for."""
        if self.rule != "balance":
            return super().reason()
        line = (
            f"q={self.num_fills} of {self.num_misses}: "
            f"link {self.link_bytes_per_s / 1e9:.1f} GB/s, "
            f"cpu beside it {self.cpu_beside_link_bytes_per_s / 1e9:.1f} GB/s, "
            f"{self.predicted_s * 1e6:.0f} us predicted, "
            f"q*={self.balanced:.2f}, credit {self.credit:.2f}"
        )
        if self.predicted_s > self.least_s * (1 + _TIE):
            line += f", one on credit for {(self.predicted_s - self.least_s) * 1e6:.0f} us"
        if self.is_short_of_slots:
            line += ", no more slots can be filled"
        return line


class FluidSplit:
    """Splits layer-step after layer-step by least predicted time; see the module."""

    __slots__ = ("_allowance_s", "_costs", "_credit", "_loss_part", "_tables")

    def __init__(self, costs: BranchCosts, *, loss_part: float = DEFAULT_LOSS_PART) -> None:
        """ValueError if `loss_part` is negative. With 0 nothing is ever credited."""
        if not 0 <= loss_part < float("inf"):
            raise ValueError(f"the part that credit may cost must be 0 or more, not {loss_part}")
        self._costs = costs
        self._loss_part = loss_part
        self._credit = 0.0
        self._allowance_s = 0.0
        #: By number of misses.
        self._tables: dict[int, _Table] = {}

    @property
    def costs(self) -> BranchCosts:
        return self._costs

    @property
    def credit(self) -> float:
        """Fills owed, in experts: 0 to MAX_CREDIT."""
        return self._credit

    @property
    def allowance_s(self) -> float:
        """What credited fills may cost now, seconds."""
        return self._allowance_s

    def set_costs(self, costs: BranchCosts) -> None:
        """New costs, from the next layer-step on; credit and allowance stay."""
        if costs != self._costs:
            self._costs = costs
            self._tables.clear()

    def plan(
        self,
        num_misses: int,
        num_fillable: int,
        *,
        has_cpu: bool,
        has_link: bool,
        rows: Sequence[int] | None = None,
        link_ahead_bytes: float = 0.0,
    ) -> Split:
        """As `SplitPlanner.plan`; what does not exist comes first.

        `num_fillable`: how many misses may be filled, by slots and admission. `rows`: rows of each
        miss, the ones to fill first first (None: one each). `link_ahead_bytes`: bytes that pass the
        link before the first fill of this layer-step. ValueError if a count is negative or `rows`
        has another length.
        """
        if num_misses < 0 or num_fillable < 0:
            raise ValueError(f"cannot split {num_misses} misses over {num_fillable} slots")
        if not num_misses:
            return self._plan(0, 0, "nothing")
        if not has_cpu:
            if not has_link:
                return self._plan(num_misses, 0, "wait")
            return self._plan(num_misses, num_misses, "no_cpu")
        if not has_link:
            return self._plan(num_misses, 0, "no_link")
        if rows is None and not link_ahead_bytes:
            table = self._known_table(num_misses)
        else:
            table = self._table(self._weights(num_misses, rows), link_ahead_bytes)
        times_s, best_of, fractional = table

        limit = min(num_misses, num_fillable)
        best = best_of[limit]
        least_s = times_s[best]
        num_fills = best
        owed = self._credit + fractional
        allowance_s = self._allowance_s
        if least_s < float("inf"):
            allowance_s += self._loss_part * least_s
        if best < limit and owed + _ROUNDING >= best + 1:
            loss_s = times_s[best + 1] - least_s
            if loss_s <= allowance_s:
                num_fills += 1
                allowance_s -= loss_s
        self._credit = min(max(owed - num_fills, 0.0), MAX_CREDIT)
        self._allowance_s = min(allowance_s, times_s[-1] / num_misses)
        is_short = best_of[num_misses] > limit
        return self._plan(
            num_misses,
            num_fills,
            "balance",
            is_short,
            fractional,
            times_s[num_fills],
            least_s,
        )

    def times_s(self, num_misses: int) -> list[float]:
        """T(q) for q = 0 to `num_misses`, experts of one row over an idle link, seconds."""
        return self._known_table(num_misses)[0]

    def alone(self, num_misses: int, num_fills: int) -> Split:
        """One branch for all of them, whatever is best; credit and allowance stay."""
        times_s = self._known_table(num_misses)[0]
        return self._plan(num_misses, num_fills, "floor", time_s=times_s[num_fills])

    # ---- inside ----

    def _known_table(self, num_misses: int) -> _Table:
        table = self._tables.get(num_misses)
        if table is None:
            weights = [float(num_misses - q) for q in range(num_misses + 1)]
            table = self._tables[num_misses] = self._table(weights, 0.0)
        return table

    def _weights(self, num_misses: int, rows: Sequence[int] | None) -> list[float]:
        """CPU work that is left after filling the first 0, 1, .. misses, in one-row experts."""
        if rows is None:
            return [float(num_misses - q) for q in range(num_misses + 1)]
        if len(rows) != num_misses:
            raise ValueError(f"{len(rows)} row counts do not suit {num_misses} misses")
        part = self._costs.cpu_row_part
        left = [0.0]
        for num_rows in reversed(rows):
            left.append(left[-1] + 1.0 + part * max(num_rows - 1, 0))
        left.reverse()
        return left

    def _table(self, weights: list[float], link_ahead_bytes: float) -> _Table:
        costs = self._costs
        times_s = [
            predicted_s(costs, num_fills, weight, link_ahead_bytes)
            for num_fills, weight in enumerate(weights)
        ]
        return times_s, _best_of(times_s), fractional_optimum(costs, weights[0], len(weights) - 1)

    def _plan(
        self,
        num_misses: int,
        num_fills: int,
        rule: Rule,
        is_short_of_slots: bool = False,
        balanced: float = 0.0,
        time_s: float = 0.0,
        least_s: float = 0.0,
    ) -> FluidPlan:
        must_wait = rule == "wait"
        costs = self._costs
        return FluidPlan(
            num_misses,
            num_fills,
            0 if must_wait else num_misses - num_fills,
            must_wait,
            rule,
            _AUTO,
            is_short_of_slots,
            costs.cpu_bytes_per_s,
            costs.link_bytes_per_s,
            balanced,
            self._credit,
            time_s,
            least_s,
            costs.cpu_beside_link_bytes_per_s,
        )


def _best_of(times_s: Sequence[float]) -> list[int]:
    """For each limit, the q up to it of least time; of equals the largest."""
    best, least_s = 0, times_s[0]
    best_of = [0]
    for num_fills in range(1, len(times_s)):
        if times_s[num_fills] <= least_s * (1 + _TIE):
            best = num_fills
            least_s = min(least_s, times_s[num_fills])
        best_of.append(best)
    return best_of


def _seconds(num_bytes: float, bytes_per_s: float) -> float:
    return num_bytes / bytes_per_s if bytes_per_s > 0 else float("inf")
