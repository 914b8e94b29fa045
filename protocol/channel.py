"""ZeroMQ, and nothing else of ours knows it: a ROUTER for the orchestrator, a DEALER for the rest.

The ROUTER is driven by the event loop through the socket's own descriptor (edge-triggered: it says
"state may have changed", not "readable"), so it is drained until EAGAIN after every wake-up *and*
looked at after every send, which can consume the edge. An asyncio-wrapped socket would cost about
30 us more per message.
"""

from __future__ import annotations

import contextlib
import math
import time
from typing import TYPE_CHECKING, Generic, TypeVar

import zmq

from protocol.codec import MessageDecoder, encode
from protocol.errors import OrchestratorGone, ProtocolError

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from protocol.messages import Message
    from protocol.run_dir import RunDir

T = TypeVar("T")

#: Frames above this never reach us: libzmq closes the connection of their sender. It is larger than
#: MAX_MESSAGE_BYTES so that moderately large rubbish can be counted.
_TRANSPORT_LIMIT_BYTES = 64 * 1024 * 1024
#: Messages in flight per peer before a send fails; a healthy peer never has more than a few.
_HIGH_WATER_MARK = 4096
#: Messages handled per wake-up before other tasks of the loop get their turn.
_DRAIN_LIMIT = 256


class RouterChannel(Generic[T]):
    """The orchestrator's socket: hears everybody, answers one identity at a time."""

    def __init__(
        self,
        run_dir: RunDir,
        decoder: MessageDecoder[T],
        on_message: Callable[[bytes, T], None],
    ) -> None:
        self._decoder = decoder
        self._on_message = on_message
        self.num_dropped = 0
        self.last_drop_reason = ""
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.set(zmq.LINGER, 0)
        self._socket.set(zmq.ROUTER_MANDATORY, 1)
        self._socket.set(zmq.MAXMSGSIZE, _TRANSPORT_LIMIT_BYTES)
        self._socket.set(zmq.SNDHWM, _HIGH_WATER_MARK)
        self._socket.set(zmq.RCVHWM, _HIGH_WATER_MARK)
        self._socket.bind(run_dir.control_endpoint)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_drain_scheduled = False

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Deliver messages from now on, in `loop`."""
        self._loop = loop
        loop.add_reader(self._socket.FD, self._drain)
        self._schedule_drain()

    def send(self, identity: bytes, message: Message) -> bool:
        """Send to one peer; False when it is gone or does not read."""
        try:
            self._socket.send_multipart((identity, encode(message)), zmq.NOBLOCK, copy=True)
        except zmq.ZMQError:
            return False
        finally:
            self._schedule_drain()
        return True

    def count_drop(self, reason: str) -> None:
        """A message was understood but not allowed; the pipeline goes on."""
        self.num_dropped += 1
        self.last_drop_reason = reason

    def _schedule_drain(self) -> None:
        if self._loop is None or self._is_drain_scheduled or self._socket.closed:
            return
        if int(self._socket.EVENTS) & zmq.POLLIN:
            self._is_drain_scheduled = True
            self._loop.call_soon(self._drain)

    def _drain(self) -> None:
        self._is_drain_scheduled = False
        for _ in range(_DRAIN_LIMIT):
            if self._socket.closed:
                return
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.ZMQError:  # nothing left (EAGAIN), or closing
                return
            if len(frames) != 2:
                self.count_drop(f"{len(frames) - 1} frames where one was expected")
                continue
            try:
                message = self._decoder.decode(frames[1])
            except ProtocolError as error:
                self.count_drop(str(error))
                continue
            self._on_message(frames[0], message)
        self._schedule_drain()

    def close(self) -> None:
        if self._loop is not None:
            with contextlib.suppress(zmq.ZMQError, ValueError):
                self._loop.remove_reader(self._socket.FD)
        self._socket.close(0)
        self._context.term()


class DealerChannel(Generic[T]):
    """A worker's or client's socket: blocking, with a descriptor that ends the wait."""

    def __init__(self, run_dir: RunDir, decoder: MessageDecoder[T], lifeline_fd: int) -> None:
        self._decoder = decoder
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.set(zmq.LINGER, 200)  # last words get out, a dead orchestrator holds nobody up
        self._socket.set(zmq.IMMEDIATE, 1)
        self._socket.set(zmq.MAXMSGSIZE, _TRANSPORT_LIMIT_BYTES)
        self._socket.set(zmq.SNDTIMEO, 2000)
        self._socket.connect(run_dir.control_endpoint)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(lifeline_fd, zmq.POLLIN)
        self._wake_fd = -1
        self.num_dropped = 0

    def send(self, message: Message) -> None:
        """Send one message.

        Raises:
            OrchestratorGone: nobody took it within two seconds.
        """
        try:
            self._socket.send(encode(message))
        except zmq.Again:
            raise OrchestratorGone("the orchestrator does not take messages") from None

    def receive(self, timeout_s: float | None = None, wake_fd: int = -1) -> T | None:
        """The next message; None after `timeout_s`, or when there is none and `wake_fd` can be
        read. Garbage is dropped and counted.

        Raises:
            OrchestratorGone: the life line ended and nothing is left to read.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            try:
                frame = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                left_s = None if deadline is None else max(0.0, deadline - time.monotonic())
                timeout_ms = None if left_s is None else math.ceil(left_s * 1e3)
                if wake_fd != self._wake_fd:
                    self._watch(wake_fd)
                ready = dict(self._poller.poll(timeout_ms))
                if self._socket in ready:
                    continue
                if ready.pop(wake_fd, None) and not ready:
                    return None
                if ready:
                    raise OrchestratorGone("the orchestrator closed the life line") from None
                return None
            try:
                return self._decoder.decode(frame)
            except ProtocolError:
                self.num_dropped += 1

    def _watch(self, wake_fd: int) -> None:
        """Poll `wake_fd` as well from now on, in place of the one before."""
        if self._wake_fd >= 0:
            self._poller.unregister(self._wake_fd)
        if wake_fd >= 0:
            self._poller.register(wake_fd, zmq.POLLIN)
        self._wake_fd = wake_fd

    def close(self) -> None:
        self._socket.close()
        self._context.term()
