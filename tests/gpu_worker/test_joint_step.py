"""Several sequences in one step: each gets what it would have got alone, to the bit."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import pytest
import torch

from expert_kernels.reference import ExpertFunction
from gpu_worker.joint_step import JointStep
from gpu_worker.model import load_dense_model
from protocol.errors import ProtocolError
from protocol.messages import SamplingParams, StepPart
from tests.checkpoints import FAMILIES, MORE_FAMILIES, make_checkpoint
from tests.gpu_worker.pipeline import Pipeline, make_model

if TYPE_CHECKING:
    from pathlib import Path

    from gpu_worker.model import DenseModel

CPU = torch.device("cpu")
PROMPTS = [[5, 17, 3, 42, 8, 77, 21], [9, 60, 33], [12, 2, 58, 11, 44, 71, 90, 3, 3, 18, 6]]
#: Plain, latent, and the ones whose caches hold more than keys and values.
QUICK_FAMILIES = {"qwen3_moe", "deepseek_v3", "qwen3_next", "lfm2_moe", "jamba"}


def _by_choices(
    layer: int, hidden: torch.Tensor, choices: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    return (hidden * (weights * (choices + layer)).sum(1, keepdim=True) / 8).to(hidden.dtype)


@pytest.mark.parametrize(
    "family",
    [
        family if family in QUICK_FAMILIES else pytest.param(family, marks=pytest.mark.slow)
        for family in (*FAMILIES, *MORE_FAMILIES)
    ],
)
@torch.inference_mode()
def test_a_row_of_many_has_the_bits_of_one_alone(family: str, tmp_path: Path) -> None:
    """Through transformers' forward, and through its recording where there is one."""
    model = load_dense_model(make_checkpoint(family, tmp_path), torch.float32, CPU, 300)
    _check_joint(model)
    if model.prepare_decode() is None:
        _check_joint(model)


def _check_joint(model: DenseModel) -> None:
    num_rows: list[int] = []

    def exchange(layer: int, hidden: torch.Tensor, *choice: torch.Tensor) -> torch.Tensor:
        num_rows.append(len(hidden))
        return _by_choices(layer, hidden, *choice)

    joint = JointStep(exchange)
    model.connect(joint)
    alone = [_decode(model, joint, [prompt], 6)[0] for prompt in PROMPTS]
    num_rows.clear()
    for found, expected in zip(_decode(model, joint, PROMPTS, 6), alone, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert num_rows[-model.num_moe_layers :] == [len(PROMPTS)] * model.num_moe_layers


def _decode(
    model: Any, joint: JointStep, prompts: list[list[int]], num_tokens: int
) -> list[list[torch.Tensor]]:
    """Logits of every sequence, prompt by prompt and then together."""
    caches = [model.new_cache() for _ in prompts]
    logits = [[model.forward(prompt, cache)] for prompt, cache in zip(prompts, caches, strict=True)]
    while len(logits[0]) < num_tokens:
        forwards = [
            functools.partial(model.forward, [int(of_one[-1].argmax())], cache)
            for of_one, cache in zip(logits, caches, strict=True)
        ]
        for of_one, following in zip(logits, joint.run(forwards), strict=True):
            of_one.append(following)
    return logits


@pytest.mark.parametrize("kernel", ["native", "torch"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tokens_and_logits_are_the_same_alone_and_in_any_batch(
    kernel: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through the worker, with experts that rows share; half of them computed elsewhere."""
    if kernel == "torch":
        for module in ("gpu_worker.worker", "tests.gpu_worker.pipeline"):
            monkeypatch.setattr(
                f"{module}.make_expert_function", lambda layout, **_: ExpertFunction(layout)
            )
    sampling = SamplingParams(temperature=0.7, seed=3)

    def half_elsewhere(pipeline: Any, routed: Any) -> None:
        here = [expert for expert in routed.experts if (expert + routed.layer) % 2]
        pipeline.run(routed, here, join=False)
        pipeline.compute_here(routed, [e for e in routed.experts if e not in here])
        pipeline.run(routed, [], join=True)

    with Pipeline(tmp_path, make_model("qwen3_moe", dtype), dtype) as pipeline:
        alone = [pipeline.generate(prompt, 7, sampling) for prompt in PROMPTS]
        pipeline.answer = half_elsewhere
        tokens = [list(prompt) for prompt in PROMPTS]
        digests: list[list[str]] = [[], [], []]
        for index, prompt in enumerate(PROMPTS):
            sampled = pipeline.step(prompt, 0, sampling, sequence=index + 10)
            tokens[index].append(sampled.token)
            digests[index].append(sampled.logits_digest)
        num_shared = 0
        for number in range(6):
            order = [(number + index) % 3 for index in range(3)]
            parts = [
                StepPart(index + 10, len(tokens[index]) - 1, tokens[index][-1:], sampling)
                for index in order
            ]
            for index, sampled in zip(order, pipeline.joint_step(parts), strict=True):
                tokens[index].append(sampled.token)
                digests[index].append(sampled.logits_digest)
            num_shared += sum(max(routed.num_rows) > 1 for routed in pipeline.routed)
        assert num_shared > 6, "rows of one expert were never computed together"
        found = [
            (of_one[len(prompt) :], of_digests)
            for of_one, prompt, of_digests in zip(tokens, PROMPTS, digests, strict=True)
        ]
        assert found == alone


@pytest.mark.parametrize(
    ("parts", "sentence"),
    [
        ([], "has 0 tokens"),
        ([StepPart(1, 0, [1]), StepPart(2, 0, [])], "has 1 tokens"),
        ([StepPart(1, 0, [1, 2]), StepPart(2, 0, [1])], "several sequences and a prompt"),
        ([StepPart(1, 0, [1]), StepPart(1, 0, [1])], "names a sequence twice"),
        ([StepPart(1, 0, [1]), StepPart(2, 3, [1])], "whose cache holds 0"),
    ],
)
def test_steps_that_cannot_be_followed_are_faults(
    parts: list[StepPart], sentence: str, tmp_path: Path
) -> None:
    model = make_model("qwen3_moe")
    with Pipeline(tmp_path, model) as pipeline, pytest.raises(Exception, match=sentence):
        pipeline.joint_step(parts)


def test_a_fault_in_a_layer_leaves_no_sequence_half_way() -> None:
    left: list[str] = []

    def fail(*_: object) -> torch.Tensor:
        raise ValueError("no experts today")

    joint = JointStep(fail)

    def forward(name: str) -> torch.Tensor:
        try:
            return joint(0, torch.zeros(1, 2), torch.zeros(1, 1), torch.zeros(1, 1))
        finally:
            left.append(name)

    with pytest.raises(ValueError, match="no experts today"):
        joint.run([lambda: forward("a"), lambda: forward("b")])
    assert left == ["a", "b"]


def test_sequences_that_go_through_different_layers_are_a_fault() -> None:
    joint = JointStep(lambda layer, hidden, choices, weights: hidden)
    row = torch.zeros(1, 2)
    forwards = [functools.partial(joint, layer, row, row, row) for layer in (0, 1)]
    with pytest.raises(ProtocolError, match="different layers"):
        joint.run(forwards)
    with pytest.raises(ProtocolError, match="different layers"):
        joint.run([forwards[0], lambda: row])
