"""Blocks of experts for measurements: a layout per format and shape, weights to fill memory with,
and what torch itself has for a format.

Weights are normal numbers with a deviation of 0.02, quantised as the loader quantises; a few tiles
of them are repeated until a block is full, which no cache notices.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, get_args

import torch
from torch.nn import functional

from expert_kernels.dequantising import torch_expert_function
from expert_kernels.reference import TORCH_DTYPE
from expert_store.formats import NAMED_FORMATS
from expert_store.layout import Dtype, ExpertForm, StoreLayout, TensorLayout, make_layout
from expert_store.packing import pack
from expert_store.quantising import quantise

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from expert_store.formats import WeightFormat

    TorchCompute = Callable[[Sequence[dict[str, torch.Tensor]], torch.Tensor], torch.Tensor]

#: What `--formats` takes.
FORMATS = (*get_args(Dtype), *NAMED_FORMATS)
_PATTERN_TILES = 4
_PATTERN_ITEMS = 4 * 1024 * 1024


def layout_of(name: str, shape: tuple[int, int, int], top_k: int) -> StoreLayout:
    """One MoE layer of `shape` (hidden size, intermediate size, experts), gated with SiLU."""
    hidden, intermediate, num_experts = shape
    weights = NAMED_FORMATS.get(name)
    dtype: Dtype = "bfloat16" if weights else name  # type: ignore[assignment]
    return make_layout(
        model_name="benchmark",
        checkpoint_fingerprint="",
        form=ExpertForm(
            hidden_size=hidden,
            intermediate_size=intermediate,
            has_gate=True,
            has_bias=False,
            is_transposed=False,
            is_interleaved=False,
            activation="silu",
            gate="act_mul",
        ),
        dtype=dtype,
        model_layer_ids=(0,),
        num_experts=(num_experts,),
        top_k=min(top_k, num_experts),
        weights=weights,
    )


def fill(memory: torch.Tensor, layout: StoreLayout) -> None:
    """Fill `memory` (uint8) with blocks of that layout, all alike."""
    generator = torch.Generator().manual_seed(0)
    if layout.weights is None:
        values = torch.randn(_PATTERN_ITEMS, generator=generator).mul_(0.02)
        pattern = values.to(TORCH_DTYPE[layout.dtype]).view(torch.uint8)
    else:
        pattern = torch.zeros(layout.block_bytes, dtype=torch.uint8)
        form = layout.form
        for tensor, num_inputs in (
            (layout.tensor("gate_up"), form.hidden_size),
            (layout.tensor("down"), form.intermediate_size),
        ):
            _fill_tensor(pattern, tensor, layout.weights, num_inputs, generator)
    for part in memory.split(pattern.numel()):
        part.copy_(pattern[: part.numel()])


def _fill_tensor(
    block: torch.Tensor,
    tensor: TensorLayout,
    weights: WeightFormat,
    num_inputs: int,
    generator: torch.Generator,
) -> None:
    matrix = torch.randn((16 * _PATTERN_TILES, num_inputs), generator=generator).mul_(0.02)
    tiles = torch.from_numpy(pack(weights, quantise(weights, matrix).matrix)).view(-1)
    part = block[tensor.offset_bytes : tensor.offset_bytes + tensor.num_bytes]
    for some in part.split(tiles.numel()):
        some.copy_(tiles[: some.numel()])


def torch_compute(layout: StoreLayout) -> TorchCompute:
    """torch's way to compute experts, from their tensors, for the same rows.

    Its own linear layers; its packed products for int8 and int4, of as many bytes, whose meaning
    does not change the time; for other formats it has none, and they become float32 first.
    """
    weights = layout.weights
    if weights is None or weights.kind not in ("int8", "int4"):
        function = torch_expert_function(layout)
        return function.run_each
    form, divisor = layout.form, 8 // weights.code_bits
    product = _int8_product if weights.kind == "int8" else _int4_product

    def compute(batch: Sequence[dict[str, torch.Tensor]], x: torch.Tensor) -> torch.Tensor:
        for tensors in batch:
            halves = [
                tensors[name].view(-1)[: outputs * inputs // divisor].view(outputs, -1)
                for name, outputs, inputs in (
                    ("gate_up", form.up_rows, form.hidden_size),
                    ("down", form.hidden_size, form.intermediate_size),
                )
            ]
            gate, up = product(x, halves[0]).chunk(2, dim=-1)
            x_next = functional.silu(gate) * up
            result = product(x_next, halves[1])
        return result

    return compute


def _int8_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    scales = torch.ones(weight.shape[0], dtype=x.dtype)
    return torch.ops.aten._weight_int8pack_mm(x, weight.view(torch.int8), scales)


def _int4_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    outputs, groups = weight.shape[0], weight.shape[1] * 2 // 32
    scales = torch.ones((groups, outputs, 2), dtype=x.dtype)
    return torch.ops.aten._weight_int4pack_mm_for_cpu(x, weight, 32, scales)
