"""How the misses of one layer-step are split between the link and the CPU.

The m experts that a layer asks for and that are not resident go to one of two places at the same
time: q of them are filled (sent over the link into slots, run on the device, kept), the other m - q
run on the CPU, in place. Both branches read the same host memory. With

    B_H   rate at which the host processes expert weights, bytes/s (the real CPU kernel)
    B_P   rate of pinned transfers over the link, bytes/s
    B_R   what the CPU has left beside a saturated link: max(B_H - B_P, 0)
    S     bytes of one expert

the link needs q S / B_P and the CPU (m - q) S / B_R. They end together at

    q* = m B_P / B_H    when B_H > B_P
    q* = m              when B_H <= B_P: nothing is left for the CPU

(Source: Headrace's design, "Miss partition" and "Residual bandwidth".)

q* is seldom whole. Rounding it in every layer-step would freeze the cache when the ratio is small:
with one miss at a time and B_P / B_H = 0.3, no miss would ever be filled. So what was owed is
carried to the next layer-step as a *credit*:

    q = floor(q* + credit)          credit := credit + q* - q

While nothing else limits q, credit stays in [0, 1), so after any number of layer-steps the fills
made differ from the sum of all q* by less than one expert. When too few slots can be filled, what
could not be filled would pile up and later burst into one layer-step, far off balance; so credit is
cut to ``MAX_CREDIT`` = 1, and no layer-step fills more than one expert beyond its own q* rounded
down. The fills made may then fall behind the sum of all q*, but never pass it.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Literal, TypeVar

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from orchestrator.core.fluid_split import BranchCosts
    from protocol.messages import ExpertKey

T = TypeVar("T")

#: Why a split is what it is; see `Split.reason`.
Rule = Literal["nothing", "wait", "no_cpu", "no_link", "mode", "balance", "floor"]

MAX_CREDIT = 1.0

# Sums of fractions may fall short of a whole number by a few units in the last place.
_ROUNDING = 1e-9


def residual_bandwidth(host_bytes_per_s: float, link_bytes_per_s: float) -> float:
    """B_R = max(B_H - B_P, 0): what the CPU has left beside a saturated link, bytes/s."""
    return max(host_bytes_per_s - link_bytes_per_s, 0.0)


def balanced_fill_count(num_misses: int, host_bytes_per_s: float, link_bytes_per_s: float) -> float:
    """q*: the number of fills at which link and CPU end together; a fraction in [0, num_misses].

    m B_P / B_H if B_H > B_P, else m. So B_P = 0 gives 0 (nothing passes the link) unless B_H is 0
    too: with both unknown every miss is filled.
    """
    if host_bytes_per_s > link_bytes_per_s:
        return num_misses * link_bytes_per_s / host_bytes_per_s
    return float(num_misses)


def predicted_step_s(
    num_fills: float,
    num_misses: int,
    expert_bytes: int,
    host_bytes_per_s: float,
    link_bytes_per_s: float,
) -> float:
    """Seconds until both branches have ended: max(q S / B_P, (m - q) S / B_R).

    A branch without work takes 0 s whatever its rate; a branch with work and a rate of 0 never
    ends: ``inf``. Hence m = 0 gives 0. ``num_fills`` may be a fraction. ValueError if it is not in
    [0, num_misses].
    """
    if not 0 <= num_fills <= num_misses:
        raise ValueError(f"cannot fill {num_fills} of {num_misses} misses")
    residual = residual_bandwidth(host_bytes_per_s, link_bytes_per_s)
    return max(
        _branch_s(num_fills * expert_bytes, link_bytes_per_s),
        _branch_s((num_misses - num_fills) * expert_bytes, residual),
    )


class FillMode(msgspec.Struct, frozen=True):
    """How many misses are filled: ``auto`` by the balance, ``all``, ``none``, or ``at_most``
    ``limit`` per layer-step.

    ``at_most`` is not adaptive: it fills ``limit`` misses wherever there are as many.
    """

    kind: Literal["auto", "all", "none", "at_most"]
    limit: int = 0  # used by at_most alone

    @classmethod
    def parse(cls, text: str) -> FillMode:
        """From the command line: ``auto``, ``all``, ``none`` or a whole number.

        ValueError with one sentence if it is none of them.
        """
        match text:
            case "auto" | "all" | "none":
                return cls(text)
            # At most 9 digits: more experts than any model has, and always a quick conversion.
            case _ if text.isascii() and text.isdigit() and len(text) <= 9:
                return cls("at_most", int(text))
        raise ValueError(
            "the fill mode is auto, all, none or a whole number of experts per layer-step, "
            f"not {text[:40]!r}"
        )

    def __str__(self) -> str:
        """The word that ``parse`` takes."""
        return str(self.limit) if self.kind == "at_most" else self.kind


class Split(msgspec.Struct, frozen=True, gc=False):
    """The plan of one layer-step: ``num_fills`` misses over the link, ``num_cpu`` on the CPU.

    They add up to ``num_misses``, except when ``must_wait``: then no branch exists and both are 0.
    """

    num_misses: int
    num_fills: int
    num_cpu: int
    must_wait: bool
    rule: Rule
    mode: FillMode
    is_short_of_slots: bool  # more would be filled if more slots could be reserved
    host_bytes_per_s: float
    link_bytes_per_s: float
    balanced: float  # q*, where the rule is balance
    credit: float  # what is carried on

    def reason(self) -> str:
        """One line for the log; built only when asked for."""
        if self.must_wait:
            return f"{self.num_misses} misses wait: no dma worker and no cpu worker"
        line = f"q={self.num_fills} of {self.num_misses}: "
        match self.rule:
            case "nothing":
                return line + "every expert is resident"
            case "no_cpu":
                return line + "no cpu worker"
            case "no_link":
                return line + "no dma worker"
            case "mode":
                line += f"fill mode {self.mode}"
            case "floor":
                branch = "link" if self.num_fills else "CPU"
                line += f"the {branch} alone, to see whether that is faster"
            case _:
                residual = residual_bandwidth(self.host_bytes_per_s, self.link_bytes_per_s)
                line += (
                    f"link {self.link_bytes_per_s / 1e9:.1f} GB/s, "
                    f"cpu beside it {residual / 1e9:.1f} GB/s, "
                    f"q*={self.balanced:.2f}, credit {max(self.credit, 0.0):.2f}"
                )
        if self.is_short_of_slots:
            line += ", no more slots can be filled"
        return line


class SplitPlanner:
    """Splits layer-step after layer-step by one fill mode, carrying the credit; see the module."""

    __slots__ = ("_credit", "_host_bytes_per_s", "_link_bytes_per_s", "_mode")

    def __init__(self, mode: FillMode, host_bytes_per_s: float, link_bytes_per_s: float) -> None:
        self._mode = mode
        self._credit = 0.0
        self.set_rates(host_bytes_per_s, link_bytes_per_s)

    @property
    def mode(self) -> FillMode:
        return self._mode

    @property
    def credit(self) -> float:
        """Fills owed, in experts: 0 (within rounding) to MAX_CREDIT."""
        return self._credit

    def set_rates(self, host_bytes_per_s: float, link_bytes_per_s: float) -> None:
        """New B_H and B_P, from the next layer-step on; the credit stays.

        ValueError unless finite and at least 0.
        """
        for name, rate in (("host", host_bytes_per_s), ("link", link_bytes_per_s)):
            if not 0 <= rate < float("inf"):  # also refuses NaN
                raise ValueError(f"the {name} rate must be 0 or more bytes/s, not {rate}")
        self._host_bytes_per_s = host_bytes_per_s
        self._link_bytes_per_s = link_bytes_per_s

    def set_costs(self, costs: BranchCosts) -> None:
        """`set_rates` with what both branches do alone."""
        self.set_rates(costs.cpu_bytes_per_s, costs.link_bytes_per_s)

    def plan(self, num_misses: int, num_fillable: int, *, has_cpu: bool, has_link: bool) -> Split:
        """Split ``num_misses``, given how many slots could be reserved now and which branches
        exist.

        What exists comes first: without a CPU branch every miss is filled, without a link none is,
        whatever the mode says. These fills, and those of mode ``all``, may exceed ``num_fillable``:
        they then go in waves. ``auto`` and ``at_most`` never do; what finds no slot runs on the
        CPU. ValueError if a count is negative.
        """
        if num_misses < 0 or num_fillable < 0:
            raise ValueError(f"cannot split {num_misses} misses over {num_fillable} slots")
        if not num_misses:
            return self._split(0, 0, "nothing")
        if not has_cpu:
            if not has_link:
                return self._split(num_misses, 0, "wait")
            return self._split(num_misses, num_misses, "no_cpu")
        if not has_link:
            return self._split(num_misses, 0, "no_link")
        match self._mode.kind:
            case "all":
                return self._split(num_misses, num_misses, "mode")
            case "none":
                return self._split(num_misses, 0, "mode")
            case "at_most":
                num_fills = min(self._mode.limit, num_misses, num_fillable)
                is_short = num_fills < min(self._mode.limit, num_misses)
                return self._split(num_misses, num_fills, "mode", is_short)
            case "auto":
                balanced = balanced_fill_count(
                    num_misses, self._host_bytes_per_s, self._link_bytes_per_s
                )
                # A debt from better times is not paid over a link that carries nothing.
                owed = self._credit + balanced if balanced else 0.0
                num_fills = min(int(owed + _ROUNDING), num_misses, num_fillable)
                # May fall below 0 by _ROUNDING: kept, so that rounding never adds up to a fill.
                self._credit = min(owed - num_fills, MAX_CREDIT)
                is_short = num_fills == num_fillable < num_misses and owed - num_fills >= 1.0
                return self._split(num_misses, num_fills, "balance", is_short, balanced)

    def _split(
        self,
        num_misses: int,
        num_fills: int,
        rule: Rule,
        is_short_of_slots: bool = False,
        balanced: float = 0.0,
    ) -> Split:
        must_wait = rule == "wait"
        return Split(
            num_misses,
            num_fills,
            0 if must_wait else num_misses - num_fills,
            must_wait,
            rule,
            self._mode,
            is_short_of_slots,
            self._host_bytes_per_s,
            self._link_bytes_per_s,
            balanced,
            self._credit,
        )


class DemandMemory:
    """When experts were last demanded, for the ``capacity`` experts demanded last.

    It knows what the directory no longer does: evicted experts and those that ran on the CPU. Every
    demand is noted, hits too, because a hit may be evicted later; so a useful capacity exceeds the
    number of slots by a few tokens' worth of (layers x top_k). The tick counts layer-steps.
    """

    __slots__ = ("_capacity", "_tick", "_ticks")

    def __init__(self, capacity: int) -> None:
        if capacity < 0:
            raise ValueError(f"a memory of {capacity} experts is not possible")
        self._capacity = capacity
        self._tick = 0
        self._ticks: OrderedDict[ExpertKey, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._ticks)

    def demanded(self, keys: Iterable[ExpertKey]) -> None:
        """One layer-step demanded ``keys``.

        Said after its fills were chosen, or all its misses would tie.
        """
        self._tick += 1
        ticks = self._ticks
        for key in keys:
            ticks[key] = self._tick
            ticks.move_to_end(key)
        while len(ticks) > self._capacity:
            ticks.popitem(last=False)

    def last_demand(self, key: ExpertKey) -> int:
        """The tick of the last demand of ``key``, from 1; 0 if none is remembered."""
        return self._ticks.get(key, 0)


def choose_fills(
    misses: Sequence[ExpertKey], num_fills: int, last_demand: Callable[[ExpertKey], float]
) -> tuple[list[ExpertKey], list[ExpertKey]]:
    """Which misses to fill and which to run on the CPU, both in router order.

    Filled are those most likely to come back: those demanded last, ties in router order. (Filling
    the router's favourites is worse: a high weight now says little about the next token, recent use
    much.) Any other score in place of ``last_demand`` serves, highest first. ValueError if
    ``num_fills`` is not in [0, len(misses)].
    """
    if not 0 <= num_fills <= len(misses):
        raise ValueError(f"cannot fill {num_fills} of {len(misses)} misses")
    if num_fills == 0:
        return [], list(misses)
    if num_fills == len(misses):
        return list(misses), []
    ranked = sorted(misses, key=last_demand, reverse=True)  # stable, in reverse too
    chosen = set(ranked[:num_fills])
    return [key for key in misses if key in chosen], [key for key in misses if key not in chosen]


def divide_among(
    experts: Sequence[T], rates: Sequence[float], rows: Sequence[int] | None = None
) -> list[list[T]]:
    """Divide set C among CPU workers so that they end about together: one list per worker, in the
    order of ``experts``.

    ``rates`` are any one unit of work per second, one per worker; only their ratios count, and a
    worker at 0 gets nothing. ``rows`` weighs each expert (default: all alike). Greedy: the heaviest
    expert first, each to the worker that would end it first, ties to the earlier expert and worker,
    so the same input gives the same answer. ValueError if there is work but no positive rate, if a
    rate or weight is negative, or if ``rows`` has another length than ``experts``.
    """
    num_experts = len(experts)
    if rows is not None and (len(rows) != num_experts or (num_experts and min(rows) < 0)):
        raise ValueError(f"row counts {list(rows)} do not suit {num_experts} experts")
    workers: list[int] = []
    for index, rate in enumerate(rates):
        if not 0 <= rate < float("inf"):  # also refuses NaN
            raise ValueError(f"a cpu worker's rate must be 0 or more and finite, not {rate}")
        if rate:
            workers.append(index)
    divided: list[list[T]] = [[] for _ in rates]
    if not num_experts:
        return divided
    if not workers:
        raise ValueError(f"{num_experts} experts to run, but no cpu worker with a rate above 0")
    if len(workers) == 1:
        divided[workers[0]].extend(experts)
        return divided

    weights = [1] * num_experts if rows is None else rows
    order: Iterable[int] = range(num_experts)
    if rows is not None:
        order = sorted(order, key=rows.__getitem__, reverse=True)
    loads = [0] * len(rates)
    owners = [0] * num_experts
    for position in order:
        weight = weights[position]
        owner, earliest = -1, float("inf")
        for worker in workers:
            end = (loads[worker] + weight) / rates[worker]
            if owner < 0 or end < earliest:
                owner, earliest = worker, end
        loads[owner] += weight
        owners[position] = owner
    for expert, owner in zip(experts, owners, strict=True):
        divided[owner].append(expert)
    return divided


def _branch_s(num_bytes: float, bytes_per_s: float) -> float:
    if not num_bytes:
        return 0.0
    return num_bytes / bytes_per_s if bytes_per_s > 0 else float("inf")
