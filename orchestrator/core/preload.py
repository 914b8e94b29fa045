"""Slots that are empty and a link that is idle: experts are copied before anybody asks for them.

Nobody knows yet who will be asked for, so the experts come in the order of their numbers, each from
all layers in turn, and only into free slots: nothing leaves for them. Where every expert has room,
all of them are resident before the first token, and no layer ever waits.

A step that begins ends the copying, for what it demands goes first; between requests it goes on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from protocol.messages import ExpertId, LayerId

if TYPE_CHECKING:
    from collections.abc import Sequence

    from orchestrator.core.directory import ExpertDirectory
    from protocol.messages import ExpertKey


class Preload:
    """Which expert is next; `num_experts` per layer, none: nothing is copied before demand."""

    __slots__ = ("_directory", "_keys", "_next", "is_awaited")

    def __init__(self, directory: ExpertDirectory, num_experts: Sequence[int]) -> None:
        self._directory = directory
        self._keys: list[ExpertKey] = [
            (LayerId(layer), ExpertId(expert))
            for expert in range(max(num_experts, default=0))
            for layer, count in enumerate(num_experts)
            if expert < count
        ]
        self._next = 0
        #: Whether a first request should wait: until all are copied, or one came all the same.
        self.is_awaited = bool(self._keys)

    def next_key(self) -> ExpertKey | None:
        """The next expert without a slot; None when all have one, or no slot is free."""
        while self._next < len(self._keys) and self._directory.num_free:
            key = self._keys[self._next]
            self._next += 1
            if self._directory.state_of(key) is None:
                return key
        return None

    def restart(self) -> None:
        """Slots may be empty again."""
        self._next = 0
