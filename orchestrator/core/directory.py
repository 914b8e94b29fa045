"""Where every expert is: the one truth about the slots in device memory.

One space of ``num_slots`` slots is shared by all layers. A slot is

    FREE --reserve--> FILLING --commit--> RESIDENT --(victim of a later reserve)--> FILLING ...
      ^------abort-------'                                                (clear: all become FREE)

Filling is slow, so it has three verbs. ``reserve`` picks the slot and evicts at once: from then on
nobody may read the victim, whose bytes are about to be overwritten. ``commit`` makes the new expert
readable. ``abort`` frees the slot; the evicted expert does not come back, because some of its bytes
may already be gone.

*Generation.* Each reserve gives its slot the next generation, and a commit or abort must name it. A
late answer of a worker that was replaced meanwhile thus changes nothing: it is refused with False.
``clear`` raises every generation.

*Pins.* A pinned slot is being read or is about to be; it is no victim. A FILLING slot may be pinned
in advance, so that nothing evicts it between its commit and its use. Pins are counted, and whoever
pins unpins.

*Guests.* A long prompt beside running streams asks once for nearly every expert. What is filled for
it is a guest: the policy does not hear of it, it takes a free slot, the slot of another guest, or
one of at most ``max_guests`` slots of others, and it is the first to leave. A later demand by
somebody else makes it one of the placed experts. Demands of a guest refresh nothing.

*Limit.* At most ``limit`` of the slots are used; it may change while serving. What is beyond it
leaves as soon as it is neither pinned nor filling (``shrink``).

*Recency* is the order of demand: ``refresh`` for a placed expert, ``reserve`` for a new one. When
the bytes land plays no part, so the same demands give the same evictions however the copies race.

Everything is O(1) for lru, except that a reserve steps over pinned and filling keys that are first
in the policy's order. Plain lists and dicts on purpose: these calls sit between the router and the
first expert of every layer.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from orchestrator.core.directory_check import check_directory
from orchestrator.core.slots import DirectoryMisuse as DirectoryMisuse
from orchestrator.core.slots import InvariantBroken as InvariantBroken
from orchestrator.core.slots import Reservation as Reservation
from orchestrator.core.slots import SlotState as SlotState
from protocol.messages import ExpertKey, SlotId

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from orchestrator.core.policies import EvictionPolicy
    from protocol.messages import ExpertId, LayerId


#: One guest for so many slots, at least one, and no more than so many: enough to copy into one slot
#: while the expert in another is computed, and a small part of what others have.
_SLOTS_PER_GUEST = 32
_MAX_GUESTS = 8


# Read on every call; a module global is cheaper than an attribute of an Enum class.
_FREE = SlotState.FREE
_FILLING = SlotState.FILLING
_RESIDENT = SlotState.RESIDENT


class ExpertDirectory:
    """Residency of all experts of a model in ``num_slots`` slots; see the module for the rules.

    Counters, all since construction: ``hits`` (refreshes of resident experts), ``fills`` (commits),
    ``evictions``, ``aborts``, ``clears``, ``lost_residents`` and ``lost_fills`` (what the clears
    dropped).
    """

    __slots__ = (
        "_filling",
        "_free",
        "_generations",
        "_guests",
        "_keys",
        "_num_evictable",
        "_pins",
        "_policy",
        "_resident",
        "_states",
        "aborts",
        "clears",
        "evictions",
        "fills",
        "hits",
        "limit",
        "lost_fills",
        "lost_residents",
        "num_slots",
    )

    def __init__(self, num_slots: int, policy: EvictionPolicy) -> None:
        """``policy`` must be fresh. ValueError if there is no slot at all."""
        if num_slots < 1:
            raise ValueError(f"the cache needs at least 1 expert slot, not {num_slots}")
        if next(policy.victims(None), None) is not None:
            raise DirectoryMisuse(
                "the policy already orders experts; give each directory a new one"
            )
        #: All slots that there are, and how many of them are to be used.
        self.num_slots = self.limit = num_slots
        #: Placed experts that the policy does not know, first to leave first.
        self._guests: dict[ExpertKey, None] = {}
        self._policy = policy
        self._states = [_FREE] * num_slots
        self._keys: list[ExpertKey | None] = [None] * num_slots
        self._pins = [0] * num_slots
        self._generations = [0] * num_slots
        self._free = self._all_slots_free()
        self._resident: dict[ExpertKey, SlotId] = {}
        self._filling: dict[ExpertKey, SlotId] = {}
        self._num_evictable = 0  # RESIDENT and not pinned
        self.hits = self.fills = self.evictions = self.aborts = 0
        self.clears = self.lost_residents = self.lost_fills = 0

    # ---- questions ----

    def slot_of(self, key: ExpertKey) -> SlotId | None:
        """The slot of ``key`` if it may be read now, that is, if RESIDENT."""
        return self._resident.get(key)

    def is_filling(self, key: ExpertKey) -> bool:
        """Whether the bytes of ``key`` are on their way into a slot."""
        return key in self._filling

    def state_of(self, key: ExpertKey) -> SlotState | None:
        """RESIDENT or FILLING; None when ``key`` has no slot."""
        if key in self._resident:
            return _RESIDENT
        return _FILLING if key in self._filling else None

    def key_in(self, slot: SlotId) -> ExpertKey | None:
        """The key that is resident in ``slot`` or on its way there."""
        if not 0 <= slot < self.num_slots:
            raise self._unknown(slot)
        return self._keys[slot]

    def generation_of(self, slot: SlotId) -> int:
        """The generation of the last reservation (or clear) of ``slot``; it only grows."""
        if not 0 <= slot < self.num_slots:
            raise self._unknown(slot)
        return self._generations[slot]

    def num_pins(self, slot: SlotId) -> int:
        """How many pins hold ``slot``."""
        if not 0 <= slot < self.num_slots:
            raise self._unknown(slot)
        return self._pins[slot]

    @property
    def num_resident(self) -> int:
        return len(self._resident)

    @property
    def num_filling(self) -> int:
        return len(self._filling)

    @property
    def num_reservable(self) -> int:
        """How many reserves in a row would succeed now: free slots and unpinned residents."""
        return self.num_free + self._num_evictable

    @property
    def num_free(self) -> int:
        """Free slots that may be used."""
        num_free = len(self._free)
        return min(num_free, max(self.limit - self.num_slots + num_free, 0))

    @property
    def has_excess(self) -> bool:
        """Whether more slots are used than the limit allows."""
        return self.num_slots - len(self._free) > self.limit

    @property
    def max_guests(self) -> int:
        """Guests that may displace others: few enough that those do not miss the slots."""
        return max(1, min(_MAX_GUESTS, self.limit // _SLOTS_PER_GUEST))

    @property
    def can_host(self) -> bool:
        """Whether a reserve for a guest would succeed now."""
        if self.num_free:
            return True
        if not self._num_evictable:
            return False
        return len(self._guests) < self.max_guests or next(self.evictable()) in self._guests

    def evictable(self, incoming: ExpertKey | None = None) -> Iterator[ExpertKey]:
        """Keys that may leave now, in the order in which they would; drop it before any change."""
        pins = self._pins
        for key in itertools.chain(self._guests, self._policy.victims(incoming)):
            slot = self._resident.get(key)
            if slot is not None and not pins[slot]:
                yield key

    def residents(self) -> list[ExpertKey]:
        """Resident keys, next victim first: for lru, least recently demanded first."""
        placed = (*self._guests, *self._policy.victims(None))
        return [key for key in placed if key in self._resident]

    # ---- demand ----

    def layer_step(self, layer: LayerId, experts: Sequence[ExpertId]) -> None:
        """Tell the policy what the router chose; once per layer-step, before the rest of it."""
        self._policy.layer_step(layer, experts)

    def refresh(self, key: ExpertKey) -> None:
        """``key``, which has a slot, is demanded: it becomes the most recent.

        Counted as a hit if resident, but not while it is filling. DirectoryMisuse if it has no
        slot.
        """
        if key in self._resident:
            self.hits += 1
        elif key not in self._filling:
            raise DirectoryMisuse(f"refresh of {_named(key)}, which has no slot")
        if key in self._guests:
            self._settle_guest(key)
        else:
            self._policy.refreshed(key)

    def demand(
        self, keys: Iterable[ExpertKey], *, is_guest: bool = False
    ) -> tuple[list[ExpertId], list[SlotId], list[ExpertKey]]:
        """`refresh` and `pin` every resident key, in order: (experts, slots, the keys that are not
        resident). One call for a layer-step, because it stands between router and experts. For a
        guest nothing is refreshed."""
        resident, pins, guests = self._resident, self._pins, self._guests
        refreshed = self._policy.refreshed
        experts: list[ExpertId] = []
        slots: list[SlotId] = []
        misses: list[ExpertKey] = []
        for key in keys:
            slot = resident.get(key)
            if slot is None:
                misses.append(key)
                continue
            if not pins[slot]:
                self._num_evictable -= 1
            pins[slot] += 1
            if not is_guest:
                if key in guests:
                    self._settle_guest(key)
                else:
                    refreshed(key)
            experts.append(key[1])
            slots.append(slot)
        self.hits += len(experts)
        return experts, slots, misses

    # ---- a fill: reserve, then commit or abort ----

    def reserve(self, key: ExpertKey, *, is_guest: bool = False) -> Reservation | None:
        """A slot for ``key``: a free one, else that of the first victim that may leave.

        The victim is evicted now. None, and no change, when every slot is FILLING or pinned, or if
        a guest can have none (``can_host``). DirectoryMisuse if ``key`` already has a slot.
        """
        if key in self._resident or key in self._filling:
            raise DirectoryMisuse(f"reserve of {_named(key)}, which already has a slot")
        evicted: ExpertKey | None = None
        if is_guest and not self.can_host:
            return None
        if self.num_free:
            slot = self._free.pop()
        elif self._num_evictable:
            evicted, slot = self._evict_for(key)
        else:
            return None
        generation = self._generations[slot] + 1
        self._generations[slot] = generation
        self._states[slot] = _FILLING
        self._keys[slot] = key
        self._filling[key] = slot
        if is_guest:
            self._guests[key] = None
        else:
            self._policy.admitted(key)
        return Reservation(slot, generation, evicted)

    def commit(self, slot: SlotId, generation: int) -> bool:
        """The bytes of that reservation are in ``slot``: its expert is resident.

        False, and no change, if that reservation is no longer open (committed, aborted, cleared, or
        a later one stands).
        """
        key = self._close_fill(slot, generation)
        if key is None:
            return False
        self._states[slot] = _RESIDENT
        self._resident[key] = slot
        if not self._pins[slot]:
            self._num_evictable += 1
        self.fills += 1
        return True

    def abort(self, slot: SlotId, generation: int) -> bool:
        """The bytes will not come: ``slot`` is free. The expert evicted for it stays gone.

        False, and no change, if that reservation is no longer open. DirectoryMisuse if the slot is
        pinned: who pinned it still counts on it, and its unpin would later hit a stranger.
        """
        if self._is_open(slot, generation) and self._pins[slot]:
            raise DirectoryMisuse(f"abort of slot {slot}, which is pinned; unpin it first")
        key = self._close_fill(slot, generation)
        if key is None:
            return False
        self._states[slot] = _FREE
        self._keys[slot] = None
        self._free.append(slot)
        self._forget(key)
        self.aborts += 1
        return True

    # ---- the limit ----

    def resize(self, limit: int) -> list[ExpertKey]:
        """Use at most ``limit`` slots from now on: who had to leave at once, as by ``shrink``.

        ValueError if it is below 1 or there are not so many slots.
        """
        if not 1 <= limit <= self.num_slots:
            raise ValueError(f"from 1 to {self.num_slots} slots can be used, not {limit}")
        self.limit = limit
        return self.shrink()

    def shrink(self) -> list[ExpertKey]:
        """Evict until the limit is kept or nothing more may leave: who left, first to leave first.
        Their slots are free."""
        evicted: list[ExpertKey] = []
        while self.has_excess and self._num_evictable:
            key, slot = self._evict_for(None)
            self._states[slot] = _FREE
            self._keys[slot] = None
            self._free.append(slot)
            evicted.append(key)
        return evicted

    # ---- pins ----

    def pin(self, slot: SlotId) -> None:
        """Keep what is in ``slot``, or on its way there, until the matching unpin.

        DirectoryMisuse if the slot is free.
        """
        if not 0 <= slot < self.num_slots:
            raise self._unknown(slot)
        state = self._states[slot]
        if state is _FREE:
            raise DirectoryMisuse(f"pin of slot {slot}, which is free")
        if state is _RESIDENT and not self._pins[slot]:
            self._num_evictable -= 1
        self._pins[slot] += 1

    def unpin(self, slot: SlotId) -> None:
        """Take one pin back. DirectoryMisuse if there is none."""
        if not 0 <= slot < self.num_slots:
            raise self._unknown(slot)
        if not self._pins[slot]:
            raise DirectoryMisuse(f"unpin of slot {slot}, which is not pinned")
        self._pins[slot] -= 1
        if not self._pins[slot] and self._states[slot] is _RESIDENT:
            self._num_evictable += 1

    def clear(self) -> None:
        """All residency is lost (the device went away): every slot is free, every pin void.

        Open reservations are refused when they come to commit or abort. Who held a pin must
        forget it: an unpin after this is misuse.
        """
        self.clears += 1
        self.lost_residents += len(self._resident)
        self.lost_fills += len(self._filling)
        self._resident.clear()
        self._filling.clear()
        self._states = [_FREE] * self.num_slots
        self._keys = [None] * self.num_slots
        self._pins = [0] * self.num_slots
        self._generations = [generation + 1 for generation in self._generations]
        self._free = self._all_slots_free()
        self._num_evictable = 0
        self._guests.clear()
        self._policy.cleared()

    # ---- the recount ----

    def check(self) -> None:
        """Recount everything from the slots up, O(num_slots); InvariantBroken says what
        disagrees.
        """
        check_directory(self)

    # ---- inside ----

    def _all_slots_free(self) -> list[SlotId]:
        # Taken from the end, so slot 0 first.
        return [SlotId(index) for index in reversed(range(self.num_slots))]

    def _unknown(self, slot: SlotId) -> DirectoryMisuse:
        # Refused by hand everywhere, because a negative index would silently mean another slot.
        return DirectoryMisuse(f"slot {slot} does not exist; there are {self.num_slots}")

    def _is_open(self, slot: SlotId, generation: int) -> bool:
        if not 0 <= slot < self.num_slots:
            raise self._unknown(slot)
        return self._states[slot] is _FILLING and self._generations[slot] == generation

    def _close_fill(self, slot: SlotId, generation: int) -> ExpertKey | None:
        if not self._is_open(slot, generation):
            return None
        key = self._keys[slot]
        assert key is not None  # a FILLING slot names its key
        del self._filling[key]
        return key

    def _evict_for(self, incoming: ExpertKey | None) -> tuple[ExpertKey, SlotId]:
        """Who leaves, and the slot, which is in no state until the caller gives it one."""
        victim = next(self.evictable(incoming), None)
        if victim is None:
            raise InvariantBroken("the policy names no victim, though a resident expert may leave")
        self._forget(victim)
        self._num_evictable -= 1
        self.evictions += 1
        return victim, self._resident.pop(victim)

    def _forget(self, key: ExpertKey) -> None:
        """``key`` is placed no longer."""
        if key in self._guests:
            del self._guests[key]
        else:
            self._policy.removed(key)

    def _settle_guest(self, key: ExpertKey) -> None:
        """A guest is demanded by one who is none: the policy hears of it."""
        del self._guests[key]
        self._policy.admitted(key)


def _named(key: ExpertKey) -> str:
    return f"layer {key[0]} expert {key[1]}"
