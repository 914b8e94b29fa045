"""The run directory: how the processes of one pipeline find each other.

Mode 0700 and owned by the user who runs the pipeline, so that file permissions decide who may
join. It holds two sockets and a lock, nothing else: weights and activations live in anonymous
memory that dies with its last holder.

    control.sock    ZeroMQ ROUTER: commands and events
    lifeline.sock   hands out the shared segments; its end means that the orchestrator is gone
    lock            flock held by the orchestrator; its text is the holder's pid
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from protocol.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Mapping

#: sun_path of a Unix socket holds 108 bytes with its final zero.
_MAX_SOCKET_PATH_BYTES = 107


def default_run_dir(environ: Mapping[str, str]) -> Path:
    """Where orchestrator and workers meet when nobody says otherwise."""
    base = environ.get("XDG_RUNTIME_DIR")
    if base and os.path.isdir(base):
        return Path(base) / "headrace"
    return Path(tempfile.gettempdir()) / f"headrace-{os.getuid()}"


class RunDir:
    """Paths inside one run directory. Creating and locking is the orchestrator's part."""

    def __init__(self, path: Path) -> None:
        self.path = path
        longest = len(os.fsencode(path / "lifeline.sock"))
        if longest > _MAX_SOCKET_PATH_BYTES:
            raise UserError(
                f"The run directory {path} makes a socket path of {longest} bytes and the system "
                f"allows {_MAX_SOCKET_PATH_BYTES}; choose a shorter --run-dir."
            )

    @property
    def control_endpoint(self) -> str:
        return f"ipc://{self.path / 'control.sock'}"

    @property
    def lifeline_path(self) -> str:
        return str(self.path / "lifeline.sock")

    def check_joinable(self) -> None:
        """Raise a UserError unless an orchestrator may be behind this directory."""
        if not self.path.is_dir():
            raise UserError(
                f"There is no run directory {self.path}; start `headrace orchestrator --model DIR` "
                "first, or name its --run-dir."
            )
        _check_private(self.path)

    def remove_leftovers(self) -> None:
        """Remove the sockets of a killed orchestrator; does nothing while one holds the lock."""
        try:
            lock_fd = os.open(self.path / "lock", os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return  # it left in order
        try:
            fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for name in ("control.sock", "lifeline.sock", "lock"):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(self.path / name)
        except OSError:
            return  # it, or its successor, is alive
        finally:
            os.close(lock_fd)


class LockedRunDir(RunDir):
    """A run directory held by this process until `close`."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._is_created = not path.exists()
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            raise UserError(
                f"The run directory {path} is a file; name another --run-dir."
            ) from None
        except OSError as error:
            raise UserError(
                f"The run directory {path} cannot be made: {error.strerror}; "
                "name another --run-dir."
            ) from None
        _check_private(path)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            self._lock_fd = os.open(path / "lock", flags, 0o600)
        except OSError as error:
            raise _unusable(path, error) from None
        try:
            self._hold()
            os.ftruncate(self._lock_fd, 0)
            os.pwrite(self._lock_fd, str(os.getpid()).encode(), 0)
            self._remove_sockets()
        except OSError as error:
            os.close(self._lock_fd)
            raise _unusable(path, error) from None
        except UserError:
            os.close(self._lock_fd)
            raise

    def _hold(self) -> None:
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(self._lock_fd, 32, 0).decode(errors="replace").strip() or "unknown"
            raise UserError(
                f"The run directory {self.path} is in use by process {holder}; stop that pipeline "
                "or name another --run-dir."
            ) from None

    def _remove_sockets(self) -> None:
        for name in ("control.sock", "lifeline.sock"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.path / name)

    def close(self) -> None:
        """Remove what this pipeline put here and give the directory up."""
        self._remove_sockets()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path / "lock")
        os.close(self._lock_fd)
        if self._is_created:
            with contextlib.suppress(OSError):
                self.path.rmdir()


def _unusable(path: Path, error: OSError) -> UserError:
    name = Path(os.fsdecode(error.filename)).name if error.filename else "lock"
    return UserError(
        f"The run directory {path} cannot be used: {name}: {error.strerror}; remove it or name "
        "another --run-dir."
    )


def _check_private(path: Path) -> None:
    info = path.stat()
    if info.st_uid != os.getuid():
        raise UserError(
            f"The run directory {path} belongs to user {info.st_uid}, not to you ({os.getuid()}); "
            "name another --run-dir."
        )
    if stat.S_IMODE(info.st_mode) & 0o077:
        raise UserError(
            f"The run directory {path} is open to other users (mode "
            f"{stat.S_IMODE(info.st_mode):04o}); run `chmod 700 {path}` or name another --run-dir."
        )
