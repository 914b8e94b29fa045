"""The directory again, slow and obvious, for comparison.

It keeps a row per slot and the log of all demands, and works everything out afresh when asked. It
shares no code with the real one but the key and slot types. ``rank`` is its policy: a function of a
key, the demand log and the incoming key; the key with the least rank leaves first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Key = tuple[int, int]
Rank = Callable[[Key, list[Key], Key | None], Any]


class Forbidden(Exception):
    """The reference's word for misuse."""


@dataclass
class Row:
    state: str = "free"
    key: Key | None = None
    pins: int = 0
    generation: int = 0


def last_demand(key: Key, log: list[Key]) -> int:
    return max(index for index, demanded in enumerate(log) if demanded == key)


def lru_rank(key: Key, log: list[Key], incoming: Key | None) -> int:
    return last_demand(key, log)


class ReferenceDirectory:
    def __init__(self, num_slots: int, rank: Rank) -> None:
        self.rows = [Row() for _ in range(num_slots)]
        self.rank = rank
        self.log: list[Key] = []
        self.hits = self.fills = self.evictions = self.aborts = 0

    def row_of(self, key: Key) -> Row | None:
        rows = [row for row in self.rows if row.key == key]
        assert len(rows) <= 1
        return rows[0] if rows else None

    def slot_of(self, key: Key) -> int | None:
        row = self.row_of(key)
        return self.rows.index(row) if row is not None and row.state == "resident" else None

    def order(self, incoming: Key | None = None) -> list[Key]:
        placed = [row.key for row in self.rows if row.key is not None]
        return sorted(placed, key=lambda key: self.rank(key, self.log, incoming))

    def residents(self) -> list[Key]:
        return [key for key in self.order() if self.row_of(key).state == "resident"]

    def num_reservable(self) -> int:
        return sum(
            row.state == "free" or (row.state == "resident" and row.pins == 0) for row in self.rows
        )

    def refresh(self, key: Key) -> None:
        row = self.row_of(key)
        if row is None:
            raise Forbidden
        self.hits += row.state == "resident"
        self.log.append(key)

    def legal_reserve(self, key: Key) -> tuple[set[int], Key | None] | None:
        """The slots that may be given to ``key`` and who leaves; None if nobody can."""
        if self.row_of(key) is not None:
            raise Forbidden
        free = {slot for slot, row in enumerate(self.rows) if row.state == "free"}
        if free:
            return free, None
        for victim in self.order(key):
            row = self.row_of(victim)
            if row.state == "resident" and row.pins == 0:
                return {self.rows.index(row)}, victim
        return None

    def reserved(self, key: Key, slot: int) -> None:
        row = self.rows[slot]
        self.evictions += row.key is not None
        self.rows[slot] = Row("filling", key, 0, row.generation + 1)
        self.log.append(key)

    def _row(self, slot: int) -> Row:
        if slot not in range(len(self.rows)):
            raise Forbidden
        return self.rows[slot]

    def commit(self, slot: int, generation: int) -> bool:
        row = self._row(slot)
        if row.state != "filling" or row.generation != generation:
            return False
        row.state = "resident"
        self.fills += 1
        return True

    def abort(self, slot: int, generation: int) -> bool:
        row = self._row(slot)
        if row.state != "filling" or row.generation != generation:
            return False
        if row.pins:
            raise Forbidden
        row.state, row.key = "free", None
        self.aborts += 1
        return True

    def pin(self, slot: int) -> None:
        if self._row(slot).state == "free":
            raise Forbidden
        self.rows[slot].pins += 1

    def unpin(self, slot: int) -> None:
        if self._row(slot).pins == 0:
            raise Forbidden
        self.rows[slot].pins -= 1

    def clear(self) -> None:
        self.rows = [Row(generation=row.generation + 1) for row in self.rows]
