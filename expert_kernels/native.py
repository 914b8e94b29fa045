"""Experts computed by the native kernels: the function of reference.py at the speed of memory.

**One call is one layer-step**: all experts asked for, all their rows, as one parallel job over a
pool of threads of the library's own (native/pool.h). Python's lock is released meanwhile.

**Bits.** A result row depends on the weights, the row and the form alone: sums are float32, in an
order that native/kernels.h states, the same for every number of threads and rows, at every address,
and on every instruction set but two: `avx512_bf16` and `amx` multiply bfloat16 weights (those not
transposed) in orders of their own. Two processes of one machine therefore agree whatever threads
each was given, as long as both compute natively and `max_isa` is the same; with torch the last bits
differ.

**Rounding** follows transformers' eager experts, so that tokens are theirs: 16-bit weights and
inputs are widened exactly, products are summed in float32, and what torch rounds to the dtype is
rounded here: each projection (with transposed weights before and after its bias, else after), and
every operation of activation and gate. What remains is the order of the additions and the last bit
of exp, tanh and erf.
"""

from __future__ import annotations

import ctypes
import logging
import threading
import weakref
from typing import TYPE_CHECKING, Literal

import torch

from expert_kernels.dequantising import torch_expert_function
from expert_kernels.native_library import (
    NativeLibraryError,
    Step,
    form_of,
    load_library,
    usable_isas,
)
from expert_kernels.reference import ExpertFunction

if TYPE_CHECKING:
    from collections.abc import Sequence

    from expert_kernels.step_rows import StepRows
    from expert_store.layout import StoreLayout

log = logging.getLogger("headrace")

#: As in protocol.worker_flags. "torch": nothing native; those of other processors do no harm.
MaxIsa = Literal[
    "torch", "scalar", "avx2", "avx512", "avx512_vnni", "avx512_bf16", "amx", "neon", "best"
]
_RANK = {
    "scalar": 0,
    "neon": 1,
    "avx2": 1,
    "avx512": 2,
    "avx512_vnni": 3,
    "avx512_bf16": 4,
    "amx": 5,
    "best": 9,
}

#: How long an idle thread of the pool looks for work before it sleeps. About what waking it costs.
SPIN_US = 20

_is_slowness_told = False


def make_expert_function(
    layout: StoreLayout, *, max_isa: MaxIsa = "best", num_threads: int = 1
) -> ExpertFunction:
    """The fastest function for this store here: native where that can be had, else torch's.

    Args:
        layout: of the store whose blocks (or slots with copies of them) will be computed.
        max_isa: the most that may be used of the processor; "torch" for no native code at all.
        num_threads: of the native function, the calling one included. torch's has one.

    Raises:
        UserError: the store's activation is unknown.
    """
    global _is_slowness_told
    if max_isa == "torch":
        return torch_expert_function(layout)
    try:
        return NativeExpertFunction(layout, max_isa=max_isa, num_threads=num_threads)
    except NativeLibraryError as error:
        if not _is_slowness_told:
            _is_slowness_told = True
            log.warning(
                "experts run on torch, at a fraction of the memory's speed: the native kernels "
                "cannot be used, %s",
                error,
            )
        return torch_expert_function(layout)


def isa_number(library: ctypes.CDLL, max_isa: MaxIsa) -> int:
    """The number, for the library, of the best instruction set up to `max_isa`."""
    names = usable_isas(library)
    return max(number for number, name in enumerate(names) if _RANK[name] <= _RANK[max_isa])


class _BlockTensors(dict[str, torch.Tensor]):
    """The tensors of a block, and where it begins."""

    __slots__ = ("address",)
    address: int


class _StepNumbers:
    """The numbers of a step where the library reads them: one array that is kept from call to call.

    Weights have emptied the caches by the time of the next call, so that everything Python touches
    then comes from memory: four new arrays and a new description took 50 us of a call of 600.
    """

    def __init__(self) -> None:
        self._step = Step()
        self._shape = (-1, -1)
        self._numbers: ctypes.Array[ctypes.c_int64] = (ctypes.c_int64 * 0)()
        self.reference = ctypes.byref(self._step)

    def write(
        self,
        blocks: list[int],
        pair_begin: list[int],
        row_ids: list[int],
        place_ids: list[int],
        hidden: int,
        places: int,
    ) -> None:
        if (len(blocks), len(row_ids)) != self._shape:
            self._lay_out(len(blocks), len(row_ids))
        self._numbers[:] = [*blocks, *pair_begin, *row_ids, *place_ids]
        self._step.hidden, self._step.places = hidden, places

    def _lay_out(self, num_experts: int, num_pairs: int) -> None:
        self._shape = num_experts, num_pairs
        self._numbers = (ctypes.c_int64 * (2 * num_experts + 1 + 2 * num_pairs))()
        step, start, size = self._step, ctypes.addressof(self._numbers), 8
        step.num_experts = num_experts
        step.blocks = start
        step.pair_begin = start + size * num_experts
        step.row_ids = start + size * (2 * num_experts + 1)
        step.place_ids = start + size * (2 * num_experts + 1 + num_pairs)


