"""One log line format for all processes: time, level, process name, message; to stderr.

As text for people, or one JSON object per line for machines, with the facts of a line (the id of a
request, for one) as fields of their own.
"""

from __future__ import annotations

import logging
import sys

import msgspec

LOG_FORMATS = ("text", "json")


class JsonLines(logging.Formatter):
    """`time` is seconds since 1970; what a caller passed as extra={"facts": {...}} is beside it."""

    def __init__(self, process_name: str) -> None:
        super().__init__()
        self._process_name = process_name

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": record.created,
            "level": record.levelname.lower(),
            "process": self._process_name,
            "message": record.getMessage(),
            **getattr(record, "facts", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        try:
            return msgspec.json.encode(line).decode()
        except UnicodeEncodeError:  # half of a surrogate pair in somebody's text
            return msgspec.json.encode({**line, "message": ascii(line["message"])}).decode()


def set_up_logging(process_name: str, level: str, form: str = "text") -> None:
    """Configure the `headrace` logger of this process. `level` is a name such as "info", `form`
    one of LOG_FORMATS."""
    handler = logging.StreamHandler(sys.stderr)
    if form == "json":
        handler.setFormatter(JsonLines(process_name))
    else:
        text = logging.Formatter(
            f"%(asctime)s.%(msecs)03d %(levelname)-7s {process_name:<12} %(message)s", "%H:%M:%S"
        )
        handler.setFormatter(text)
    root = logging.getLogger("headrace")
    root.handlers[:] = [handler]
    root.propagate = False
    root.setLevel(level.upper())
