"""The directory's edges, one by one, and what `check()` finds."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from orchestrator.core.directory import (
    DirectoryMisuse,
    ExpertDirectory,
    InvariantBroken,
    SlotState,
)
from orchestrator.core.policies import Lru

if TYPE_CHECKING:
    from collections.abc import Callable

Key = tuple[int, int]


def new_directory(num_slots: int, residents: int = 0) -> ExpertDirectory:
    directory = ExpertDirectory(num_slots, Lru())
    for expert in range(residents):
        fill(directory, (0, expert))
    return directory


def fill(directory: ExpertDirectory, key: Key) -> int:
    reservation = directory.reserve(key)
    assert reservation is not None
    assert directory.commit(reservation.slot, reservation.generation)
    return reservation.slot


@pytest.mark.parametrize("num_slots", [0, -1])
def test_no_slots_is_refused_with_the_number(num_slots: int) -> None:
    with pytest.raises(ValueError, match=f"at least 1 expert slot, not {num_slots}"):
        ExpertDirectory(num_slots, Lru())


def test_a_policy_serves_one_directory() -> None:
    policy = Lru()
    ExpertDirectory(2, policy).reserve((0, 0))
    with pytest.raises(DirectoryMisuse, match="give each directory a new one"):
        ExpertDirectory(2, policy)


def test_life_of_a_slot() -> None:
    directory = new_directory(1)
    reservation = directory.reserve((0, 5))
    assert reservation is not None
    assert (reservation.slot, reservation.generation, reservation.evicted) == (0, 1, None)
    assert directory.slot_of((0, 5)) is None  # not readable while the bytes are on their way
    assert directory.state_of((0, 5)) is SlotState.FILLING
    assert directory.is_filling((0, 5))
    assert directory.commit(0, 1)
    assert directory.slot_of((0, 5)) == 0
    assert not directory.commit(0, 1)  # said twice: no second fill
    assert directory.fills == 1
    second = directory.reserve((1, 5))
    assert second is not None
    assert (second.slot, second.generation, second.evicted) == (0, 2, (0, 5))
    assert directory.state_of((0, 5)) is None
    directory.check()


def test_one_slot_and_fewer_slots_than_top_k() -> None:
    for num_slots in (1, 3):
        directory = new_directory(num_slots)
        for layer in range(4):
            reserved = [directory.reserve((layer, expert)) for expert in range(4)]
            # The first ones take all slots; while they fill, nobody can leave for the rest.
            assert [r is not None for r in reserved] == [i < num_slots for i in range(4)]
            assert directory.num_reservable == 0
            for reservation in reserved:
                if reservation is not None:
                    assert directory.commit(reservation.slot, reservation.generation)
            directory.check()
        assert directory.evictions == 3 * num_slots


def test_a_demand_is_pins_and_refreshes_in_one_call() -> None:
    at_once, one_by_one = new_directory(6, residents=4), new_directory(6, residents=4)
    order = one_by_one.residents()
    reservation = at_once.reserve((9, 9)), one_by_one.reserve((9, 9))
    assert None not in reservation
    keys = [order[2], (7, 7), order[0], (9, 9)]
    slots = []
    for key in (order[2], order[0]):
        slot = one_by_one.slot_of(key)
        assert slot is not None
        one_by_one.pin(slot)
        one_by_one.refresh(key)
        slots.append(slot)
    assert at_once.demand(keys) == ([order[2][1], order[0][1]], slots, [(7, 7), (9, 9)])
    assert at_once.residents() == one_by_one.residents()
    assert at_once.hits == one_by_one.hits == 2
    assert at_once.num_reservable == one_by_one.num_reservable
    assert [at_once.num_pins(slot) for slot in slots] == [1, 1]
    at_once.check()


def test_all_pinned_then_one_let_go() -> None:
    directory = new_directory(3, residents=3)
    for slot in range(3):
        directory.pin(slot)
    assert directory.num_reservable == 0
    assert directory.reserve((1, 0)) is None
    assert directory.evictions == 0
    directory.unpin(directory.slot_of((0, 1)))
    reservation = directory.reserve((1, 0))
    assert reservation is not None
    assert reservation.evicted == (0, 1)
    directory.check()


def test_two_pins_need_two_unpins() -> None:
    directory = new_directory(1, residents=1)
    directory.pin(0)
    directory.pin(0)
    directory.unpin(0)
    assert directory.reserve((1, 0)) is None
    directory.unpin(0)
    assert directory.reserve((1, 0)) is not None


def test_a_pin_taken_while_filling_protects_after_the_commit() -> None:
    directory = new_directory(1)
    reservation = directory.reserve((0, 0))
    assert reservation is not None
    directory.pin(reservation.slot)
    assert directory.commit(reservation.slot, reservation.generation)
    assert directory.num_reservable == 0
    assert directory.reserve((0, 1)) is None
    directory.check()


def test_a_pin_taken_and_let_go_while_filling_leaves_no_trace() -> None:
    directory = new_directory(2)
    reservation = directory.reserve((0, 0))
    assert reservation is not None
    directory.pin(reservation.slot)
    directory.unpin(reservation.slot)
    directory.check()
    assert directory.num_reservable == 1  # the other slot: this one still waits for its bytes
    assert directory.abort(reservation.slot, reservation.generation)
    assert directory.num_reservable == 2


def test_recency_is_the_order_of_demand_not_of_landing() -> None:
    directory = new_directory(3)
    reservations = [directory.reserve((0, expert)) for expert in range(3)]
    for reservation in reversed(reservations):
        assert reservation is not None
        directory.commit(reservation.slot, reservation.generation)
    assert directory.residents() == [(0, 0), (0, 1), (0, 2)]


def test_a_demand_while_filling_counts_for_recency_only() -> None:
    directory = new_directory(2)
    for expert in (0, 1):
        directory.reserve((0, expert))
    directory.refresh((0, 0))
    for slot in (0, 1):
        assert directory.commit(slot, 1)
    assert directory.hits == 0
    assert directory.residents() == [(0, 1), (0, 0)]


def test_an_aborted_fill_frees_the_slot_and_restores_nothing() -> None:
    directory = new_directory(1, residents=1)
    reservation = directory.reserve((1, 0))
    assert reservation is not None
    assert reservation.evicted == (0, 0)
    assert directory.abort(reservation.slot, reservation.generation)
    assert directory.residents() == []
    assert directory.num_reservable == 1
    assert not directory.commit(reservation.slot, reservation.generation)  # landed too late
    assert not directory.abort(reservation.slot, reservation.generation)
    assert directory.aborts == 1
    directory.check()


def test_a_late_commit_does_not_bless_the_next_fill_of_the_slot() -> None:
    directory = new_directory(1)
    first = directory.reserve((0, 0))
    assert first is not None
    directory.abort(first.slot, first.generation)
    second = directory.reserve((0, 1))
    assert second is not None
    assert second.slot == first.slot
    assert not directory.commit(first.slot, first.generation)
    assert not directory.abort(first.slot, first.generation)
    assert directory.is_filling((0, 1))
    directory.check()


def test_clear_loses_all_and_refuses_what_was_open() -> None:
    directory = new_directory(3, residents=2)
    directory.pin(0)
    stale = directory.reserve((1, 0))
    assert stale is not None
    before = [directory.generation_of(slot) for slot in range(3)]
    directory.clear()
    directory.check()
    assert directory.residents() == []
    assert directory.num_reservable == 3
    assert not directory.commit(stale.slot, stale.generation)
    assert not directory.abort(stale.slot, stale.generation)
    with pytest.raises(DirectoryMisuse):
        directory.unpin(0)  # the pin went with the device
    again = [directory.reserve((1, expert)) for expert in range(3)]
    assert all(r is not None and r.generation > before[r.slot] for r in again)
    assert not directory.commit(stale.slot, stale.generation)
    assert (directory.clears, directory.lost_residents, directory.lost_fills) == (1, 2, 1)
    directory.check()


MISUSES: dict[str, tuple[Callable[[ExpertDirectory], object], str]] = {
    "reserve a resident": (lambda d: d.reserve((0, 0)), "layer 0 expert 0, which already has"),
    "reserve a filling one": (lambda d: d.reserve((0, 1)), "layer 0 expert 1, which already has"),
    "refresh a stranger": (lambda d: d.refresh((2, 7)), "layer 2 expert 7, which has no slot"),
    "pin a free slot": (lambda d: d.pin(2), "slot 2, which is free"),
    "unpin what is not pinned": (lambda d: d.unpin(0), "slot 0, which is not pinned"),
    "abort a pinned fill": (lambda d: d.abort(1, 1), "slot 1, which is pinned"),
    "pin below": (lambda d: d.pin(-1), "slot -1 does not exist; there are 3"),
    "pin above": (lambda d: d.pin(3), "slot 3 does not exist"),
    "unpin below": (lambda d: d.unpin(-1), "slot -1 does not exist"),
    "commit below": (lambda d: d.commit(-2, 1), "slot -2 does not exist"),
    "abort above": (lambda d: d.abort(3, 1), "slot 3 does not exist"),
    "ask below": (lambda d: d.key_in(-1), "slot -1 does not exist"),
    "ask pins above": (lambda d: d.num_pins(3), "slot 3 does not exist"),
    "ask generation below": (lambda d: d.generation_of(-1), "slot -1 does not exist"),
}


@pytest.mark.parametrize("name", MISUSES)
def test_misuse_is_named_and_changes_nothing(name: str) -> None:
    misuse, sentence = MISUSES[name]
    directory = new_directory(3, residents=1)  # slot 0 resident, 1 filling and pinned, 2 free
    directory.reserve((0, 1))
    directory.pin(1)

    def snapshot() -> object:
        slots = range(3)
        return (
            [directory.key_in(slot) for slot in slots],
            [directory.num_pins(slot) for slot in slots],
            [directory.generation_of(slot) for slot in slots],
            directory.residents(),
            directory.num_reservable,
            directory.hits,
        )

    before = snapshot()
    with pytest.raises(DirectoryMisuse, match=sentence):
        misuse(directory)
    assert snapshot() == before
    directory.check()


def _corrupt(attribute: str, change: Callable[[object], object]) -> Callable[[object], None]:
    def corrupt(directory: object) -> None:
        changed = change(getattr(directory, attribute))
        if changed is not None:
            setattr(directory, attribute, changed)

    return corrupt


CORRUPTIONS: dict[str, tuple[Callable[[object], None], str]] = {
    "negative pins": (_corrupt("_pins", lambda p: p.__setitem__(0, -1)), "has -1 pins"),
    "pinned free slot": (_corrupt("_pins", lambda p: p.__setitem__(2, 1)), "free, but pinned"),
    "named free slot": (_corrupt("_keys", lambda k: k.__setitem__(2, (5, 5))), "free, but pinned"),
    "nameless resident": (_corrupt("_keys", lambda k: k.__setitem__(0, None)), "names no expert"),
    "two slots": (_corrupt("_keys", lambda k: k.__setitem__(1, (0, 0))), "in two slots"),
    "lost resident": (_corrupt("_resident", lambda r: r.clear()), "resident keys do not match"),
    "lost fill": (_corrupt("_filling", lambda f: f.clear()), "filling keys do not match"),
    "free slot twice": (_corrupt("_free", lambda f: f.append(2)), "list of free slots"),
    "evictable": (_corrupt("_num_evictable", lambda n: n + 1), "may be evicted, but 2"),
    "pin not counted": (_corrupt("_pins", lambda p: p.__setitem__(0, 1)), "may be evicted, but 1"),
    "policy forgot": (_corrupt("_policy", lambda p: p.removed((0, 0))), "policy orders other"),
    "policy invents": (_corrupt("_policy", lambda p: p.admitted((7, 7))), "policy orders other"),
    "fills": (_corrupt("fills", lambda n: n + 1), "are not the resident experts"),
    "evictions": (_corrupt("evictions", lambda n: n + 1), "are not the resident experts"),
    "aborts": (_corrupt("aborts", lambda n: n + 1), "generations do not add up"),
    "generation": (_corrupt("_generations", lambda g: g.__setitem__(2, 1)), "generations do not"),
}


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_check_finds(name: str) -> None:
    corrupt, sentence = CORRUPTIONS[name]
    directory = new_directory(3, residents=1)
    directory.reserve((0, 1))
    directory.check()
    corrupt(directory)
    with pytest.raises(InvariantBroken, match=sentence):
        directory.check()


def test_check_finds_a_policy_that_repeats_itself() -> None:
    class Stutter(Lru):
        def victims(self, incoming: Key | None) -> object:
            return iter([key for key in super().victims(incoming) for _ in range(2)])

    directory = ExpertDirectory(2, Stutter())
    directory.reserve((0, 0))
    with pytest.raises(InvariantBroken, match="orders an expert twice"):
        directory.check()


def test_a_policy_that_names_no_victim_is_a_broken_invariant() -> None:
    class Miser(Lru):
        def victims(self, incoming: Key | None) -> object:
            return iter(())

    directory = ExpertDirectory(1, Miser())
    fill(directory, (0, 0))
    with pytest.raises(InvariantBroken, match="names no victim"):
        directory.reserve((0, 1))


def test_the_policy_hears_of_every_layer_step() -> None:
    class Listener(Lru):
        heard: list[object]

        def layer_step(self, layer: int, experts: object) -> None:
            self.heard.append((layer, experts))

    listener = Listener()
    listener.heard = []
    ExpertDirectory(1, listener).layer_step(3, [7, 1])
    assert listener.heard == [(3, [7, 1])]


# ---- whole traces, every miss filled ----


def replay(directory: ExpertDirectory, trace: list[list[Key]]) -> int:
    """Hits; a layer-step pins its hits before it fills its misses, as a real one does."""
    for step in trace:
        hits = [key for key in step if directory.slot_of(key) is not None]
        for key in hits:
            directory.refresh(key)
            directory.pin(directory.slot_of(key))
        for key in step:
            if key not in hits:
                fill(directory, key)
        for key in hits:
            directory.unpin(directory.slot_of(key))
    directory.check()
    return directory.hits


def lru_hits(num_slots: int, trace: list[list[Key]]) -> int:
    """The same on a plain list, oldest first."""
    cached: list[Key] = []
    num_hits = 0
    for step in trace:
        hits = [key for key in step if key in cached]
        num_hits += len(hits)
        misses = [key for key in step if key not in hits]
        cached = [key for key in cached if key not in hits] + hits + misses
        del cached[:-num_slots]
    return num_hits


@pytest.mark.parametrize("num_slots", [9, 12, 18, 40])
def test_zipf_trace_hits_as_often_as_a_plain_list(num_slots: int) -> None:
    rng = random.Random(7)
    num_layers, num_experts, top_k = 4, 16, 4
    weights = [1 / (1 + rank) for rank in range(num_experts)]
    trace = []
    for _ in range(300):
        for layer in range(num_layers):
            chosen: list[Key] = []
            while len(chosen) < top_k:
                expert = (rng.choices(range(num_experts), weights)[0] + 5 * layer) % num_experts
                if (layer, expert) not in chosen:
                    chosen.append((layer, expert))
            trace.append(chosen)
    hits = replay(ExpertDirectory(num_slots, Lru()), trace)
    assert hits == lru_hits(num_slots, trace)
    # Until a layer's turn comes again, the others demand (layers - 1) x top_k other experts.
    assert (hits > 0) == (num_slots > (num_layers - 1) * top_k)


def test_cyclic_trace_falls_off_the_cliff_one_slot_below_layers_times_top_k() -> None:
    num_layers, top_k, num_tokens = 6, 3, 20
    trace = [
        [(layer, expert) for expert in range(top_k)]
        for _ in range(num_tokens)
        for layer in range(num_layers)
    ]
    cliff = num_layers * top_k
    assert replay(ExpertDirectory(cliff, Lru()), trace) == (num_tokens - 1) * cliff
    below = replay(ExpertDirectory(cliff - top_k, Lru()), trace)
    assert below == 0
