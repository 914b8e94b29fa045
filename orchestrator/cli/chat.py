"""`headrace chat`: talk to a server in the terminal."""

from __future__ import annotations

import argparse
import os
import sys
import time
from typing import TYPE_CHECKING, Any

from orchestrator.cli.asking import ServerAddress, add_server
from protocol.errors import EXIT_OK, UserError
from protocol.worker_flags import number

if TYPE_CHECKING:
    from collections.abc import Iterable

_EPILOG = """\
example:
  headrace chat --system "Answer in one sentence."
  echo "What is a list?" | headrace chat --max-tokens 60

In a chat: /help lists the commands, /new forgets what was said, /quit (or Ctrl-D) ends. Ctrl-C
ends an answer."""

_HELP = """\
/help   this list
/new    forget what was said
/quit   end (or Ctrl-D); Ctrl-C ends an answer
Everything else is said to the model. Put a space before what begins with a slash and is no
command; what begins with two slashes is said as it is."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register `chat` with the command line."""
    parser = subparsers.add_parser(
        "chat",
        help="talk to a server in the terminal",
        description="Talk to a server in the terminal. Input that is no terminal is one message.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_server(parser)
    parser.add_argument("--system", metavar="TEXT", help="what the model is told first")
    parser.add_argument(
        "--max-tokens", type=number(int, 1, "tokens"), metavar="N", help="longest answer"
    )
    parser.add_argument(
        "--temperature",
        type=number(float, 0, "temperature"),
        metavar="X",
        help="0 is greedy (default: the checkpoint's)",
    )
    parser.add_argument("--seed", type=int, metavar="N", help="the same seed gives the same text")
    parser.set_defaults(func=run)


def run(options: argparse.Namespace) -> int:
    """Returns the exit code; raises UserError."""
    chat = Chat(ServerAddress(options, os.environ), options)
    if not sys.stdin.isatty():
        text = sys.stdin.read().strip()
        if not text:
            raise UserError('There is nothing to say: the input is empty; try echo "Hello" | ...')
        chat.answer(text)
        return EXIT_OK
    print(f"{chat.model_name()}; /new begins anew, /quit ends, /help", file=sys.stderr)
    while True:
        try:
            line = input("> ")
        except EOFError:
            print()
            return EXIT_OK
        text = line.strip()
        if line.startswith("/") and not line.startswith("//"):
            if text == "/quit":
                return EXIT_OK
            if text == "/new":
                chat.begin()
            elif text == "/help":
                print(_HELP, file=sys.stderr)
            else:
                print(
                    f"headrace: {text[:40]!r} is no command and was not said to the model; /help "
                    "lists the commands, a space before it says it",
                    file=sys.stderr,
                )
        elif text:
            try:
                chat.answer(text)
            except KeyboardInterrupt:
                print("\n(ended)", file=sys.stderr)
            except UserError as error:  # as where the context is full: /new helps, leaving does not
                print(f"headrace: {error}", file=sys.stderr)


class Chat:
    """What was said so far. An answer that was cut short is kept as far as it came."""

    def __init__(self, server: ServerAddress, options: argparse.Namespace) -> None:
        self._server = server
        self._fields = {
            name: value
            for name in ("max_tokens", "temperature", "seed")
            if (value := getattr(options, name)) is not None
        }
        self._system = options.system
        self.begin()

    def begin(self) -> None:
        self._messages: list[dict[str, Any]] = []
        if self._system:
            self._messages.append({"role": "system", "content": self._system})

    def model_name(self) -> str:
        """Raises UserError when nobody answers."""
        return str(self._server.get("/v1/models")["data"][0]["id"])

    def answer(self, text: str) -> None:
        """Say one thing, print the answer as it comes and, to a person, its speed."""
        self._messages.append({"role": "user", "content": text})
        started_s = time.monotonic()
        said: list[str] = []
        usage: dict[str, int] = {}
        chunks = self._server.stream(
            "/v1/chat/completions",
            {
                "messages": self._messages,
                "stream_options": {"include_usage": True},
                **self._fields,
            },
        )
        is_whole = False
        try:
            for piece in _pieces(chunks, usage):
                said.append(piece)
                sys.stdout.write(piece)
                sys.stdout.flush()
            is_whole = True
        finally:
            if said or is_whole:
                self._messages.append({"role": "assistant", "content": "".join(said)})
            else:  # a question that got no answer is as if it had not been asked
                self._messages.pop()
        sys.stdout.write("\n")
        if sys.stderr.isatty() and usage:
            elapsed_s = time.monotonic() - started_s
            print(
                f"({usage['completion_tokens']} tokens in {elapsed_s:.1f} s, "
                f"{usage['prompt_tokens']} before)",
                file=sys.stderr,
            )


def _pieces(chunks: Iterable[dict[str, Any]], usage: dict[str, int]) -> Iterable[str]:
    for chunk in chunks:
        usage.update(chunk.get("usage") or {})
        for choice in chunk["choices"]:
            piece = choice["delta"].get("content")
            if piece:
                yield piece
