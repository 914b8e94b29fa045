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

A new policy is a class with these methods and one line in ``_POLICIES``.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

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


_POLICIES: dict[str, Callable[[], EvictionPolicy]] = {"lru": Lru}

POLICY_NAMES: tuple[str, ...] = tuple(sorted(_POLICIES))


def make_policy(name: str) -> EvictionPolicy:
    """A fresh policy by its command-line name; ValueError names the known ones."""
    try:
        factory = _POLICIES[name]
    except KeyError:
        known = ", ".join(POLICY_NAMES)
        raise ValueError(f"unknown eviction policy {name!r}; known: {known}") from None
    return factory()
