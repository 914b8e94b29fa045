"""Which copy is next: those that somebody waits for, then the others, these in pieces.

A copy in the background is a guess about the future, so it must never hold up a demand. An awaited
copy goes to the link at once and whole. Of the others one piece after the other goes there, at most
`PIECES_ON_LINK` at a time and only while no awaited copy is on the link; an awaited one therefore
waits for that much at most. What a piece takes is counted as the copy's time; pauses are not.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from expert_kernels.cuda_copy import DoneCopy

if TYPE_CHECKING:
    from dma_worker.copier import Copier
    from expert_store.layout import StoreLayout

PIECE_BYTES = 1 << 20
#: One moves, one follows it without a gap.
PIECES_ON_LINK = 2
#: Tag of every piece; copies are numbered from 1.
_PIECE = -1


@dataclass
class _Patient:
    """A copy that is not awaited: how much of it was sent, and how much has arrived."""

    copy: int
    layer: int
    expert: int
    slot: int
    num_sent: int = 0
    num_done: int = 0
    busy_ns: int = 0


class CopyQueue:
    """In front of one `Copier`, which it owns."""

    def __init__(
        self, copier: Copier, layout: StoreLayout, *, piece_bytes: int = PIECE_BYTES
    ) -> None:
        self._copier = copier
        self._block_bytes = layout.block_bytes
        self._piece_bytes = piece_bytes
        self._patient: deque[_Patient] = deque()
        #: Whose pieces are on the link, in order.
        self._pieces: deque[_Patient] = deque()

    @property
    def num_in_flight(self) -> int:
        """Copies that have not ended, and pieces on the link."""
        return self._copier.num_in_flight + len(self._patient)

    def submit(self, copy: int, layer: int, expert: int, slot: int, *, is_awaited: bool) -> None:
        """Copy the block of (layer, expert), which exists, into `slot`, which exists."""
        if is_awaited:
            self._copier.submit(copy, layer, expert, slot)
        else:
            self._patient.append(_Patient(copy, layer, expert, slot))
            self._send_pieces()

    def poll(self) -> list[DoneCopy]:
        """Copies that have ended since the last call."""
        ended: list[DoneCopy] = []
        for done in self._copier.poll():
            if done.tag != _PIECE:
                ended.append(done)
                continue
            patient = self._pieces.popleft()
            patient.num_done += done.num_bytes
            patient.busy_ns += done.ended_ns - done.started_ns
            if patient.num_done == self._block_bytes:
                self._patient.remove(patient)
                started_ns = done.ended_ns - patient.busy_ns
                ended.append(DoneCopy(patient.copy, started_ns, done.ended_ns, self._block_bytes))
        self._send_pieces()
        return ended

    def wait(self) -> None:
        """Sleep a little while copies are in flight."""
        self._copier.wait()

    def close(self) -> None:
        """Give up the arena at once; what is in flight is never reported."""
        self._patient.clear()
        self._pieces.clear()
        self._copier.close()

    def _send_pieces(self) -> None:
        if not self._patient or self._copier.num_in_flight > len(self._pieces):
            return  # nothing to send, or somebody waits for what is on the link
        for patient in self._patient:
            while patient.num_sent < self._block_bytes:
                if len(self._pieces) >= PIECES_ON_LINK:
                    return
                num_bytes = min(self._piece_bytes, self._block_bytes - patient.num_sent)
                self._copier.submit(
                    _PIECE,
                    patient.layer,
                    patient.expert,
                    patient.slot,
                    (patient.num_sent, num_bytes),
                )
                patient.num_sent += num_bytes
                self._pieces.append(patient)
