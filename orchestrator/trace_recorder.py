"""Writes what routers chose in live runs as a routing trace, the form that `simulate` reads.

Only layer-steps of one row say who was chosen together: a decode step of one sequence. Steps of
several rows (a prompt, several sequences at once) are counted and left out. What a step has chosen
counts once the step is over, so one that a worker's death cut short leaves nothing.

The file is made at the start, beside the one it is to be, and takes its name when it is whole: a
name that cannot be written is told before a run is spent on it, and a trace that lies there already
is lost to nothing but a whole new one. What a recording that was killed has left beside it is taken
away by the next one; a lock that ends with its process says which file nobody writes any more.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import logging
import os
import re
import secrets
import stat
import time
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.core.events import Passed, Submit
from protocol.errors import UserError
from protocol.messages import Routed, StartStep, StepDone

if TYPE_CHECKING:
    from expert_store.layout import StoreLayout
    from orchestrator.core.events import CoreCommand, CoreEvent

log = logging.getLogger("headrace")

#: A step of 48 layers and top-8 has 768 bytes: at most this many of such steps are kept.
MAX_STEPS = 1_000_000
#: A file this young may be one that its recording has not locked yet, or locks no longer.
_SURELY_LOCKED_S = 10.0


class TraceRecorder:
    """Hears the same events and commands as the latency log from `begin` on; `close` writes the
    file."""

    def __init__(self, path: Path) -> None:
        """Raises UserError when the file cannot be made."""
        self._path = path
        try:
            self._target = Path(os.path.realpath(path))  # a link stays a link
            _check_replaceable(self._target)
            _remove_left_over(self._target)
            self._fresh = self._target.with_name(f"{self._target.name}.{secrets.token_hex(4)}.tmp")
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            self._file = os.fdopen(os.open(self._fresh, flags, 0o644), "wb")
            with contextlib.suppress(OSError):  # some file systems have no locks
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise UserError(
                f"The routing trace {path} cannot be written: {error.strerror}; name another file."
            ) from None
        #: None until the model is loaded.
        self._layout: StoreLayout | None = None
        self._steps: list[list[list[int]]] = []
        #: Of the step under way, by layer.
        self._chosen: dict[int, list[int]] = {}
        self._step = -1
        self._starts: list[int] = []
        self._is_new_request = True
        self.num_left_out = 0

    def begin(self, layout: StoreLayout) -> None:
        """The model is loaded and has this layout."""
        self._layout = layout

    def hear(self, event: CoreEvent, commands: list[CoreCommand]) -> None:
        """An event, and what the core made of it."""
        match event:
            case Routed() | Passed():
                if event.step == self._step and max(event.num_rows) == 1:
                    self._chosen[event.layer] = list(event.experts)
            case StepDone():
                if event.step == self._step:
                    self._end_step()
            case Submit():
                self._is_new_request = True
            case _:
                pass
        for command in commands:
            if isinstance(command, StartStep):
                self._step = command.step
                self._chosen = {}

    def _end_step(self) -> None:
        layout = self._layout
        assert layout is not None  # no step comes before
        rows = [self._chosen.get(layer, []) for layer in range(layout.num_layers)]
        is_whole = all(len(experts) == layout.top_k for experts in rows)
        if not is_whole or len(self._steps) >= MAX_STEPS:
            self.num_left_out += 1
            return
        if self._is_new_request:
            self._starts.append(len(self._steps))
            self._is_new_request = False
        self._steps.append(rows)

    def close(self) -> str:
        """Write what was recorded. Returns "", or one sentence when that failed."""
        layout = self._layout
        if layout is None:
            return ""
        if not self._steps:
            log.warning("no routing was recorded: no decode step of one sequence was seen")
            return ""
        try:
            with self._file:
                self._write(layout)
                self._file.flush()
                os.fsync(self._file.fileno())  # some file systems say only here that they are full
            self._fresh.replace(self._target)
        except OSError as error:
            return (
                f"The routing trace {self._path} cannot be written: {error.strerror}; its "
                f"{len(self._steps)} decode steps are lost: record them again into another file."
            )
        finally:
            self.discard()
        log.info(
            "%d decode steps recorded in %s; %d steps of several rows left out",
            len(self._steps),
            self._path,
            self.num_left_out,
        )
        return ""

    def _write(self, layout: StoreLayout) -> None:
        import numpy as np

        np.savez_compressed(
            self._file,
            ids=np.array(self._steps, np.int16),
            num_experts=np.array(max(layout.num_experts), np.int64),
            model=np.array(layout.model_name),
            request_starts=np.array(self._starts, np.int32),
            phase=np.ones(len(self._steps), np.uint8),
            layer_ids=np.arange(layout.num_layers, dtype=np.int32),
            expert_bytes=np.full(layout.num_layers, layout.expert_bytes, np.int64),
        )

    def discard(self) -> None:
        """Leave nothing behind but a trace that is whole."""
        for end in (self._file.close, self._fresh.unlink):
            with contextlib.suppress(OSError):  # it was told already, or there is nothing
                end()


def _check_replaceable(target: Path) -> None:
    """Raises OSError unless there is nothing, or an ordinary file that may be written."""
    try:
        mode = target.stat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISREG(mode):  # a device, say, would be gone for good
        raise OSError(errno.EINVAL, "it is there and no ordinary file")
    if not os.access(target, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


def _remove_left_over(target: Path) -> None:
    """Take away what recordings into `target` left that were killed."""
    beside = f"{glob.escape(target.name)}.*.tmp"
    for path in target.parent.glob(beside):
        middle = path.name[len(target.name) + 1 : -len(".tmp")]
        if re.fullmatch(r"[0-9a-f]{8}", middle) is None or not path.is_file():
            continue
        with contextlib.suppress(OSError), path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if time.time() - os.fstat(file.fileno()).st_mtime > _SURELY_LOCKED_S:
                path.unlink()
                log.info("%s is removed; a recording that was killed has left it", path)
