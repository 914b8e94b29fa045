"""A pipeline of one's own: the orchestrator as a child that cannot outlive its parent.

The child holds the read end of a pipe whose write end only this process has. However this process
ends, `kill -9` included, the pipe ends with it, and the orchestrator leaves in order and takes its
workers along. The child has a session of its own, so that a Ctrl-C at the terminal reaches this
process alone, which then ends everything in order. What the child has to say to a person it says
on the inherited stderr.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Self

from protocol.run_dir import RunDir

if TYPE_CHECKING:
    from types import TracebackType

#: The orchestrator's own three stages take less.
_END_TIMEOUT_S = 10.0


class OwnPipeline:
    """Context manager: a supervised pipeline in `run_dir`, or in a fresh private directory."""

    def __init__(self, arguments: list[str], run_dir: Path | None) -> None:
        self._arguments = arguments
        self._is_private = run_dir is None
        # Made by the orchestrator, which also removes it; the name cannot be guessed.
        path = run_dir or Path(tempfile.gettempdir()) / f"headrace-{secrets.token_hex(8)}"
        self.run_dir = RunDir(path)

    def __enter__(self) -> Self:
        read_fd, self._write_fd = os.pipe()
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-P",
                "-m",
                "orchestrator.cli.main",
                "orchestrator",
                "--supervise",
                "--run-dir",
                str(self.run_dir.path),
                "--parent-fd",
                str(read_fd),
                *self._arguments,
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=(read_fd,),
            start_new_session=True,
        )
        os.close(read_fd)
        return self

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def end(self) -> int:
        """End it if it still runs; returns its exit code (negative: the signal that ended it)."""
        if self._write_fd >= 0:
            os.close(self._write_fd)
            self._write_fd = -1
        try:
            return self._process.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait(_END_TIMEOUT_S)

    def wait(self, timeout_s: float) -> int | None:
        """Its exit code when it ends by itself within `timeout_s`, else None."""
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.end()
        if self._is_private:  # only what a killed orchestrator left
            with contextlib.suppress(OSError):
                shutil.rmtree(self.run_dir.path)
