"""The life line: one Unix socket per worker that hands out shared memory and tells of deaths.

A worker connects to `lifeline.sock` and waits. When the model is loaded, the orchestrator sends
one `Grant` (4 bytes little-endian length, then MessagePack) with the segments' file descriptors
attached (SCM_RIGHTS, in the order of `Grant.segments`). After that neither side writes: the kernel
closes the socket when either process ends, however it ends, and the other side sees it at once.

`Grant.token` must come back in the worker's Hello; it ties the ZeroMQ peer to this socket, whose
SO_PEERCRED names the process, so a pid cannot be made up.
"""

from __future__ import annotations

import array
import os
import socket
import struct
import time
from typing import TYPE_CHECKING

import msgspec

from protocol.errors import OrchestratorGone, ProtocolError, UserError

if TYPE_CHECKING:
    from protocol.run_dir import RunDir

_MAX_GRANT_BYTES = 64 * 1024
_MAX_SEGMENTS = 16
_LENGTH = struct.Struct("<I")


class FieldLayout(msgspec.Struct, frozen=True):
    """One array inside a segment: numpy-like dtype name, shape, and where its first byte lies."""

    dtype: str
    shape: list[int]
    offset_bytes: int


class SegmentGrant(msgspec.Struct, frozen=True):
    """One shared segment. `fields` is empty where the segment has a header of its own."""

    name: str
    num_bytes: int
    fields: dict[str, FieldLayout] = {}


class Grant(msgspec.Struct, frozen=True):
    """What a worker is given: a token and the segments."""

    token: str
    segments: list[SegmentGrant]


def listen(run_dir: RunDir) -> socket.socket:
    """The orchestrator's listening socket, non-blocking, mode 0600."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    listener.bind(run_dir.lifeline_path)
    os.chmod(run_dir.lifeline_path, 0o600)
    listener.listen(16)
    listener.setblocking(False)
    return listener


def peer_pid(connection: socket.socket) -> int:
    """The process at the other end, as the kernel knows it."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", raw)[0])


def send_grant(connection: socket.socket, grant: Grant, fds: list[int]) -> None:
    """Send `grant` and its descriptors in one message.

    Raises:
        OSError: the worker is gone or does not read.
    """
    payload = msgspec.msgpack.encode(grant)
    frame = _LENGTH.pack(len(payload)) + payload
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
    if connection.sendmsg([frame], ancillary) != len(frame):
        raise OSError("the worker does not read its life line")


class Lifeline:
    """The worker's end. `segments` maps a name to (descriptor, grant)."""

    def __init__(self, connection: socket.socket, grant: Grant, fds: list[int]) -> None:
        self._connection = connection
        self.token = grant.token
        self.segments: dict[str, tuple[int, SegmentGrant]] = {
            segment.name: (fd, segment) for segment, fd in zip(grant.segments, fds, strict=True)
        }

    @classmethod
    def connect(cls, run_dir: RunDir, wait_s: float) -> Lifeline:
        """Join the pipeline behind `run_dir`.

        Waits up to `wait_s` for an orchestrator to listen, then as long as it takes to load.

        Raises:
            UserError: no orchestrator there.
            OrchestratorGone: it went away before it granted anything.
            ProtocolError: what it sent is no grant.
        """
        deadline = time.monotonic() + wait_s
        while True:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
            try:
                run_dir.check_joinable()
                connection.connect(run_dir.lifeline_path)
                break
            except (UserError, OSError) as error:
                connection.close()
                if time.monotonic() >= deadline:
                    if isinstance(error, UserError):
                        raise
                    raise UserError(
                        f"No orchestrator listens in {run_dir.path}; start `headrace orchestrator "
                        "--model DIR` first, or name its --run-dir."
                    ) from None
                time.sleep(0.05)
        fds: list[int] = []
        try:
            return cls(connection, _receive_grant(connection, fds), fds)
        except BaseException:
            for fd in fds:
                os.close(fd)
            connection.close()
            raise

    def fileno(self) -> int:
        return self._connection.fileno()

    def wait_for_end(self) -> None:
        """Block until the orchestrator is gone."""
        while True:
            try:
                if not self._connection.recv(64):
                    return
            except OSError:
                return

    def close(self) -> None:
        for fd, _ in self.segments.values():
            os.close(fd)
        self.segments = {}
        self._connection.close()


def _receive_grant(connection: socket.socket, fds: list[int]) -> Grant:
    """The grant; descriptors are added to `fds` as they come, so that none is lost on an error."""
    data = b""
    size_bytes = _LENGTH.size
    while len(data) < size_bytes:
        try:
            chunk, new_fds, _, _ = socket.recv_fds(connection, _MAX_GRANT_BYTES, _MAX_SEGMENTS)
        except OSError:
            chunk, new_fds = b"", []
        fds += new_fds
        data += chunk
        if not chunk:
            raise OrchestratorGone("the orchestrator left before it handed out its memory")
        if len(data) >= _LENGTH.size:
            size_bytes = _LENGTH.size + _LENGTH.unpack_from(data)[0]
        if size_bytes > _LENGTH.size + _MAX_GRANT_BYTES:
            raise ProtocolError("the life line sent a grant over its size limit")
    try:
        grant = msgspec.msgpack.decode(data[_LENGTH.size :], type=Grant)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ProtocolError(f"the life line sent no valid grant: {error}") from None
    if len(grant.segments) != len(fds):
        raise ProtocolError(
            f"the life line granted {len(grant.segments)} segments with {len(fds)} descriptors"
        )
    return grant
