"""How an answer leaves: whole, or as a stream of events; and what happens when its reader goes.

Both ways a task waits for the client's end beside the one that writes, so a request whose client
has gone is taken back at once, not with the next write.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
from starlette.responses import Response

from orchestrator.http.errors import ApiError, json_response

if TYPE_CHECKING:
    from collections.abc import Iterable

    from starlette.types import Receive, Scope, Send

    from orchestrator.http.generation import Generation, Piece

DONE = b"data: [DONE]\n\n"
#: A comment of the event stream: readers drop it, and nobody takes the silence for an end.
KEEP_ALIVE = b": still working\n\n"
#: Nobody hears it; it is for the log.
CLIENT_GONE = 499
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
_encoder = msgspec.json.Encoder()


class Answer(Protocol):
    """One endpoint's own shape of an answer."""

    def begin(self) -> Iterable[dict[str, Any]]:
        """First chunks of a stream."""

    def chunks(self, piece: Piece) -> Iterable[dict[str, Any]]:
        """Chunks of a stream for one more piece."""

    def end(self) -> Iterable[dict[str, Any]]:
        """Last chunks of a stream: the usage, if it was asked for."""

    def take(self, piece: Piece) -> None:
        """One more piece of an answer that is sent whole."""

    def whole(self) -> dict[str, Any]:
        """The answer that is sent whole."""


async def _watch(receive: Receive, generation: Generation) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    generation.abandon()


@contextlib.asynccontextmanager
async def _watched(receive: Receive, generation: Generation):  # type: ignore[no-untyped-def]
    """Around the making of an answer: it ends with its client, and ends in order in any case."""
    watcher = asyncio.create_task(_watch(receive, generation))
    try:
        yield
    finally:
        watcher.cancel()
        generation.end()
        with contextlib.suppress(asyncio.CancelledError):
            await watcher


async def whole_answer(receive: Receive, generation: Generation, answer: Answer) -> Response:
    """Wait for all pieces, answer once.

    Raises:
        ApiError: the pipeline ended meanwhile.
    """
    async with _watched(receive, generation):
        async for pieces in generation.pieces():
            for piece in pieces:
                answer.take(piece)
        if generation.is_abandoned:
            return Response(status_code=CLIENT_GONE)
        return json_response(answer.whole())


class EventStream(Response):
    """Server-sent events, one per chunk, then `[DONE]`."""

    def __init__(self, generation: Generation, answer: Answer) -> None:
        super().__init__()
        self._generation = generation
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        generation, answer = self._generation, self._answer
        async with _watched(receive, generation):
            await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
            await _send(send, _events(answer.begin()))
            try:
                async for pieces in generation.pieces():
                    chunks = [chunk for piece in pieces for chunk in answer.chunks(piece)]
                    if chunks:
                        await _send(send, _events(chunks))
                    elif not pieces:
                        await _send(send, KEEP_ALIVE)
                last = _events(answer.end())
            except ApiError as error:
                last = _events([error.body()])
            if not generation.is_abandoned:
                await _send(send, last + DONE)
            await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _send(send: Send, body: bytes) -> None:
    if body:
        await send({"type": "http.response.body", "body": body, "more_body": True})


def _events(chunks: Iterable[dict[str, Any]]) -> bytes:
    return b"".join(b"data: " + _encoder.encode(chunk) + b"\n\n" for chunk in chunks)
