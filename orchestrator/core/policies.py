"""Which resident expert leaves when a slot is needed.

The directory owns the slots and says what happened; a policy owns nothing but an order over the
keys it was told about, and answers one question: in which order would they leave? The directory
walks that order lazily and takes the first key that may leave now (a policy knows neither pins nor
fills in flight, so it cannot get them wrong).

What a policy is told, in this order within one layer-step:

1. ``layer_step(layer, experts)``: the router chose these, whether or not they are in a slot.
   Statistics live here (a decayed reuse probability, say); plain recency needs none.
2. ``refreshed(key)``: the key was demanded and is placed.
3. ``admitted(key)``: a slot was reserved for the key. It counts as demanded now, not when its bytes
   land, so that the order follows the demands and not the luck of the copies.
4. ``removed(key)``: the key left (evicted, or its fill was aborted).

*Worth* is an option of a policy that scores every expert, placed or not (``WorthPolicy``). Misses
are then filled by worth, and a miss that is worth less than the expert it would evict is not filled
at all: admission (see ``fill_choice``).

A new policy is a class with these methods and one line in ``_POLICIES``. Those that need numpy are
imported when they are asked for.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from orchestrator.core.foresight import Foresight
    from orchestrator.core.reuse import LearnKernel
    from protocol.messages import ExpertId, ExpertKey, LayerId


class EvictionPolicy(Protocol):
    """An order over the placed keys (resident or filling), least worth keeping first."""

    def layer_step(self, layer: LayerId, experts: Sequence[ExpertId], /) -> None:
        """The router of ``layer`` chose ``experts``; said once, before their hits and fills."""

    def refreshed(self, key: ExpertKey, /) -> None:
        """The placed ``key`` was demanded."""

    def admitted(self, key: ExpertKey, /) -> None:
        """``key`` got a slot; it was not placed before."""

    def removed(self, key: ExpertKey, /) -> None:
        """``key`` is no longer placed."""

    def cleared(self) -> None:
        """Nothing is placed any more; what was learned about demand may stay."""

    def victims(self, incoming: ExpertKey | None, /) -> Iterator[ExpertKey]:
        """Every placed key once, the one to evict first first.

        ``incoming`` is the key that wants the slot (a policy with a budget per layer needs its
        layer); None when the order is only looked at. The iterator is dropped before the policy is
        told of any change.
        """


@runtime_checkable
class WorthPolicy(Protocol):
    """A policy that can compare any two experts."""

    def worth(self, key: ExpertKey, /) -> float:
        """What keeping ``key`` is worth at this moment; only the order of worths means something.
        Victims come in rising order of it."""


@runtime_checkable
class DeferringPolicy(Protocol):
    """A policy whose ``layer_step`` only takes note, because it stands between router and experts.

    The order and the worths are then those of the layer's last visit until ``settle``, which
    whoever drives the directory calls once its commands are out; the next ``layer_step`` does it
    otherwise.
    """

    def settle(self) -> None:
        """Learn from the last ``layer_step``, if that has not been done."""


class Lru:
    """Exact least recently demanded first.

    The reference: every other policy is measured against it.
    """

    __slots__ = ("_order",)

    def __init__(self) -> None:
        # An OrderedDict, because the first key of a plain dict costs a scan over the holes that
        # removals leave.
        self._order: OrderedDict[ExpertKey, None] = OrderedDict()

    def layer_step(self, layer: LayerId, experts: Sequence[ExpertId]) -> None:
        pass  # Recency is all there is, and refreshed/admitted say it.

    def refreshed(self, key: ExpertKey) -> None:
        self._order.move_to_end(key)

    def admitted(self, key: ExpertKey) -> None:
        self._order[key] = None

    def removed(self, key: ExpertKey) -> None:
        del self._order[key]

    def cleared(self) -> None:
        self._order.clear()

    def victims(self, incoming: ExpertKey | None) -> Iterator[ExpertKey]:
        return iter(self._order)


class LruLayer:
    """Least recently demanded of one layer first, so that every layer keeps as many as the others.

    The incoming expert takes from its own layer, unless another layer has more experts placed: then
    from the one with the most. So the slots spread evenly over the layers, whatever their number.
    Plain lru evicts just what the next layers need once the slots are fewer than layers x top_k;
    this one does not.
    """

    __slots__ = ("_orders",)

    def __init__(self) -> None:
        self._orders: dict[LayerId, OrderedDict[ExpertKey, None]] = {}

    def layer_step(self, layer: LayerId, experts: Sequence[ExpertId]) -> None:
        pass

    def refreshed(self, key: ExpertKey) -> None:
        self._orders[key[0]].move_to_end(key)

    def admitted(self, key: ExpertKey) -> None:
        self._orders.setdefault(key[0], OrderedDict())[key] = None

    def removed(self, key: ExpertKey) -> None:
        del self._orders[key[0]][key]

    def cleared(self) -> None:
        self._orders.clear()

    def victims(self, incoming: ExpertKey | None) -> Iterator[ExpertKey]:
        own = None if incoming is None else incoming[0]
        layers = sorted(
            self._orders, key=lambda layer: (-len(self._orders[layer]), layer != own, layer)
        )
        for layer in layers:
            yield from self._orders[layer]


class DemandShape(msgspec.Struct, frozen=True):
    """What is demanded: ``top_k`` of ``num_experts`` experts in each of ``num_layers`` layers."""

    num_layers: int
    num_experts: int
    top_k: int


def _lfu(shape: DemandShape, kernel: LearnKernel | None) -> EvictionPolicy:
    from orchestrator.core.scored_policy import DecayedLfu

    return DecayedLfu(shape.num_layers, shape.num_experts, shape.top_k)


def _reuse(shape: DemandShape, kernel: LearnKernel | None) -> EvictionPolicy:
    from orchestrator.core.reuse import Reuse

    return Reuse(shape.num_layers, shape.num_experts, shape.top_k, kernel=kernel)


def _reuse_tables(shape: DemandShape, kernel: LearnKernel | None) -> EvictionPolicy:
    from orchestrator.core.reuse import DEFAULT_NUM_TABLES, Reuse

    return Reuse(
        shape.num_layers,
        shape.num_experts,
        shape.top_k,
        num_tables=DEFAULT_NUM_TABLES,
        kernel=kernel,
    )


_POLICIES: dict[str, Callable[[DemandShape, LearnKernel | None], EvictionPolicy]] = {
    "lru": lambda shape, kernel: Lru(),
    "lru-layer": lambda shape, kernel: LruLayer(),
    "lfu": _lfu,
    "reuse": _reuse,
    "reuse-tables": _reuse_tables,
}
#: A policy then finds out.
UNKNOWN_SHAPE = DemandShape(0, 0, 0)

POLICY_NAMES: tuple[str, ...] = tuple(sorted(_POLICIES))


def make_policy(
    name: str, shape: DemandShape = UNKNOWN_SHAPE, kernel: LearnKernel | None = None
) -> EvictionPolicy:
    """A fresh policy by its command-line name; ValueError names the known ones.

    Without ``shape`` a policy that needs it learns it from what it sees, and starts worse; with a
    ``kernel`` the policies that have use for it learn quicker.
    """
    try:
        factory = _POLICIES[name]
    except KeyError:
        known = ", ".join(POLICY_NAMES)
        raise ValueError(f"unknown eviction policy {name!r}; known: {known}") from None
    return factory(shape, kernel)


def make_foresight(shape: DemandShape, num_ahead: int) -> Foresight:
    """Needs numpy. ValueError unless the shape is known."""
    from orchestrator.core.foresight import Foresight

    return Foresight(shape, num_ahead)
