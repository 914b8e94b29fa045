"""Tells a person what the core found out about the machine, without flooding the log.

On a busy machine rates move several times a second, and each move is true. One line in a while says
what there is to know; the latency log has them all.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

log = logging.getLogger("headrace")

#: Shortest time between two lines at INFO.
EVERY_S = 10.0


class News:
    """One line in `EVERY_S` at INFO, the others at DEBUG. `now_s` is a monotonic clock."""

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self._next_s = 0.0
        self._num_held_back = 0

    def tell(self, what: object) -> None:
        """Say it, or count it and let the next line say how many there were."""
        now_s = self._now_s()
        if now_s < self._next_s:
            self._num_held_back += 1
            log.debug("%s", what)
            return
        more = f" ({self._num_held_back} like it before)" if self._num_held_back else ""
        self._next_s, self._num_held_back = now_s + EVERY_S, 0
        log.info("%s%s", what, more)
