"""Layers whose missing parts are told by words in shared memory: the gpu_worker joins by itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from protocol.completions import Completion
from protocol.messages import Ran, Routed, Run
from tests.gpu_worker.pipeline import Pipeline, make_model, run_all

if TYPE_CHECKING:
    from collections.abc import Iterator

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pipeline]:
    made = Pipeline(
        tmp_path_factory.mktemp("words"), make_model("qwen3_moe"), num_reports=63, has_words=True
    )
    yield made
    made.close()


@pytest.fixture(scope="module")
def expected(pipeline: Pipeline) -> tuple[list[int], list[str]]:
    """Every layer answered by one `Run` that says join."""
    forget_all(pipeline)
    pipeline.answer = run_all
    return pipeline.generate(PROMPT, 4)


def forget_all(pipeline: Pipeline) -> None:
    table = pipeline.table
    assert table is not None
    table.take(table.head)
    for layer, num_experts in enumerate(pipeline.layout.num_experts):
        for expert in range(num_experts):
            table.unpublish(layer, expert)
    pipeline.others.clear()


def say_done(pipeline: Pipeline, routed: Routed, expert: int, slot: int) -> None:
    pipeline.completions.write(
        routed.step, routed.layer, expert, Completion(slot, pipeline.epoch, 1, 2)
    )


def in_parts(pipeline: Pipeline, routed: Routed) -> None:
    """A third are hits, a third lie in slots by now, a third are computed elsewhere."""
    assert routed.is_self_joining
    hits, fills, rest = (routed.experts[part::3] for part in range(3))
    for expert in routed.experts:  # of steps that are over
        done = Completion(0, pipeline.epoch, 1, 2)
        pipeline.completions.write(routed.step - 1, routed.layer, expert, done)
    for expert in fills:
        say_done(pipeline, routed, expert, pipeline.slot_of(routed.layer, expert))
    if rest:
        pipeline.compute_here(routed, rest)
        for expert in rest:
            say_done(pipeline, routed, expert, -1)
    pipeline.run(routed, hits, join=False)


def test_words_and_runs_together_give_the_same_bits(
    pipeline: Pipeline, expected: tuple[list[int], list[str]]
) -> None:
    forget_all(pipeline)
    pipeline.answer = in_parts
    assert pipeline.generate(PROMPT, 4, sequence=1) == expected
    assert not pipeline.others  # what has run is reported in the ring
    table = pipeline.table
    assert table is not None
    reports = table.take(table.head)
    assert not any(any(report.num_rows) for report in reports)
    assert all(0 < report.started_ns <= report.ended_ns for report in reports)
    last = [report for report in reports if report.layer == 2][-2:]
    routed = pipeline.routed[2]
    ran = {expert for report in last for expert in report.experts}
    assert ran == {*routed.experts[0::3], *routed.experts[1::3]}


def test_runs_are_said_at_once_where_slots_are_short(
    pipeline: Pipeline, expected: tuple[list[int], list[str]]
) -> None:
    forget_all(pipeline)

    def in_waves(pipeline: Pipeline, routed: Routed) -> None:
        command = Run(pipeline.epoch, routed.step, routed.layer, [], [], False, True)
        pipeline.send(command)
        for expert in routed.experts:
            event = pipeline.receive()
            assert isinstance(event, Ran)
            assert event.num_reports == routed.num_reports
            say_done(pipeline, routed, expert, pipeline.slot_of(routed.layer, expert))
        event = pipeline.receive()
        assert isinstance(event, Ran)
        assert event.experts == routed.experts[-1:]

    pipeline.answer = in_waves
    assert pipeline.generate(PROMPT, 4, sequence=2) == expected


def test_hits_of_a_layer_with_misses_are_begun_from_the_table(
    pipeline: Pipeline, expected: tuple[list[int], list[str]]
) -> None:
    forget_all(pipeline)
    table = pipeline.table
    assert table is not None
    for layer, num_experts in enumerate(pipeline.layout.num_experts):
        for expert in range(0, num_experts, 2):
            table.publish(layer, expert, pipeline.slot_of(layer, expert))
    num_started = 0

    def rest_elsewhere(pipeline: Pipeline, routed: Routed) -> None:
        nonlocal num_started
        assert routed.started == [expert for expert in routed.experts if expert % 2 == 0]
        num_started += len(routed.started)
        rest = [expert for expert in routed.experts if expert % 2]
        pipeline.compute_here(routed, rest)
        for expert in rest:
            say_done(pipeline, routed, expert, -1)

    pipeline.answer = rest_elsewhere
    assert pipeline.generate(PROMPT, 4, sequence=4) == expected
    assert not pipeline.others
    assert table.fence % 2 == 0
    reports = [report for report in table.take(table.head) if not any(report.num_rows)]
    assert sum(len(report.experts) for report in reports) == num_started > 0


def test_what_is_begun_is_said_at_once_where_that_is_asked_for(
    pipeline: Pipeline, expected: tuple[list[int], list[str]]
) -> None:
    forget_all(pipeline)
    table = pipeline.table
    assert table is not None
    for layer in range(pipeline.layout.num_layers):
        table.publish(layer, 0, pipeline.slot_of(layer, 0))
    num_told = 0

    def ask_first(pipeline: Pipeline, routed: Routed) -> None:
        nonlocal num_told
        before = table.head
        pipeline.send(Run(pipeline.epoch, routed.step, routed.layer, [], [], False, True))
        event = pipeline.receive()
        assert isinstance(event, Ran)
        assert not event.experts
        assert event.num_reports >= before
        if routed.started:
            assert event.num_reports == table.head
            assert table.fence % 2 == 0
            num_told += 1
        rest = [expert for expert in routed.experts if expert not in routed.started]
        pipeline.compute_here(routed, rest)
        for expert in rest:
            say_done(pipeline, routed, expert, -1)

    pipeline.answer = ask_first
    assert pipeline.generate(PROMPT, 4, sequence=5) == expected
    assert num_told > 0


def test_a_word_that_names_no_slot_is_a_fault(pipeline: Pipeline) -> None:
    from tests.gpu_worker.pipeline import WorkerFailed

    forget_all(pipeline)
    pipeline.answer = lambda pipeline, routed: say_done(
        pipeline, routed, routed.experts[0], pipeline.setup.num_slots
    )
    with pytest.raises(WorkerFailed, match="slot 24 of 24"):
        pipeline.step([1], 0, sequence=3)
