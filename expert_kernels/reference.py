"""One expert on some rows, computed with torch, with the same bits wherever it runs.

For a row x:  y = W2 · gate(W1 · x + b1) + b2,  products and gate in the weights' dtype, as
transformers computes them; the result row is then widened to float32, in which rows are joined.

The bits are the same in every process because everything that could change them is fixed:

- one expert is computed by one thread: callers set torch's intra-op threads to 1 in every thread
  that computes (`use_one_thread`); parallelism is over experts, never inside one;
- all rows that chose the expert go in one call, in ascending row order: a matrix product of
  another shape may add in another order;
- inputs and weights are contiguous and begin on a cache line (64 bytes), in a block of the store
  and in a slot alike: kernels may peel differently at other alignments.

What is not fixed is the machine: another CPU, torch build or device rounds differently.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from expert_kernels.activations import activation
from expert_kernels.step_rows import run_expert

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from expert_kernels.step_rows import StepRows
    from expert_store.layout import ExpertForm, StoreLayout, TensorDtype

TORCH_DTYPE: dict[TensorDtype, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "uint8": torch.uint8,
}


def use_one_thread() -> None:
    """Let the calling thread compute alone. The setting is per thread and per process: every
    thread that computes experts calls this before its first operation."""
    torch.set_num_threads(1)


class ExpertFunction:
    """The function of every expert of one store, in torch: the fallback, and the one for devices.

    `takes_whole_steps`: whether `run_step` shares its work out over threads of its own; where it
    does not, callers may compute experts side by side. `isa`: the instruction set, or "torch".

    Raises:
        UserError: the store's activation is unknown here.
    """

    takes_whole_steps = False
    isa = "torch"

    def __init__(self, layout: StoreLayout) -> None:
        form = layout.form
        self.layout = layout
        self.hidden_size = form.hidden_size
        self.dtype = TORCH_DTYPE[layout.dtype]
        self._first_name = "gate_up" if form.has_gate else "up"
        self._first_bias_name = f"{self._first_name}_bias"
        self._has_bias = form.has_bias
        self._gate = _gate(form)
        self._linear = _transposed_linear if form.is_transposed else functional.linear
        self._views = [
            (
                tensor.name,
                tensor.offset_bytes,
                tensor.offset_bytes + tensor.num_bytes,
                TORCH_DTYPE[tensor.dtype],
                tensor.shape,
            )
            for tensor in layout.tensors
        ]

    def tensors_of(self, block: torch.Tensor) -> dict[str, torch.Tensor]:
        """The tensors in `block` (uint8 [>= block_bytes], 64-byte aligned): views, no copies.

        Callers keep the result: making it costs as much as computing a small expert.
        """
        return {
            name: block[start:end].view(dtype).view(shape)
            for name, start, end, dtype, shape in self._views
        }

    def __call__(self, tensors: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        """float32 [n, hidden_size], contiguous, for `x` [n, hidden_size] in the store's dtype."""
        if self._has_bias:
            middle = self._linear(x, tensors[self._first_name], tensors[self._first_bias_name])
            result = self._linear(self._gate(middle), tensors["down"], tensors["down_bias"])
        else:
            middle = self._linear(x, tensors[self._first_name])
            result = self._linear(self._gate(middle), tensors["down"])
        return result if result.dtype is torch.float32 else result.float()

    def run_step(
        self,
        step_rows: StepRows,
        experts: Sequence[int],
        tensors: Sequence[dict[str, torch.Tensor]],
    ) -> None:
        """Compute `experts`, each from its `tensors`, for the rows that chose it, into their
        places; an expert that no row chose is passed over."""
        for expert, of_expert in zip(experts, tensors, strict=True):
            run_expert(self, of_expert, step_rows, expert)

    def run_each(self, tensors: Sequence[dict[str, torch.Tensor]], x: torch.Tensor) -> torch.Tensor:
        """float32 [num_experts, n, hidden_size]: each of the experts on the same rows `x`."""
        return torch.stack([self(of_expert, x) for of_expert in tensors])


def _transposed_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """x [n, inputs] @ weight [inputs, outputs], rounded to the dtype before the bias is added."""
    product = torch.mm(x, weight)
    return product if bias is None else product.add_(bias)


def _gate(form: ExpertForm) -> Callable[[torch.Tensor], torch.Tensor]:
    """[n, up_rows] -> [n, intermediate_size], contiguous; `expert_store.layout.GateKind`."""
    if form.gate == "act":
        return activation(form.activation)
    if form.gate == "alpha_swiglu":
        alpha, limit = form.alpha, form.limit
        assert alpha is not None, "the layout was checked to have it"
        assert limit is not None, "the layout was checked to have it"

        def combine(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
            gate = gate.clamp(max=limit)
            up = up.clamp(min=-limit, max=limit)
            return (up + 1) * (gate * torch.sigmoid(gate * alpha))

    elif form.gate == "clamped_act_mul":
        act, bound = activation(form.activation), form.limit
        assert bound is not None, "the layout was checked to have a limit"

        def combine(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
            return act(gate.clamp(max=bound)) * up.clamp(min=-bound, max=bound)

    else:
        plain_act = activation(form.activation)

        def combine(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
            return plain_act(gate) * up

    if form.is_interleaved:
        return lambda middle: combine(middle[:, ::2], middle[:, 1::2]).contiguous()
    return lambda middle: combine(*middle.chunk(2, dim=-1)).contiguous()
