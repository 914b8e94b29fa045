"""How the next token is chosen and what is told of the choice: parts of messages."""

from __future__ import annotations

import msgspec


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """How the next token is chosen. temperature 0 is greedy; 0 / 1.0 / 0.0 switch a filter off.

    The random number for a token depends on (seed, position) alone, so that a sequence rebuilt
    after a crash goes on with the very tokens it would have had. In order: `logit_bias` and the
    penalties change the logits, then a mask (`StepPart.allowed_tokens`) forbids, then temperature
    and the filters. Greedy decoding is the arg max of what bias, penalties and mask leave.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    #: Taken off a token's logit once (presence), and once per time it was generated (frequency);
    #: of both the prompt does not count. 0.0: off.
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    #: Divides the positive and multiplies the negative logits of tokens that the prompt or the
    #: answer holds. 1.0: off.
    repetition_penalty: float = 1.0
    #: Token -> what is added to its logit.
    logit_bias: dict[int, float] = {}
    #: How many of the likeliest tokens to report with each sampled one; None: no report at all,
    #: 0: only the sampled one's own.
    num_logprobs: int | None = None


class TokenLogprobs(msgspec.Struct, frozen=True):
    """Natural logarithms of probabilities at one sampled token.

    They are the model's own: the softmax of the logits before bias, penalties, mask, temperature
    and filters. `top_tokens`, likeliest first, are the `SamplingParams.num_logprobs` likeliest, and
    `top_logprobs` belongs to them one by one; the sampled token need not be among them.
    """

    logprob: float
    top_tokens: list[int] = []
    top_logprobs: list[float] = []


class Sampled(msgspec.Struct, frozen=True, omit_defaults=True):
    """The token that follows one part of a step."""

    token: int
    logits_digest: str = ""
    #: If `SamplingParams.num_logprobs` asked for them.
    logprobs: TokenLogprobs | None = None
