"""Quantised matrices in numpy: into the store's tiles, out of them, and back to float32.

This is the definition that the native kernels are tested against, and what a loader packs with; it
is written for clearness and whole matrices at once. Bytes: `expert_store.formats`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from expert_store.formats import TILE_OUTPUTS, ScaleKind, WeightFormat, num_tiles

if TYPE_CHECKING:
    from collections.abc import Iterator

Array = npt.NDArray[Any]

#: As stored. bfloat16, e8m0 and e4m3 are raw bits, for numpy has no such numbers.
SCALE_DTYPE: dict[ScaleKind, type[np.generic]] = {
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": np.uint16,
    "e8m0": np.uint8,
    "e4m3": np.uint8,
}
#: e2m1 codes 0 .. 15.
E2M1_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6] * 2, np.float32)
E2M1_VALUES[8:] *= -1


def _e4m3_values() -> npt.NDArray[np.float32]:
    codes = np.arange(256)
    exponent, fraction = codes >> 3 & 15, codes & 7
    normal = np.ldexp(1 + fraction / 8, exponent - 7)
    values = np.where(exponent == 0, np.ldexp(fraction / 8, -6), normal)
    values[codes & 0x7F == 0x7F] = np.nan
    return np.where(codes & 0x80, -values, values).astype(np.float32)


#: e4m3 codes 0 .. 255.
E4M3_VALUES = _e4m3_values()


@dataclass(frozen=True)
class QuantisedMatrix:
    """A matrix [outputs, inputs] as codes and scales, in the order of its outputs and inputs.

    codes: uint8 [outputs, inputs], one code per byte whatever its bits (int8: two's complement).
    scales: [outputs, groups] in SCALE_DTYPE.
    zero_points: uint8 [outputs, groups], where the format has them.
    output_scales: float32 [outputs], where the format has them.
    """

    codes: Array
    scales: Array
    zero_points: Array | None = None
    output_scales: Array | None = None


def packed_shape(weights: WeightFormat, num_outputs: int, num_inputs: int) -> tuple[int, int]:
    """(tiles, bytes of a tile)."""
    return num_tiles(num_outputs), weights.tile_bytes(num_inputs)


def pack(weights: WeightFormat, matrix: QuantisedMatrix) -> npt.NDArray[np.uint8]:
    """uint8 [tiles, tile_bytes]. Raises ValueError when the arrays do not fit the format."""
    num_outputs, num_inputs = matrix.codes.shape
    num_groups = weights.num_groups(num_inputs)
    _require(matrix.codes, np.uint8, (num_outputs, num_inputs), "codes")
    _require(matrix.scales, SCALE_DTYPE[weights.scale], (num_outputs, num_groups), "scales")
    tiles = np.zeros(packed_shape(weights, num_outputs, num_inputs), np.uint8)
    if weights.has_output_scales:
        output_scales = _present(matrix.output_scales, "output scales")
        _require(output_scales, np.float32, (num_outputs,), "output scales")
        header = _in_tiles(output_scales[:, None])
        tiles[:, : weights.header_bytes] = _bytes_of(header[:, :, 0])
    scales = _in_tiles(matrix.scales).transpose(0, 2, 1)  # [tiles, groups, 16]
    zero_points = None
    if weights.has_zero_points:
        given = _present(matrix.zero_points, "zero points")
        _require(given, np.uint8, (num_outputs, num_groups), "zero points")
        zero_points = _in_tiles(given).transpose(0, 2, 1)
    codes = _lines_of(weights, matrix.codes)
    for first, last, at in _records(weights, num_inputs):
        count = last - first
        part = _bytes_of(scales[:, first:last])
        tiles[:, at : at + part.shape[1]] = part
        if zero_points is not None:
            start = at + weights.record_scale_bytes - weights.groups_per_record * TILE_OUTPUTS
            tiles[:, start : start + count * TILE_OUTPUTS] = _bytes_of(zero_points[:, first:last])
        start = at + weights.record_scale_bytes
        tiles[:, start : start + count * weights.group_code_bytes] = _bytes_of(codes[:, first:last])
    return tiles


def unpack(
    weights: WeightFormat, tiles: npt.NDArray[np.uint8], num_outputs: int, num_inputs: int
) -> QuantisedMatrix:
    """What `pack` was given. `tiles` is uint8 [tiles, tile_bytes]; ValueError if of other size."""
    _require(tiles, np.uint8, packed_shape(weights, num_outputs, num_inputs), "tiles")
    count_tiles, num_groups = tiles.shape[0], weights.num_groups(num_inputs)
    scale_dtype = np.dtype(SCALE_DTYPE[weights.scale])
    scales = np.zeros((count_tiles, num_groups, TILE_OUTPUTS), scale_dtype)
    zero_points = np.zeros((count_tiles, num_groups, TILE_OUTPUTS), np.uint8)
    codes = np.zeros((count_tiles, num_groups, weights.group_code_bytes), np.uint8)
    for first, last, at in _records(weights, num_inputs):
        count = last - first
        num_bytes = count * TILE_OUTPUTS * scale_dtype.itemsize
        part = np.ascontiguousarray(tiles[:, at : at + num_bytes]).view(scale_dtype)
        scales[:, first:last] = part.reshape(count_tiles, count, TILE_OUTPUTS)
        if weights.has_zero_points:
            start = at + weights.record_scale_bytes - weights.groups_per_record * TILE_OUTPUTS
            part = tiles[:, start : start + count * TILE_OUTPUTS]
            zero_points[:, first:last] = part.reshape(count_tiles, count, TILE_OUTPUTS)
        start = at + weights.record_scale_bytes
        part = tiles[:, start : start + count * weights.group_code_bytes]
        codes[:, first:last] = part.reshape(count_tiles, count, -1)
    output_scales = None
    if weights.has_output_scales:
        header = np.ascontiguousarray(tiles[:, : weights.header_bytes])
        output_scales = header.view(np.float32).reshape(-1)[:num_outputs]
    return QuantisedMatrix(
        codes=_codes_of(weights, codes)[:num_outputs, :num_inputs],
        scales=scales.transpose(0, 2, 1).reshape(-1, num_groups)[:num_outputs],
        zero_points=zero_points.transpose(0, 2, 1).reshape(-1, num_groups)[:num_outputs]
        if weights.has_zero_points
        else None,
        output_scales=output_scales,
    )


def dequantise(weights: WeightFormat, matrix: QuantisedMatrix) -> npt.NDArray[np.float32]:
    """float32 [outputs, inputs]: value * scale, then * scale of the output, if there is one."""
    num_inputs = matrix.codes.shape[1]
    group_of = np.arange(num_inputs) // weights.group_size
    values = code_values(weights, matrix.codes)
    if weights.kind == "int4":
        zero: Array | float = 8.0
        if matrix.zero_points is not None:
            zero = matrix.zero_points.astype(np.float32)[:, group_of]
        values = values - zero
    result = values * scale_values(weights.scale, matrix.scales)[:, group_of]
    if matrix.output_scales is not None:
        result *= matrix.output_scales[:, None]
    return result.astype(np.float32, copy=False)


def code_values(weights: WeightFormat, codes: Array) -> npt.NDArray[np.float32]:
    """float32 of the codes' shape; int4 before its zero point is taken off."""
    if weights.kind == "int8":
        return codes.view(np.int8).astype(np.float32)
    if weights.kind == "int4":
        return codes.astype(np.float32)
    table = E4M3_VALUES if weights.kind == "fp8" else E2M1_VALUES
    return table[codes]


def scale_values(kind: ScaleKind, scales: Array) -> npt.NDArray[np.float32]:
    """float32 of the scales' shape."""
    if kind == "bfloat16":
        return (scales.astype(np.uint32) << 16).view(np.float32)
    if kind == "e8m0":
        return np.ldexp(np.float32(1), scales.astype(np.int32) - 127).astype(np.float32)
    if kind == "e4m3":
        return E4M3_VALUES[scales]
    return scales.astype(np.float32)


def interleave_tiles(gate: Array, up: Array) -> npt.NDArray[np.uint8]:
    """The first projection as it is stored, uint8 [tiles, 2, tile_bytes], of its packed halves."""
    return np.stack([gate, up], axis=1)


def _records(weights: WeightFormat, num_inputs: int) -> Iterator[tuple[int, int, int]]:
    """(first group, first group of the next record, offset of the record within its tile)."""
    num_groups, at = weights.num_groups(num_inputs), weights.header_bytes
    for first in range(0, num_groups, weights.groups_per_record):
        last = min(first + weights.groups_per_record, num_groups)
        yield first, last, at
        at += weights.record_scale_bytes + (last - first) * weights.group_code_bytes


def _in_tiles(values: Array) -> Array:
    """[outputs, n] -> [tiles, 16, n], zeros beyond the last output."""
    num_outputs, width = values.shape
    padded = np.zeros((num_tiles(num_outputs) * TILE_OUTPUTS, width), values.dtype)
    padded[:num_outputs] = values
    return padded.reshape(-1, TILE_OUTPUTS, width)


def _lines_of(weights: WeightFormat, codes: Array) -> npt.NDArray[np.uint8]:
    """[outputs, inputs] -> [tiles, groups, group_code_bytes]."""
    num_inputs = codes.shape[1]
    num_groups, size = weights.num_groups(num_inputs), weights.group_size
    padded = np.zeros((codes.shape[0], num_groups * size), np.uint8)
    padded[:, :num_inputs] = codes
    in_tiles = _in_tiles(padded)
    if weights.code_bits == 8:
        dwords = in_tiles.reshape(-1, TILE_OUTPUTS, num_groups, size // 4, 4)
    else:
        halves = in_tiles.reshape(-1, TILE_OUTPUTS, num_groups, size // 8, 2, 4)
        dwords = halves[..., 0, :] | halves[..., 1, :] << 4
    lines = dwords.transpose(0, 2, 3, 1, 4)  # [tiles, groups, lines, 16, 4]
    return lines.reshape(lines.shape[0], num_groups, -1)


def _codes_of(weights: WeightFormat, lines: Array) -> npt.NDArray[np.uint8]:
    """The inverse of `_lines_of`, padding included."""
    count_tiles, num_groups, _ = lines.shape
    dwords = lines.reshape(count_tiles, num_groups, -1, TILE_OUTPUTS, 4).transpose(0, 3, 1, 2, 4)
    if weights.code_bits == 4:
        dwords = np.stack([dwords & 15, dwords >> 4], axis=-2)
    return dwords.reshape(count_tiles * TILE_OUTPUTS, num_groups * weights.group_size)


def _bytes_of(values: Array) -> npt.NDArray[np.uint8]:
    """[tiles, ...] -> [tiles, bytes]."""
    return np.ascontiguousarray(values).view(np.uint8).reshape(values.shape[0], -1)


def _present(array: Array | None, what: str) -> Array:
    if array is None:
        raise ValueError(f"{what} are missing")
    return array


def _require(array: Array, dtype: type[np.generic], shape: tuple[int, ...], what: str) -> None:
    if array.dtype != np.dtype(dtype) or array.shape != shape:
        wanted = f"{np.dtype(dtype)} {list(shape)}"
        raise ValueError(f"{what} are {array.dtype} {list(array.shape)}, not {wanted}")
