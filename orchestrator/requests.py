"""Requests as the shell sees them: checked, tokenised, streamed to their client, summed up.

The core knows a request by an id of ours and a list of tokens. This book knows whose it is, turns
its tokens into text and measures what only a clock can tell.
"""

from __future__ import annotations

import hashlib
import math
import time
from typing import TYPE_CHECKING

from orchestrator.core.events import PromptRead, RequestCounters, RequestDone, Submit, TokenOut
from orchestrator.latency_log import WHOLE
from orchestrator.stage_times import StageTimes
from orchestrator.text_model import Detokenizer, TextModel
from protocol.messages import (
    Accepted,
    Finished,
    FinishReason,
    Generate,
    Generated,
    Rejected,
    RequestId,
    RequestStats,
    SamplingParams,
)

if TYPE_CHECKING:
    from orchestrator.clients import Client

_MAX_REQUESTS = 1024
_MAX_PROMPT_CHARS = 4_000_000
#: What OpenAI's interface allows, and enough for anybody's report.
MAX_LOGPROBS = 20
MAX_BIASES = 1024


class OpenRequest:
    """One request that is not over."""

    def __init__(
        self, client: Client, generate: Generate, detokenizer: Detokenizer, num_restarts: int
    ) -> None:
        self.client = client
        #: The client's own name for it.
        self.name = generate.request
        self.detokenizer = detokenizer
        self.num_restarts_before = num_restarts
        self.num_prompt = 0
        self.tokens: list[int] = []
        self.pieces: list[str] = []
        self.digest = ""
        self.submitted_s = time.monotonic()
        self.first_token_s = 0.0
        self.last_token_s = 0.0


class RequestBook:
    """All open requests. Ids towards the core are ours, so that clients cannot clash."""

    def __init__(self, model: TextModel, num_slots: int, total_experts: int) -> None:
        self._model = model
        self._num_slots = num_slots
        self._total_experts = total_experts
        self._open: dict[RequestId, OpenRequest] = {}
        self._next = 1

    def accept(
        self, client: Client, generate: Generate, num_restarts: int
    ) -> tuple[Accepted, Submit] | Rejected:
        """Check and tokenise a request."""
        sentence = self._why_rejected(client, generate)
        if sentence is not None:
            return Rejected(generate.request, sentence)
        if generate.prompt_tokens is None:
            tokens = self._model.encode(generate.prompt)
        else:
            tokens = list(generate.prompt_tokens)
        sentence = self._model.why_wrong_length(tokens)
        if sentence is not None:
            return Rejected(generate.request, sentence)
        opened = OpenRequest(client, generate, Detokenizer(self._model, tokens), num_restarts)
        opened.num_prompt = len(tokens)
        request = RequestId(f"{self._next}")
        self._next += 1
        self._open[request] = opened
        submit = Submit(
            request,
            tokens,
            min(generate.max_tokens, self._model.context - len(tokens)),
            frozenset() if generate.ignore_eos else self._model.eos_tokens,
            generate.sampling,
        )
        return Accepted(generate.request, len(tokens)), submit

    def find(self, client: Client, name: RequestId) -> RequestId | None:
        """Our id of a client's request."""
        for request, opened in self._open.items():
            if opened.client == client and opened.name == name:
                return request
        return None

    def clients(self) -> list[Client]:
        """Everyone who waits for tokens."""
        return list({opened.client for opened in self._open.values()})

    def token(self, out: TokenOut) -> tuple[Client, Generated] | None:
        """A new token: the message for the client."""
        opened = self._open.get(out.request)
        if opened is None:
            return None
        opened.last_token_s = time.monotonic()
        if not opened.tokens:
            opened.first_token_s = opened.last_token_s
        opened.tokens.append(out.token)
        if out.logits_digest:
            joined = (opened.digest + out.logits_digest).encode()
            opened.digest = hashlib.sha256(joined).hexdigest()
        text = opened.detokenizer.push(out.token)
        opened.pieces.append(text)
        logprobs = [] if out.logprobs is None else [out.logprobs]
        return opened.client, Generated(opened.name, [out.token], text, logprobs)

    def no_token(self, out: PromptRead) -> tuple[Client, Generated] | None:
        """Nothing new yet: a message that says so."""
        opened = self._open.get(out.request)
        return None if opened is None else (opened.client, Generated(opened.name, [], ""))

    def done(
        self, done: RequestDone, times: StageTimes, num_restarts: int, sentence: str = ""
    ) -> list[tuple[Client, Generated | Finished]]:
        """The last messages of a request."""
        opened = self._open.pop(done.request, None)
        if opened is None:
            return []
        messages: list[tuple[Client, Generated | Finished]] = []
        rest = opened.detokenizer.finish()
        if rest:
            opened.pieces.append(rest)
            messages.append((opened.client, Generated(opened.name, [], rest)))
        stats = self._stats(opened, done.counters, times, num_restarts)
        finished = Finished(opened.name, done.reason, stats, "".join(opened.pieces), sentence)
        return [*messages, (opened.client, finished)]

    def abandon(
        self, sentence: str, num_restarts: int
    ) -> list[tuple[Client, Generated | Finished]]:
        """The pipeline ends: last messages of all that are still open."""
        reason: FinishReason = "error"
        messages = []
        for request in list(self._open):
            done = RequestDone(request, reason, RequestCounters())
            messages += self.done(done, StageTimes(), num_restarts, sentence)
        return messages

    def _stats(
        self,
        opened: OpenRequest,
        counters: RequestCounters,
        times: StageTimes,
        num_restarts: int,
    ) -> RequestStats:
        num_tokens = len(opened.tokens)
        decode_s = opened.last_token_s - opened.first_token_s
        elapsed_s = time.monotonic() - opened.submitted_s
        # The first token belongs to the prompt (ttft_s); the rate is that of the others.
        if num_tokens > 1 and decode_s > 0:
            tokens_per_s = (num_tokens - 1) / decode_s
        else:
            tokens_per_s = num_tokens / elapsed_s if elapsed_s > 0 else 0.0
        return RequestStats(
            prompt_tokens=opened.num_prompt,
            generated_tokens=num_tokens,
            elapsed_s=elapsed_s,
            tokens_per_s=tokens_per_s,
            ttft_s=opened.first_token_s - opened.submitted_s if num_tokens else 0.0,
            layer_steps=counters.layer_steps,
            hits=counters.hits,
            fills=counters.fills,
            cpu_experts=counters.cpu_experts,
            fills_behind=counters.fills_behind,
            evictions=counters.evictions,
            fill_bytes=counters.fill_bytes,
            cpu_bytes=counters.cpu_bytes,
            fill_busy_s=counters.fill_busy_ns / 1e9,
            cpu_busy_s=counters.cpu_busy_ns / 1e9,
            worker_restarts=num_restarts - opened.num_restarts_before,
            slots=self._num_slots,
            total_experts=self._total_experts,
            stages=times.stats(WHOLE),
            logits_digest=opened.digest,
        )

    def _why_rejected(self, client: Client, generate: Generate) -> str | None:
        if len(self._open) >= _MAX_REQUESTS:
            return f"{_MAX_REQUESTS} requests are open already; try again later."
        if self.find(client, generate.request) is not None:
            return f"Request {generate.request!r} is open already; give each its own name."
        if generate.max_tokens < 1:
            return f"max_tokens is {generate.max_tokens}; ask for at least one token."
        if len(generate.prompt) > _MAX_PROMPT_CHARS:
            return f"The prompt has {len(generate.prompt)} characters; shorten it."
        sentence = why_not_sampled(generate.sampling)
        if sentence is None and any(
            not 0 <= token < self._model.vocab_size for token in generate.sampling.logit_bias
        ):
            sentence = (
                f"logit_bias names a token outside the vocabulary of {self._model.vocab_size}; "
                "use the model's own token ids."
            )
        return sentence


