"""How single tokens run through the dense part: "native", "traced", "compiled" or "eager".

    eager      transformers' own forward, as prompts do
    traced     a recording of it, replayed: the same operations, the same bits, less Python
    compiled   the recording, its segments compiled by torch: other roundings, no native library
    native     the recording as a list for the native library: sums in another order, least time

The path is decided once per pipeline, by a person, never by what lies in a cache on disk: a worker
that takes another's place must compute the same bits. A model that cannot be recorded stays eager,
a recording that cannot be compiled or run natively stays a replay; one line says so.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from expert_kernels.native_library import NativeLibraryError
from protocol.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable

    from expert_kernels.native_dense import DenseKernels
    from gpu_worker.model import DenseModel

log = logging.getLogger("headrace.gpu_worker")

DENSE_PATHS = ("eager", "traced", "compiled", "native")


def set_up_dense_path(
    model: DenseModel,
    path: str,
    progress: Callable[[int, int, str], None],
    kernels: Callable[[], DenseKernels] | None = None,
) -> str:
    """Make `model` run single tokens along `path`; call it in inference mode. `kernels` makes what
    "native" runs on; without it, on an accelerator, that is "traced".

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
    if path == "traced" or (path == "native" and kernels is None):
        return "traced"
    if path == "native":
        assert kernels is not None  # see above
        return _set_up_native(model, kernels)

    def report(done: int, total: int) -> None:
        progress(done, total, f"compiling the dense part, {done} of {total} kinds of segments")

    why_not = model.compile_decode(report)
    if why_not is not None:
        log.warning("the dense part is not compiled, and runs without: %s", why_not)
        return "traced"
    return "compiled"


def quantise_dense(
    model: DenseModel, name: str, kernels: Callable[[], DenseKernels] | None
) -> None:
    """Store the large linear layers of `model` in the format `name`; "auto" leaves them.

    Raises:
        UserError: there is nothing here that computes with them.
    """
    if name == "auto":
        return
    if kernels is None:
        raise UserError(
            f"--dense-dtype {name} is for --device cpu: an accelerator computes the dense part in "
            "floats; leave the flag out."
        )
    try:
        num_layers = model.quantise_linears(name, kernels())
    except NativeLibraryError as error:
        raise UserError(
            f"--dense-dtype {name} needs the native kernels, which cannot be used here: {error}; "
            "leave the flag out."
        ) from None
    log.info("%d linear layers of the dense part are stored in %s", num_layers, name)


def _set_up_native(model: DenseModel, kernels: Callable[[], DenseKernels]) -> str:
    try:
        why_not = model.use_native(kernels())
    except NativeLibraryError as error:
        why_not = str(error)
    if why_not is None:
        return "native"
    log.warning("single tokens do not run natively, and slower: %s", why_not)
    return "traced"
