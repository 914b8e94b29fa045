"""MessagePack in and out, typed and bounded: what does not fit the types is a `ProtocolError`."""

from __future__ import annotations

from typing import Generic, TypeVar

import msgspec

from protocol.errors import ProtocolError
from protocol.messages import (
    MAX_MESSAGE_BYTES,
    ClientReply,
    ClientRequest,
    Message,
    WorkerCommand,
    WorkerEvent,
)

T = TypeVar("T")
_encoder = msgspec.msgpack.Encoder()


def encode(message: Message) -> bytes:
    """One message as one MessagePack map."""
    return _encoder.encode(message)


class MessageDecoder(Generic[T]):
    """Decodes one direction's union of messages; built once, since building costs milliseconds."""

    def __init__(self, union: object, direction: str) -> None:
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(union)
        self._direction = direction

    def decode(self, frame: bytes) -> T:
        """The message in `frame`.

        Raises:
            ProtocolError: too large, not MessagePack, unknown type, or a field of the wrong type.
        """
        if len(frame) > MAX_MESSAGE_BYTES:
            raise ProtocolError(
                f"{self._direction} frame of {len(frame)} bytes is over {MAX_MESSAGE_BYTES}"
            )
        try:
            return self._decoder.decode(frame)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ProtocolError(
                f"{self._direction} frame is not a valid message: {error}"
            ) from None


def to_orchestrator() -> MessageDecoder[WorkerEvent | ClientRequest]:
    """Decoder of everything that the orchestrator hears."""
    return MessageDecoder(WorkerEvent | ClientRequest, "incoming")


def to_worker() -> MessageDecoder[WorkerCommand]:
    """Decoder of everything that a worker hears."""
    return MessageDecoder(WorkerCommand, "command")


def to_client() -> MessageDecoder[ClientReply]:
    """Decoder of everything that a client hears."""
    return MessageDecoder(ClientReply, "reply")
