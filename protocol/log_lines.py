"""Log lines as JSON objects."""

from __future__ import annotations

import logging

import msgspec


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
