"""Everyone who asks for tokens: over the socket, or inside this process as the HTTP server does.

A client beyond the socket is its ZeroMQ identity, one in here is an object that hears. Both have
their requests in the same book and hear the same messages in the same order, so there is one path
for tokens and one place that knows whose they are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from orchestrator.core.events import PromptRead, TokenOut
from orchestrator.grammars import Grammars
from protocol.messages import Generate, Rejected

if TYPE_CHECKING:
    from collections.abc import Callable

    from orchestrator.core.events import RequestDone, Submit
    from orchestrator.grammars import Matcher
    from orchestrator.requests import RequestBook
    from orchestrator.stage_times import StageTimes
    from protocol.messages import ClientReply, Message, RequestId, Status


class LocalClient(Protocol):
    """A client in this process. `hear` must not raise, and must not ask the engine for anything:
    it is called in the middle of a step."""

    def hear(self, reply: ClientReply) -> None: ...


Client = bytes | LocalClient


class Clients:
    """Whose requests are open. `send(identity, message)` says whether the message left."""

    def __init__(
        self, send: Callable[[bytes, Message], bool], num_restarts: Callable[[], int]
    ) -> None:
        self._send = send
        self._num_restarts = num_restarts
        self._book: RequestBook | None = None
        self.grammars = Grammars()

    def open(self, book: RequestBook) -> None:
        """The model is loaded: requests are welcome."""
        self._book = book

    def send(self, client: Client, reply: ClientReply) -> bool:
        """False when the client is gone."""
        if isinstance(client, bytes):
            return self._send(client, reply)
        client.hear(reply)
        return True

    def accept(
        self, client: Client, generate: Generate, matcher: Matcher | None = None
    ) -> Submit | None:
        """Check a request and tell its client; what the core is to be told if it is accepted."""
        if self._book is None:
            sentence = "The model is still loading; try again."
            self.send(client, Rejected(generate.request, sentence))
            return None
        answer = self._book.accept(client, generate, self._num_restarts())
        if isinstance(answer, Rejected):
            self.send(client, answer)
            return None
        reply, submit = answer
        if matcher is not None:
            self.grammars.attach(submit.request, matcher)
        self.send(client, reply)
        return submit

    def find(self, client: Client, name: RequestId) -> RequestId | None:
        """The core's id of a client's request."""
        return None if self._book is None else self._book.find(client, name)

    def token(self, out: TokenOut | PromptRead) -> bool:
        """Pass a token on, or the sign of life that a long prompt gives; False when nobody is
        there to take it. A client in here says itself that it has gone."""
        if self._book is None:
            return True
        answer = self._book.token(out) if isinstance(out, TokenOut) else self._book.no_token(out)
        if answer is None or (isinstance(out, PromptRead) and not isinstance(answer[0], bytes)):
            return True
        return self.send(*answer)

    def done(self, done: RequestDone, times: StageTimes) -> None:
        """Pass the end of a request on."""
        self.grammars.detach(done.request)
        if self._book is not None:
            for answer in self._book.done(done, times, self._num_restarts(), done.sentence):
                self.send(*answer)

    def tell(self, status: Status) -> None:
        """Tell everyone who waits for tokens."""
        if self._book is not None:
            for client in self._book.clients():
                self.send(client, status)

    def abandon(self, sentence: str) -> None:
        """The pipeline ends: last messages of all requests that are open."""
        if self._book is not None:
            for answer in self._book.abandon(sentence, self._num_restarts()):
                self.send(*answer)
