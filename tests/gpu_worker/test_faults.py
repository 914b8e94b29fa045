"""What a gpu_worker does with commands that are late, lost, wrong or impossible."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from gpu_worker.worker import resolve_device
from protocol.errors import UserError
from protocol.messages import (
    Copy,
    DropSequence,
    Execute,
    Routed,
    Run,
    SamplingParams,
    StartStep,
    StepPart,
)
from tests.gpu_worker.pipeline import Pipeline, WorkerFailed, experts_of, make_model, run_all

if TYPE_CHECKING:
    from pathlib import Path

GREEDY = SamplingParams()


@pytest.fixture
def pipeline(tmp_path: Path) -> Any:
    with Pipeline(tmp_path, make_model("mixtral")) as pipeline:
        yield pipeline


def test_late_and_foreign_commands_are_dropped(pipeline: Pipeline) -> None:
    expected = pipeline.generate([1, 2, 3], 4)

    def noise_first(pipeline: Pipeline, routed: Routed) -> None:
        epoch, step, layer = pipeline.epoch, routed.step, routed.layer
        for stale in (
            Run(epoch, step - 1, layer, [], [], True),
            Run(epoch, step, layer + 1, [], [], True),
            Run(epoch - 1, step, layer, [], [], True),
            DropSequence(epoch, 99),
            DropSequence(epoch - 1, 0),
            Copy(epoch, 5, 0, 0, 0),
            Execute(epoch, step, layer, [0]),
        ):
            pipeline.send(stale)
        run_all(pipeline, routed)
        pipeline.send(Run(epoch, step, layer, [], [], True))  # once more: the layer is joined

    pipeline.answer = noise_first
    assert pipeline.generate([1, 2, 3], 4) == expected


def test_a_repeated_run_changes_nothing(pipeline: Pipeline) -> None:
    expected = pipeline.generate([1, 2, 3], 4)

    def run_twice(pipeline: Pipeline, routed: Routed) -> None:
        pipeline.run(routed, routed.experts, join=False)
        run_all(pipeline, routed)

    pipeline.answer = run_twice
    assert pipeline.generate([1, 2, 3], 4) == expected


def test_a_sequence_dropped_within_its_step_is_dropped_after_it(pipeline: Pipeline) -> None:
    expected = pipeline.step([1, 2, 3], 0, GREEDY)

    def drop_first(pipeline: Pipeline, routed: Routed) -> None:
        pipeline.send(DropSequence(pipeline.epoch, 0))
        run_all(pipeline, routed)

    pipeline.answer = drop_first
    assert pipeline.step([1, 2, 3], 0, GREEDY).logits_digest == expected.logits_digest
    pipeline.answer = run_all
    with pytest.raises(WorkerFailed, match="position 3 of sequence 0, whose cache holds 0"):
        pipeline.step([4], 3)


def _bad_answer(field: str) -> Any:
    def answer(pipeline: Pipeline, routed: Routed) -> None:
        experts, slots = list(routed.experts), [0] * len(routed.experts)
        if field == "expert":
            experts[0] = next(e for e in range(-1, 99) if e not in routed.experts)
        elif field == "slot":
            slots[-1] = pipeline.layout.total_experts
        elif field == "negative slot":
            slots[-1] = -1
        elif field == "lengths":
            slots.pop()
        if field == "step":
            pipeline.send(StartStep(pipeline.epoch, routed.step + 1, [StepPart(5, 0, [1])]))
        else:
            pipeline.send(Run(pipeline.epoch, routed.step, routed.layer, experts, slots, True))

    return answer


@pytest.mark.parametrize(
    ("field", "sentence"),
    [
        ("expert", "expert -?[0-9]+, which no row of the layer chose"),
        ("slot", "slot 12 of 12"),
        ("negative slot", "slot -1 of 12"),
        ("lengths", "2 experts and 1 slots"),
        ("step", "step 2 was started within step 1, layer 0"),
    ],
)
def test_a_command_that_cannot_be_followed_is_a_fault(
    pipeline: Pipeline, field: str, sentence: str
) -> None:
    pipeline.answer = _bad_answer(field)
    with pytest.raises(WorkerFailed, match=sentence) as caught:
        pipeline.step([7], 0)
    assert not caught.value.event.is_user_error
    pipeline.close()
    assert pipeline.exit_code == 1


@pytest.mark.parametrize(
    ("tokens", "start", "sentence"),
    [
        ([1], 3, "position 3 of sequence 0, whose cache holds 0"),
        ([], 0, "has 0 tokens, 1 to 32 are allowed"),
        ([1] * 33, 0, "has 33 tokens"),
        ([1, 96], 0, "token outside the vocabulary of 96"),
        ([-1], 0, "token outside the vocabulary"),
        ([1], 200, "would hold 201 positions, 200 are allowed"),
    ],
)
def test_a_step_that_cannot_be_run_is_a_fault(
    pipeline: Pipeline, tokens: list[int], start: int, sentence: str
) -> None:
    with pytest.raises(WorkerFailed, match=sentence):
        pipeline.step(tokens, start)


def test_logits_with_nan_name_their_step(tmp_path: Path) -> None:
    broken = make_model("mixtral")
    with torch.no_grad():
        experts_of(broken)[-1].down_proj.fill_(float("nan"))
    with Pipeline(tmp_path, make_model("mixtral"), store_model=broken) as pipeline:
        pipeline.step([1, 2], 0)  # nothing to sample: nobody looks at the logits
        with pytest.raises(WorkerFailed, match="step 2: the logits hold NaN"):
            pipeline.step([3], 2, GREEDY)


def test_a_store_of_another_model_is_refused(tmp_path: Path) -> None:
    other = make_model("mixtral", num_hidden_layers=2)
    with pytest.raises(WorkerFailed, match="has 3 MoE layers, the expert store 2") as caught:
        Pipeline(tmp_path, make_model("mixtral"), store_model=other)
    assert caught.value.event.is_user_error


def test_devices_that_are_not_there_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device("auto").type == "cpu"
    with pytest.raises(UserError, match="no CUDA device in this machine; use --device cpu"):
        resolve_device("cuda")
    with pytest.raises(UserError, match="'tpu' is not known"):
        resolve_device("tpu")
