"""Segments of the decode step, compiled by torch's inductor, one program per kind.

Compiling costs seconds per kind and needs a C++ compiler (on a CUDA device: triton), so it is done
once at the start, and inductor keeps what it made on disk: where, says TORCHINDUCTOR_CACHE_DIR,
which the program's edge sets. It runs in a thread, so that the worker goes on reporting progress
and can give up waiting. All kinds are compiled or none is: half a compiled model would be neither
as fast as the one nor as exact as the other.

A program rounds elsewhere than its replay does. `compare` lets both see the same tensors; a bf16
result may differ by a few units of its last place, a float32 result by the order of its additions.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import threading
import time
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from gpu_worker.decode_step import SegmentKind

log = logging.getLogger("headrace.gpu_worker")

#: How long a start may take longer for the sake of compiling.
MAX_COMPILE_S = 600.0
_REPORT_S = 2.0
#: Largest difference between program and replay, relative to the largest value, per dtype.
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 4e-2, torch.float16: 1e-2}


class CompileFailed(Exception):
    """The segments are not compiled; the text says why, in one line."""


def compile_kinds(
    kinds: Sequence[SegmentKind],
    report: Callable[[int, int], None],
    max_s: float = MAX_COMPILE_S,
) -> list[Callable[..., Any]]:
    """Compile every kind; `report(done, total)` is called at least every few seconds.

    Raises:
        CompileFailed: there is no compiler, it failed, or `max_s` seconds have passed.
    """
    programs: list[Callable[..., Any]] = []
    failures: list[Exception] = []
    is_given_up = threading.Event()

    def work() -> None:
        try:
            for kind in kinds:
                if is_given_up.is_set():
                    return
                programs.append(_compile(kind))
        except Exception as error:  # whatever a compiler may say
            failures.append(error)

    thread = threading.Thread(target=work, name="compile", daemon=True)
    deadline_s = time.monotonic() + max_s
    report(0, len(kinds))
    thread.start()
    while thread.is_alive():
        report(len(programs), len(kinds))
        thread.join(min(_REPORT_S, max(0.0, deadline_s - time.monotonic())))
        if thread.is_alive() and time.monotonic() >= deadline_s:
            is_given_up.set()
            raise CompileFailed(f"it took longer than {max_s:.0f} s")
    if failures:
        lines = str(failures[0]).strip().splitlines() or [""]
        raise CompileFailed(f"{type(failures[0]).__name__}: {lines[0][:160]}")
    return programs


def _compile(kind: SegmentKind) -> Callable[..., Any]:
    # Imported late: seconds, and only those who compile pay them.
    inductor = importlib.import_module("torch._inductor")
    config = importlib.import_module("torch._inductor.config")
    # One thread, like the rest of this process, and no pool of compilers that would outlive it.
    options = {"cpp.threads": 1, "compile_threads": 1}
    with torch.no_grad(), config.patch(options), _quiet():
        artifact = inductor.standalone_compile(
            kind.graph, list(kind.examples), dynamic_shapes="from_example_inputs"
        )
    return getattr(artifact, "_compiled_fn", artifact)


@contextlib.contextmanager
def _quiet():
    """Inductor warns about what it cannot do here; the person can do nothing about it."""
    loggers = [logging.getLogger(name) for name in ("torch._inductor", "torch._functorch")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def why_different(
    program: Callable[..., Any], inputs: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]
) -> str | None:
    """Run `program` on `inputs` and say how far it is from `expected`, if too far.

    Whole numbers are a router's choices: of experts with nearly equal scores either may be named,
    and the weights beside them, which are compared, then hardly differ.
    """
    for result, wanted in zip(program(*inputs), expected, strict=True):
        if result.shape != wanted.shape or result.dtype != wanted.dtype:
            return f"shape {tuple(result.shape)} instead of {tuple(wanted.shape)}"
        if wanted.is_floating_point() and (difference := why_apart(result, wanted)):
            return difference
    return None


def why_apart(
    result: torch.Tensor, wanted: torch.Tensor, tolerance: float | None = None
) -> str | None:
    """How far two float tensors of one shape are apart, if farther than rounding explains (or than
    `tolerance`, relative to the largest value)."""
    if tolerance is None:
        tolerance = _TOLERANCE.get(wanted.dtype, 1e-4)
    scale = max(float(wanted.abs().max()), 1e-6)
    difference = float((result.float() - wanted.float()).abs().max()) / scale
    return (
        None
        if difference <= tolerance
        else (f"a relative difference of {difference:.1e} in {wanted.dtype}")
    )
