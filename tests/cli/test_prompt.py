"""A prompt comes as an argument, from a file or through a pipe."""

from __future__ import annotations

import argparse
import io
import sys
from typing import TYPE_CHECKING

import pytest

from orchestrator.cli.main import main
from orchestrator.cli.prompt import add_prompt_flags, prompt_of
from protocol.errors import UserError

if TYPE_CHECKING:
    from pathlib import Path


def ask(*words: str) -> str:
    parser = argparse.ArgumentParser()
    add_prompt_flags(parser.add_argument_group(), is_required=True)
    return prompt_of(parser.parse_args(words))


def pipe(content: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"def main():\n", "def main():"),
        (b"two\nlines\n\n", "two\nlines\n"),
        (b"of Windows\r\n", "of Windows"),
        ("größer".encode(), "größer"),
        (b"", ""),
    ],
)
def test_a_file_is_a_prompt(
    content: bytes, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "prompt.txt"
    path.write_bytes(content)
    assert ask("--prompt-file", str(path)) == text
    pipe(content, monkeypatch)
    assert ask("--prompt-file", "-") == text


def test_an_argument_is_taken_as_it_stands() -> None:
    assert ask("--prompt", "a\n") == "a\n"


@pytest.mark.parametrize(
    ("content", "says"),
    [(b"ab\xff", "is not UTF-8 (byte 2)"), (b"x" * (4 * 2**20 + 1), "holds more than 4 MiB")],
)
def test_what_is_no_prompt_is_one_sentence(
    content: bytes, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "prompt.txt"
    path.write_bytes(content)
    with pytest.raises(UserError) as told:
        ask("--prompt-file", str(path))
    assert f"{path} {says}" in str(told.value)
    pipe(content, monkeypatch)
    with pytest.raises(UserError) as told:
        ask("--prompt-file", "-")
    assert f"stdin {says}" in str(told.value)


def test_a_file_that_cannot_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--prompt-file", str(tmp_path / "none.txt")]) == 2
    said = capsys.readouterr().err
    assert "none.txt cannot be read: No such file or directory" in said
    assert main(["generate", "--prompt-file", str(tmp_path)]) == 2
    assert "Is a directory" in capsys.readouterr().err


def test_one_prompt_is_enough(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["generate", "--prompt", "a", "--prompt-file", "b"])
    assert "not allowed with" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main(["generate"])
    assert "--prompt --prompt-file is required" in capsys.readouterr().err
