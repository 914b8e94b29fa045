"""Quantising by the native library: what `expert_store.quantising` computes, at memory speed.

The library is built with the project where there is a C++ compiler; without it a loader quantises
with torch, to the same bytes, some ten times slower.
"""

from __future__ import annotations

import ctypes
import functools
import sys
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from expert_store.formats import FormatKind, ScaleKind, WeightFormat

LIBRARY_NAME = "headrace_quantise.so"
_VERSION = 1
_KINDS: dict[FormatKind, int] = {"int8": 0, "int4": 1, "mxfp4": 2, "nvfp4": 3, "fp8": 4}
_SCALES: dict[ScaleKind, int] = {"float32": 0, "float16": 1, "bfloat16": 2, "e8m0": 3, "e4m3": 4}


class Job(ctypes.Structure):
    """HrQuantiseJob of native/quantise.h."""

    _fields_ = (
        ("kind", ctypes.c_int32),
        ("scale", ctypes.c_int32),
        ("group_size", ctypes.c_int32),
        ("has_zero_points", ctypes.c_int32),
        ("is_bfloat16", ctypes.c_int32),
        ("groups_per_record", ctypes.c_int32),
        ("is_plain", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
        ("num_outputs", ctypes.c_int64),
        ("num_inputs", ctypes.c_int64),
        ("source_stride", ctypes.c_int64),
        ("tile_stride", ctypes.c_int64),
        ("source", ctypes.c_void_p),
        ("tiles", ctypes.c_void_p),
        ("error_square", ctypes.c_double),
        ("size_square", ctypes.c_double),
    )


@functools.cache
def load_library() -> ctypes.CDLL | None:
    """The library of this installation; None where there is none, or one of another release."""
    roots = [Path(__file__).parent.parent]
    roots += [Path(sysconfig.get_paths()[key]) for key in ("platlib", "purelib")]
    roots += [Path(entry) for entry in sys.path if entry.endswith("-packages")]
    for path in (root / "expert_store" / "native" / LIBRARY_NAME for root in roots):
        if not path.is_file():
            continue
        try:
            library = ctypes.CDLL(str(path))
            if library.hr_quantise_version() != _VERSION:
                return None
        except (OSError, AttributeError):
            return None
        library.hr_quantise.argtypes = [ctypes.POINTER(Job)]
        library.hr_quantise.restype = ctypes.c_int32
        return library
    return None


def quantise_into(
    library: ctypes.CDLL,
    weights: WeightFormat,
    matrix: torch.Tensor,
    tiles: npt.NDArray[np.uint8],
    *,
    is_plain: bool = False,
) -> tuple[float, float]:
    """Write the matrix [outputs, inputs] (any float dtype, finite) into `tiles`.

    `tiles` is uint8 [tiles, tile_bytes], zeros, contiguous within each tile: a way of a store's
    tensor will do. Python's lock is released meanwhile. `is_plain`: without the processor's own
    instructions, to the same bytes.

    Returns:
        Sums of squares over all weights: of the errors, of the weights.
    """
    if matrix.dtype is not torch.bfloat16 or matrix.stride(1) != 1:
        matrix = matrix.float() if matrix.dtype is not torch.bfloat16 else matrix
        matrix = matrix.contiguous()
    job = Job(
        kind=_KINDS[weights.kind],
        scale=_SCALES[weights.scale],
        group_size=weights.group_size,
        has_zero_points=weights.has_zero_points,
        is_bfloat16=matrix.dtype is torch.bfloat16,
        groups_per_record=weights.groups_per_record,
        is_plain=is_plain,
        num_outputs=matrix.shape[0],
        num_inputs=matrix.shape[1],
        source_stride=matrix.stride(0),
        tile_stride=tiles.strides[0],
        source=matrix.data_ptr(),
        tiles=tiles.ctypes.data,
    )
    if library.hr_quantise(ctypes.byref(job)):
        raise ValueError(f"the native library knows no {weights.name}")
    return job.error_square, job.size_square
