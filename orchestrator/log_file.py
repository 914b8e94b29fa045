"""The file of a latency log: one record, one line of JSON."""

from __future__ import annotations

import contextlib
import logging
import os
from typing import TYPE_CHECKING

import msgspec

from protocol.errors import UserError

if TYPE_CHECKING:
    from pathlib import Path

    from orchestrator.latency_log import LogRecord

log = logging.getLogger("headrace")

_FLUSH_BYTES = 256 * 1024


class LogFile:
    """JSON Lines, written in large pieces; a full disk ends the log, never the pipeline."""

    def __init__(self, path: Path) -> None:
        """Raises UserError when the file cannot be made."""
        self._path = path
        try:
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise UserError(
                f"The latency log {path} cannot be written: {error.strerror}; name another "
                "--latency-log."
            ) from None
        self._lost = ""
        self._encoder = msgspec.json.Encoder()
        self._buffer = bytearray()

    def write(self, record: LogRecord) -> None:
        if self._fd < 0:
            return
        self._buffer += self._encoder.encode(record)
        self._buffer += b"\n"
        if len(self._buffer) >= _FLUSH_BYTES:
            self.flush()

    def flush(self) -> None:
        view = memoryview(bytes(self._buffer))
        self._buffer.clear()
        while view and self._fd >= 0:
            try:
                view = view[os.write(self._fd, view) :]
            except OSError as error:
                log.error("the latency log %s ends here: %s", self._path, error.strerror)
                self._lost = (
                    f"The latency log {self._path} is not whole ({error.strerror}); name a "
                    "--latency-log where there is room."
                )
                os.close(self._fd)
                self._fd = -1

    def close(self) -> str:
        """What was lost, one sentence; "" when the log is whole."""
        self.flush()
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                os.close(self._fd)
            self._fd = -1
        return self._lost
