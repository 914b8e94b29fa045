"""The order of memory between two processes, paid for by the one that has the time.

A hot path that stores a word and then loads another needs a full barrier between the two, since a
processor may do the load first. membarrier(2) turns that around: the hot process registers once,
and the slow one makes the kernel run a barrier on every processor that runs a registered process.
After `run` each of them has either done its load before, and then its store is visible, or will do
it afterwards, and then sees what the slow one stored.
"""

from __future__ import annotations

import ctypes
import os
import platform

#: Number of the system call, by machine.
_SYSCALL = {"x86_64": 324, "aarch64": 283, "riscv64": 283}
_QUERY = 0
_GLOBAL = 1
_GLOBAL_EXPEDITED = 2
_REGISTER_GLOBAL_EXPEDITED = 4
#: Processors of these kinds do not reorder stores with stores or loads with loads.
_STRONGLY_ORDERED = frozenset({"x86_64", "AMD64", "i686"})


def is_strongly_ordered() -> bool:
    """Whether only a load may overtake an earlier store here, and nothing else anything."""
    return platform.machine() in _STRONGLY_ORDERED


class MemoryBarrier:
    """`run` is a full barrier on every processor that runs a process which said `register`.

    `is_there` is False where the kernel has no such call; then `run` must not be relied upon.
    """

    def __init__(self) -> None:
        number = _SYSCALL.get(platform.machine())
        self._number = -1 if number is None or os.name != "posix" else number
        self._syscall = ctypes.CDLL(None, use_errno=True).syscall
        commands = self._call(_QUERY)
        self._command = 0
        if commands > 0:
            if commands & _GLOBAL_EXPEDITED and commands & _REGISTER_GLOBAL_EXPEDITED:
                self._command = _GLOBAL_EXPEDITED
            elif commands & _GLOBAL:
                self._command = _GLOBAL  # the same after some ms, and nobody need register
        self.is_there = self._command != 0

    def register(self) -> bool:
        """Take part as a hot process; False if the kernel would not have it."""
        if self._command != _GLOBAL_EXPEDITED:
            return self.is_there
        return self._call(_REGISTER_GLOBAL_EXPEDITED) == 0

    def run(self) -> bool:
        """False if it could not be done: nothing may be concluded then."""
        return self.is_there and self._call(self._command) == 0

    def _call(self, command: int) -> int:
        if self._number < 0:
            return -1
        return int(self._syscall(ctypes.c_long(self._number), command, 0, 0))
