"""How single tokens run through the dense part: "eager", "traced" or "compiled".

    eager      transformers' own forward, as prompts do
    traced     a recording of it, replayed: the same operations, the same bits, less Python
    compiled   the recording, its segments compiled: other roundings, least time

The path is decided once per pipeline, by a person, never by what lies in a cache on disk: a worker
that takes another's place must compute the same bits. A model that cannot be recorded stays eager,
a recording that cannot be compiled stays a replay; one line says so.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from protocol.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpu_worker.model import DenseModel

log = logging.getLogger("headrace.gpu_worker")

DENSE_PATHS = ("eager", "traced", "compiled")


def set_up_dense_path(
    model: DenseModel, path: str, progress: Callable[[int, int, str], None]
) -> str:
    """Make `model` run single tokens along `path`; call it in inference mode.

    Returns:
        The path that is taken.

    Raises:
        UserError: there is no such path.
    """
    if path not in DENSE_PATHS:
        raise UserError(
            f"The dense path {path!r} is not known; run all processes from the same release."
        )
    if path == "eager":
        return "eager"
    progress(1, 2, "recording the decode step")
    why_not = model.prepare_decode()
    if why_not is not None:
        log.info(
            "single tokens run through transformers, for this model is not recorded: %s", why_not
        )
        return "eager"
    if path == "traced":
        return "traced"

    def report(done: int, total: int) -> None:
        progress(done, total, f"compiling the dense part, {done} of {total} kinds of segments")

    why_not = model.compile_decode(report)
    if why_not is not None:
        log.warning("the dense part is not compiled, and runs without: %s", why_not)
        return "traced"
    return "compiled"
