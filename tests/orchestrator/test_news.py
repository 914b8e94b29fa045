"""Moves of the rates: a line in ten seconds, and a word on those left out."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from orchestrator.news import EVERY_S, News

if TYPE_CHECKING:
    import pytest


def test_one_line_in_a_while_says_how_many_there_were(caplog: pytest.LogCaptureFixture) -> None:
    clock = [100.0]
    news = News(lambda: clock[0])
    with caplog.at_level(logging.INFO, logger="headrace"):
        news.tell("first")
        for _ in range(5):
            clock[0] += EVERY_S / 10
            news.tell("soon after")
        assert caplog.messages == ["first"]
        clock[0] = 100.0 + EVERY_S
        news.tell("later")
        assert caplog.messages == ["first", "later (5 like it before)"]
        clock[0] += EVERY_S
        news.tell("much later")
    assert caplog.messages[2:] == ["much later"]


def test_all_are_there_for_who_asks_for_them(caplog: pytest.LogCaptureFixture) -> None:
    news = News(lambda: 1.0)
    with caplog.at_level(logging.DEBUG, logger="headrace"):
        for what in ("one", "two", "three"):
            news.tell(what)
    assert caplog.messages == ["one", "two", "three"]
