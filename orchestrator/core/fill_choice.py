"""Which misses may be filled, best first, and which are copied behind the CPU's back.

*Rank and admission.* With a policy that knows worths, misses are ranked by worth, and the i-th best
miss is held against the i-th victim: it is admitted if a slot is free or if it is worth more than
the victim. Misses fall in worth and victims rise, so the first refusal ends it. Without worths the
rank is the last demand (the most recent first), and every miss is admitted that finds a slot.

*Fill-behind.* A miss that ran on the CPU can be copied too, off the critical path: the link would
idle during attention and hits, and its time is worth nothing then. Such a copy waits for demanded
fills. Whether it may also run *beside the CPU* is a matter of price. While it runs, the CPU loses

    kappa = (C - C_beside) / P_beside     bytes of CPU work per byte copied

which is 1 where link and CPU just share the memory (C_beside = C - P), and 0 where they do not
meet. So a copy beside the CPU costs kappa executions of an expert, and pays if the newcomer saves
more than kappa executions beyond what its victim would have saved. Worths are logarithms of
discounted reuse, so a difference of 1 means a newcomer e times better; on real traces a difference
of kappa separates copies that pay from copies that do not. Others wait for the CPU to be idle.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import msgspec

from orchestrator.core.policies import WorthPolicy
from protocol.messages import ExpertKey

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from orchestrator.core.directory import ExpertDirectory
    from orchestrator.core.fluid_split import BranchCosts
    from orchestrator.core.policies import EvictionPolicy

FillBehindMode = Literal["auto", "on", "off"]
FILL_BEHIND_MODES: tuple[FillBehindMode, ...] = ("auto", "on", "off")
#: One on the link and one to follow it; more only hold slots that hold nothing yet.
DEFAULT_MAX_BEHIND = 2


class Candidates(msgspec.Struct, frozen=True, gc=False):
    """The misses of a layer-step, best to fill first; the first `num_admitted` may be filled.

    `gains[i]` is the worth of the i-th over that of its victim: inf where a slot is free, and 0.0
    where the policy knows no worths.
    """

    ranked: list[ExpertKey]
    gains: list[float]

    @property
    def num_admitted(self) -> int:
        return len(self.gains)


class FillChoice:
    """Ranks and admits the misses of layer-step after layer-step."""

    __slots__ = ("_last_demand", "_worth")

    def __init__(self, policy: EvictionPolicy, last_demand: Callable[[ExpertKey], float]) -> None:
        """`last_demand` ranks where `policy` knows no worths; higher is filled first."""
        self._last_demand = last_demand
        self._worth = policy.worth if isinstance(policy, WorthPolicy) else None

    @property
    def needs_last_demand(self) -> bool:
        """Whether `last_demand` is ever asked; if not, nobody need remember it."""
        return self._worth is None

    def candidates(self, directory: ExpertDirectory, misses: Sequence[ExpertKey]) -> Candidates:
        """After `directory.layer_step` and after the hits were pinned, so that none is a victim."""
        worth = self._worth
        num_misses = len(misses)
        if worth is None:
            ranked = sorted(misses, key=self._last_demand, reverse=True)
            return Candidates(ranked, [0.0] * min(num_misses, directory.num_reservable))
        if num_misses == 1:
            ranked = [misses[0]]
            worths = [worth(misses[0])]
        else:
            scored = sorted(((worth(key), key) for key in misses), key=_score, reverse=True)
            ranked = [key for _, key in scored]
            worths = [score for score, _ in scored]
        num_free = directory.num_free
        gains = [float("inf")] * min(num_free, num_misses)
        if num_free < num_misses:
            for score, victim in zip(worths[num_free:], directory.evictable(), strict=False):
                gain = score - worth(victim)
                if not gain > 0:  # nor where both are worth -inf
                    break
                gains.append(gain)
        return Candidates(ranked, gains)


class BehindCopy(msgspec.Struct, frozen=True, gc=False):
    """Copy `key` into a slot off the critical path; beside a working CPU only if so said."""

    key: ExpertKey
    is_beside_cpu: bool


class FillBehind:
    """Which of the misses that run on the CPU are copied too."""

    __slots__ = ("_max_in_flight", "_mode", "_price")

    def __init__(
        self,
        mode: FillBehindMode,
        costs: BranchCosts,
        *,
        max_in_flight: int = DEFAULT_MAX_BEHIND,
    ) -> None:
        """ValueError if the mode is unknown or `max_in_flight` is less than 1."""
        if mode not in FILL_BEHIND_MODES:
            known = ", ".join(FILL_BEHIND_MODES)
            raise ValueError(f"unknown fill-behind mode {mode!r}; known: {known}")
        if max_in_flight < 1:
            raise ValueError(f"fill-behind needs at least 1 copy in flight, not {max_in_flight}")
        self._mode = mode
        self._max_in_flight = max_in_flight
        self.set_costs(costs)

    @property
    def price(self) -> float:
        """kappa: executions lost per copy beside the CPU."""
        return self._price

    def set_costs(self, costs: BranchCosts) -> None:
        """New rates, from the next choice on."""
        lost = max(costs.cpu_bytes_per_s - costs.cpu_beside_link_bytes_per_s, 0.0)
        link = costs.link_beside_cpu_bytes_per_s
        self._price = lost / link if link > 0 else float("inf")

    def choose(
        self, candidates: Candidates, num_fills: int, num_in_flight: int
    ) -> list[BehindCopy]:
        """The best admitted misses beyond the first `num_fills`, which are filled anyway."""
        if self._mode == "off":
            return []
        end = min(candidates.num_admitted, num_fills + self._max_in_flight - num_in_flight)
        is_always_beside = self._mode == "on"
        return [
            BehindCopy(
                candidates.ranked[index], is_always_beside or candidates.gains[index] > self._price
            )
            for index in range(num_fills, end)
        ]


def _score(scored: tuple[float, ExpertKey]) -> float:
    return scored[0]
