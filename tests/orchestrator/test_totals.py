"""Running sums over what passes between core and workers."""

from __future__ import annotations

from orchestrator.core.events import Passed, Publish, ResetTable, Unpublish
from orchestrator.totals import BusyTime, Totals
from protocol.messages import (
    Copied,
    CopyId,
    Epoch,
    Executed,
    ExpertId,
    LayerId,
    Routed,
    SlotId,
    StepId,
)

EPOCH, STEP, LAYER = Epoch(1), StepId(1), LayerId(2)


def experts(*numbers: int) -> list[ExpertId]:
    return [ExpertId(number) for number in numbers]


def test_busy_time_counts_overlap_once() -> None:
    busy = BusyTime()
    for span in ((0, 10), (5, 12), (6, 8), (20, 21)):
        busy.add(*span)
    assert busy.sum_ns == 12 + 1


def test_layers_passed_and_routed() -> None:
    totals = Totals()
    totals.event(Passed(EPOCH, STEP, LAYER, experts(1, 2), [1, 1], 5, 6, 9, 0), 20)
    totals.event(Routed(EPOCH, STEP, LAYER, experts(1), [1], 100), 130)
    assert (totals.num_passed_layers, totals.num_hits) == (1, 2)
    assert (totals.num_routed_layers, totals.ipc_wait_ns) == (1, 30)
    assert totals.gpu_busy.sum_ns == 3


def test_bytes_by_path() -> None:
    totals = Totals()
    totals.event(Copied(EPOCH, CopyId(1), 0, 4, 1000), 5)
    totals.event(Executed(EPOCH, STEP, LAYER, experts(1, 2), 0, 7, 2000), 8)
    assert (totals.fill_bytes, totals.link_busy.sum_ns) == (1000, 4)
    assert (totals.cpu_bytes, totals.cpu_busy.sum_ns) == (2000, 7)


def test_residents_follow_the_table() -> None:
    totals = Totals()
    totals.command(Publish(LAYER, ExpertId(1), SlotId(0)))
    totals.command(Publish(LAYER, ExpertId(2), SlotId(1)))
    totals.command(Unpublish(LAYER, ExpertId(1)))
    assert totals.residents == {LAYER: 1}
    assert totals.num_evictions == 1
    totals.command(ResetTable(None))
    assert totals.residents == {LAYER: 0}
