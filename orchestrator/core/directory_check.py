"""The directory's recount of itself, from the slots up."""

from __future__ import annotations

from typing import TYPE_CHECKING

from orchestrator.core.slots import InvariantBroken, SlotState
from protocol.messages import SlotId

if TYPE_CHECKING:
    from orchestrator.core.directory import ExpertDirectory
    from protocol.messages import ExpertKey


def check_directory(directory: ExpertDirectory) -> None:
    """O(slots). InvariantBroken says what disagrees."""
    resident: dict[ExpertKey, SlotId] = {}
    filling: dict[ExpertKey, SlotId] = {}
    free: list[SlotId] = []
    num_evictable = 0
    for index in range(directory.num_slots):
        slot = SlotId(index)
        state, key, pins = directory._states[slot], directory._keys[slot], directory._pins[slot]
        if pins < 0:
            raise InvariantBroken(f"slot {slot} has {pins} pins")
        if state is SlotState.FREE:
            if key is not None or pins:
                raise InvariantBroken(f"slot {slot} is free, but pinned or named")
            free.append(slot)
            continue
        if key is None:
            raise InvariantBroken(f"slot {slot} is {state.value} but names no expert")
        if key in resident or key in filling:
            raise InvariantBroken(f"{_named(key)} is in two slots")
        (resident if state is SlotState.RESIDENT else filling)[key] = slot
        num_evictable += state is SlotState.RESIDENT and pins == 0
    hold(resident == directory._resident, "the resident keys do not match the slots")
    hold(filling == directory._filling, "the filling keys do not match the slots")
    hold(sorted(directory._free) == free, "the list of free slots does not match the slots")
    hold(
        num_evictable == directory._num_evictable,
        f"{num_evictable} slots may be evicted, but {directory._num_evictable} are counted",
    )
    hold(directory._guests.keys() <= {*resident, *filling}, "a guest has no slot")
    ordered = [*directory._guests, *directory._policy.victims(None)]
    hold(len(ordered) == len(set(ordered)), "the policy orders an expert twice")
    hold(
        set(ordered) == resident.keys() | filling.keys(),
        "the policy orders other experts than those in the slots",
    )
    hold(
        directory.fills - directory.evictions - directory.lost_residents == len(resident),
        "fills less evictions and losses are not the resident experts",
    )
    num_reserves = directory.fills + directory.aborts + directory.lost_fills + len(filling)
    hold(
        sum(directory._generations) == num_reserves + directory.clears * directory.num_slots,
        "the generations do not add up to the reservations and clears",
    )


def hold(condition: bool, sentence: str) -> None:
    """InvariantBroken with `sentence` unless `condition`."""
    if not condition:
        raise InvariantBroken(sentence)


def _named(key: ExpertKey) -> str:
    return f"layer {key[0]} expert {key[1]}"
