"""`headrace chat` and `top` against a server that answers what a test says."""

from __future__ import annotations

import io
import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

import pytest

from orchestrator.cli.main import main

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def server(status: int, message: str, asked: list[dict[str, Any]]) -> Iterator[str]:
    """The address of a server that refuses everything; `asked` gets the bodies."""

    class Refuse(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(200, {"data": [{"id": "made-up"}]})

        def do_POST(self) -> None:
            asked.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            self._answer(status, {"error": {"message": message}})

        def _answer(self, code: int, body: dict[str, Any]) -> None:
            content = json.dumps(body).encode()
            self.send_response(code)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Refuse) as listening:
        thread = threading.Thread(target=listening.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.server_port}"
        finally:
            listening.shutdown()
            thread.join()


@pytest.mark.parametrize(("more", "says"), [([], "given none"), (["--api-key", "x"], "wrong one")])
def test_a_refused_key_is_told_in_words_of_the_command_line(
    more: list[str],
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("HEADRACE_API_KEY", raising=False)
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello"))
    with server(401, "send `Authorization`", []) as url:
        assert main(["chat", "--url", url, *more]) == 2
    err = capsys.readouterr().err
    assert says in err
    assert "--api-key" in err
    assert "Authorization" not in err


def test_empty_input_asks_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("\n"))
    asked: list[dict[str, Any]] = []
    with server(500, "", asked) as url:
        assert main(["chat", "--url", url]) == 2
    assert asked == []
    assert "input is empty" in capsys.readouterr().err


def say_in_a_chat(lines: list[str], monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """What each request of a chat said, on a terminal on which a person types these lines."""
    typed = iter(lines)

    def say(_: str) -> str:
        for line in typed:
            return line
        raise EOFError

    monkeypatch.setattr("builtins.input", say)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    asked: list[dict[str, Any]] = []
    with server(400, "The context is full.", asked) as url:
        assert main(["chat", "--url", url]) == 0
    return [[said["content"] for said in body["messages"]] for body in asked]


def test_a_refusal_does_not_end_a_chat(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert say_in_a_chat(["one", "two"], monkeypatch) == [["one"], ["two"]]
    assert capsys.readouterr().err.count("The context is full.") == 2


def test_the_commands_of_a_chat_are_listed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert say_in_a_chat(["/help "], monkeypatch) == []
    err = capsys.readouterr().err
    for command in ("/help", "/new", "/quit"):
        assert f"\n{command} " in err
    assert "two slashes is said as it is" in err


def test_an_unknown_command_is_not_said_to_the_model(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = ["/nwe", "/new of " + "x" * 99, "/", " /etc is what?", "// a comment", "/quit", "late"]
    assert say_in_a_chat(lines, monkeypatch) == [["/etc is what?"], ["// a comment"]]
    err = capsys.readouterr().err
    assert "'/nwe' is no command" in err
    assert err.count("is no command") == 3
    assert "x" * 50 not in err
