"""Runs the loader process: progress on its way, a layout at the end, or one clear sentence.

The loader gets an empty memfd by inheritance and its reports come line by line over its standard
output. It is the only process that reads expert weights from disk, and it is gone before the first
token.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from typing import TYPE_CHECKING

import msgspec

from expert_store.reports import Failure, Inspection, Loaded, Progress, Report, decode_report
from protocol.errors import EXIT_USER_ERROR, UserError
from protocol.sizes import part_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

log = logging.getLogger("headrace")

#: A layout of a very large model, as JSON, stays far below this.
_MAX_LINE_BYTES = 1 << 20
_END_TIMEOUT_S = 10.0
#: Between two reports; a cold disk may be slow, a loader that says nothing for so long is stuck.
_SILENCE_TIMEOUT_S = 300.0


class LoaderFault(Exception):
    """The loader ended without saying why; its own output on stderr may tell."""


async def load_store(
    model_dir: Path,
    dtype: str,
    expert_dtype: str,
    fd: int,
    on_progress: Callable[[Progress], None],
    numa_nodes: str = "",
    reserved_fd: int | None = None,
) -> Loaded:
    """Load the experts of a checkpoint into the empty memfd `fd`, or into `reserved_fd` if there
    are enough of its huge pages, divided among `numa_nodes`.

    Raises:
        UserError: the checkpoint cannot be loaded; its one sentence.
        LoaderFault: the loader broke down.
    """
    arguments = _arguments("load", model_dir, dtype, expert_dtype)
    if numa_nodes:
        arguments += ["--numa-nodes", numa_nodes]
    fds: tuple[int, ...] = (fd,)
    if reserved_fd is not None:
        fds = (fd, reserved_fd)
        arguments += ["--reserved-fd", str(reserved_fd)]
    report = await _run([*arguments, "--fd", str(fd)], fds, on_progress)
    if not isinstance(report, Loaded):
        raise LoaderFault("the loader answered something else")
    log.info(
        "of the experts, %s lie in huge pages%s",
        part_of(report.huge_page_bytes, report.layout.total_bytes),
        ", reserved ones" if report.is_reserved else report.reserved_note,
    )
    if report.numa_note:
        log.log(logging.INFO if report.numa_nodes else logging.WARNING, "%s", report.numa_note)
    return report


async def inspect_model(
    model_dir: Path, dtype: str, expert_dtype: str = "auto", dense_dtype: str = "auto"
) -> Inspection:
    """What config and file headers tell; reads no weights.

    Raises:
        UserError: the checkpoint cannot be used; its one sentence.
        LoaderFault: the loader broke down.
    """
    arguments = _arguments("inspect", model_dir, dtype, expert_dtype)
    arguments += ["--dense-dtype", dense_dtype]
    report = await _run(arguments, (), lambda progress: None)
    if not isinstance(report, Inspection):
        raise LoaderFault("the loader answered something else")
    return report


def _arguments(command: str, model_dir: Path, dtype: str, expert_dtype: str) -> list[str]:
    return [
        command, "--model", str(model_dir), "--dtype", dtype, "--expert-dtype", expert_dtype,
    ]  # fmt: skip


async def _run(
    arguments: list[str], fds: tuple[int, ...], on_progress: Callable[[Progress], None]
) -> Report:
    """The loader's answer: its last report."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-P",
        "-m",
        "expert_store",
        *arguments,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        pass_fds=fds,
        limit=_MAX_LINE_BYTES,
        start_new_session=True,  # a Ctrl-C at the terminal is the orchestrator's to handle
    )
    assert process.stdout is not None
    try:
        while line := await asyncio.wait_for(process.stdout.readline(), _SILENCE_TIMEOUT_S):
            report = decode_report(line)
            if isinstance(report, Failure):
                raise UserError(report.message)
            if not isinstance(report, Progress):
                # Its work is done. It is not waited for: an interpreter with torch in it takes
                # seconds to leave, on a busy machine many.
                return report
            on_progress(report)
        code = await asyncio.wait_for(process.wait(), _END_TIMEOUT_S)
    except (msgspec.DecodeError, ValueError) as error:
        raise LoaderFault(f"the loader said what is no report: {error}") from None
    except TimeoutError:
        raise LoaderFault("the loader hangs") from None
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    ending = f"signal {-code}" if code < 0 else f"code {code}"
    raise LoaderFault(
        f"the loader ended with {ending}"
        + (" (out of memory?)" if code == -9 else "")
        + (" (wrong arguments)" if code == EXIT_USER_ERROR else "")
    )
