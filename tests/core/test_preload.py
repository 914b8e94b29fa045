"""Experts that are copied before anybody asks: which, when, and what a request makes of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from orchestrator.core.core import Core
from orchestrator.core.events import (
    CoreConfig,
    Publish,
    Resize,
    Submit,
    Withdraw,
    WorkerJoined,
    WorkerLost,
)
from protocol.messages import Arena, Copied, Copy, Epoch, RequestId, StartStep

if TYPE_CHECKING:
    from collections.abc import Sequence

    from orchestrator.core.events import CoreCommand
    from protocol.messages import Role

GPU, DMA, CPU = Epoch(1), Epoch(2), Epoch(3)
NUM_EXPERTS = (3, 2)


def make_core(num_slots: int, preload: tuple[int, ...] = NUM_EXPERTS) -> Core:
    return Core(
        CoreConfig(
            num_layers=2,
            top_k=2,
            expert_bytes=100,
            num_slots=num_slots,
            max_rows=1,
            max_sequence_tokens=16,
            preload=preload,
        )
    )


def join(core: Core, role: Role, epoch: Epoch) -> list[Copy]:
    """A worker comes; the copies that are begun then."""
    arena = Arena("shared", 5, 128) if role == "gpu_worker" else None
    return copies(core.handle(WorkerJoined(epoch, role, 50.0, arena)))


def copies(commands: Sequence[CoreCommand]) -> list[Copy]:
    return [command for command in commands if isinstance(command, Copy)]


def land(core: Core, under_way: list[Copy], most: int = 1000) -> list[tuple[int, int]]:
    """Copy after copy arrives, and whatever that begins; the experts, in order."""
    done = []
    while under_way and len(done) < most:
        assert len(under_way) <= 2
        copy = under_way.pop(0)
        commands = core.handle(Copied(copy.epoch, copy.copy, 100, 0, 1000))
        assert Publish(copy.layer, copy.expert, copy.slot) in commands
        under_way += copies(commands)
        done.append((copy.layer, copy.expert))
        core.check()
    return done


def started(num_slots: int, preload: tuple[int, ...] = NUM_EXPERTS) -> tuple[Core, list[Copy]]:
    core = make_core(num_slots, preload)
    assert join(core, "cpu_worker", CPU) == []
    assert join(core, "gpu_worker", GPU) == []
    return core, join(core, "dma_worker", DMA)


def test_all_that_fits_is_there_before_the_first_request() -> None:
    core, under_way = started(5)
    assert core.is_preloading
    assert land(core, under_way) == [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2)]
    assert not core.is_preloading
    assert core.snapshot().num_resident == 5
    assert core.snapshot().totals.evictions == 0


def test_free_slots_and_no_others() -> None:
    core, under_way = started(3)
    assert land(core, under_way) == [(0, 0), (1, 0), (0, 1)]
    assert not core.is_preloading


def test_nothing_unless_it_is_wanted() -> None:
    core, under_way = started(5, ())
    assert (under_way, core.is_preloading) == ([], False)


def test_without_a_link_nobody_waits() -> None:
    core = make_core(5)
    join(core, "gpu_worker", GPU)
    join(core, "cpu_worker", CPU)
    assert not core.is_preloading


def test_a_request_goes_first_and_the_rest_follows_it() -> None:
    core, under_way = started(5)
    done = land(core, under_way, most=1)
    commands = core.handle(Submit(RequestId("a"), [1], 1, frozenset()))
    assert [type(command) for command in commands] == [StartStep]
    assert not core.is_preloading
    done += land(core, under_way)
    assert done == [(0, 0), (1, 0), (0, 1)]  # what was on its way, and no more
    core.handle(WorkerLost(GPU))  # the step is void, all slots are empty
    assert join(core, "gpu_worker", Epoch(9)) == []  # the request goes first
    done = land(core, copies(core.handle(Withdraw(RequestId("a")))))
    assert (core.is_idle, done) == (False, [])  # its step is still under way


def test_what_a_lost_worker_left_undone_is_done_by_the_next() -> None:
    core, under_way = started(5)
    land(core, under_way, most=2)
    core.handle(WorkerLost(DMA))
    core.check()
    assert not core.is_preloading  # nobody could copy
    again = join(core, "dma_worker", Epoch(7))
    assert core.is_preloading
    land(core, again)
    assert core.snapshot().num_resident == 5
    core.handle(WorkerLost(GPU))
    assert core.snapshot().num_resident == 0


def test_more_room_is_used() -> None:
    core, under_way = started(5)
    land(core, under_way)
    core.handle(Resize(2))
    assert core.snapshot().num_resident == 2
    land(core, copies(core.handle(Resize(4))))
    assert core.snapshot().num_resident == 4
