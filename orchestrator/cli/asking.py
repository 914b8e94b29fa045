"""Asking a server over HTTP, with the standard library alone: for `headrace chat` and `top`."""

from __future__ import annotations

import json
import urllib.error
import urllib.parse
import urllib.request
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from protocol.errors import UserError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Mapping

DEFAULT_URL = "http://127.0.0.1:8000"
_CONNECT_S = 10.0
#: Longest silence inside an answer; a server sends comments more often.
_SILENCE_S = 300.0
_DATA = b"data: "


def add_server(parser: argparse.ArgumentParser) -> None:
    """--url and --api-key."""
    parser.add_argument(
        "--url", metavar="URL", help=f"where the server is (HEADRACE_URL; default: {DEFAULT_URL})"
    )
    parser.add_argument("--api-key", metavar="KEY", help="the server's key (HEADRACE_API_KEY)")


class ServerAddress:
    """One server, from flags and the environment."""

    def __init__(self, options: argparse.Namespace, environ: Mapping[str, str]) -> None:
        url = options.url or environ.get("HEADRACE_URL") or DEFAULT_URL
        parts = urllib.parse.urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UserError(f"{url!r} is no address of a server; say --url {DEFAULT_URL}.")
        self.url = parts.geturl().rstrip("/").removesuffix("/v1")
        self._key = options.api_key or environ.get("HEADRACE_API_KEY") or ""

    def get(self, path: str) -> Any:
        """The JSON at a path. Raises UserError."""
        with self._open(path, None, _CONNECT_S) as answer:
            return json.load(answer)

    def stream(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Chunks of a streamed answer. Raises UserError, also for an error inside the stream."""
        with self._open(path, {**body, "stream": True}, _SILENCE_S) as answer:
            for line in answer:
                if not line.startswith(_DATA) or line.strip() == b"data: [DONE]":
                    continue
                chunk = json.loads(line.removeprefix(_DATA))
                if "error" in chunk:
                    raise UserError(str(chunk["error"]["message"]))
                yield chunk

    def _open(self, path: str, body: dict[str, Any] | None, timeout_s: float) -> Any:
        headers = {"content-type": "application/json"}
        if self._key:
            headers["authorization"] = f"Bearer {self._key}"
        content = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, content, headers)
        # No proxy: the server is a person's own, and a proxy would see the key.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            return opener.open(request, timeout=timeout_s)
        except urllib.error.HTTPError as error:
            with error:
                if error.code == HTTPStatus.UNAUTHORIZED:
                    raise UserError(
                        f"The server at {self.url} asks for its API key and "
                        f"{'was given a wrong one' if self._key else 'was given none'}; say "
                        "HEADRACE_API_KEY=KEY or --api-key KEY."
                    ) from None
                raise UserError(_sentence_of(error.read()) or f"{self.url}: {error}") from None
        except (urllib.error.URLError, OSError) as error:
            reason = getattr(error, "reason", error)
            raise UserError(
                f"No server answers at {self.url} ({reason}); start `headrace serve MODEL`, or "
                "name its --url."
            ) from None


def _sentence_of(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return ""
