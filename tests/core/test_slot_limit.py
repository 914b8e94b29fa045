"""The number of slots in use changes while serving."""

from __future__ import annotations

import pytest

from orchestrator.core.core import Core
from orchestrator.core.directory import ExpertDirectory
from orchestrator.core.events import Resize
from orchestrator.core.policies import Lru
from tests.core.test_core_step import CONFIG, copied, ran, routed, started, step_done, submit
from tests.core.test_guests import filled, key


def test_a_smaller_limit_evicts_the_least_recent_and_a_larger_one_gives_room() -> None:
    directory = ExpertDirectory(4, Lru())
    filled(directory, 0, 1, 2, 3)
    assert directory.resize(2) == [key(0, 0), key(0, 1)]
    directory.check()
    assert not directory.has_excess
    assert (directory.num_free, directory.num_reservable) == (0, 2)
    assert filled(directory, 5) == [key(0, 2)]
    directory.resize(4)
    assert directory.num_free == 2
    assert filled(directory, 6, 7, 8) == [None, None, key(0, 3)]


def test_what_is_pinned_or_filling_stays_until_it_is_not() -> None:
    directory = ExpertDirectory(3, Lru())
    filled(directory, 0)
    _, slots, _ = directory.demand([key(0, 0)])
    reservation = directory.reserve(key(0, 1))
    assert reservation is not None
    filled(directory, 2)
    assert directory.resize(1) == [key(0, 2)]
    assert directory.has_excess
    assert directory.commit(reservation.slot, reservation.generation)
    assert directory.shrink() == [key(0, 1)]
    directory.unpin(slots[0])
    assert directory.shrink() == []
    directory.check()
    assert directory.residents() == [key(0, 0)]


@pytest.mark.parametrize("limit", [0, 5, -1])
def test_a_limit_beyond_the_slots_is_refused(limit: int) -> None:
    directory = ExpertDirectory(4, Lru())
    with pytest.raises(ValueError, match="from 1 to 4 slots"):
        directory.resize(limit)
    core = Core(CONFIG)
    assert core.handle(Resize(limit)) == []
    assert core.snapshot().num_slots == 4
    assert core.snapshot().num_ignored_events == 1


def test_a_running_pipeline_gives_slots_up_as_they_are_read_no_more() -> None:
    core = started()
    submit(core, 5, max_tokens=9)
    for step, expert in enumerate((3, 5), start=1):
        core.handle(routed(step, 0, expert))
        core.handle(copied(step))
        core.handle(ran(step, 0, expert))
        core.handle(step_done(step, 7))
    assert core.snapshot().num_resident == 2
    core.handle(routed(3, 0, 5))
    core.handle(Resize(1))
    core.check()
    assert (core.snapshot().num_resident, core.snapshot().num_slots) == (1, 1)
    core.handle(ran(3, 0, 5))
    core.handle(step_done(3, 7))
    core.check()
    core.handle(Resize(4))
    assert (core.snapshot().num_slots, core.snapshot().max_slots) == (4, 4)
