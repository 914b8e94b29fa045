"""A layer whose experts all lie in slots, for one row on a device that is the CPU: one native call.

    look at the table, compute, join, leave a report      expert_kernels/native/resident_layer.h

Python's way through `Exchange` does the same and takes ten times as long beside the experts' own
time. It stays for everything else: several rows, accelerators, no compiler, rows that choose an
expert twice, and layers that miss an expert, which must be asked for.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import torch

from expert_kernels.native import NativeExpertFunction
from expert_kernels.native_library import DTYPES, NativeLibraryError, load_library
from protocol.errors import ProtocolError

if TYPE_CHECKING:
    from expert_kernels.reference import ExpertFunction
    from expert_kernels.step_rows import ActivationViews
    from gpu_worker.slots import SlotViews
    from protocol.residency import ResidencyReader

_CODES = {getattr(torch, name): code for name, code in DTYPES.items()}
_PASSED, _ASK, _NO_MEMORY, _NO_SLOT = 0, 1, 2, 4


class _Layers(ctypes.Structure):
    """HrResidentLayers."""

    _fields_ = (
        ("size_bytes", ctypes.c_int64),
        ("words", ctypes.c_void_p),
        ("table", ctypes.c_void_p),
        ("reports", ctypes.c_void_p),
        ("num_layers", ctypes.c_int64),
        ("num_experts", ctypes.c_int64),
        ("num_reports", ctypes.c_int64),
        ("report_words", ctypes.c_int64),
        ("slots", ctypes.c_void_p),
        ("num_slots", ctypes.c_int64),
        ("slot_bytes", ctypes.c_int64),
        ("places", ctypes.c_void_p),
        ("top_k", ctypes.c_int64),
        ("pool", ctypes.c_void_p),
        ("form", ctypes.c_void_p),
        ("isa", ctypes.c_int64),
        ("epoch", ctypes.c_int64),
        ("step", ctypes.c_int64),
        ("joined_ns", ctypes.c_int64),
    )


class ResidentLayers:
    """Call it for every layer of one row; it says whether it could do the layer."""

    def __init__(
        self,
        function: NativeExpertFunction,
        views: ActivationViews,
        slots: SlotViews,
        table: ResidencyReader,
    ) -> None:
        """`views` and `slots` are those that Python's way reads and writes.

        Raises:
            NativeLibraryError: the library is an older one without this function.
        """
        try:
            self._pass = load_library().hr_pass_layer
        except AttributeError:
            raise NativeLibraryError("they are of an older build") from None
        self._pass.argtypes = [
            ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p,
            ctypes.c_void_p, ctypes.c_int32, ctypes.c_void_p,
        ]  # fmt: skip
        self._pass.restype = ctypes.c_int32
        self._kept = (function, views, slots, table)  # what the pointers point into
        self._dtype = views.hidden.dtype
        self._hidden_size = views.hidden.shape[1]
        self._top_k = views.top_k
        pool, form, isa = function.handles
        memory = slots.memory
        self._layers = _Layers(
            size_bytes=ctypes.sizeof(_Layers),
            slots=memory.data_ptr(),
            num_slots=memory.shape[0],
            slot_bytes=memory.stride(0),
            places=views.places.data_ptr(),
            top_k=views.top_k,
            pool=pool,
            form=form,
            isa=isa,
        )
        for name, value in table.layout().items():
            setattr(self._layers, name, value)
        self._address = ctypes.addressof(self._layers)
        outputs = [
            torch.empty((1, self._hidden_size), dtype=self._dtype)
            for _ in range(self._layers.num_layers)
        ]
        self._outputs = [(output, output.data_ptr()) for output in outputs]

    @classmethod
    def of(
        cls,
        function: ExpertFunction,
        views: ActivationViews,
        slots: SlotViews,
        table: ResidencyReader | None,
    ) -> ResidentLayers | None:
        """None where Python must do it."""
        if table is None or not isinstance(function, NativeExpertFunction):
            return None
        try:
            return cls(function, views, slots, table)
        except NativeLibraryError:
            return None

    @property
    def address(self) -> int:
        """Of the HrResidentLayers, for native code that calls `hr_pass_layer` by itself."""
        return self._address

    @property
    def joined_ns(self) -> int:
        """When the last layer was joined."""
        return int(self._layers.joined_ns)

    @joined_ns.setter
    def joined_ns(self, joined_ns: int) -> None:
        self._layers.joined_ns = joined_ns

    def begin_step(self, epoch: int, step: int) -> None:
        """The layers that follow belong to `step`."""
        self._layers.epoch, self._layers.step, self._layers.joined_ns = epoch, step, 0

    def __call__(
        self,
        layer: int,
        routed_ns: int,
        hidden: torch.Tensor,
        choices: torch.Tensor,
        weights: torch.Tensor,
    ) -> torch.Tensor | None:
        """The output [1, H] of one layer, reported; None if it is to be done in Python. The tensor
        is the layer's own and is written again in the next step: making one costs as much as all
        the rest.

        Args:
            hidden: [1, H], choices: [1, K], weights: [1, K].

        Raises:
            ProtocolError: the table names a slot that does not exist.
        """
        code = _CODES.get(weights.dtype)
        if (
            code is None
            or hidden.numel() != self._hidden_size
            or choices.numel() != self._top_k
            or weights.numel() != self._top_k
            or hidden.dtype is not self._dtype
            or choices.dtype is not torch.int64
            or not (hidden.is_contiguous() and choices.is_contiguous() and weights.is_contiguous())
        ):
            return None
        out, address = self._outputs[layer]
        told: int = self._pass(
            self._address, layer, routed_ns,
            hidden.data_ptr(), choices.data_ptr(), weights.data_ptr(), code, address,
        )  # fmt: skip
        if told == _PASSED:
            return out
        if told == _ASK:
            return None
        if told == _NO_SLOT:
            raise ProtocolError(f"the table of layer {layer} names a slot that does not exist")
        if told == _NO_MEMORY:
            raise MemoryError(f"no memory for the rows of layer {layer}")
        raise TypeError(f"layer {layer} is not computed natively (code {told})")
