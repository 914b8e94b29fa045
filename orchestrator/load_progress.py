"""How far loading is, for the person who waits: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import logging
import sys
import time
from typing import TYPE_CHECKING, Self

from protocol.sizes import size

if TYPE_CHECKING:
    from types import TracebackType

    from rich.progress import Progress, TaskID

    from expert_store.reports import QuantisationErrors

log = logging.getLogger("headrace")

_LINE_EVERY_S = 5.0


def tell_errors(errors: QuantisationErrors) -> None:
    """What quantising has cost, on stderr: one line, and the worst tensors where lines of level
    info are wanted."""
    print(  # noqa: T201
        f"headrace: experts quantised to {errors.format}: relative error of the weights "
        f"{errors.relative_error:.4f}, at worst {errors.worst[0].relative_error:.4f} "
        f"({errors.worst[0].name})",
        file=sys.stderr,
        flush=True,
    )
    for error in errors.worst:
        log.info("relative error %.4f: %s", error.relative_error, error.name)


class LoadProgress:
    """Context manager around one load; writes to stderr."""

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._last_line_s = time.monotonic()

    def __enter__(self) -> Self:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import (
                BarColumn,
                DownloadColumn,
                Progress,
                TextColumn,
                TransferSpeedColumn,
            )

            self._bar = Progress(
                TextColumn("{task.description}", markup=False),  # the model's name is in it
                BarColumn(),
                DownloadColumn(),
                TransferSpeedColumn(),
                console=Console(stderr=True),
                transient=True,
            )
            self._task = self._bar.add_task(f"loading {self._model_name}", total=None)
            self._bar.start()
        return self

    def update(self, done_bytes: int, total_bytes: int, text: str) -> None:
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=done_bytes, total=total_bytes)
            return
        now_s = time.monotonic()
        if now_s - self._last_line_s >= _LINE_EVERY_S:
            self._last_line_s = now_s
            percent = 100 * done_bytes / total_bytes if total_bytes else 100.0
            print(  # noqa: T201
                f"headrace: {text}: {percent:.0f} % of {size(total_bytes)}",
                file=sys.stderr,
                flush=True,
            )

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
