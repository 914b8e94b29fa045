"""Ctrl-C that cannot get lost.

The interpreter drops what a signal's handler raises in the middle of a destructor or a weakref's
callback ("Exception ignored in ..."), and a command that was to end goes on. So the signal is
remembered as well, and whoever waits in a loop asks for it.
"""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import FrameType, TracebackType


class Interrupts:
    """SIGINT raises KeyboardInterrupt, as ever, and `check` raises it again if that was dropped.

    For the main thread. After a `with` block the handler from before is back.
    """

    def __init__(self) -> None:
        self._is_interrupted = False

    def __enter__(self) -> Interrupts:
        self._before = signal.signal(signal.SIGINT, self._interrupt)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        self._is_interrupted = True
        raise KeyboardInterrupt

    def check(self) -> None:
        """Raises KeyboardInterrupt if there was a SIGINT."""
        if self._is_interrupted:
            raise KeyboardInterrupt
