"""What a slot can be, what reserves one, and what can be wrong about it."""

from __future__ import annotations

from enum import Enum

import msgspec

from protocol.messages import ExpertKey, SlotId


class SlotState(Enum):
    """What a slot holds: nothing, bytes on their way, or a readable expert."""

    FREE = "free"
    FILLING = "filling"
    RESIDENT = "resident"


class DirectoryMisuse(ValueError):
    """A call that the state of the directory forbids: a bug of the caller. Nothing was changed."""


class InvariantBroken(AssertionError):
    """``check()`` found two parts that disagree: a bug of the directory or of its policy."""


class Reservation(msgspec.Struct, frozen=True, gc=False):
    """A slot that waits for bytes, the generation to name at its end, and who left for it."""

    slot: SlotId
    generation: int
    evicted: ExpertKey | None
