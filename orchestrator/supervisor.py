"""Keeps workers running: starts them, starts them again when they die, ends them in three stages.

A worker that dies is started again at once; one that dies again and again waits longer each time,
and one that never gets ready ends the pipeline. Exit codes 2 and 3 say "it would fail the same way
again" (protocol.errors) and end the pipeline with the worker's own sentence.

Nobody is left behind: an orderly end asks, terminates, kills, each with a bound; and should the
orchestrator itself be killed, the end of its life lines makes every worker leave.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import time
from typing import TYPE_CHECKING

from protocol.errors import EXIT_DO_NOT_RESTART, EXIT_FAULT, EXIT_USER_ERROR

if TYPE_CHECKING:
    from collections.abc import Callable

    from protocol.messages import Role
    from protocol.run_dir import RunDir

log = logging.getLogger("headrace")

_FIRST_BACKOFF_S = 0.1
_MAX_BACKOFF_S = 10.0
#: A worker that lived so long starts again without a wait.
_STABLE_S = 10.0
#: Deaths in a row, with no Ready in between, that end the pipeline.
_MAX_FAILED_STARTS = 5
#: The three stages of an end: after the Shutdown message, after SIGTERM, after SIGKILL.
_ASK_S = 3.0
_TERMINATE_S = 2.0
_KILL_S = 2.0


class Supervisor:
    """Runs one gpu_worker, one dma_worker and a cpu_worker for each of `cpu_worker_flags`.
    `on_fatal(sentence, exit_code)` is called when a worker cannot be kept running;
    `last_words(pid)` tells why one failed."""

    def __init__(
        self,
        cpu_worker_flags: list[list[str]],
        run_dir: RunDir,
        log_flags: list[str],
        kernel_flags: list[str],
        last_words: Callable[[int], str],
        on_fatal: Callable[[str, int], None],
    ) -> None:
        self._workers: list[tuple[Role, list[str]]] = [("gpu_worker", []), ("dma_worker", [])]
        self._workers += [("cpu_worker", flags) for flags in cpu_worker_flags]
        self._run_dir = run_dir
        self._log_flags = log_flags
        self._kernel_flags = kernel_flags
        self._last_words = last_words
        self._on_fatal = on_fatal
        self._stopping = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._processes: dict[int, asyncio.subprocess.Process] = {}
        self._ready_pids: set[int] = set()
        self.num_restarts: dict[Role, int] = {}

    def start(self) -> None:
        """Start all workers in the running loop."""
        self._tasks = [asyncio.create_task(self._keep(*worker)) for worker in self._workers]

    def worker_is_ready(self, pid: int) -> None:
        """A worker said Ready: it can start, so its next death is no failed start."""
        self._ready_pids.add(pid)

    async def _keep(self, role: Role, own_flags: list[str]) -> None:
        backoff_s = _FIRST_BACKOFF_S
        num_failed_starts = 0
        flags = [*self._log_flags, *own_flags]
        if role != "dma_worker":
            flags = [*flags, *self._kernel_flags]
        while not self._stopping.is_set():
            started_s = time.monotonic()
            try:
                process = await asyncio.create_subprocess_exec(
                    sys.executable,
                    "-P",
                    "-m",
                    role,
                    "--run-dir",
                    str(self._run_dir.path),
                    *flags,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=asyncio.subprocess.DEVNULL,
                    start_new_session=True,  # a Ctrl-C at the terminal is the orchestrator's
                )
            except OSError as error:
                self._on_fatal(f"The {role} cannot be started: {error.strerror}.", EXIT_FAULT)
                return
            self._processes[process.pid] = process
            code = await process.wait()
            del self._processes[process.pid]
            words = self._last_words(process.pid)
            was_ready = process.pid in self._ready_pids
            self._ready_pids.discard(process.pid)
            if self._stopping.is_set():
                return
            if code in (EXIT_USER_ERROR, EXIT_DO_NOT_RESTART):
                self._on_fatal(words or f"The {role} cannot run here; see above.", EXIT_USER_ERROR)
                return
            num_failed_starts = 0 if was_ready else num_failed_starts + 1
            ending = f"signal {-code}" if code < 0 else f"code {code}"
            if num_failed_starts >= _MAX_FAILED_STARTS:
                self._on_fatal(
                    f"The {role} ended {num_failed_starts} times before it was ready, last with "
                    f"{ending}{': ' + words if words else ''}.",
                    EXIT_FAULT,
                )
                return
            if time.monotonic() - started_s > _STABLE_S:
                backoff_s = _FIRST_BACKOFF_S
            log.warning(
                "%s (process %d) ended with %s; it is started again in %.1f s",
                role, process.pid, ending, backoff_s,
            )  # fmt: skip
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, _MAX_BACKOFF_S)
            self.num_restarts[role] = self.num_restarts.get(role, 0) + 1

    def announce_stop(self) -> None:
        """From now on deaths are expected."""
        self._stopping.set()

    async def stop(self) -> None:
        """End all workers; they were asked already. Returns within the three bounds."""
        self._stopping.set()
        # Those that are not ready may not have heard that they were asked: still importing.
        for pid in self._processes.keys() - self._ready_pids:
            with contextlib.suppress(ProcessLookupError):
                self._processes[pid].terminate()
        if await self._all_ended(_ASK_S):
            return
        for process in list(self._processes.values()):
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
        if await self._all_ended(_TERMINATE_S):
            return
        for process in list(self._processes.values()):
            log.warning("process %d does not leave; it is killed", process.pid)
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        await self._all_ended(_KILL_S)

    async def _all_ended(self, timeout_s: float) -> bool:
        # Those between two lives sleep in their back-off: nothing to wait for.
        waits = [asyncio.ensure_future(process.wait()) for process in self._processes.values()]
        if waits:
            _, pending = await asyncio.wait(waits, timeout=timeout_s)
            for wait in pending:
                wait.cancel()
            if pending:
                return False
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        return not self._processes
