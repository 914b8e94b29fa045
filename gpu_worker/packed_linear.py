"""Large linear layers of the dense part with quantised weights: what `--dense-dtype` asks for.

`pack_linears` puts a `PackedLinear` in place of every large linear layer. Its forward is one
registered operation, `headrace::packed_linear`, which runs the native kernels of quantised experts,
for any number of rows: a prompt and a single token meet the same function. A recording of the model
sees the operation, and the native decode step runs it as one of its own.

What is quantised, says expert_store.dense_linears; formats are those of docs/expert-formats.md.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import torch

from expert_kernels.dequantising import dequantise_tiles
from expert_kernels.native_dense import OP_CODES, VALUES, Op, format_number
from expert_store.dense_linears import large_linears, pack_matrix
from expert_store.expert_dtype import parse_expert_dtype

if TYPE_CHECKING:
    from expert_kernels.native_dense import DenseKernels, Operand
    from expert_store.formats import WeightFormat

_library = torch.library.Library("headrace", "FRAGMENT")
_library.define(
    "packed_linear(Tensor x, Tensor tiles, Tensor? bias, int num_outputs, str format) -> Tensor"
)
#: What the operation runs on: an operation cannot carry it, and a process has one.
_kernels_in_use: list[DenseKernels] = []


class PackedLinear(torch.nn.Module):
    """A linear layer [*, inputs] -> [*, outputs] of weights in `name`'s format."""

    def __init__(self, linear: torch.nn.Linear, name: str) -> None:
        super().__init__()
        weights = format_of(name)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self._name = name
        self._dtype = linear.weight.dtype
        self.register_buffer(
            "tiles", torch.from_numpy(pack_matrix(weights, linear.weight.detach()))
        )
        self.register_buffer("bias", None if linear.bias is None else linear.bias.detach())

    @property
    def weight(self) -> torch.Tensor:
        """[outputs, inputs] in the model's dtype, made anew: for code that looks at weights."""
        assert isinstance(self.tiles, torch.Tensor)
        found = dequantise_tiles(
            format_of(self._name), self.tiles, self.out_features, self.in_features
        )
        return found.to(self._dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = torch.ops.headrace.packed_linear(
            x, self.tiles, self.bias, self.out_features, self._name
        )
        return found


def format_of(name: str) -> WeightFormat:
    """The format that --dense-dtype names."""
    weights = parse_expert_dtype(name)
    assert weights is not None, "floats are not packed"
    return weights


def pack_linears(model: torch.nn.Module, name: str, kernels: DenseKernels) -> int:
    """Quantise the large linear layers of `model` to the format `name`; how many there were."""
    _kernels_in_use[:] = [kernels]
    paths = [path for path, _ in large_linears(model)]
    for path in paths:  # one by one: the floats of each are let go before the next is made
        owner, _, leaf = path.rpartition(".")
        module = model.get_submodule(owner)
        setattr(module, leaf, PackedLinear(getattr(module, leaf), name))
    return len(paths)


def _packed_linear(
    x: torch.Tensor, tiles: torch.Tensor, bias: torch.Tensor | None, num_outputs: int, name: str
) -> torch.Tensor:
    rows = x.reshape(-1, x.shape[-1])
    out = x.new_empty(*x.shape[:-1], num_outputs)
    op = Op(code=OP_CODES["packed_linear"], num_dims=3)
    op.sizes[:3] = [rows.shape[0], num_outputs, rows.shape[1]]
    op.n, op.m = format_number(format_of(name)), tiles.data_ptr()
    _lay(op.out, out.view(-1, num_outputs))
    _lay(op.a, rows)
    _lay(op.b, None)
    _lay(op.c, bias)
    if len(rows):
        _kernels_in_use[0].run(ctypes.addressof(op), 0, 1, 0, 0)
    return out


def _lay(operand: Operand, tensor: torch.Tensor | None) -> None:
    if tensor is None:
        operand.dtype = -1
        return
    operand.offset, operand.dtype = tensor.data_ptr(), VALUES[tensor.dtype]
    operand.strides[: tensor.dim()] = list(tensor.stride())


_library.impl("packed_linear", _packed_linear, "CompositeExplicitAutograd")
