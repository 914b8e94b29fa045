"""The texts that one HTTP request asks for, from the engine to pieces that may be shown.

    Generation.start()   one request to the engine per choice
    Generation.pieces()  what they say, stop strings taken out; an empty list is a sign of silence
    Generation.end()     whatever is still open is cancelled

The engine says things in the middle of a step; a `Mailbox` keeps them until the request's own task
runs. A client that goes away closes the mailbox, and its requests leave with the step in flight.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from orchestrator.http.errors import ApiError, bad_request
from protocol.messages import (
    Cancel,
    Finished,
    Generate,
    Generated,
    Rejected,
    RequestId,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from orchestrator.engine import Engine
    from orchestrator.grammars import Matcher
    from orchestrator.http.metrics import ServerMetrics
    from orchestrator.http.stop_strings import StopFinder
    from protocol.messages import ClientReply, SamplingParams, TokenLogprobs


class Mailbox:
    """A client inside this process; see orchestrator.clients.LocalClient."""

    def __init__(self) -> None:
        self._replies: deque[ClientReply] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self.is_closed = False

    def hear(self, reply: ClientReply) -> None:
        self._replies.append(reply)
        self._wake()

    def close(self) -> None:
        """Nobody will read what comes from now on."""
        self.is_closed = True
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def take(self, timeout_s: float) -> list[ClientReply]:
        """All that was said, at least one reply unless `timeout_s` went by or it was closed."""
        if not self._replies and not self.is_closed:
            loop = asyncio.get_running_loop()
            self._waiter = loop.create_future()
            timer = loop.call_later(timeout_s, self._wake)
            try:
                await self._waiter
            finally:
                timer.cancel()
                self._waiter = None
        taken = list(self._replies)
        self._replies.clear()
        return taken


@dataclass(slots=True)
class Choice:
    """One text: what is asked for, and how far it is."""

    index: int
    prompt_tokens: list[int]
    max_tokens: int
    sampling: SamplingParams
    ignore_eos: bool
    stops: StopFinder
    matcher: Matcher | None = None
    name: RequestId = field(default_factory=lambda: RequestId(uuid.uuid4().hex))
    num_tokens: int = 0
    finish_reason: str | None = None
    #: The engine still works on it.
    is_open: bool = False
    last_token_s: float = 0.0


@dataclass(slots=True)
class Piece:
    """What became certain of one choice. `finish_reason` is set with its last piece."""

    choice: Choice
    text: str
    tokens: list[int]
    logprobs: list[TokenLogprobs]
    finish_reason: str | None = None


class Generation:
    """All choices of one HTTP request. `on_end` is called once, when nothing of it is left."""

    def __init__(
        self,
        engine: Engine,
        metrics: ServerMetrics,
        choices: list[Choice],
        keep_alive_s: float,
        on_end: Callable[[], None],
    ) -> None:
        self._engine = engine
        self._metrics = metrics
        self.choices = choices
        self._keep_alive_s = keep_alive_s
        self._on_end: Callable[[], None] | None = on_end
        self._mailbox = Mailbox()
        self._by_name = {choice.name: choice for choice in choices}
        self._started_s = time.monotonic()

    @property
    def is_abandoned(self) -> bool:
        return self._mailbox.is_closed

    @property
    def num_generated(self) -> int:
        return sum(choice.num_tokens for choice in self.choices)

    async def start(self) -> None:
        """Ask the engine.

        Raises:
            ApiError: it refuses one of the choices; the others are taken back.
        """
        for choice in self.choices:
            self._engine.ask(
                self._mailbox,
                Generate(
                    choice.name,
                    "",
                    choice.prompt_tokens,
                    choice.max_tokens,
                    choice.ignore_eos,
                    choice.sampling,
                ),
                choice.matcher,
            )
            choice.is_open = True
        # Accepted or not is said at once, so this takes no time.
        self._early = await self._mailbox.take(self._keep_alive_s)
        for reply in self._early:
            if isinstance(reply, Rejected):
                self._by_name[reply.request].is_open = False
                raise bad_request(reply.sentence)

    async def pieces(self) -> AsyncIterator[list[Piece]]:
        """Pieces as they come, until every choice is finished or the client is gone.

        Raises:
            ApiError: the pipeline ended or met a fault.
        """
        replies = self._early
        while True:
            found = [piece for reply in replies if (piece := self._piece(reply)) is not None]
            if found:
                yield found
            if self.is_abandoned or all(choice.finish_reason for choice in self.choices):
                return
            replies = await self._mailbox.take(self._keep_alive_s)
            if not replies and not self.is_abandoned:
                yield []

    def _piece(self, reply: ClientReply) -> Piece | None:
        if isinstance(reply, Generated):
            return self._generated(self._by_name[reply.request], reply)
        if isinstance(reply, Finished):
            return self._finished(self._by_name[reply.request], reply)
        if isinstance(reply, Rejected):
            raise bad_request(reply.sentence)
        return None  # Accepted, or a Status: somebody is missing and the request waits

    def _generated(self, choice: Choice, reply: Generated) -> Piece | None:
        if choice.finish_reason is not None:
            return None  # said before the cancellation was heard
        if reply.tokens:
            choice.num_tokens += len(reply.tokens)
            now_s = time.monotonic()
            if choice.last_token_s:
                self._metrics.saw_token(now_s - choice.last_token_s)
            else:
                self._metrics.saw_first_token(now_s - self._started_s)
            choice.last_token_s = now_s
        text = choice.stops.push(reply.text)
        if choice.stops.is_stopped:
            self._close(choice, "stop")
            self._cancel(choice)
        if text or reply.logprobs or choice.finish_reason:
            return Piece(choice, text, reply.tokens, reply.logprobs, choice.finish_reason)
        return None

    def _finished(self, choice: Choice, reply: Finished) -> Piece | None:
        choice.is_open = False
        if choice.finish_reason is not None:
            return None
        if reply.reason in ("error", "cancelled"):
            self._close(choice, reply.reason)
            if reply.reason == "cancelled":
                return None
            raise ApiError(503, reply.sentence or "The pipeline met a fault.", code="engine_error")
        text = choice.stops.finish()
        self._close(choice, reply.reason)
        return Piece(choice, text, [], [], choice.finish_reason)

    def _close(self, choice: Choice, reason: str) -> None:
        choice.finish_reason = reason
        elapsed_s = time.monotonic() - self._started_s
        num_prompt = len(choice.prompt_tokens)
        self._metrics.saw_end(reason, num_prompt, choice.num_tokens, elapsed_s)

    def _cancel(self, choice: Choice) -> None:
        if choice.is_open:
            self._engine.ask(self._mailbox, Cancel(choice.name))

    def abandon(self) -> None:
        """The client is gone: stop working for it now."""
        for choice in self.choices:
            if choice.finish_reason is None:
                self._close(choice, "abort")
            self._cancel(choice)
        self._mailbox.close()

    def end(self) -> None:
        """The answer is out, or nobody wants it."""
        for choice in self.choices:
            if choice.finish_reason is None:
                self._close(choice, "abort")
            self._cancel(choice)
        if self._on_end is not None:
            self._on_end()
            self._on_end = None
