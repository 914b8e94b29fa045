"""The compiled form of what the policy `reuse` learns per layer-step.

The core knows no libraries: it is handed a kernel that works on its arrays (LearnKernel there). The
library is built with the project where there is a C++ compiler; without it numpy does the same,
some ten times slower. Worths agree to the fourth digit, not to the last bit.
"""

from __future__ import annotations

import ctypes
import functools
import sys
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from orchestrator.core.reuse import LearnArrays

LIBRARY_NAME = "headrace_reuse.so"
_VERSION = 1


class _Reuse(ctypes.Structure):
    """HrReuse of native/reuse.cpp."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in (
            "num_layers", "num_experts", "num_tables", "top_k", "max_chosen", "reserved",
        )),
        *((name, ctypes.c_void_p) for name in ("state", "decay", "floors", "weights")),
        *((name, ctypes.c_double) for name in (
            "odds_factor", "discount", "discount_tokens", "table_prior", "evidence_floor",
            "evidence_weight", "least_product",
        )),
        *((name, ctypes.c_void_p) for name in (
            "tables", "pairs", "num_choices", "latest", "sources", "is_placed", "worth", "rank",
            "odds", "products",
        )),
    )  # fmt: skip


class NativeKernel:
    """Learns in the library. One serves any number of policies."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._learn = library.hr_reuse_learn

    def bind(self, arrays: LearnArrays) -> Callable[[int, Sequence[int], float], None]:
        """`learn(layer, chosen, tick)` on these arrays, which are kept alive by it."""
        values = arrays._asdict()
        reuse = _Reuse()
        for field in _Reuse._fields_:
            name, kind = field[0], field[1]
            if name != "reserved":
                value = values[name]
                setattr(reuse, name, value.ctypes.data if kind is ctypes.c_void_p else value)
        learn, pointer = self._learn, ctypes.byref(reuse)
        room = (ctypes.c_int32 * arrays.num_experts)()
        held = (arrays, reuse)

        def learn_one(layer: int, chosen: Sequence[int], tick: float) -> None:
            count = len(chosen)
            room[:count] = list(chosen)
            learn(pointer, layer, room, count, tick)

        learn_one.held = held  # type: ignore[attr-defined]
        return learn_one


@functools.cache
def load_kernel() -> NativeKernel | None:
    """The kernel of this installation; None where there is none, or one of another release."""
    roots = [Path(__file__).parent.parent]
    roots += [Path(sysconfig.get_paths()[key]) for key in ("platlib", "purelib")]
    roots += [Path(entry) for entry in sys.path if entry.endswith("-packages")]
    for path in (root / "orchestrator" / "native" / LIBRARY_NAME for root in roots):
        if not path.is_file():
            continue
        try:
            library = ctypes.CDLL(str(path))
            if library.hr_reuse_version() != _VERSION:
                return None
        except (OSError, AttributeError):
            return None
        library.hr_reuse_learn.argtypes = [
            ctypes.c_void_p, ctypes.c_int32, ctypes.c_void_p, ctypes.c_int32, ctypes.c_double,
        ]  # fmt: skip
        library.hr_reuse_learn.restype = None
        return NativeKernel(library)
    return None
