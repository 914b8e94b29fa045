"""Quantised experts in torch: what stands in where no native kernel reads a format, and on devices.

Every call turns the whole expert into float32 first, so it costs several times what reading 16-bit
weights would; the worker says so once. Sums are float32 sums of float32 products; each projection
is then rounded to the dtype of the rows, as `reference.ExpertFunction` does. The values are exactly
those of `expert_store.packing.dequantise`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from expert_kernels.reference import ExpertFunction
from expert_store.formats import SCALE_BYTES, TILE_OUTPUTS
from expert_store.packing import E2M1_VALUES

if TYPE_CHECKING:
    from expert_store.formats import WeightFormat
    from expert_store.layout import StoreLayout

_SCALE_DTYPE = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "e4m3": torch.float8_e4m3fn,
}


class DequantisingExpertFunction(ExpertFunction):
    """See `ExpertFunction`; for stores with `layout.weights`."""

    def __init__(self, layout: StoreLayout) -> None:
        super().__init__(layout)
        assert layout.weights is not None, "plain stores have a plain function"
        self._weights = layout.weights
        self._inputs = {
            self._first_name: layout.form.hidden_size,
            "down": layout.form.intermediate_size,
        }
        self._outputs = {
            self._first_name: layout.form.intermediate_size,
            "down": layout.form.hidden_size,
        }

    def __call__(self, tensors: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        middle = self._project(tensors, self._first_name, x)
        return self._project(tensors, "down", self._gate(middle)).float()

    def matrix(self, tensors: dict[str, torch.Tensor], name: str) -> torch.Tensor:
        """float32 [outputs, inputs] of the weights `name`: all gates, then all ups."""
        tiles = tensors[name]
        halves = [
            dequantise_tiles(self._weights, tiles[:, way], self._outputs[name], self._inputs[name])
            for way in range(tiles.shape[1])
        ]
        return halves[0] if len(halves) == 1 else torch.cat(halves)

    def _project(
        self, tensors: dict[str, torch.Tensor], name: str, x: torch.Tensor
    ) -> torch.Tensor:
        bias = tensors[f"{name}_bias"].float() if self._has_bias else None
        return functional.linear(x.float(), self.matrix(tensors, name), bias).to(self.dtype)


def torch_expert_function(layout: StoreLayout) -> ExpertFunction:
    """The function of this store's experts in torch, on whatever device its tensors lie.

    Raises:
        UserError: the store's activation is unknown.
    """
    return ExpertFunction(layout) if layout.weights is None else DequantisingExpertFunction(layout)


def dequantise_tiles(
    weights: WeightFormat, tiles: torch.Tensor, num_outputs: int, num_inputs: int
) -> torch.Tensor:
    """float32 [num_outputs, num_inputs] of packed tiles, uint8 [tiles, tile_bytes]."""
    count, num_groups = tiles.shape[0], weights.num_groups(num_inputs)
    per_record = weights.groups_per_record
    num_full, num_last = divmod(num_groups, per_record)
    full_bytes = weights.record_scale_bytes + per_record * weights.group_code_bytes
    body = tiles[:, weights.header_bytes :]
    parts = []
    if num_full:
        records = body[:, : num_full * full_bytes].reshape(count, num_full, full_bytes)
        parts.append(_groups_of(weights, records, per_record))
    if num_last:
        parts.append(_groups_of(weights, body[:, None, num_full * full_bytes :], num_last))
    values = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
    result = values.transpose(1, 2).reshape(count * TILE_OUTPUTS, -1)
    if weights.has_output_scales:
        header = tiles[:, : weights.header_bytes].contiguous().view(torch.float32)
        result *= header.reshape(-1, 1)
    return result[:num_outputs, :num_inputs]


def _groups_of(weights: WeightFormat, records: torch.Tensor, num_groups: int) -> torch.Tensor:
    """float32 [tiles, groups, 16, group_size] of records [tiles, records, bytes], each with
    `num_groups` groups."""
    count = records.shape[0]
    scale_bytes = num_groups * TILE_OUTPUTS * SCALE_BYTES[weights.scale]
    scales = _scales_of(weights, records[..., :scale_bytes].contiguous())
    begin = weights.record_scale_bytes
    codes = records[..., begin : begin + num_groups * weights.group_code_bytes]
    lines = codes.reshape(count, -1, weights.group_code_bytes // 64, TILE_OUTPUTS, 4)
    if weights.code_bits == 4:
        lines = torch.stack([lines & 15, lines >> 4], dim=4)  # low half: the first four inputs
    ordered = lines.movedim(3, 2).reshape(count, -1, TILE_OUTPUTS, weights.group_size)
    values = _values_of(weights, ordered)
    if weights.kind == "int4":
        if weights.has_zero_points:
            begin -= weights.groups_per_record * TILE_OUTPUTS
            zeros = records[..., begin : begin + num_groups * TILE_OUTPUTS]
            values = values - zeros.reshape(count, -1, TILE_OUTPUTS, 1).float()
        else:
            values = values - 8
    return values * scales.reshape(count, -1, TILE_OUTPUTS, 1)


def _values_of(weights: WeightFormat, codes: torch.Tensor) -> torch.Tensor:
    if weights.kind == "int8":
        return codes.contiguous().view(torch.int8).float()
    if weights.kind == "int4":
        return codes.float()
    if weights.kind == "fp8":
        return codes.contiguous().view(torch.float8_e4m3fn).float()
    return torch.from_numpy(E2M1_VALUES).to(codes.device)[codes.int()]


def _scales_of(weights: WeightFormat, raw: torch.Tensor) -> torch.Tensor:
    """float32 of scales as stored."""
    if weights.scale == "e8m0":
        return torch.exp2(raw.float() - 127)
    return raw.view(_SCALE_DTYPE[weights.scale]).float()
