"""Masks go with the steps of constrained requests, after the tokens that came before them."""

from __future__ import annotations

from orchestrator.core.events import TokenOut
from orchestrator.grammars import Grammars
from protocol.messages import (
    Epoch,
    RequestId,
    SamplingParams,
    SequenceId,
    StartStep,
    StepId,
    StepPart,
)

MINE, OTHER = RequestId("mine"), RequestId("other")
OWNERS = {SequenceId(1): MINE, SequenceId(2): OTHER}
SAMPLING = SamplingParams()


class Recorder:
    """A matcher whose mask says what it has consumed."""

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def consume_token(self, token: int) -> bool:
        self.tokens.append(token)
        return True

    def compute_bitmask(self) -> bytes:
        return bytes([len(self.tokens), *self.tokens])


class Nothing(Recorder):
    """A matcher that allows no token."""

    def compute_bitmask(self) -> bytes:
        return bytes(8)


def test_a_mask_that_allows_nothing_is_none() -> None:
    grammars = Grammars()
    grammars.attach(MINE, Nothing())
    assert grammars.see(step(part(1)), OWNERS.get) == step(part(1))


def step(*parts: StepPart) -> StartStep:
    return StartStep(Epoch(1), StepId(1), list(parts))


def part(sequence: int, sampling: SamplingParams | None = SAMPLING) -> StepPart:
    return StepPart(SequenceId(sequence), 0, [5], sampling)


def test_only_sampled_parts_of_constrained_requests_get_a_mask() -> None:
    grammars = Grammars()
    assert not grammars
    grammars.attach(MINE, Recorder())
    assert grammars
    grammars.see(TokenOut(OTHER, 9, ""), OWNERS.get)
    grammars.see(TokenOut(MINE, 7, ""), OWNERS.get)
    seen = grammars.see(step(part(1), part(2)), OWNERS.get)
    assert isinstance(seen, StartStep)
    assert [part.allowed_tokens for part in seen.parts] == [bytes([1, 7]), b""]
    replayed = step(part(1, None))
    assert grammars.see(replayed, OWNERS.get) == replayed
    grammars.detach(MINE)
    assert grammars.see(step(part(1)), OWNERS.get) == step(part(1))
