"""How many slots a person asked for."""

from __future__ import annotations

import pytest

from orchestrator.settings import count_slots
from protocol.errors import UserError


@pytest.mark.parametrize(
    ("text", "slots"),
    [
        ("1", 1),
        ("192", 192),
        ("25%", 48),
        ("12.5%", 24),
        ("100%", 192),
        ("0.1%", 1),
        (".5%", 1),
        (" 7 ", 7),
    ],
)
def test_counts(text: str, slots: int) -> None:
    assert count_slots(text, 192) == slots


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("0", "no expert slot"),
        ("0%", "no expert slot"),
        ("-1", "not a number"),
        ("-5%", "not a number"),
        ("193", "more than the 192 experts"),
        ("101%", "more than all experts"),
        ("a few", "not a number"),
        ("", "not a number"),
        ("2.5", "not a number"),
        ("nan%", "not a number"),
        ("1e3", "not a number"),
        ("٣", "not a number"),
    ],
)
def test_refuses_with_a_sentence(text: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        count_slots(text, 192)
