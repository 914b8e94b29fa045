"""Stop strings in a text that comes in pieces: what may be shown now, and where it ends.

A piece may end in the beginning of a stop string. That end is held back until the next piece shows
whether the stop string is complete, in which case nothing from its first character on is shown, or
was none after all.
"""

from __future__ import annotations


class StopFinder:
    """For one text. With no stops everything is passed on at once."""

    def __init__(self, stops: list[str]) -> None:
        self._stops = stops
        self._held = ""
        self.is_stopped = False
        #: What came after the stop string, in the piece that completed it.
        self.rest = ""

    def push(self, piece: str) -> str:
        """The text that `piece` makes certain; sets `is_stopped` when a stop string is complete."""
        if not self._stops or self.is_stopped:
            return "" if self.is_stopped else piece
        text = self._held + piece
        found = [(place, stop) for stop in self._stops if (place := text.find(stop)) >= 0]
        if found:
            place, stop = min(found)
            self.is_stopped = True
            self._held = ""
            self.rest = text[place + len(stop) :]
            return text[:place]
        num_held = max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]

    def finish(self) -> str:
        """The text is over: what was held back belongs to it."""
        rest, self._held = self._held, ""
        return rest


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
