"""Around every request: its id, its line in the log, the key, and how large it may be.

Plain ASGI, in front of the framework: what is refused here costs no parsing.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import re
import time
import uuid
from typing import TYPE_CHECKING

from starlette.exceptions import HTTPException

from orchestrator.http.errors import ApiError

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from orchestrator.http.generation import Generation
    from orchestrator.http.metrics import ServerMetrics
    from orchestrator.http.settings import ServerSettings

log = logging.getLogger("headrace.http")

#: What anybody may see: whether we are well, and a page without a figure in it.
OPEN_PATHS = frozenset({"/", "/health", "/ready", "/version"})
#: Asked every few seconds by whoever watches; that we are well, or not yet, is no news there.
_WATCHED_PATHS = frozenset({"/health", "/ready", "/metrics", "/v1/stats"})
_NO_NEWS = frozenset({200, 503})
ADMIN_PREFIX = "/admin/"
#: Of a refused body so much is read, for so long.
_DRAIN_BYTES, _DRAIN_S = 256 << 20, 5.0
_SANE_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


class RequestNote:
    """What the log line of a request is made of."""

    __slots__ = ("generation", "request_id", "started_s", "status")

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.started_s = time.monotonic()
        self.status = 0
        #: Set by who makes one.
        self.generation: Generation | None = None


class Guard:
    """ASGI middleware."""

    def __init__(self, app: ASGIApp, settings: ServerSettings, metrics: ServerMetrics) -> None:
        self._app = app
        self._settings = settings
        self._metrics = metrics
        self._key = settings.api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        note = RequestNote(_request_id(headers.get(b"x-request-id", b"")))
        scope["headrace.note"] = note

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                note.status = message["status"]
                message["headers"] = [
                    *message["headers"],
                    (b"x-request-id", note.request_id.encode()),
                ]
            await send(message)

        try:
            self._check(scope["path"], headers)
            await self._app(scope, self._bounded(receive), send_with_id)
        except ApiError as error:
            await _refuse(error, scope, receive, send_with_id)
        finally:
            self._write(scope, note)

    def _check(self, path: str, headers: dict[bytes, bytes]) -> None:
        """Raises ApiError: 401, 403 or 413."""
        if path.startswith(ADMIN_PREFIX) and not self._key:
            raise ApiError(
                403, "Admin endpoints need a server that was started with --api-key.", code="no_key"
            )
        if self._key and path not in OPEN_PATHS and not self._has_key(headers):
            raise ApiError(
                401,
                "The API key is missing or wrong; send it as `Authorization: Bearer KEY`.",
                code="invalid_api_key",
            )
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > self._settings.max_body_bytes:
            raise self._too_large()

    def _has_key(self, headers: dict[bytes, bytes]) -> bool:
        kind, _, given = headers.get(b"authorization", b"").partition(b" ")
        # Compared in a time that does not tell how much of it is right.
        return hmac.compare_digest(given.strip(), self._key) and kind.lower() == b"bearer"

    def _too_large(self) -> ApiError:
        return ApiError(
            413,
            f"The body is larger than {self._settings.max_body_bytes} bytes; send less, or start "
            "the server with a larger --max-body-mb.",
            code="body_too_large",
        )

    def _bounded(self, receive: Receive) -> Receive:
        """A body without a stated length is counted as it comes."""
        left = self._settings.max_body_bytes

        async def receive_bounded() -> Message:
            nonlocal left
            message = await receive()
            if message["type"] == "http.request":
                left -= len(message.get("body", b""))
                if left < 0:
                    error = self._too_large()
                    # The one kind of exception that the framework passes on while it reads a body.
                    raise HTTPException(error.status, error.message)
            return message

        return receive_bounded

    def _write(self, scope: Scope, note: RequestNote) -> None:
        path = scope["route"].path if "route" in scope else "(none)"
        self._metrics.saw_answer(path, note.status)
        is_watched = scope["path"] in _WATCHED_PATHS and note.status in _NO_NEWS
        level = logging.DEBUG if is_watched else logging.INFO
        if not log.isEnabledFor(level):
            return
        elapsed_ms = (time.monotonic() - note.started_s) * 1e3
        facts = {
            "request_id": note.request_id,
            "method": scope["method"],
            "path": scope["path"],
            "status": note.status,
            "elapsed_ms": round(elapsed_ms, 1),
        }
        if note.generation is not None:
            choices = note.generation.choices
            facts["prompt_tokens"] = len(choices[0].prompt_tokens)
            facts["generated_tokens"] = note.generation.num_generated
            facts["finish_reason"] = choices[0].finish_reason
        log.log(
            level,
            "%s %s %d in %.0f ms%s [%s]",
            scope["method"],
            _printable(scope["path"]),
            note.status,
            elapsed_ms,
            f", {facts['generated_tokens']} tokens ({facts['finish_reason']})"
            if note.generation is not None
            else "",
            note.request_id,
            extra={"facts": facts},
        )


async def _refuse(error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer at once, and end the answer when the body has come or for some time did not: closing a
    connection with bytes unread resets it, and the client would never see the answer."""

    async def send_all_but_the_end(message: Message) -> None:
        if message["type"] == "http.response.body":
            message = {**message, "more_body": True}
        await send(message)

    await error.response()(scope, receive, send_all_but_the_end)
    is_body_held_back = any(name == b"expect" for name, _ in scope["headers"])
    if not is_body_held_back:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_DRAIN_S):
                await _drain(receive)
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _drain(receive: Receive) -> None:
    num_bytes = 0
    while num_bytes < _DRAIN_BYTES:
        message = await receive()
        if message["type"] != "http.request" or not message.get("more_body", False):
            return
        num_bytes += len(message.get("body", b""))


def _printable(path: str) -> str:
    """A path in one log line, whatever bytes somebody sent."""
    return path.encode("unicode_escape").decode()[:200]


def _request_id(given: bytes) -> str:
    """The client's own id if it is a sane one, else a new one."""
    text = given.decode("latin-1")
    return text if _SANE_ID.fullmatch(text) else f"req-{uuid.uuid4().hex}"
