"""Which token comes next, as a pure function of logits, parameters, seed and position.

Biases, penalties and a mask come first (gpu_worker.logit_rules). Greedy is the arg max of what they
leave. Otherwise the logits pass temperature, top-k, top-p and min-p, in that order and with the
meaning that transformers' logits processors give them; then one token is drawn by inverting the
cumulative distribution at a number u in [0, 1).

u comes from (seed, position) alone, through a counter-based generator, not from a stream that
earlier tokens have advanced: a sequence that is rebuilt after a crash, or whose steps are replayed,
draws the very numbers it would have drawn. Everything runs in float32 on the CPU, and the
distribution is summed up in float64 in the order of the token ids, so that the device on which the
logits were computed has no say beyond the logits themselves.
"""

from __future__ import annotations

import hashlib
import math
from typing import TYPE_CHECKING

import msgspec
import torch

from gpu_worker.logit_rules import adjust
from protocol.errors import WorkFault

if TYPE_CHECKING:
    from collections.abc import Sequence

    from protocol.messages import SamplingParams

#: Below this temperature the distribution is a single spike; dividing by it would only overflow.
MIN_TEMPERATURE = 1e-5

#: Tokens of a vocabulary that are looked at together, and how many of the best may be a nucleus.
_BLOCK = 64
_NUCLEUS = 256

_MASK_64 = (1 << 64) - 1
_GOLDEN_GAMMA = 0x9E3779B97F4A7C15


class LogitsError(WorkFault):
    """The logits name no token: one of them is NaN, or none of them is finite."""


def scores_of(logits: torch.Tensor) -> torch.Tensor:
    """[vocab], any float dtype, any device -> float32 on the CPU, contiguous.

    Raises:
        LogitsError: the logits name no token.
    """
    scores = logits.to("cpu", torch.float32).contiguous()
    values = scores.numpy()
    # numpy's is several times faster, and finds a NaN first, too
    if not math.isfinite(values[values.argmax()]):
        raise LogitsError("the logits hold NaN or infinity; the weights or the prompt overflow")
    return scores


def sample(
    logits: torch.Tensor,
    params: SamplingParams,
    position: int,
    tokens: Sequence[int] = (),
    num_prompt: int = 0,
    allowed: bytes = b"",
) -> int:
    """The next token.

    Args:
        logits: [vocab], any float dtype, any device.
        params: how to choose; values outside their range act as the nearest one inside it.
        position: of the token to be drawn, counted from the sequence's first token.
        tokens, num_prompt, allowed: see gpu_worker.logit_rules.adjust.

    Raises:
        LogitsError: the logits name no token, or none that is allowed.
    """
    scores = adjust(scores_of(logits), params, tokens, num_prompt, allowed)
    values = scores.numpy()
    best = int(values.argmax())
    if not math.isfinite(values[best]):
        raise LogitsError("no token is allowed that the logits could name")
    if not params.temperature >= MIN_TEMPERATURE:
        return best
    kept = None
    if 0 < params.top_k < len(scores):
        kept = _best_tokens(scores, params.top_k)
        params = msgspec.structs.replace(params, top_k=0)
        weights = filter_logits(scores[kept], params).softmax(dim=-1)
    elif params.top_p < 1.0 and (head := _nucleus(scores, params)) is not None:
        kept, weights = head
    else:
        weights = filter_logits(scores, params).softmax(dim=-1)
    cumulative = weights.double().cumsum(dim=-1)
    target = uniform(params.seed, position) * float(cumulative[-1])
    place = int(torch.searchsorted(cumulative, target, right=True))
    if place >= len(weights):  # target was rounded up to the total
        place = int(weights.nonzero()[-1])
    return place if kept is None else int(kept[place])


def _best_tokens(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Ascending ids, int64, of all tokens that score no less than the `count`-th best.

    Large vocabularies are looked through in blocks: the `count`-th best of the blocks' maxima is a
    bound that at least `count` tokens reach and few others do.
    """
    num_blocks = len(scores) // _BLOCK
    if num_blocks <= count:
        return (scores >= scores.topk(count).values[-1]).nonzero().view(-1)
    end = num_blocks * _BLOCK
    maxima = torch.cat((scores[:end].view(num_blocks, _BLOCK).amax(dim=1), scores[end:]))
    tokens = (scores >= maxima.topk(count).values[-1]).nonzero().view(-1)
    found = scores[tokens]
    return tokens[found >= found.topk(count).values[-1]]


def _nucleus(
    scores: torch.Tensor, params: SamplingParams
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Tokens, ascending, and their weights under top-p and min-p, found among the best few; None
    where those few do not hold top-p of the distribution, or hold it by a hair."""
    if len(scores) <= _NUCLEUS * _BLOCK:
        return None
    tokens = _best_tokens(scores, _NUCLEUS)
    log_total = float((scores / params.temperature).logsumexp(dim=0))
    weights = ((scores[tokens] / params.temperature).double() - log_total).exp()
    if float(weights.sum()) < params.top_p + 1e-3:
        return None
    descending, order = weights.sort(descending=True, stable=True)
    # As in filter_logits: who is beyond those that already make up top_p is the tail.
    is_kept = descending.cumsum(dim=0) - descending < params.top_p
    is_kept &= descending >= params.min_p * descending[0]
    is_kept[0] = True
    return tokens, weights * torch.empty_like(is_kept).scatter_(0, order, is_kept)


def filter_logits(scores: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """float32 [vocab] -> the same with temperature applied and what may not be drawn at -inf.

    Formulas: transformers' TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper and
    MinPLogitsWarper, in the order in which its `generate` applies them. One token always stays.
    """
    scores = scores / params.temperature
    if params.top_k > 0:
        kth_best = scores.topk(min(params.top_k, len(scores))).values[-1]
        scores = scores.masked_fill(scores < kth_best, -math.inf)
    if params.top_p < 1.0:
        ascending, order = scores.sort()
        is_tail = ascending.softmax(dim=-1).cumsum(dim=-1) <= 1.0 - params.top_p
        is_tail[-1] = False
        scores = scores.masked_fill(
            torch.empty_like(is_tail).scatter_(0, order, is_tail), -math.inf
        )
    if params.min_p > 0.0:
        weights = scores.softmax(dim=-1)
        best = weights.argmax()
        is_tail = weights < params.min_p * weights[best]
        is_tail[best] = False
        scores = scores.masked_fill(is_tail, -math.inf)
    return scores


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) for one token: 53 bits of SplitMix64's output function.

    The counter `position` steps through the stream that `seed` (mixed once, so that neighbouring
    seeds share nothing) begins. Source: Steele, Lea, Flood, "Fast splittable pseudorandom number
    generators", OOPSLA 2014, and the variant 13 constants that its reference code uses.
    """
    start = _mix(seed & _MASK_64)
    return (_mix((start + (position + 1) * _GOLDEN_GAMMA) & _MASK_64) >> 11) * 2.0**-53


def digest(logits: torch.Tensor) -> str:
    """16 hex digits that tell two float32 [vocab] tensors apart, bit for bit (blake2b, 8 bytes)."""
    values = logits.to("cpu", torch.float32).contiguous()
    return hashlib.blake2b(values.numpy().tobytes(), digest_size=8).hexdigest()


def _mix(value: int) -> int:
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return value ^ (value >> 31)
