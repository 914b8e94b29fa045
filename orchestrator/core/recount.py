"""The recount of everything that hangs on slots: pins, fills, reads. For tests and simulations."""

from __future__ import annotations

from typing import TYPE_CHECKING

from orchestrator.core.layer_step import hold
from protocol.messages import SlotId

if TYPE_CHECKING:
    from collections.abc import Mapping

    from orchestrator.core.background import BackgroundFills
    from orchestrator.core.directory import ExpertDirectory
    from orchestrator.core.layer_step import LayerStep
    from orchestrator.core.workers import Roster
    from protocol.messages import ExpertId, LayerId, StepId


def recount(
    directory: ExpertDirectory,
    work: LayerStep | None,
    roster: Roster,
    running: Mapping[tuple[StepId, LayerId], Mapping[ExpertId, SlotId]],
    background: BackgroundFills,
    is_at_rest: bool,
    is_guest: bool,
) -> None:
    """Hold the directory against the layer-step in progress, the slots still read and the fills
    in the background, O(slots). `is_at_rest`: the gpu_worker uses nothing it looked up by itself.
    `is_guest`: the step in flight is a guest's.

    Raises:
        InvariantBroken: what disagrees, or that nothing would ever happen again.
    """
    directory.check()
    pins = [0] * directory.num_slots
    for (_, layer), slots in running.items():
        hold(bool(slots), "a layer-step is kept for no slot")
        for expert, slot in slots.items():
            pins[slot] += 1
            hold(directory.slot_of((layer, expert)) == slot, f"slot {slot} is run too early")
    num_filling = len(background)
    hold(not (background.retiring and is_at_rest), "a slot retires from a gpu_worker at rest")
    hold(not num_filling or roster.link_epoch is not None, "fills wait for a lost link")
    if work is not None:
        num_filling += len(work.copying)
        for expert, reservation in work.copying.values():
            slot = reservation.slot
            pins[slot] += 1
            hold(
                directory.is_filling((work.layer, expert))
                and directory.key_in(slot) == (work.layer, expert)
                and directory.generation_of(slot) == reservation.generation,
                f"slot {slot} does not wait for the copy into it",
            )
        work.check(roster)
        if work.unfilled:
            # Deadlock: every slot that a fill could take must be held by something that ends.
            can_reserve = directory.can_host if is_guest else directory.num_reservable > 0
            hold(not can_reserve, "a fill waits though a slot can be reserved")
            is_going_on = bool(work.copying or running or background.copying)
            hold(is_going_on, "fills wait, but nothing is in flight")
    hold(directory.num_filling == num_filling, "a slot waits for a copy that nobody makes")
    for index, count in enumerate(pins):
        hold(directory.num_pins(SlotId(index)) == count, f"slot {index} is pinned for nobody")
    hold(not running or roster.gpu_epoch is not None, "slots are run by nobody")
