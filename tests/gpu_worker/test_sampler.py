"""The sampler against transformers' own logits processors, and at the edges of its parameters."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from gpu_worker.sampler import LogitsError, digest, filter_logits, sample, uniform
from protocol.messages import SamplingParams


def _logits(seed: int, vocab: int = 50) -> torch.Tensor:
    return 3.0 * torch.randn(vocab, generator=torch.Generator().manual_seed(seed))


def _by_transformers(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    steps = LogitsProcessorList([TemperatureLogitsWarper(params.temperature)])
    if params.top_k:
        steps.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1.0:
        steps.append(TopPLogitsWarper(params.top_p))
    if params.min_p > 0.0:
        steps.append(MinPLogitsWarper(params.min_p))
    return steps(torch.zeros(1, 1, dtype=torch.int64), logits[None].clone())[0]


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    temperature=st.floats(0.05, 4.0),
    top_k=st.sampled_from([0, 1, 2, 7, 49, 50, 1000]),
    top_p=st.sampled_from([1e-6, 0.1, 0.5, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 1e-3, 0.05, 0.5, 1.0]),
)
def test_filters_equal_transformers(
    seed: int, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    params = SamplingParams(temperature, top_k, top_p, min_p)
    logits = _logits(seed)
    found = filter_logits(logits, params)
    assert torch.equal(found, _by_transformers(logits, params))
    assert math.isfinite(found[sample(logits, params, seed)])


def test_ties_of_the_last_kept_token_are_filtered_as_transformers_does() -> None:
    logits = torch.tensor([1.0, 2.0, 2.0, 0.0, 2.0])
    for params in (SamplingParams(1.0, top_k=2), SamplingParams(1.0, top_p=0.5)):
        assert torch.equal(filter_logits(logits, params), _by_transformers(logits, params))


@pytest.mark.parametrize("temperature", [0.0, 1e-9, -1.0, math.nan])
def test_no_temperature_is_greedy(temperature: float) -> None:
    logits = _logits(1)
    for position in range(20):
        found = sample(logits, SamplingParams(temperature, seed=position), position)
        assert found == int(logits.argmax())


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(1.0, top_k=1),
        SamplingParams(1.0, top_p=1e-9),
        SamplingParams(1.0, top_p=0.0),
        SamplingParams(1.0, top_p=-3.0),
        SamplingParams(1.0, min_p=1.0),
        SamplingParams(1.0, min_p=7.0),
        SamplingParams(1e-4),
    ],
)
def test_filters_that_leave_one_token_draw_that(params: SamplingParams) -> None:
    logits = _logits(2)
    assert {sample(logits, params, position) for position in range(50)} == {int(logits.argmax())}


def test_draws_follow_the_distribution() -> None:
    """5000 draws: each share within 5 standard deviations of its probability."""
    logits, params, num_draws = _logits(3, vocab=6), SamplingParams(1.3, seed=5), 5000
    expected = (logits / 1.3).softmax(dim=-1).tolist()
    counts = Counter(sample(logits, params, position) for position in range(num_draws))
    for token, share in enumerate(expected):
        tolerance = 5 * math.sqrt(share * (1 - share) / num_draws)
        assert abs(counts[token] / num_draws - share) < tolerance


def test_a_draw_depends_on_seed_and_position_alone() -> None:
    logits = _logits(4, vocab=1000)

    def draw(seed: int, position: int) -> int:
        return sample(logits, SamplingParams(2.0, seed=seed), position)

    first = [draw(7, position) for position in range(30)]
    assert [draw(7, position) for position in reversed(range(30))] == first[::-1]
    assert [draw(8, position) for position in range(30)] != first
    assert draw(-1, 3) == draw((1 << 64) - 1, 3)
    numbers = {uniform(seed, position) for seed in range(50) for position in range(50)}
    assert len(numbers) == 2500
    assert all(0.0 <= number < 1.0 for number in numbers)
    assert abs(sum(numbers) / 2500 - 0.5) < 0.03


def test_a_token_that_cannot_be_is_never_drawn() -> None:
    logits = torch.full((40,), -math.inf)
    logits[[3, 17]] = torch.tensor([1.0, 0.5])
    drawn = {sample(logits, SamplingParams(1.0), position) for position in range(200)}
    assert drawn == {3, 17}


@pytest.mark.parametrize("values", [[0.0, math.nan, 1.0], [math.inf, 0.0], [-math.inf, -math.inf]])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_name_no_token_are_an_error(values: list[float], temperature: float) -> None:
    with pytest.raises(LogitsError, match="NaN or infinity"):
        sample(torch.tensor(values), SamplingParams(temperature), 0)


def test_half_precision_logits_are_sampled_as_their_float32_values() -> None:
    logits = _logits(5).bfloat16()
    params = SamplingParams(0.7, top_p=0.8, seed=1)
    for position in range(30):
        assert sample(logits, params, position) == sample(logits.float(), params, position)
    assert digest(logits) == digest(logits.float())


def test_a_digest_tells_one_bit() -> None:
    logits = _logits(6)
    other = logits.clone()
    other.view(torch.int32)[11] ^= 1
    assert len(digest(logits)) == 16
    assert digest(logits) == digest(logits.clone())
    assert digest(logits) != digest(other)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(0.8, top_k=40),
        SamplingParams(0.8, top_k=5, top_p=0.7, min_p=0.02),
        SamplingParams(0.3, top_p=0.9),
        SamplingParams(0.3, top_p=0.5, min_p=0.1),
        SamplingParams(5.0, top_p=0.99),  # wider than the few that are looked at first
    ],
    ids=str,
)
def test_large_vocabularies_draw_from_what_the_filters_keep(params: SamplingParams) -> None:
    """20 000 tokens take the short cuts; the draws must be those of the filtered distribution."""
    logits = _logits(9, vocab=20_000)
    weights = filter_logits(logits, params).softmax(dim=-1).double()
    cumulative = weights.cumsum(dim=-1)
    for position in range(40):
        token = sample(logits, params, position)
        assert weights[token] > 0
        target = uniform(params.seed, position) * float(cumulative[-1])
        below = float(cumulative[token] - weights[token])
        assert below - 1e-5 <= target <= float(cumulative[token]) + 1e-5
