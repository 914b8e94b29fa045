"""docs/protocol.md names every message and every field, and no message that does not exist."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import msgspec
import pytest

from protocol import messages
from protocol.messages import (
    MAX_MESSAGE_BYTES,
    PROTOCOL_VERSION,
    Arena,
    Capabilities,
    ClientReply,
    ClientRequest,
    RequestStats,
    Sampled,
    SamplingParams,
    StageStats,
    StepPart,
    TokenLogprobs,
    WorkerCommand,
    WorkerEvent,
    WorkerSetup,
    WorkerStatus,
)

TEXT = (Path(__file__).resolve().parents[2] / "docs/protocol.md").read_text()
PARTS = (
    Arena,
    Capabilities,
    RequestStats,
    Sampled,
    SamplingParams,
    StageStats,
    StepPart,
    TokenLogprobs,
    WorkerSetup,
    WorkerStatus,
)
UNIONS = (WorkerEvent, WorkerCommand, ClientRequest, ClientReply)
STRUCTS = [*(kind for union in UNIONS for kind in get_args(union)), *PARTS]


def documented(text: str) -> dict[str, set[str]]:
    """Struct name -> fields, from table rows that begin with a `Name`."""
    rows = re.findall(r"^\| `([A-Z]\w+)` \| (.*) \|$", text, re.MULTILINE)
    return {name: set(re.findall(r"`([a-z]\w*)`", fields)) for name, fields in rows}


@pytest.mark.parametrize("kind", STRUCTS, ids=lambda kind: kind.__name__)
def test_every_field_is_documented(kind: type[msgspec.Struct]) -> None:
    described = documented(TEXT)
    assert kind.__name__ in described
    missing = set(kind.__struct_fields__) - described[kind.__name__]
    assert not missing


def test_nothing_else_is_documented() -> None:
    assert set(documented(TEXT)) == {kind.__name__ for kind in STRUCTS}


def test_every_struct_of_the_module_is_looked_at() -> None:
    defined = {
        value
        for value in vars(messages).values()
        if isinstance(value, type) and issubclass(value, msgspec.Struct)
    } - {msgspec.Struct, messages.Message}
    assert defined == set(STRUCTS)


def test_numbers_are_the_codes_own() -> None:
    assert f"Version of the protocol: **{PROTOCOL_VERSION}**" in TEXT
    assert MAX_MESSAGE_BYTES == 4 * 1024 * 1024
    assert "more than 4 MiB" in TEXT


def test_the_check_can_fail() -> None:
    assert documented("| `Copy` | dma_worker: `epoch` and `slot` |\n| none | `x` |") == {
        "Copy": {"epoch", "slot"}
    }
