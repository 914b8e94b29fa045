"""Layers whose experts all lie in published slots: no message, the same tokens, one report each."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.gpu_worker.pipeline import Pipeline, make_model, run_all

if TYPE_CHECKING:
    from collections.abc import Iterator

    from protocol.messages import Routed

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pipeline]:
    made = Pipeline(tmp_path_factory.mktemp("passing"), make_model("qwen3_moe"), num_reports=63)
    yield made
    made.close()


def refill(pipeline: Pipeline) -> None:
    table = pipeline.table
    assert table is not None
    table.take(table.head)
    for layer, num_experts in enumerate(pipeline.layout.num_experts):
        for expert in range(num_experts):
            table.publish(layer, expert, pipeline.layout.block_index(layer, expert))


def test_passed_layers_give_the_tokens_of_asked_ones(pipeline: Pipeline) -> None:
    refill(pipeline)
    table = pipeline.table
    assert table is not None
    routed: list[Routed] = []

    def note(pipeline: Pipeline, event: Routed) -> None:
        routed.append(event)
        run_all(pipeline, event)

    pipeline.answer = note
    before = table.head
    passing = pipeline.generate(PROMPT, 5, sequence=1)
    assert not routed
    reports = table.take(table.head)
    assert len(reports) == table.head - before == 5 * pipeline.layout.num_layers
    assert table.fence % 2 == 0
    for number, report in enumerate(reports):
        assert report.layer == number % pipeline.layout.num_layers
        assert report.routed_ns <= report.started_ns <= report.ended_ns
        num_rows = len(PROMPT) if number < pipeline.layout.num_layers else 1
        assert sum(report.num_rows) == num_rows * pipeline.layout.top_k
        assert bool(report.joined_ns) is (report.layer > 0)

    for expert in range(pipeline.layout.num_experts[0]):
        table.unpublish(0, expert)
    mixed = pipeline.generate(PROMPT, 5, sequence=2)
    assert {event.layer for event in routed} == {0}
    # Each says what was reported before it: the other two layers of the steps before.
    assert [event.num_reports - table.head for event in routed] == [-10, -8, -6, -4, -2]
    assert passing == mixed


def test_a_full_ring_makes_the_worker_ask(pipeline: Pipeline) -> None:
    refill(pipeline)
    pipeline.answer = run_all
    num_steps = 63 // pipeline.layout.num_layers  # nobody takes a report in this test
    for start in range(num_steps + 2):
        pipeline.step([7], start, sequence=3)
        assert len(pipeline.routed) == (0 if start < num_steps else pipeline.layout.num_layers)
