"""One log line format for all processes: time, level, process name, message; to stderr."""

from __future__ import annotations

import logging
import sys


def set_up_logging(process_name: str, level: str) -> None:
    """Configure the `headrace` logger of this process. `level` is a name such as "info"."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        logging.Formatter(
            f"%(asctime)s.%(msecs)03d %(levelname)-7s {process_name:<12} %(message)s", "%H:%M:%S"
        )
    )
    root = logging.getLogger("headrace")
    root.handlers[:] = [handler]
    root.propagate = False
    root.setLevel(level.upper())
