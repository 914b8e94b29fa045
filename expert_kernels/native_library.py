"""The native expert kernels, loaded and described to ctypes; the mirror of native/experts.h.

The library is built with the project (CMakeLists.txt). Where there was no compiler, or where it is
none of this release, `load_library` says so and callers compute with torch instead.

It lies in native/ beside this file when the project was installed as a wheel. Installed for
development, Python's files stay where they are and the library lies in the environment.
"""

from __future__ import annotations

import ctypes
import functools
import sys
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from expert_store.formats import FormatKind, ScaleKind
    from expert_store.layout import Dtype, ExpertForm, GateKind, StoreLayout

ABI_VERSION = 5
LIBRARY_NAME = "headrace_experts.so"

#: HrDtype.
DTYPES: dict[Dtype, int] = {"float32": 0, "bfloat16": 1, "float16": 2}
#: HrKind.
KINDS: dict[FormatKind, int] = {"int8": 1, "int4": 2, "mxfp4": 3, "nvfp4": 4, "fp8": 5}
#: HrScale.
SCALES: dict[ScaleKind, int] = {
    "float32": 0,
    "float16": 1,
    "bfloat16": 2,
    "e8m0": 3,
    "e4m3": 4,
}
_GATES: dict[GateKind, int] = {"act_mul": 0, "clamped_act_mul": 1, "alpha_swiglu": 2, "act": 3}
_ACTIVATIONS = {
    "gelu": 0,
    "gelu_10": 1,
    "gelu_accurate": 2,
    "gelu_new": 2,
    "gelu_fast": 3,
    "gelu_pytorch_tanh": 4,
    "hardswish": 5,
    "leaky_relu": 6,
    "linear": 7,
    "mish": 8,
    "quick_gelu": 9,
    "relu": 10,
    "relu2": 11,
    "relu6": 12,
    "sigmoid": 13,
    "silu": 14,
    "swish": 14,
    "sqrtsoftplus": 15,
    "tanh": 16,
}


class NativeLibraryError(Exception):
    """The native kernels cannot be had here; the message says why."""


