"""What changes the logits before a token is chosen, and what is told of them afterwards.

    bias          + logit_bias[t]
    repetition    / r where positive, * r where negative, for tokens of prompt or answer
    frequency     - f times the number of times that t was generated
    presence      - p if t was generated at all
    mask          -inf where the token is not allowed

in this order. (Formulas: transformers' RepetitionPenaltyLogitsProcessor, and the penalties of
OpenAI's interface, which count the answer and not the prompt.) All of it is a function of the
parameters and of the tokens that the sequence holds, so a sequence that was rebuilt after a crash
goes on as it would have.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from protocol.messages import TokenLogprobs

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from protocol.messages import SamplingParams


def adjust(
    scores: torch.Tensor,
    params: SamplingParams,
    tokens: Sequence[int] = (),
    num_prompt: int = 0,
    allowed: bytes = b"",
) -> torch.Tensor:
    """float32 [vocab], on the CPU -> the same with biases, penalties and mask applied; `scores`
    itself where there are none.

    Args:
        tokens: all tokens of the sequence, of which the first `num_prompt` are the prompt.
        allowed: a bit per token, token t at bit t % 8 of byte t // 8; empty: all are allowed.
    """
    has_bias, generated = bool(params.logit_bias), tokens[num_prompt:]
    has_repetition = params.repetition_penalty != 1.0 and bool(tokens)
    has_counts = bool(params.presence_penalty or params.frequency_penalty) and bool(generated)
    if not (has_bias or has_repetition or has_counts or allowed):
        return scores
    scores = scores.clone()
    values = scores.numpy()  # the same memory; its indexing costs a fraction of torch's
    if has_bias:
        for token, bias in params.logit_bias.items():
            if 0 <= token < len(values):
                values[token] += np.float32(bias)
    if has_repetition:
        known = np.unique(np.asarray(tokens))
        penalty = np.float32(params.repetition_penalty)
        held = values[known]
        values[known] = np.where(held < 0, held * penalty, held / penalty)
    if has_counts:
        known, counts = np.unique(np.asarray(generated), return_counts=True)
        values[known] -= np.float32(params.frequency_penalty) * counts.astype(np.float32)
        values[known] -= np.float32(params.presence_penalty)
    if allowed:
        bits = np.unpackbits(np.frombuffer(allowed, np.uint8), bitorder="little")[: len(values)]
        is_allowed = np.zeros(len(values), bool)
        is_allowed[: len(bits)] = bits
        values[~is_allowed] = -np.inf
    return scores


def logprobs_of(scores: torch.Tensor, token: int, num_best: int) -> TokenLogprobs:
    """What the model itself, before any rule, says of `token` and of the `num_best` likeliest.

    `scores` is float32 [vocab]; ties stand in the order of their ids.
    """
    values = scores.numpy()
    log_total = float(scores.logsumexp(dim=0))
    num_best = min(num_best, len(values))
    best: list[int] = []
    if num_best > 0:
        bound = np.partition(values, len(values) - num_best)[len(values) - num_best]
        candidates = np.flatnonzero(values >= bound)
        order = np.argsort(-values[candidates], kind="stable")
        best = candidates[order][:num_best].tolist()
    return TokenLogprobs(
        float(values[token]) - log_total, best, [float(values[t]) - log_total for t in best]
    )
