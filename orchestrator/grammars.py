"""Which tokens a constrained request may go on with, step by step.

The gpu_worker samples, this process knows the grammar: so a step of a constrained request carries a
mask of allowed tokens, a bit per token of the vocabulary, and nobody else's does. The core emits a
token and the step after it in one breath; `see` is shown its commands in order, moves the grammar
on with the one and writes the mask into the other.

A gpu_worker that dies changes nothing: tokens are emitted once, replayed steps sample nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import msgspec

from orchestrator.core.events import TokenOut
from protocol.messages import StartStep

if TYPE_CHECKING:
    from collections.abc import Callable

    from orchestrator.core.events import CoreCommand
    from protocol.messages import RequestId, SequenceId, StepPart


class Matcher(Protocol):
    """A grammar and how far a text is in it; llguidance's LLMatcher is one."""

    def consume_token(self, token: int) -> bool: ...

    def compute_bitmask(self) -> bytes: ...


class Grammars:
    """Matchers of open requests; false when there are none."""

    def __init__(self) -> None:
        self._matchers: dict[RequestId, Matcher] = {}

    def __len__(self) -> int:
        return len(self._matchers)

    def attach(self, request: RequestId, matcher: Matcher) -> None:
        """Constrain a request, before it is submitted."""
        self._matchers[request] = matcher

    def detach(self, request: RequestId) -> None:
        """The request is over."""
        self._matchers.pop(request, None)

    def see(
        self, command: CoreCommand, request_of: Callable[[SequenceId], RequestId | None]
    ) -> CoreCommand:
        """The command as it is to be carried out. `request_of` is the core's knowledge."""
        if isinstance(command, TokenOut):
            matcher = self._matchers.get(command.request)
            if matcher is not None:
                matcher.consume_token(command.token)
        elif isinstance(command, StartStep):
            return msgspec.structs.replace(
                command, parts=[self._masked(part, request_of) for part in command.parts]
            )
        return command

    def _masked(
        self, part: StepPart, request_of: Callable[[SequenceId], RequestId | None]
    ) -> StepPart:
        request = None if part.sampling is None else request_of(part.sequence)
        matcher = None if request is None else self._matchers.get(request)
        if matcher is None:
            return part
        # A mask that allows nothing, as of a grammar that is over in a vocabulary without an end
        # token, could not be sampled from at all.
        mask = matcher.compute_bitmask()
        return msgspec.structs.replace(part, allowed_tokens=mask) if mask.strip(b"\0") else part
