"""A model without numbers: routings with temporal locality, and tokens that remember everything.

The digest of a sequence depends on every token, on its order and on the shapes in which the tokens
went through (as real sums do), so a step that was replayed in other chunks, twice or not at all
changes every token after it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

_MASK = (1 << 64) - 1
#: How many positions share most of their experts.
LOCALITY = 6


def mix(*numbers: int) -> int:
    """A 64-bit hash of whole numbers, the same in every process."""
    state = 0x9E3779B97F4A7C15
    for number in numbers:
        state = ((state ^ number) * 0xBF58476D1CE4E5B9) & _MASK
        state ^= state >> 29
    return state


@dataclass
class Cache:
    """What a KV cache stands for: how many positions it holds and the digest of all of them."""

    num_tokens: int = 0
    digest: int = 0

    def extended(self, tokens: list[int]) -> tuple[Cache, list[int]]:
        """The cache after one step over `tokens`, and the digest of each row."""
        digest = mix(self.digest, len(tokens))
        rows = []
        for token in tokens:
            digest = mix(digest, token)
            rows.append(digest)
        return Cache(self.num_tokens + len(tokens), digest), rows


@dataclass(frozen=True)
class SyntheticModel:
    """Routings and tokens, both functions of what came before and of the seed."""

    seed: int
    num_layers: int
    num_experts: int
    top_k: int
    num_tokens: int = 40

    def route(self, layer: int, position: int, row: int) -> list[int]:
        """The experts of one row, best first."""
        chosen: list[int] = []
        for rank in range(self.top_k):
            if mix(row, layer, rank) % 4:
                expert = mix(self.seed, layer, position // LOCALITY, rank)
            else:
                expert = mix(row, layer, rank, 1)
            expert %= self.num_experts
            while expert in chosen:
                expert = (expert + 1) % self.num_experts
            chosen.append(expert)
        return chosen

    def sample(self, digest: int, seed: int) -> int:
        return mix(digest, seed) % self.num_tokens


@dataclass
class Answer:
    """What a request gets when nothing ever goes wrong."""

    reason: str
    tokens: list[int] = field(default_factory=list)


def undisturbed(
    model: SyntheticModel,
    prompt: list[int],
    max_tokens: int,
    eos_tokens: frozenset[int],
    sampling_seed: int,
    max_rows: int,
    max_sequence_tokens: int,
) -> Answer:
    """The oracle: prefill chunk by chunk, then token by token, with nobody else around."""
    cache = Cache()
    for start in range(0, len(prompt), max_rows):
        cache, _ = cache.extended(prompt[start : start + max_rows])
    answer = Answer("length")
    while True:
        token = model.sample(cache.digest, sampling_seed)
        if token in eos_tokens:
            answer.reason = "stop"
            return answer
        answer.tokens.append(token)
        num_tokens = len(prompt) + len(answer.tokens)
        if len(answer.tokens) == max_tokens or num_tokens == max_sequence_tokens:
            return answer
        cache, _ = cache.extended([token])
