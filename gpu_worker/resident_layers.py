"""Layers of one row on a device that is the CPU, natively: expert_kernels/native/resident_layer.h.

    all experts in slots    look at the table, compute, join, leave a report: one call
    else                    look, publish the row; then, one call each, compute what lies in slots
                            as it comes, and join

Python's way (gpu_worker.rows) does the same and takes ten times as long beside the experts' own
time. It stays for everything else: several rows, accelerators, no compiler, and rows that choose an
expert twice.
"""

from __future__ import annotations

import ctypes
import time
from typing import TYPE_CHECKING, Literal

import torch

from expert_kernels.native import NativeExpertFunction
from expert_kernels.native_library import DTYPES, NativeLibraryError, load_library
from protocol.errors import ProtocolError
from protocol.messages import ExpertId, SlotId
from protocol.residency import NO_SLOT

if TYPE_CHECKING:
    from collections.abc import Sequence

    from expert_kernels.reference import ExpertFunction
    from expert_kernels.step_rows import ActivationViews
    from gpu_worker.slots import SlotViews
    from protocol.residency import ResidencyReader

_CODES = {getattr(torch, name): code for name, code in DTYPES.items()}
_PASSED, _ASK, _NO_MEMORY, _NO_SLOT, _ROUTED = 0, 1, 2, 4, 5
_MAX_TOP_K = 64


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
        ("hidden_row", ctypes.c_void_p),
        ("choices_row", ctypes.c_void_p),
        ("header", ctypes.c_void_p),
        ("pool", ctypes.c_void_p),
        ("form", ctypes.c_void_p),
        ("isa", ctypes.c_int64),
        ("epoch", ctypes.c_int64),
        ("step", ctypes.c_int64),
        ("joined_ns", ctypes.c_int64),
        ("starts_some", ctypes.c_int64),
        ("seen", ctypes.c_int32 * _MAX_TOP_K),
    )


class ResidentLayers:
    """Call `begin` for every layer of one row; if that says "routed", others must compute a part,
    and this object is the layer's `Rows` (gpu_worker.rows) up to its join."""

    def __init__(
        self,
        function: NativeExpertFunction,
        views: ActivationViews,
        slots: SlotViews,
        table: ResidencyReader,
    ) -> None:
        """`views` and `slots` are those that Python's way reads and writes.

        Raises:
            NativeLibraryError: the library is an older one without these functions.
        """
        try:
            library = load_library()
            self._pass = library.hr_pass_layer
            self._compute = library.hr_compute_choices
            self._join = library.hr_join_row
        except AttributeError:
            raise NativeLibraryError("they are of an older build") from None
        address, number = ctypes.c_void_p, ctypes.c_int64
        self._pass.argtypes = [
            address, number, number, address, address, address, ctypes.c_int32, address,
        ]  # fmt: skip
        self._compute.argtypes = [address, address, number, address, address, number]
        self._join.argtypes = [address, address, ctypes.c_int32, address]
        self._pass.restype = self._compute.restype = self._join.restype = ctypes.c_int32
        self._kept = (function, views, slots, table)  # what the pointers point into
        self._dtype = views.hidden.dtype
        self._hidden_size = views.hidden.shape[1]
        self._top_k = views.top_k
        pool, form, isa = function.handles
        self._num_threads = function.num_threads
        memory = slots.memory
        self._layers = _Layers(
            size_bytes=ctypes.sizeof(_Layers),
            slots=memory.data_ptr(),
            num_slots=memory.shape[0],
            slot_bytes=memory.stride(0),
            places=views.places.data_ptr(),
            top_k=views.top_k,
            hidden_row=views.hidden.data_ptr(),
            choices_row=views.choices.data_ptr(),
            header=ctypes.addressof(ctypes.c_char.from_buffer(views.header)),
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
        #: Of the layer that was routed: its input, and the number of each expert's choice.
        self._hidden = outputs[0]
        self._layer = 0
        self._choice_of: dict[int, int] = {}
        self._computed_ns = 0

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
    def joined_ns(self) -> int:
        """When the last layer was joined."""
        return int(self._layers.joined_ns)

    @joined_ns.setter
    def joined_ns(self, joined_ns: int) -> None:
        self._layers.joined_ns = joined_ns

    def begin_step(self, epoch: int, step: int, *, starts_some: bool) -> None:
        """The layers that follow belong to `step`. `starts_some`: what lies in slots may be
        computed from the table even if the layer must be asked for."""
        layers = self._layers
        layers.epoch, layers.step, layers.joined_ns = epoch, step, 0
        layers.starts_some = starts_some

    def begin(
        self,
        layer: int,
        routed_ns: int,
        hidden: torch.Tensor,
        choices: torch.Tensor,
        weights: torch.Tensor,
    ) -> torch.Tensor | Literal["routed"] | None:
        """The output [1, H] of one layer, reported, if all its experts lie in slots; "routed" if
        not, and the row is published; None if nothing was done, and Python must do it. The tensor
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
        if told == _ROUTED:
            self._hidden, self._layer = hidden, layer
            self._choice_of = dict(zip(choices.tolist()[0], range(self._top_k), strict=True))
            return "routed"
        if told == _ASK:
            return None
        if told == _NO_SLOT:
            raise ProtocolError(f"the table of layer {layer} names a slot that does not exist")
        raise self._fault(told)

    def _fault(self, code: int) -> Exception:
        if code == _NO_MEMORY:
            return MemoryError("no memory for the rows of a layer")
        return TypeError(f"experts are not computed natively (code {code})")

    # ---- of a routed layer ----

    @property
    def counts(self) -> dict[ExpertId, int]:
        """Rows per chosen expert, in the router's order."""
        return dict.fromkeys(map(ExpertId, self._choice_of), 1)

    @property
    def seen(self) -> dict[ExpertId, SlotId]:
        """The slots of what may be computed from the table now."""
        return {
            ExpertId(expert): SlotId(slot)
            for expert, slot in zip(self._choice_of, self._layers.seen, strict=False)
            if slot != NO_SLOT
        }

    def compute(
        self, experts: Sequence[ExpertId], slots: Sequence[SlotId], num_elsewhere: int = 0
    ) -> None:
        """See gpu_worker.rows.Rows. The processors are shared with who computes `num_elsewhere`:
        threads of two processes on one core only wait for each other."""
        count = len(experts)
        most = 0
        if num_elsewhere:
            most = max(round(self._num_threads * count / (count + num_elsewhere)), 1)
        ks = (ctypes.c_int64 * count)(*[self._choice_of[expert] for expert in experts])
        told = self._compute(
            self._address, self._hidden.data_ptr(), count, ks, (ctypes.c_int32 * count)(*slots),
            most,
        )  # fmt: skip
        if told != _PASSED:
            raise self._fault(told)
        self._computed_ns = time.monotonic_ns()

    def wait_computed(self) -> int:
        """See gpu_worker.rows.Rows."""
        return self._computed_ns

    def join(self, weights: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """See gpu_worker.rows.Rows; `weights` and `dtype` as they were given to `begin`."""
        out, address = self._outputs[self._layer]
        told = self._join(self._address, weights.data_ptr(), _CODES[weights.dtype], address)
        if told != _PASSED:
            raise self._fault(told)
        return out
