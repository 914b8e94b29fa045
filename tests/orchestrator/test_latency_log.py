"""The fold: events and commands in, records and stage statistics out; and the file they go to."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from orchestrator.core.events import CoreCommand, CoreEvent, Planned
from orchestrator.core.planner import FillMode, Split
from orchestrator.latency_log import (
    LatencyFold,
    LayerRecord,
    LogHeader,
    LogRecord,
    StepRecord,
    layer_stages,
)
from orchestrator.log_file import LogFile
from protocol.errors import UserError
from protocol.messages import (
    Copied,
    Copy,
    CopyId,
    Epoch,
    Executed,
    ExpertId,
    LayerId,
    Ran,
    RequestId,
    Routed,
    Sampled,
    SamplingParams,
    SequenceId,
    SlotId,
    StartStep,
    StepDone,
    StepId,
    StepPart,
)

GPU, DMA, CPU = Epoch(1), Epoch(2), Epoch(3)
REQUEST = RequestId("1")


def start(step: int = 1) -> StartStep:
    return StartStep(GPU, StepId(step), [StepPart(SequenceId(1), 4, [9], SamplingParams())])


def routed(layer: int, at_ns: int, joined_ns: int = 0, step: int = 1) -> Routed:
    experts = [ExpertId(1), ExpertId(2), ExpertId(3)]
    return Routed(GPU, StepId(step), LayerId(layer), experts, [1, 1, 1], at_ns, joined_ns)


def planned(layer: int, step: int = 1) -> Planned:
    split = Split(2, 1, 1, False, "mode", FillMode("all"), False, 2e9, 1e9, 0.0, 0.0)
    hits, fills, cpu = [ExpertId(1)], [ExpertId(2)], [ExpertId(3)]
    return Planned([REQUEST], StepId(step), LayerId(layer), 1, hits, fills, cpu, split)


def ran(layer: int, expert: int, started_ns: int, ended_ns: int) -> Ran:
    return Ran(GPU, StepId(1), LayerId(layer), [ExpertId(expert)], started_ns, ended_ns)


def done(step: int = 1) -> StepDone:
    return StepDone(GPU, StepId(step), [Sampled(7)], joined_ns=1900, done_ns=2000)


#: One step of two layers: (what, its time) in the order in which the engine passes it on.
STORY: list[tuple[CoreEvent | CoreCommand, int]] = [
    (start(), 100),
    (routed(0, 200), 0),
    (planned(0), 230),
    (Copy(DMA, CopyId(5), LayerId(0), ExpertId(2), SlotId(8)), 230),
    (ran(0, 1, 240, 300), 0),
    (Copied(DMA, CopyId(5), 250, 400, 24), 0),
    (Executed(CPU, StepId(1), LayerId(0), [ExpertId(3)], 260, 900, 48), 0),
    (ran(0, 2, 410, 500), 0),
    (routed(1, 1200, joined_ns=1000), 0),
    (planned(1), 1300),
    (done(), 0),
]


def play(story: list[tuple[CoreEvent | CoreCommand, int]]) -> tuple[LatencyFold, list[LogRecord]]:
    records: list[LogRecord] = []
    fold = LatencyFold(records.append)
    fold.begin_request(REQUEST)
    tell(fold, story)
    return fold, records


def tell(fold: LatencyFold, story: list[tuple[CoreEvent | CoreCommand, int]]) -> None:
    for what, at_ns in story:
        if isinstance(what, (StartStep, Planned, Copy)):
            fold.command(what, at_ns)
        else:
            fold.event(what)


def test_one_step() -> None:
    fold, records = play(STORY)
    first, second, step = records
    assert isinstance(first, LayerRecord)
    assert isinstance(second, LayerRecord)
    assert isinstance(step, StepRecord)
    assert (first.request, first.step, first.layer, first.num_rows) == ("1", 1, 0, 1)
    assert (first.hits, first.fills, first.cpu, first.q, first.m) == ([1], [2], [3], 1, 2)
    assert (first.fill_bytes, first.cpu_bytes) == (24, 48)
    assert (first.routed_ns, first.planned_ns, first.joined_ns) == (200, 230, 1000)
    assert [(fill.expert, fill.slot, fill.worker) for fill in first.dma] == [(2, 8, DMA)]
    assert first.is_complete
    assert "fill mode all" in first.reason
    assert dict(layer_stages(first)) == {
        "dense": 100,
        "plan": 30,
        "gpu_hits": 60,
        "dma": 150,
        "gpu_fills": 90,
        "cpu": 640,
        "join": 100,  # the CPU was last, at 900
        "layer": 800,
    }
    assert (second.dense_ns, second.joined_ns) == (200, 1900)
    assert (step.started_ns, step.joined_ns, step.done_ns, step.start) == (100, 1900, 2000, 4)
    assert (step.is_complete, step.is_sampled, step.request) == (True, True, "1")
    stages = fold.end_request(REQUEST).stats("step")
    assert stages["step"].max_us == 1.9
    assert stages["sample"].max_us == 0.1
    assert stages["layer"].num_samples == 2
    assert stages["cpu"].share == pytest.approx(640 / 1900)
    assert fold.end_request(REQUEST).stats("step") == {}


def test_without_a_log_the_statistics_are_the_same() -> None:
    with_log, _ = play(STORY)
    without = LatencyFold()
    without.begin_request(REQUEST)
    tell(without, STORY)
    assert without.end_request(REQUEST).stats("step") == with_log.end_request(REQUEST).stats("step")


def test_an_interrupted_step_is_logged_and_not_counted() -> None:
    fold, records = play(STORY[:8])
    fold.command(start(step=2), 5000)
    layer, step = records
    assert isinstance(layer, LayerRecord)
    assert isinstance(step, StepRecord)
    assert not layer.is_complete
    assert not step.is_complete
    assert fold.end_request(REQUEST).stats("step") == {}


def test_what_was_under_way_at_the_end_is_logged() -> None:
    fold, records = play(STORY[:5])
    fold.close()
    assert [type(record) for record in records] == [LayerRecord, StepRecord]
    fold.close()
    assert len(records) == 2


def test_late_and_repeated_events_change_nothing() -> None:
    expected = play(STORY)[1]
    noisy: list[tuple[CoreEvent | CoreCommand, int]] = []
    stale_run = Executed(CPU, StepId(0), LayerId(0), [ExpertId(3)], 1, 2, 48)
    for what, at_ns in STORY:
        noisy += [(what, at_ns), (Copied(DMA, CopyId(99), 1, 2, 24), 0), (stale_run, 0)]
        if isinstance(what, Routed):
            noisy.append((what, at_ns))
    noisy.append((done(), 0))
    assert play(noisy)[1] == expected


def test_a_fill_that_was_given_up_leaves_no_span() -> None:
    story = [item for item in STORY if not isinstance(item[0], Copied)]
    first = play(story)[1][0]
    assert isinstance(first, LayerRecord)
    assert (first.dma, first.fill_bytes) == ([], 0)


def test_the_file_holds_every_record(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    log = LogFile(path)
    _, records = play(STORY)
    header = LogHeader(1, "m", "float32", 2, 1, 24, 6, 24)
    for record in (header, *records):
        log.write(record)
    assert path.read_bytes() == b""  # buffered
    log.close()
    decoded = [msgspec.json.decode(line, type=LogRecord) for line in path.read_bytes().splitlines()]
    assert decoded == [header, *records]
    log.write(header)  # closed: nothing happens


def test_a_log_that_cannot_be_made_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be written"):
        LogFile(tmp_path / "missing" / "log.jsonl")


def test_a_full_disk_ends_the_log_and_nothing_else() -> None:
    log = LogFile(Path("/dev/full"))
    log.write(LogHeader(1, "m", "float32", 2, 1, 24, 6, 24))
    log.flush()
    log.write(LogHeader(1, "m", "float32", 2, 1, 24, 6, 24))
    assert "/dev/full is not whole (No space left on device)" in log.close()


def test_a_whole_log_has_lost_nothing(tmp_path: Path) -> None:
    log = LogFile(tmp_path / "log.jsonl")
    log.write(LogHeader(1, "m", "float32", 2, 1, 24, 6, 24))
    assert log.close() == ""
    assert log.close() == ""
