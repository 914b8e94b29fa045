"""Biases, penalties, masks and log probabilities, against transformers where it has the same."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
)

from gpu_worker.logit_rules import adjust, logprobs_of
from gpu_worker.sampler import LogitsError, filter_logits, sample
from protocol.messages import SamplingParams, StepPart, TokenLogprobs
from tests.gpu_worker.pipeline import Pipeline, make_model

if TYPE_CHECKING:
    from pathlib import Path

VOCAB = 40
TOKENS = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=30)


def _logits(seed: int, vocab: int = VOCAB) -> torch.Tensor:
    return 3.0 * torch.randn(vocab, generator=torch.Generator().manual_seed(seed))


def mask_of(allowed: set[int], vocab: int = VOCAB) -> bytes:
    mask = bytearray((vocab + 7) // 8)
    for token in allowed:
        mask[token // 8] |= 1 << token % 8
    return bytes(mask)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    tokens=TOKENS,
    penalty=st.sampled_from([0.5, 0.9, 1.1, 1.7, 9.0]),
    bias=st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-100, 100, width=32), max_size=5),
    banned=st.sets(st.integers(0, VOCAB - 1), max_size=30),
)
def test_rules_equal_transformers(
    seed: int, tokens: list[int], penalty: float, bias: dict[int, float], banned: set[int]
) -> None:
    logits, context = _logits(seed), torch.tensor([tokens])
    expected = logits[None].clone()
    if bias:
        of_tokens = {(token,): float(value) for token, value in bias.items()}
        expected = SequenceBiasLogitsProcessor(of_tokens)(context, expected)
    expected = RepetitionPenaltyLogitsProcessor(penalty)(context, expected)
    if banned:
        expected = SuppressTokensLogitsProcessor(sorted(banned))(context, expected)
    params = SamplingParams(repetition_penalty=penalty, logit_bias=bias)
    allowed = mask_of(set(range(VOCAB)) - banned) if banned else b""
    before = logits.clone()
    # The prompt's share of the tokens makes no difference to any of these.
    for num_prompt in (0, len(tokens)):
        found = adjust(logits, params, tokens, num_prompt, allowed)
        torch.testing.assert_close(found, expected[0], rtol=3e-7, atol=0)
    assert torch.equal(logits, before), "the logits themselves are still wanted"


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    prompt=TOKENS,
    answer=st.lists(st.integers(0, VOCAB - 1), max_size=30),
    presence=st.floats(-2, 2, width=32),
    frequency=st.floats(-2, 2, width=32),
)
def test_counts_are_of_the_answer_alone(
    seed: int, prompt: list[int], answer: list[int], presence: float, frequency: float
) -> None:
    logits = _logits(seed)
    params = SamplingParams(presence_penalty=presence, frequency_penalty=frequency)
    found = adjust(logits, params, prompt + answer, len(prompt))
    for token in range(VOCAB):
        count = answer.count(token)
        expected = float(logits[token]) - count * frequency - (presence if count else 0.0)
        assert float(found[token]) == pytest.approx(expected, rel=1e-5, abs=1e-5)


def test_without_rules_the_logits_pass_untouched() -> None:
    logits = _logits(1)
    assert adjust(logits, SamplingParams(0.7, seed=3), [1, 2, 3], 1) is logits


def test_a_mask_binds_greedy_and_drawn_tokens_alike() -> None:
    logits = _logits(2, vocab=20_000)
    allowed = {7, 4000, 19_999}
    mask = mask_of(allowed, 20_000)
    best = max(allowed, key=lambda token: float(logits[token]))
    assert sample(logits, SamplingParams(), 0, allowed=mask) == best
    for params in (
        SamplingParams(5.0),
        SamplingParams(5.0, top_k=40),
        SamplingParams(5.0, top_p=0.9),
        SamplingParams(5.0, min_p=0.01, top_p=0.99),
    ):
        drawn = {sample(logits, params, position, allowed=mask) for position in range(60)}
        assert drawn <= allowed
        assert len(drawn) > 1


def test_a_mask_that_ends_early_forbids_the_rest() -> None:
    logits = torch.arange(40.0)
    assert sample(logits, SamplingParams(), 0, allowed=b"\xff\x01") == 8


def test_a_mask_that_allows_nothing_is_an_error() -> None:
    with pytest.raises(LogitsError, match="no token is allowed"):
        sample(_logits(3), SamplingParams(), 0, allowed=b"\x00")


def test_a_bias_for_a_token_that_does_not_exist_changes_nothing() -> None:
    logits = _logits(4)
    assert torch.equal(adjust(logits, SamplingParams(logit_bias={VOCAB: 9.0, -1: 9.0})), logits)


def test_filters_see_what_the_rules_leave() -> None:
    logits = torch.tensor([3.0, 2.0, 1.0, 0.0])
    params = SamplingParams(1.0, top_k=1, logit_bias={3: 10.0})
    assert {sample(logits, params, position) for position in range(20)} == {3}
    assert math.isinf(float(filter_logits(adjust(logits, params), params)[0]))


@pytest.mark.parametrize("num_best", [0, 1, 5, 99])
def test_logprobs_are_the_log_softmax(num_best: int) -> None:
    logits = _logits(5)
    expected = logits.log_softmax(dim=0)
    found = logprobs_of(logits, 11, num_best)
    assert found.logprob == pytest.approx(float(expected[11]), abs=1e-5)
    assert found.top_tokens == expected.argsort(descending=True)[:num_best].tolist()
    of_best = [float(expected[token]) for token in found.top_tokens]
    assert found.top_logprobs == pytest.approx(of_best, abs=1e-5)


def test_equal_logits_stand_in_the_order_of_their_ids() -> None:
    found = logprobs_of(torch.tensor([1.0, 2.0, 1.0, 1.0]), 0, 3)
    assert found.top_tokens == [1, 0, 2]


def test_the_worker_counts_what_the_sequence_holds_however_it_came_to_hold_it(
    tmp_path: Path,
) -> None:
    """The same tokens after a rebuild in other hands: prompt in chunks, the rest one by one."""
    prompt = [5, 17, 3, 42, 8, 77, 21]
    params = SamplingParams(
        0.9,
        seed=4,
        presence_penalty=0.7,
        frequency_penalty=0.9,
        repetition_penalty=1.2,
        logit_bias={9: 3.0},
        num_logprobs=2,
    )
    with Pipeline(tmp_path, make_model("qwen3_moe")) as pipeline:

        def step(sequence: int, start: int, tokens: list[int], *, samples: bool = True) -> object:
            sampling, num_prompt = (params, len(prompt)) if samples else (None, 0)
            part = StepPart(sequence, start, tokens, sampling, num_prompt)  # type: ignore[arg-type]
            (sampled,) = pipeline.joint_step([part])
            return sampled

        answers = [step(1, 0, prompt)]
        for index in range(11):
            answers.append(step(1, len(prompt) + index, [answers[-1].token]))  # type: ignore[attr-defined]
        tokens = [answer.token for answer in answers]  # type: ignore[attr-defined]
        logprobs = [answer.logprobs for answer in answers]  # type: ignore[attr-defined]
        assert all(isinstance(of_one, TokenLogprobs) for of_one in logprobs)
        assert all(len(of_one.top_tokens) == 2 for of_one in logprobs)
        plain, _ = pipeline.generate(prompt, 12, SamplingParams(0.9, seed=4), sequence=2)
        assert plain != tokens
        step(3, 0, prompt, samples=False)
        for index, token in enumerate(tokens[:6]):
            step(3, len(prompt) + index, [token], samples=False)
        again = step(3, len(prompt) + 6, [tokens[6]])
        assert again == answers[7]
