"""The gpu_worker decodes; the test holds its hand. The reference is transformers' own model."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
import torch

from protocol.messages import Arena, Ran, Routed, SamplingParams
from tests.gpu_worker.pipeline import FAMILIES, Pipeline, make_model

if TYPE_CHECKING:
    from pathlib import Path

PROMPT = [5, 17, 3, 42, 8, 77, 21, 9, 60, 33, 12, 2, 58]


def reference_tokens(model: Any, prompt: list[int], num_tokens: int) -> list[int]:
    output = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        max_new_tokens=num_tokens,
        do_sample=False,
    )
    return output[0, len(prompt) :].tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_equal_transformers_generate(family: str, tmp_path: Path) -> None:
    model = make_model(family)
    expected = reference_tokens(model, PROMPT, 32)
    assert len(set(expected)) > 8, "the reference repeats itself: it could not show a difference"
    with Pipeline(tmp_path, model) as pipeline:
        tokens, _ = pipeline.generate(PROMPT, 32)
    assert tokens == expected
    assert pipeline.exit_code == 0


@pytest.mark.process
def test_a_real_process_decodes_the_same_and_leaves_in_order(tmp_path: Path) -> None:
    model = make_model("qwen3_moe")
    with Pipeline(tmp_path, model, in_process=False) as pipeline:
        tokens, _ = pipeline.generate(PROMPT, 32)
        assert pipeline.ready.arena == Arena(
            "shared", pipeline.layout.total_experts, pipeline.layout.block_bytes
        )
        assert pipeline.progress
    assert tokens == reference_tokens(model, PROMPT, 32)
    assert pipeline.exit_code == 0
    assert "Traceback" not in pipeline.worker.stderr()


def _one_by_one(pipeline: Pipeline, routed: Routed) -> None:
    order = list(routed.experts)
    random.Random(routed.step * 100 + routed.layer).shuffle(order)
    for expert in order:
        pipeline.run(routed, [expert], join=False)
    pipeline.run(routed, [], join=True)


def _join_with_last(pipeline: Pipeline, routed: Routed) -> None:
    *first, last = reversed(routed.experts)
    if first:
        pipeline.run(routed, first, join=False)
    pipeline.run(routed, [last], join=True)


def _half_elsewhere(pipeline: Pipeline, routed: Routed) -> None:
    chance = random.Random(routed.step * 100 + routed.layer)
    here = [expert for expert in routed.experts if chance.random() < 0.5]
    pipeline.run(routed, here, join=False)
    pipeline.compute_here(routed, [expert for expert in routed.experts if expert not in here])
    pipeline.run(routed, [], join=True)


def _all_elsewhere(pipeline: Pipeline, routed: Routed) -> None:
    pipeline.compute_here(routed, routed.experts)
    pipeline.run(routed, [], join=True)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_who_computes_an_expert_changes_no_bit(dtype: str, tmp_path: Path) -> None:
    with Pipeline(tmp_path, make_model("qwen3_moe", dtype), dtype) as pipeline:
        expected = pipeline.generate(PROMPT, 8, chunk=7)
        assert len(set(expected[1])) == 8
        for sequence, answer in enumerate(
            (_one_by_one, _join_with_last, _half_elsewhere, _all_elsewhere), start=1
        ):
            pipeline.answer = answer
            found = pipeline.generate(PROMPT, 8, chunk=7, sequence=sequence)
            assert found == expected, answer.__name__


def test_a_sequence_replayed_from_its_tokens_has_the_same_logits(tmp_path: Path) -> None:
    sampling = SamplingParams(temperature=0.8, top_p=0.9, seed=11)
    with Pipeline(tmp_path, make_model("gpt_oss")) as pipeline:
        tokens, digests = pipeline.generate(PROMPT, 8, sampling, chunk=5)
        # Rebuilt as after a crash: the prompt's chunks again, decoded tokens one by one, silently.
        for start in range(0, len(PROMPT), 5):
            pipeline.step(PROMPT[start : start + 5], start)
        for index, token in enumerate(tokens[:-1]):
            is_last = index == len(tokens) - 2
            done = pipeline.step([token], len(PROMPT) + index, sampling if is_last else None)
        assert (done.token, done.logits_digest) == (tokens[-1], digests[-1])


def test_sequences_do_not_see_each_other(tmp_path: Path) -> None:
    with Pipeline(tmp_path, make_model("deepseek_v3")) as pipeline:
        alone = pipeline.generate(PROMPT, 6, sequence=1)
        pipeline.step(PROMPT[:4], 0, sequence=2)
        pipeline.step(PROMPT, 0, sequence=3)
        done = pipeline.step(PROMPT[4:9], 4, SamplingParams(), sequence=2)
        assert pipeline.generate(PROMPT, 6, sequence=3) == alone
        assert pipeline.step(PROMPT[:9], 0, SamplingParams(), sequence=4).token == done.token


def test_events_of_a_step_tell_what_the_router_did(tmp_path: Path) -> None:
    with Pipeline(tmp_path, make_model("qwen3_moe")) as pipeline:
        choices: list[list[list[int]]] = []

        def look(pipeline: Pipeline, routed: Routed) -> None:
            step, layer, num_rows = pipeline.views.read_header()
            assert (step, layer, num_rows) == (routed.step, routed.layer, len(PROMPT))
            choices.append(pipeline.views.choices[:num_rows].tolist())
            pipeline.run(routed, routed.experts, join=True)

        pipeline.answer = look
        pipeline.step(PROMPT, 0, SamplingParams())
        assert len(pipeline.routed) == pipeline.layout.num_layers == 3
        joined_ns = 0
        for routed, chosen in zip(pipeline.routed, choices, strict=True):
            flat = [expert for row in chosen for expert in row]
            assert routed.experts == list(dict.fromkeys(flat))
            assert routed.num_rows == [flat.count(expert) for expert in routed.experts]
            assert routed.joined_ns < routed.routed_ns
            assert (routed.joined_ns == 0) is (routed.layer == 0)
            assert routed.joined_ns >= joined_ns
            joined_ns = routed.joined_ns
        ran = [event for event in pipeline.others if isinstance(event, Ran)]
        assert [event.experts for event in ran] == [event.experts for event in pipeline.routed]
        assert all(event.started_ns < event.ended_ns for event in ran)
        done = pipeline.done
        assert done.done_ns > done.joined_ns > joined_ns


@pytest.mark.parametrize("family", ["deepseek_v3", "gpt_oss", "mixtral"])
def test_prompt_chunks_agree_with_the_whole_prompt(family: str, tmp_path: Path) -> None:
    """Chunks of other sizes add in another order, so logits agree closely and tokens fully."""
    model = make_model(family)
    with Pipeline(tmp_path, model) as pipeline:
        for sequence, chunk in enumerate((13, 4, 1)):
            tokens, _ = pipeline.generate(PROMPT, 10, chunk=chunk, sequence=sequence)
            assert tokens == reference_tokens(model, PROMPT, 10), chunk
