"""Fills that nobody waits for yet, into slots that the gpu_worker may still be reading.

A fill on demand is easy: the gpu_worker waits in `Routed`, so every earlier use of every slot is
over. A fill in the background may come while the gpu_worker walks through layers by itself. It may
have read in the table where the victim lies, a moment before the victim was taken out, and not be
through with it. So between victim and copy there is a *grace period*:

    Foreseen --reserve--> retiring --grace over--> copying --Copied--> resident
                |                                     ^
                +-- the gpu_worker is known to rest --+

The victim leaves the table (`Unpublish`), then `Retire` asks the shell to say `Retired` once the
worker's fence has moved. A free slot retires as well: it may have become free by an abort while its
last expert was still being read. The gpu_worker is known to rest, and all grace is over, when a
layer-step is decided (it waits, or runs what is pinned) and between steps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from orchestrator.core.directory import InvariantBroken
from orchestrator.core.events import Publish, Retire, Unpublish
from protocol.messages import Copy

if TYPE_CHECKING:
    from orchestrator.core.directory import ExpertDirectory, Reservation
    from orchestrator.core.events import CoreCommand
    from protocol.messages import Copied, CopyId, Epoch, ExpertKey

Fill = tuple["ExpertKey", "Reservation"]


class BackgroundFills:
    """Fills that belong to no layer-step; each is retiring or copying, under the id of its copy."""

    __slots__ = ("_directory", "copying", "evicted", "retiring")

    def __init__(self, directory: ExpertDirectory) -> None:
        self._directory = directory
        self.retiring: dict[CopyId, Fill] = {}
        self.copying: dict[CopyId, Fill] = {}
        #: Experts that left in the background during the step in flight. A layer that was passed
        #: before may be heard of afterwards.
        self.evicted: set[ExpertKey] = set()

    def __len__(self) -> int:
        return len(self.retiring) + len(self.copying)

    def begin(
        self,
        key: ExpertKey,
        copy: CopyId,
        link: Epoch,
        commands: list[CoreCommand],
        *,
        is_resting: bool,
    ) -> Reservation | None:
        """Fill `key`, which has no slot. None if there is no slot to be had."""
        reservation = self._directory.reserve(key)
        if reservation is None:
            return None
        if reservation.evicted is not None:
            self.evicted.add(reservation.evicted)
            commands.append(Unpublish(*reservation.evicted))
        self.retiring[copy] = (key, reservation)
        if is_resting:
            self.rest(link, commands)
        else:
            commands.append(Retire(copy, *key, reservation.slot))
        return reservation

    def rest(self, link: Epoch | None, commands: list[CoreCommand]) -> None:
        """The gpu_worker uses nothing that it looked up before: all that retires may be copied."""
        if self.retiring and link is not None:
            for copy in list(self.retiring):
                self.retired(copy, link, commands)

    def retired(self, copy: CopyId, link: Epoch, commands: list[CoreCommand]) -> bool:
        """One grace period is over. False if that was known."""
        fill = self.retiring.pop(copy, None)
        if fill is None:
            return False
        (layer, expert), reservation = fill
        self.copying[copy] = fill
        commands.append(Copy(link, copy, layer, expert, reservation.slot, is_awaited=False))
        return True

    def copied(self, copied: Copied, commands: list[CoreCommand]) -> bool:
        """A fill has landed. False if it is none of these."""
        fill = self.copying.pop(copied.copy, None)
        if fill is None:
            return False
        (layer, expert), reservation = fill
        if not self._directory.commit(reservation.slot, reservation.generation):
            raise InvariantBroken(f"slot {reservation.slot} was taken from the copy into it")
        commands.append(Publish(layer, expert, reservation.slot))
        return True

    def adopt(self, key: ExpertKey) -> tuple[CopyId, Reservation]:
        """`key`, which is being copied, is demanded: from now on it belongs to a layer-step."""
        for copy, (other, reservation) in self.copying.items():
            if other == key:
                del self.copying[copy]
                return copy, reservation
        raise InvariantBroken(f"layer {key[0]} expert {key[1]} is filled for nobody")

    def link_lost(self) -> None:
        """Nothing will be copied."""
        for fills in (self.retiring, self.copying):
            for _, reservation in fills.values():
                self._directory.abort(reservation.slot, reservation.generation)
            fills.clear()

    def gpu_lost(self) -> None:
        """The slots are gone."""
        self.retiring.clear()
        self.copying.clear()
        self.evicted.clear()
