"""Every message there and back, and frames that are none."""

from __future__ import annotations

import contextlib
import types
import typing
from typing import Any, get_args

import msgpack
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.codec import MessageDecoder, encode, to_client, to_orchestrator, to_worker
from protocol.errors import ProtocolError
from protocol.messages import (
    MAX_MESSAGE_BYTES,
    ClientReply,
    ClientRequest,
    Copy,
    CopyId,
    Epoch,
    Execute,
    ExpertId,
    Failed,
    LayerId,
    Message,
    Shutdown,
    SlotId,
    StepId,
    WorkerCommand,
    WorkerEvent,
)

DIRECTIONS: list[tuple[MessageDecoder[Any], tuple[type[Message], ...]]] = [
    (to_orchestrator(), (*get_args(WorkerEvent), *get_args(ClientRequest))),
    (to_worker(), get_args(WorkerCommand)),
    (to_client(), get_args(ClientReply)),
]
CASES = [(decoder, kind) for decoder, kinds in DIRECTIONS for kind in kinds]

INT64 = st.integers(-(2**63), 2**64 - 1)


def values_of(annotation: Any) -> st.SearchStrategy[Any]:
    """Anything that a field of that type may hold."""
    origin, arguments = typing.get_origin(annotation), get_args(annotation)
    if hasattr(annotation, "__supertype__"):  # a NewType
        return values_of(annotation.__supertype__)
    if origin is typing.Literal:
        return st.sampled_from(arguments)
    if origin is types.UnionType or origin is typing.Union:
        return st.one_of(*(values_of(argument) for argument in arguments))
    if origin is list:
        return st.lists(values_of(arguments[0]), max_size=3)
    if origin is dict:
        return st.dictionaries(values_of(arguments[0]), values_of(arguments[1]), max_size=2)
    if isinstance(annotation, type) and issubclass(annotation, msgspec.Struct):
        return structs_of(annotation)
    return {
        int: INT64,
        float: st.floats(allow_nan=False),
        str: st.text(max_size=8),
        bytes: st.binary(max_size=8),
        bool: st.booleans(),
        type(None): st.none(),
    }[annotation]


def structs_of(kind: type[msgspec.Struct]) -> st.SearchStrategy[msgspec.Struct]:
    hints = typing.get_type_hints(kind)
    fields = {name: values_of(hints[name]) for name in kind.__struct_fields__}
    return st.builds(kind, **fields)


@pytest.mark.parametrize(("decoder", "kind"), CASES, ids=[kind.__name__ for _, kind in CASES])
@settings(deadline=None, max_examples=20)
@given(data=st.data())
def test_every_message_comes_back_as_it_was(
    decoder: MessageDecoder[Any], kind: type[Message], data: st.DataObject
) -> None:
    message = data.draw(structs_of(kind))
    frame = encode(typing.cast("Message", message))
    assert decoder.decode(frame) == message
    as_map = msgpack.unpackb(frame, strict_map_key=False)  # what an outsider sees
    assert as_map["type"] == kind.__name__
    assert set(as_map) <= {"type", *kind.__struct_fields__}


EXECUTE = {"type": "Execute", "epoch": 1, "step": 2, "layer": 3, "experts": [4]}


@pytest.mark.parametrize(
    "content",
    [
        {key: value for key, value in EXECUTE.items() if key != "layer"},
        {key: value for key, value in EXECUTE.items() if key != "type"},
        {**EXECUTE, "type": "Exec"},
        {**EXECUTE, "type": "Executed"},  # of the other direction
        {**EXECUTE, "type": 5},
        {**EXECUTE, "step": "2"},
        {**EXECUTE, "step": 2.5},
        {**EXECUTE, "step": True},
        {**EXECUTE, "experts": 4},
        {**EXECUTE, "experts": [None]},
        {**EXECUTE, "type": "Shutdown", "reason": b"\xff"},
        ["Execute", 1, 2, 3, [4]],
        "Execute",
        None,
    ],
)
def test_what_does_not_fit_the_types_is_a_protocol_error(content: Any) -> None:
    with pytest.raises(ProtocolError, match="command frame is not a valid message"):
        to_worker().decode(msgpack.packb(content))


def test_unknown_fields_are_ignored_and_order_is_free() -> None:
    reordered = {"experts": [4], "new": {"deep": [1]}, "layer": 3, "step": 2, "epoch": 1}
    frame = msgpack.packb({**reordered, "type": "Execute"})
    expected = Execute(Epoch(1), StepId(2), LayerId(3), [ExpertId(4)])
    assert to_worker().decode(frame) == expected


@settings(deadline=None, max_examples=200)
@given(st.binary(max_size=200))
def test_random_bytes_are_a_message_or_a_protocol_error(frame: bytes) -> None:
    for decoder, _ in DIRECTIONS:
        with contextlib.suppress(ProtocolError):
            assert isinstance(decoder.decode(frame), Message)


@settings(deadline=None, max_examples=100)
@given(st.data())
def test_damaged_messages_are_a_message_or_a_protocol_error(data: st.DataObject) -> None:
    frame = bytearray(encode(Copy(Epoch(1), CopyId(2**40), LayerId(3), ExpertId(200), SlotId(5))))
    for _ in range(data.draw(st.integers(1, 3))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(ProtocolError):
        assert isinstance(to_worker().decode(bytes(frame)), Message)


def test_every_truncation_is_a_protocol_error() -> None:
    frame = encode(Execute(Epoch(1), StepId(2), LayerId(3), [ExpertId(4), ExpertId(300)]))
    for length in range(len(frame)):
        with pytest.raises(ProtocolError):
            to_worker().decode(frame[:length])


def test_deep_nesting_is_a_protocol_error() -> None:
    with pytest.raises(ProtocolError):
        to_worker().decode(b"\x91" * 200_000 + b"\x90")
    deep = b"\x82\xa4type\xa7Execute\xa3new" + b"\x91" * 200_000 + b"\x90"
    with pytest.raises(ProtocolError):
        to_worker().decode(deep)


def test_the_size_limit_is_exact() -> None:
    decoder = to_orchestrator()
    overhead = len(encode(Failed(Epoch(1), "x" * 100_000))) - 100_000
    fits = encode(Failed(Epoch(1), "x" * (MAX_MESSAGE_BYTES - overhead)))
    assert len(fits) == MAX_MESSAGE_BYTES
    assert isinstance(decoder.decode(fits), Failed)
    with pytest.raises(ProtocolError, match=f"is over {MAX_MESSAGE_BYTES}"):
        decoder.decode(encode(Failed(Epoch(1), "x" * (MAX_MESSAGE_BYTES - overhead + 1))))


def test_messages_cannot_be_changed() -> None:
    message = Shutdown(Epoch(1), "why")
    with pytest.raises(AttributeError):
        message.reason = "no"  # type: ignore[misc]
