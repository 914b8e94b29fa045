"""The join of a layer-step by the native library: one call instead of a dozen torch operations.

The same additions in the same order as gpu_worker.rows.weighted_sum, each rounded to float32.
"""

from __future__ import annotations

import ctypes

import torch

from expert_kernels.native_library import DTYPES, NativeLibraryError, WeightedSum, load_library

_CODES = {getattr(torch, name): code for name, code in DTYPES.items()}


class NativeJoin:
    """Call it like `weighted_sum`, from one thread.

    Raises:
        NativeLibraryError: there is no library, or an older one without this function.
    """

    def __init__(self) -> None:
        try:
            self._run = load_library().hr_weighted_sum
        except AttributeError:
            raise NativeLibraryError("they are of an older build") from None
        self._run.argtypes, self._run.restype = [ctypes.c_void_p], ctypes.c_int32
        self._sum = WeightedSum()
        self._address = ctypes.addressof(self._sum)

    def __call__(
        self, rows: torch.Tensor, weights: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        """[n, H] in `dtype`: sum of weights[:, k] * rows[:, k], k ascending; `rows` float32
        [n, K, H] and contiguous, `weights` [n, K]."""
        num_rows, top_k, hidden_size = rows.shape
        weights = weights.contiguous()
        out = torch.empty((num_rows, hidden_size), dtype=dtype)
        call = self._sum
        call.rows, call.weights, call.out = rows.data_ptr(), weights.data_ptr(), out.data_ptr()
        call.num_rows, call.top_k, call.hidden_size = num_rows, top_k, hidden_size
        call.weights_dtype, call.out_dtype = _CODES[weights.dtype], _CODES[dtype]
        if self._run(self._address):
            raise TypeError(f"rows are not joined from {weights.dtype} into {dtype}")
        return out