class Form(ctypes.Structure):
    """HrForm."""

    _fields_ = (
        ("hidden_size", ctypes.c_int32),
        ("intermediate_size", ctypes.c_int32),
        ("dtype", ctypes.c_int32),
        ("gate", ctypes.c_int32),
        ("activation", ctypes.c_int32),
        ("has_gate", ctypes.c_int32),
        ("has_bias", ctypes.c_int32),
        ("is_transposed", ctypes.c_int32),
        ("is_interleaved", ctypes.c_int32),
        ("alpha", ctypes.c_float),
        ("limit", ctypes.c_float),
        ("kind", ctypes.c_int32),
        ("scale", ctypes.c_int32),
        ("group_size", ctypes.c_int32),
        ("has_zero_points", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
        ("first_offset", ctypes.c_int64),
        ("down_offset", ctypes.c_int64),
        ("first_bias_offset", ctypes.c_int64),
        ("down_bias_offset", ctypes.c_int64),
    )


class Step(ctypes.Structure):
    """HrStep."""

    _fields_ = (
        ("num_experts", ctypes.c_int64),
        ("blocks", ctypes.c_void_p),
        ("pair_begin", ctypes.c_void_p),
        ("row_ids", ctypes.c_void_p),
        ("place_ids", ctypes.c_void_p),
        ("hidden", ctypes.c_void_p),
        ("places", ctypes.c_void_p),
        ("most_threads", ctypes.c_int64),
    )


class WeightedSum(ctypes.Structure):
    """HrWeightedSum."""

    _fields_ = (
        ("rows", ctypes.c_void_p),
        ("weights", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("num_rows", ctypes.c_int64),
        ("top_k", ctypes.c_int64),
        ("hidden_size", ctypes.c_int64),
        ("weights_dtype", ctypes.c_int32),
        ("out_dtype", ctypes.c_int32),
    )


def form_of(layout: StoreLayout) -> Form:
    """A store's form as the library takes it.

    Raises:
        NativeLibraryError: an activation that the library does not know.
    """
    form: ExpertForm = layout.form
    if form.activation not in _ACTIVATIONS:
        raise NativeLibraryError(f"they do not know the activation {form.activation!r}")
    weights = layout.weights
    offsets = {tensor.name: tensor.offset_bytes for tensor in layout.tensors}
    return Form(
        hidden_size=form.hidden_size,
        intermediate_size=form.intermediate_size,
        dtype=DTYPES[layout.dtype],
        gate=_GATES[form.gate],
        activation=_ACTIVATIONS[form.activation],
        has_gate=form.has_gate,
        has_bias=form.has_bias,
        is_transposed=form.is_transposed,
        is_interleaved=form.is_interleaved,
        alpha=form.alpha or 0.0,
        limit=form.limit or 0.0,
        kind=KINDS[weights.kind] if weights else 0,
        scale=SCALES[weights.scale] if weights else 0,
        group_size=weights.group_size if weights else 0,
        has_zero_points=weights.has_zero_points if weights else 0,
        first_offset=offsets["gate_up" if form.has_gate else "up"],
        down_offset=offsets["down"],
        first_bias_offset=offsets.get("gate_up_bias" if form.has_gate else "up_bias", 0),
        down_bias_offset=offsets.get("down_bias", 0),
    )


def library_places() -> list[Path]:
    """Where the library may lie, best first."""
    roots = [Path(__file__).parent.parent]
    roots += [Path(sysconfig.get_paths()[key]) for key in ("platlib", "purelib")]
    roots += [Path(entry) for entry in sys.path if entry.endswith("-packages")]
    return list(dict.fromkeys(root / "expert_kernels" / "native" / LIBRARY_NAME for root in roots))


def open_library(places: Iterable[Path]) -> ctypes.CDLL:
    """The first library there is, its functions described.

    Raises:
        NativeLibraryError: there is none, or it cannot be loaded or is of another release.
    """
    path = next((place for place in places if place.is_file()), None)
    if path is None:
        raise NativeLibraryError("they have not been built (no C++ compiler when it was installed)")
    try:
        library = ctypes.CDLL(str(path))
        found = library.hr_abi_version()
    except (OSError, AttributeError) as error:
        raise NativeLibraryError(f"{path} cannot be loaded: {error}") from None
    if found != ABI_VERSION:
        raise NativeLibraryError(
            f"{path} is of another release (interface {found}, {ABI_VERSION} is wanted); "
            "install Headrace again"
        )
    library.hr_isa_name.argtypes = [ctypes.c_int32]
    library.hr_isa_name.restype = ctypes.c_char_p
    library.hr_pool_create.argtypes = [ctypes.c_int32, ctypes.c_int32]
    library.hr_pool_create.restype = ctypes.c_void_p
    library.hr_pool_destroy.argtypes = [ctypes.c_void_p]
    library.hr_pool_destroy.restype = None
    library.hr_run.argtypes = [
        ctypes.c_void_p, ctypes.POINTER(Form), ctypes.c_int32, ctypes.POINTER(Step),
    ]  # fmt: skip
    library.hr_run.restype = ctypes.c_int32
    library.hr_read.argtypes = [
        ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64,
        ctypes.c_int32, ctypes.c_int32, ctypes.c_int32,
    ]  # fmt: skip
    library.hr_read.restype = ctypes.c_uint64
    return library


@functools.cache
def load_library() -> ctypes.CDLL:
    """The library of this installation, loaded once.

    Raises:
        NativeLibraryError: see `open_library`.
    """
    return open_library(library_places())


def usable_isas(library: ctypes.CDLL) -> list[str]:
    """Instruction sets that library and processor share, ascending; the first is "scalar"."""
    names: list[str] = []
    while (name := library.hr_isa_name(len(names))) is not None:
        names.append(name.decode())
    return names