def why_not_sampled(sampling: SamplingParams) -> str | None:
    """What is wrong with sampling parameters, or None."""
    for name in ("presence_penalty", "frequency_penalty"):
        if not -2 <= (penalty := getattr(sampling, name)) <= 2:
            return f"{name} is {penalty}; it must be from -2 to 2 (0: off)."
    # Logits are divided by it: a tiny one would make infinities of them.
    if not 0.01 <= sampling.repetition_penalty <= 10:
        return (
            f"repetition_penalty is {sampling.repetition_penalty}; it must be from 0.01 to 10 "
            "(1: off)."
        )
    if len(sampling.logit_bias) > MAX_BIASES:
        return f"logit_bias names {len(sampling.logit_bias)} tokens; {MAX_BIASES} is the limit."
    if not all(-100 <= bias <= 100 for bias in sampling.logit_bias.values()):
        return "logit_bias holds a bias that is not from -100 to 100."
    if not 0 <= (sampling.num_logprobs or 0) <= MAX_LOGPROBS:
        return f"num_logprobs is {sampling.num_logprobs}; it must be from 0 to {MAX_LOGPROBS}."
    if not (math.isfinite(sampling.temperature) and sampling.temperature >= 0):
        return f"temperature is {sampling.temperature}; it must be 0 (greedy) or more."
    if sampling.top_k < 0:
        return f"top_k is {sampling.top_k}; it must be 0 (off) or more."
    if not 0 < sampling.top_p <= 1:
        return f"top_p is {sampling.top_p}; it must be above 0 and at most 1 (off)."
    if not 0 <= sampling.min_p < 1:
        return f"min_p is {sampling.min_p}; it must be 0 (off) or more and below 1."
    if not 0 <= sampling.seed < 2**63:
        return f"seed is {sampling.seed}; it must be 0 or more and below 2**63."
    return None
