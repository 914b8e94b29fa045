"""The residency segment: table, fence, ring and what is refused; and the barrier behind it."""

from __future__ import annotations

import pytest

from orchestrator.core.events import ResetTable, Retire, Retired
from orchestrator.residency import ResidencyBoard
from protocol.errors import ProtocolError
from protocol.membarrier import MemoryBarrier
from protocol.messages import CopyId, Epoch, ExpertId, LayerId, SlotId
from protocol.residency import NO_SLOT, ResidencyReader, ResidencyWriter, residency_grant

EPOCH = 5


def segment(num_reports: int = 4) -> tuple[ResidencyWriter, ResidencyReader, bytearray]:
    grant = residency_grant(3, 8, 4, num_reports)
    memory = bytearray(grant.num_bytes)
    writer = ResidencyWriter(memory, grant)
    writer.reset(EPOCH)
    return writer, ResidencyReader(memory, grant), memory


def report(
    reader: ResidencyReader, *, step: int = 1, layer: int = 0, experts: tuple[int, ...]
) -> None:
    reader.report(EPOCH, step, layer, experts, [1] * len(experts), (1, 2, 3, 4))


def test_a_look_enters_the_fence_if_anything_is_there() -> None:
    writer, reader, _ = segment()
    assert reader.look(1, [2, 3]) == [NO_SLOT, NO_SLOT]
    assert reader.fence == 2
    writer.publish(1, 2, 6)
    assert reader.look(1, [2, 3]) == [6, NO_SLOT]
    assert reader.fence == 3
    assert reader.ran(EPOCH, 1, 1, [2], 10, 20)
    reader.leave()
    assert reader.fence == 4
    (told,) = writer.take(reader.num_reports)
    assert (told.experts, told.num_rows, told.routed_ns) == ([2], [0], 0)
    writer.publish(1, 3, 0)
    assert reader.look(1, [3, 2]) == [0, 6]
    assert reader.fence == 5
    report(reader, layer=1, experts=(3, 2))
    assert reader.fence == 6
    writer.unpublish(1, 2)
    assert reader.look(1, [3, 2]) == [0, NO_SLOT]
    assert writer.published() == {(1, 3): 0}


def test_reports_come_out_as_they_went_in() -> None:
    writer, reader, _ = segment(num_reports=2)
    for step in range(1, 9):
        reader.report(EPOCH, step, 2, [step % 8, 7 - step % 4], [3, 1], (10, 20, 30, 40))
        (taken,) = writer.take(reader.num_reports)
        assert (taken.step, taken.layer, taken.experts) == (step, 2, [step % 8, 7 - step % 4])
        assert (taken.num_rows, taken.joined_ns) == ([3, 1], 40)
        assert writer.take(reader.num_reports) == []


def test_whole_layers_are_taken_before_a_message_names_them() -> None:
    writer, reader, _ = segment(num_reports=3)
    assert writer.take_layers() == []
    writer.publish(0, 1, 1)
    for layer in range(2):
        report(reader, layer=layer, experts=(1,))
    assert [taken.layer for taken in writer.take_layers()] == [0, 1]
    report(reader, layer=2, experts=(1,))
    assert reader.look(0, [1]) == [1]
    assert reader.ran(EPOCH, 2, 0, [1], 10, 20)
    reader.leave()
    # A layer with misses was begun; the rest of it comes with messages.
    assert [taken.layer for taken in writer.take_layers()] == [2]
    assert writer.take_layers() == []
    assert [taken.num_rows for taken in writer.take(reader.num_reports)] == [[0]]
    report(reader, layer=3, experts=(1,))
    with pytest.raises(ProtocolError, match="that is none"):
        writer.take_layers()


def test_a_full_ring_takes_no_more() -> None:
    writer, reader, _ = segment(num_reports=2)
    writer.publish(0, 1, 1)
    for _ in range(2):
        assert reader.look(0, [1]) == [1]
        report(reader, experts=(1,))
    assert reader.look(0, [1]) is None
    assert (reader.num_full, reader.fence) == (1, 4)
    assert len(writer.take(2)) == 2
    assert reader.look(0, [1]) == [1]


def test_more_experts_than_a_report_holds_are_asked_for() -> None:
    writer, reader, _ = segment()
    for expert in range(5):
        writer.publish(0, expert, expert)
    assert reader.look(0, [0, 1, 2, 3, 4]) is None


def test_reports_that_are_none_are_refused() -> None:
    writer, reader, _ = segment()
    with pytest.raises(ProtocolError, match="names report 1 of 0"):
        writer.take(1)
    for wrong in (
        {"layer": 3, "experts": (1,)},
        {"layer": 0, "experts": (8,)},
        {"layer": 0, "experts": (-1,)},
    ):
        writer.reset(EPOCH)
        report(reader, **wrong)  # type: ignore[arg-type]
        with pytest.raises(ProtocolError, match="that is none"):
            writer.take(1)
    writer.reset(EPOCH + 1)
    report(reader, experts=(1,))
    with pytest.raises(ProtocolError, match="that is none"):
        writer.take(1)


class Board:
    """A board whose timers are fired by hand."""

    def __init__(self, *, has_barrier: bool = True) -> None:
        grant = residency_grant(3, 8, 4)
        memory = bytearray(grant.num_bytes)
        self.timers: list[object] = []
        self.told: list[Retired] = []
        barrier = MemoryBarrier()
        barrier.is_there = has_barrier
        barrier.run = lambda: has_barrier  # type: ignore[method-assign]
        self.board = ResidencyBoard(
            memory, grant, lambda _, action: self.timers.append(action), self.told.append, barrier
        )
        self.reader = ResidencyReader(memory, grant)
        self.board.carry(ResetTable(Epoch(EPOCH)))

    def retire(self, copy: int) -> None:
        self.board.carry(Retire(CopyId(copy), LayerId(0), ExpertId(1), SlotId(2)))

    def fire(self) -> None:
        timers, self.timers = self.timers, []
        for action in timers:
            action()  # type: ignore[operator]


def test_retired_is_said_at_once_where_nothing_is_in_use() -> None:
    board = Board()
    board.retire(1)
    assert board.told == [Retired(CopyId(1))]
    assert not board.timers


def test_retired_is_said_when_the_fence_has_moved() -> None:
    board = Board()
    writer_side = board.board
    board.reader.look(0, [])  # enters the fence
    board.retire(1)
    board.fire()
    assert board.told == []
    board.reader.report(EPOCH, 1, 0, [], [], (0, 0, 0, 0))
    board.fire()
    assert board.told == [Retired(CopyId(1))]
    assert not board.timers
    writer_side.carry(ResetTable(None))
    board.fire()
    assert board.told == [Retired(CopyId(1))]


def test_without_a_barrier_nothing_is_concluded() -> None:
    board = Board(has_barrier=False)
    board.retire(1)
    board.fire()
    assert board.told == []


def test_the_kernels_barrier_runs_where_it_says_so() -> None:
    barrier = MemoryBarrier()
    assert barrier.run() is barrier.is_there
    assert barrier.register() is barrier.is_there
