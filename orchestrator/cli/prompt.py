"""The prompt: an argument, a file, or what comes in through a pipe."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from protocol.errors import UserError

if TYPE_CHECKING:
    import argparse
    from typing import BinaryIO

#: More than any message holds; who pipes in an endless stream is told, not waited for.
_MAX_PROMPT_BYTES = 4 * 1024 * 1024
_STDIN = Path("-")


def add_prompt_flags(group: argparse._ArgumentGroup, *, is_required: bool) -> None:
    """--prompt and --prompt-file; one of them where that is required."""
    either = group.add_mutually_exclusive_group(required=is_required)
    either.add_argument("--prompt", metavar="TEXT", help="the text to continue")
    either.add_argument(
        "--prompt-file",
        type=Path,
        metavar="FILE",
        help="read that text from a file, or with - from stdin; one line break at its end is left "
        "out",
    )


def prompt_of(options: argparse.Namespace) -> str:
    """What both flags say. Raises UserError: it cannot be read, or is no text."""
    if options.prompt_file is None:
        return _checked(options.prompt)
    content = _read(options.prompt_file)
    if len(content) > _MAX_PROMPT_BYTES:
        raise UserError(
            f"{_name(options.prompt_file)} holds more than {_MAX_PROMPT_BYTES // 2**20} MiB, "
            "which is no prompt; name another --prompt-file."
        )
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise UserError(
            f"{_name(options.prompt_file)} is not UTF-8 (byte {error.start}); convert it first."
        ) from None
    return text.removesuffix("\n").removesuffix("\r")


def _read(path: Path) -> bytes:
    try:
        if path == _STDIN:
            return _read_from(sys.stdin.buffer)
        with path.open("rb") as file:
            return _read_from(file)
    except OSError as error:
        raise UserError(
            f"{_name(path)} cannot be read: {error.strerror or error}; check --prompt-file."
        ) from None


def _read_from(file: BinaryIO) -> bytes:
    return file.read(_MAX_PROMPT_BYTES + 1)


def _name(path: Path) -> str:
    return "stdin" if path == _STDIN else str(path)


def _checked(prompt: str) -> str:
    """What is no text cannot be a prompt: arguments arrive as bytes, of whatever kind."""
    try:
        prompt.encode()
    except UnicodeEncodeError:
        raise UserError(
            "The prompt is not valid UTF-8; check the encoding of the terminal or script that "
            "gives it."
        ) from None
    return prompt
