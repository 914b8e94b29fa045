"""The native decode step to ctypes: the mirror of native/dense.h.

`DenseKernels` holds the library, the threads and the instruction set that a list of operations runs
with; who makes such lists is gpu_worker.native_program.
"""

from __future__ import annotations

import ctypes
import weakref
from typing import TYPE_CHECKING

import torch

from expert_kernels.native import SPIN_US, NativeExpertFunction, isa_number
from expert_kernels.native_library import KINDS, SCALES, NativeLibraryError, load_library

if TYPE_CHECKING:
    from expert_kernels.native import MaxIsa
    from expert_kernels.reference import ExpertFunction
    from expert_store.formats import WeightFormat

DENSE_VERSION = 2
MAX_DIMS = 5
#: HrValue of an operand that is the operation's number x.
NO_VALUE = -1
#: HrValue.
VALUES = {
    torch.float32: 0,
    torch.bfloat16: 1,
    torch.float16: 2,
    torch.int64: 3,
    torch.bool: 4,
    torch.complex64: 5,
}
#: HrOpCode, in its order.
_OP_NAMES = (
    "copy", "neg", "abs", "exp", "sin", "cos", "sqrt", "rsqrt", "reciprocal", "sigmoid", "silu",
    "tanh", "relu", "square", "pow", "clamp", "not", "add", "sub", "mul", "div", "maximum",
    "minimum", "gt", "ge", "lt", "le", "eq", "ne", "where", "polar", "complex_mul",
    "sum", "mean", "max", "softmax", "layer_norm", "topk",
    "gather", "scatter", "embedding", "linear", "attend", "packed_linear",
)  # fmt: skip
OP_CODES = {name: code for code, name in enumerate(_OP_NAMES)}


class Operand(ctypes.Structure):
    """HrOperand."""

    _fields_ = (
        ("offset", ctypes.c_int64),
        ("strides", ctypes.c_int32 * MAX_DIMS),
        ("dtype", ctypes.c_int16),
        ("is_in_frame", ctypes.c_int16),
    )


class Op(ctypes.Structure):
    """HrOp."""

    _fields_ = (
        ("code", ctypes.c_int32),
        ("num_dims", ctypes.c_int32),
        ("sizes", ctypes.c_int32 * MAX_DIMS),
        ("reserved", ctypes.c_int32),
        ("out", Operand),
        ("a", Operand),
        ("b", Operand),
        ("c", Operand),
        ("x", ctypes.c_double),
        ("y", ctypes.c_double),
        ("n", ctypes.c_int64),
        ("m", ctypes.c_int64),
    )


class CacheLayer(ctypes.Structure):
    """HrCacheLayer."""

    _fields_ = (
        ("keys", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        ("key_head_stride", ctypes.c_int64),
        ("value_head_stride", ctypes.c_int64),
        ("end", ctypes.c_int64),
        ("window", ctypes.c_int64),
        ("room_number", ctypes.c_int64),
    )


def format_number(weights: WeightFormat) -> int:
    """A format as HR_OP_PACKED_LINEAR takes it."""
    return (
        KINDS[weights.kind]
        | SCALES[weights.scale] << 8
        | weights.has_zero_points << 16
        | weights.group_size << 24
    )


class DenseKernels:
    """Threads and instruction set for `run`: those of a native expert function, where there is one
    in the process, so that its threads are awake when the dense part wants them.

    Raises:
        NativeLibraryError: there is no library, an older one, or nothing native is wanted.
    """

    def __init__(
        self,
        function: ExpertFunction | None = None,
        *,
        max_isa: MaxIsa = "best",
        num_threads: int = 1,
    ) -> None:
        library = load_library()
        try:
            found = library.hr_dense_version()
        except AttributeError:
            raise NativeLibraryError("they are of an older build") from None
        if found != DENSE_VERSION:
            raise NativeLibraryError("they are of another release; install Headrace again")
        self._run = library.hr_dense_run
        self._run.restype = ctypes.c_int32
        self._run.argtypes = [
            ctypes.c_void_p, ctypes.c_int32, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64,
            ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64,
        ]  # fmt: skip
        if isinstance(function, NativeExpertFunction):
            self._pool, self._isa = function.pool, function.isa_number
            self._owner = function  # the pool lives as long as it does
            return
        if max_isa == "torch" or function is not None:
            raise NativeLibraryError("experts run on torch, too")
        self._isa = isa_number(library, max_isa)
        pool = library.hr_pool_create(num_threads, SPIN_US)
        if not pool:
            raise NativeLibraryError(f"{num_threads} threads could not be started")
        self._pool = ctypes.c_void_p(pool)
        self.close = weakref.finalize(self, library.hr_pool_destroy, self._pool)

    def run(
        self,
        ops: int,
        first: int,
        last: int,
        frame: int,
        caches: int,
        source: int = 0,
        in_offset: int = 0,
        num_in_bytes: int = 0,
    ) -> None:
        """Run operations `first` .. `last` - 1 of the list at address `ops`; see hr_dense_run.

        Raises:
            MemoryError: no memory for rows.
        """
        code = self._run(
            self._pool, self._isa, ops, first, last, frame, caches, source, in_offset, num_in_bytes
        )
        if code:
            raise MemoryError(f"the dense part of a layer could not be computed (code {code})")
