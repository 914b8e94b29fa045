"""The real directory against the reference, after every operation, for three policies.

Two of the policies live here only: they show that the interface carries more than recency (a
frequency count, and a policy that must know the layer of the incoming expert).
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.core.directory import DirectoryMisuse, ExpertDirectory, Reservation
from orchestrator.core.policies import Lru
from tests.core.reference_directory import (
    Forbidden,
    Key,
    ReferenceDirectory,
    last_demand,
    lru_rank,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

KEYS: list[Key] = [(layer, expert) for layer in range(3) for expert in range(4)]


class FrequencyPolicy(Lru):
    """Fewest demands ever first, then least recent."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[Key] = Counter()

    def refreshed(self, key: Key) -> None:
        super().refreshed(key)
        self.counts[key] += 1

    def admitted(self, key: Key) -> None:
        super().admitted(key)
        self.counts[key] += 1

    def victims(self, incoming: Key | None) -> Iterator[Key]:
        return iter(sorted(super().victims(incoming), key=self.counts.__getitem__))


def frequency_rank(key: Key, log: list[Key], incoming: Key | None) -> Any:
    return log.count(key), last_demand(key, log)


class SameLayerPolicy(Lru):
    """The incoming expert's own layer first, each layer by recency."""

    def victims(self, incoming: Key | None) -> Iterator[Key]:
        order = list(super().victims(incoming))
        if incoming is None:
            return iter(order)
        return iter(sorted(order, key=lambda key: key[0] != incoming[0]))


def same_layer_rank(key: Key, log: list[Key], incoming: Key | None) -> Any:
    return incoming is not None and key[0] != incoming[0], last_demand(key, log)


POLICIES = {
    "lru": (Lru, lru_rank),
    "frequency": (FrequencyPolicy, frequency_rank),
    "same-layer": (SameLayerPolicy, same_layer_rank),
}

# Weights by repetition: demands and commits make the interesting states, a clear ends them.
VERBS = (
    ["demand"] * 6
    + ["commit_open"] * 5
    + ["pin_placed"] * 3
    + ["unpin"] * 3
    + ["abort_open", "commit_any", "abort_any", "reserve", "refresh", "pin", "clear"]
)
# Long lists on purpose: left alone, hypothesis prefers about five operations, and reaches little.
OPERATIONS = st.lists(
    st.tuples(st.sampled_from(VERBS), st.integers(0, 59)), min_size=25, max_size=60
)


class Pair:
    """Both directories, driven alike."""

    def __init__(self, num_slots: int, policy: str) -> None:
        factory, rank = POLICIES[policy]
        self.real = ExpertDirectory(num_slots, factory())
        self.reference = ReferenceDirectory(num_slots, rank)
        self.issued: list[Reservation] = []

    def both(self, real: Callable[[], Any], reference: Callable[[], Any]) -> None:
        try:
            expected = reference()
        except Forbidden:
            with pytest.raises(DirectoryMisuse):
                real()
        else:
            assert real() == expected

    def same(self, verb: str, *arguments: Any) -> None:
        self.both(
            lambda: getattr(self.real, verb)(*arguments),
            lambda: getattr(self.reference, verb)(*arguments),
        )

    def reserve(self, key: Key) -> None:
        try:
            legal = self.reference.legal_reserve(key)
        except Forbidden:
            with pytest.raises(DirectoryMisuse):
                self.real.reserve(key)
            return
        reservation = self.real.reserve(key)
        if legal is None:
            assert reservation is None
            return
        slots, evicted = legal
        assert reservation is not None
        assert reservation.slot in slots
        assert reservation.evicted == evicted
        self.reference.reserved(key, reservation.slot)
        assert reservation.generation == self.reference.rows[reservation.slot].generation
        self.issued.append(reservation)

    def step(self, verb: str, number: int) -> None:
        key = KEYS[number % len(KEYS)]
        num_slots = self.real.num_slots
        is_open = [
            r
            for r in self.issued
            if (row := self.reference.rows[r.slot]).generation == r.generation
            and row.state == "filling"
        ]
        match verb:
            case "demand" if self.reference.row_of(key) is not None:
                self.same("refresh", key)
            case "demand" | "reserve":
                self.reserve(key)
            case "refresh":
                self.same("refresh", key)
            case "commit_open" | "abort_open" if is_open:
                reservation = is_open[number % len(is_open)]
                self.same(verb[:-5], reservation.slot, reservation.generation)
            case "commit_any" | "abort_any" if self.issued:
                reservation = self.issued[number % len(self.issued)]
                self.same(verb[:-4], reservation.slot, reservation.generation)
            case "pin_placed":
                slots = [i for i, row in enumerate(self.reference.rows) if row.key is not None]
                if slots:
                    self.same("pin", slots[number % len(slots)])
            case "pin" | "unpin":
                self.same(verb, number % (num_slots + 2) - 1)  # one below, one above too
            case "clear" if number % 3 == 0:
                self.same("clear")

    def compare(self) -> None:
        real, reference = self.real, self.reference
        real.check()
        for key in KEYS:
            row = reference.row_of(key)
            assert real.slot_of(key) == reference.slot_of(key)
            state = real.state_of(key)
            assert (state.value if state else None) == (row.state if row else None)
            assert real.is_filling(key) == (row is not None and row.state == "filling")
        for slot, row in enumerate(reference.rows):
            assert real.key_in(slot) == row.key
            assert real.num_pins(slot) == row.pins
            assert real.generation_of(slot) == row.generation
        assert real.residents() == reference.residents()
        assert real.num_reservable == reference.num_reservable()
        assert real.num_resident == sum(row.state == "resident" for row in reference.rows)
        assert real.num_filling == sum(row.state == "filling" for row in reference.rows)
        assert (real.hits, real.fills, real.evictions, real.aborts) == (
            reference.hits,
            reference.fills,
            reference.evictions,
            reference.aborts,
        )


# A failure is shrunk for up to five minutes, and the counterexample is worth the wait.
@pytest.mark.timeout(400)
@pytest.mark.parametrize("policy", sorted(POLICIES))
@settings(max_examples=40, deadline=None, derandomize=True)
@given(num_slots=st.integers(1, 7), operations=OPERATIONS)
def test_directory_equals_the_reference_after_every_operation(
    policy: str, num_slots: int, operations: list[tuple[str, int]]
) -> None:
    pair = Pair(num_slots, policy)
    pair.compare()
    for verb, number in operations:
        pair.step(verb, number)
        pair.compare()


@pytest.mark.timeout(400)
@settings(max_examples=25, deadline=None, derandomize=True)
@given(num_slots=st.integers(1, 7), operations=OPERATIONS)
def test_num_reservable_is_the_number_of_reserves_that_succeed(
    num_slots: int, operations: list[tuple[str, int]]
) -> None:
    pair = Pair(num_slots, "lru")
    for verb, number in operations:
        pair.step(verb, number)
    promised = pair.real.num_reservable
    strangers = [(9, expert) for expert in range(num_slots + 1)]
    results = [pair.real.reserve(key) for key in strangers]
    assert [result is not None for result in results] == [
        index < promised for index in range(num_slots + 1)
    ]
    pair.real.check()
