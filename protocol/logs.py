"""One log line format for all processes: time, level, process name, message; to stderr.

As text for people, or one JSON object per line for machines, with the facts of a line (the id of a
request, for one) as fields of their own.
"""

from __future__ import annotations

import logging
import sys

LOG_FORMATS = ("text", "json")


def set_up_logging(process_name: str, level: str, form: str = "text") -> None:
    """Configure the `headrace` logger of this process. `level` is a name such as "info", `form`
    one of LOG_FORMATS."""
    handler = logging.StreamHandler(sys.stderr)
    if form == "json":
        # Only then: this module is imported by commands that are to be quick.
        from protocol.log_lines import JsonLines

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
