"""Names from outside are printed as they are: rich's markup and emoji codes mean nothing here."""

from __future__ import annotations

import io
import sys
from typing import TYPE_CHECKING

import msgspec
from rich.table import Table

from orchestrator.cli import plan
from orchestrator.cli.terminal import console_for
from orchestrator.fit import Question
from orchestrator.load_progress import LoadProgress
from protocol.errors import UserError
from tests.orchestrator.test_fit import ask

if TYPE_CHECKING:
    import pytest

NAME = "x/gptq[int4] [/red] :smile:"
#: Would clear the screen, colour what follows and write backwards.
STEERING = "a\x1b[2J\x1b[31mb\u202ec\rd\x9b"
SHOWN = r"a\x1b[2J\x1b[31mb\u202ec\rd\x9b"


def test_a_console_shows_text_as_it_stands() -> None:
    stream = io.StringIO()
    console = console_for(stream)
    table = Table(title=NAME)
    table.add_column(NAME)
    table.add_row(NAME)
    console.print(NAME, style="bold")
    console.print(table)
    assert stream.getvalue().count(NAME) == 4


def test_names_do_not_steer_a_terminal() -> None:
    stream = _terminal()
    console = console_for(stream)
    table = Table(box=None)
    table.add_column(STEERING)
    table.add_row(STEERING)
    console.print(STEERING)
    console.print(table)
    assert stream.getvalue().count(SHOWN) == 3
    assert str(UserError(f"{STEERING} is no model;\n\tname another, größer: 🦙")) == (
        f"{SHOWN} is no model;\n\tname another, größer: 🦙"
    )


def test_a_plan_keeps_the_brackets_of_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    fit = msgspec.structs.replace(ask(Question(device="cpu")), model=NAME)
    plan._show(fit)
    out = capsys.readouterr().out
    assert f"{NAME} (" in out
    assert "[green]" not in out
    assert "yes" in out


def test_a_plan_on_a_terminal_still_has_its_colours(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = _terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("TERM", "xterm")
    plan._show(ask(Question(device="cpu")))
    assert "\x1b[32myes" in terminal.getvalue()


def test_a_bar_of_loading_keeps_the_brackets_of_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = _terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with LoadProgress("a[/b]c[int4]") as progress:
        progress.update(1, 2, "loading")
    assert "loading a[/b]c[int4]" in terminal.getvalue()


def _terminal() -> io.StringIO:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    return Terminal()