class NativeExpertFunction(ExpertFunction):
    """See `ExpertFunction`. Use from one thread at a time; others wait.

    `isa` is the instruction set in use.

    Raises:
        NativeLibraryError: no library, no threads, or a form that it does not know.
        UserError: the store's activation is unknown.
    """

    takes_whole_steps = True

    def __init__(
        self, layout: StoreLayout, *, max_isa: MaxIsa = "best", num_threads: int = 1
    ) -> None:
        super().__init__(layout)
        self._library = load_library()
        self._form = form_of(layout)
        self.isa_number = isa_number(self._library, max_isa)
        self.isa = usable_isas(self._library)[self.isa_number]
        self.num_threads = num_threads
        pool = self._library.hr_pool_create(num_threads, SPIN_US)
        if not pool:
            raise NativeLibraryError(f"{num_threads} threads could not be started")
        #: Address of the threads (HrPool), valid as long as this object lives.
        self.pool = ctypes.c_void_p(pool)
        self._first_offset = self._form.first_offset
        self._form_reference = ctypes.byref(self._form)
        self._numbers = _StepNumbers()
        self._one_caller = threading.Lock()
        self.close = weakref.finalize(self, self._library.hr_pool_destroy, self.pool)

    @property
    def handles(self) -> tuple[int, int, int]:
        """What hr_run takes beside a step: addresses of pool and form, which live as long as this,
        and the number of the instruction set."""
        return self.pool.value or 0, ctypes.addressof(self._form), self.isa_number

    def tensors_of(self, block: torch.Tensor) -> dict[str, torch.Tensor]:
        tensors = _BlockTensors(super().tensors_of(block))
        tensors.address = block.data_ptr()
        return tensors

    def __call__(self, tensors: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return self.run_each([tensors], x)[0]

    def run_each(
        self,
        tensors: Sequence[dict[str, torch.Tensor]],
        x: torch.Tensor,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`out`: where the result is to lie, else in new memory."""
        num_experts, num_rows = len(tensors), x.shape[0]
        if out is None:
            out = torch.empty((num_experts, num_rows, self.hidden_size), dtype=torch.float32)
        self._run(
            [self._address(of_expert) for of_expert in tensors],
            [num_rows * e for e in range(num_experts + 1)],
            list(range(num_rows)) * num_experts,
            list(range(num_rows * num_experts)),
            x if x.is_contiguous() else x.contiguous(),
            out,
        )
        return out

    def run_step(
        self,
        step_rows: StepRows,
        experts: Sequence[int],
        tensors: Sequence[dict[str, torch.Tensor]],
    ) -> None:
        views = step_rows.views
        blocks: list[int] = []
        pair_begin = [0]
        row_ids: list[int] = []
        place_ids: list[int] = []
        for expert, of_expert in zip(experts, tensors, strict=True):
            choice = step_rows.choice_of.get(expert)
            if choice is not None:
                row_ids.append(0)
                place_ids.append(choice)
            elif (found := step_rows.by_expert.get(expert)) is not None:
                row_ids += found[0].tolist()
                place_ids += found[1].tolist()
            else:
                continue
            blocks.append(self._address(of_expert))
            pair_begin.append(len(row_ids))
        self._run(blocks, pair_begin, row_ids, place_ids, step_rows.hidden, views.places)

    def read(
        self, memory: torch.Tensor, num_streams: int, ahead_bytes: int, farther_bytes: int = 0
    ) -> int:
        """A checksum of `memory` (uint8): reading alone, with all threads, for comparison.
        `num_streams`, `ahead_bytes`, `farther_bytes`: see hr_read."""
        num_bytes = memory.numel()
        way = (num_streams, ahead_bytes, farther_bytes)
        return int(self._library.hr_read(self.pool, memory.data_ptr(), num_bytes, *way))

    def _address(self, tensors: dict[str, torch.Tensor]) -> int:
        """Where the block begins that these tensors are views of."""
        if isinstance(tensors, _BlockTensors):
            return tensors.address
        return tensors[self._first_name].data_ptr() - self._first_offset

    def _run(
        self,
        blocks: list[int],
        pair_begin: list[int],
        row_ids: list[int],
        place_ids: list[int],
        hidden: torch.Tensor,
        places: torch.Tensor,
    ) -> None:
        with self._one_caller:
            self._numbers.write(
                blocks, pair_begin, row_ids, place_ids, hidden.data_ptr(), places.data_ptr()
            )
            code = self._library.hr_run(
                self.pool, self._form_reference, self.isa_number, self._numbers.reference
            )
        if code:
            raise MemoryError(f"no memory for the rows of {len(blocks)} experts (code {code})")
