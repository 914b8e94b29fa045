"""Floats to codes: how a 16-bit checkpoint becomes a quantised store.

Every format is filled in one pass over a matrix, rounding to nearest, without calibration data:

- ``int8``   scale = largest |w| of the group / 127
- ``int4``   symmetric: the weight of largest size becomes -8, so the scale has the sign that this
  takes; with zero points: the range from the least to the largest weight, zero included
- ``mxfp4``  the power of two that brings the largest weight to 4 .. 7, of which 6 .. 7 rounds to 6
- ``nvfp4``  scale of an output = its largest |w| / (6 * 448); of a group = its largest |w| / 6
- ``fp8``    scale = largest |w| of the group / 448

Codes are rounded against the scale as stored, not as computed, so the scale's own rounding adds
nothing. `relative_error` is |w - dequantised| / |w| over a whole matrix.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from expert_store.packing import QuantisedMatrix

if TYPE_CHECKING:
    import numpy as np

    from expert_store.formats import WeightFormat

#: Weights that are worked on at a time: their intermediates stay in a core's own cache.
_CHUNK_WEIGHTS = 64 * 1024
_LEAST_STEP = 2.0**-126
_LEAST_EXPONENT, _LARGEST_EXPONENT = -127, 127
#: Halves between neighbouring values of e2m1; at a tie the even code wins, so some include it.
_E2M1_BORDERS = (
    (0.25, False), (0.75, True), (1.25, False), (1.75, True),
    (2.5, False), (3.5, True), (5.0, False),
)  # fmt: skip
_E2M1_VALUES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


class Quantised:
    """A matrix and how far it is from the one it was made of."""

    def __init__(self, matrix: QuantisedMatrix, error_square: float, size_square: float) -> None:
        self.matrix = matrix
        self.error_square = error_square
        """Sum of squared differences."""
        self.size_square = size_square
        """Sum of squared weights."""


def quantise(weights: WeightFormat, matrix: torch.Tensor) -> Quantised:
    """The matrix [outputs, inputs] (any float dtype, finite) in the format's codes and scales."""
    outputs, inputs = matrix.shape
    num_groups = weights.num_groups(inputs)
    width = num_groups * weights.group_size
    codes = torch.empty((outputs, inputs), dtype=torch.uint8)
    scales = torch.empty((outputs, num_groups), dtype=_SCALE_DTYPE[weights.scale])
    zeros = torch.empty((outputs, num_groups), dtype=torch.uint8)
    output_scales = torch.empty(outputs)
    step = max(1, _CHUNK_WEIGHTS // width)
    padded = torch.zeros((min(step, outputs), width))
    error_square = size_square = 0.0
    for begin in range(0, outputs, step):
        end = min(begin + step, outputs)
        chunk = padded[: end - begin]
        chunk[:, :inputs] = matrix[begin:end]
        groups = chunk.view(end - begin, num_groups, weights.group_size)
        result = _QUANTISERS[weights.kind](weights, groups)
        found_codes, scales[begin:end], found_zeros, found_output_scales, values = result
        codes[begin:end] = found_codes.view(end - begin, width)[:, :inputs]
        if found_zeros is not None:
            zeros[begin:end] = found_zeros
        if found_output_scales is not None:
            output_scales[begin:end] = found_output_scales
        size_square += float(torch.dot(chunk.view(-1), chunk.view(-1)))
        difference = values.view(-1).sub_(chunk.view(-1))
        error_square += float(torch.dot(difference, difference))
    made = QuantisedMatrix(
        codes.numpy(),
        _stored(scales),
        zeros.numpy() if weights.has_zero_points else None,
        output_scales.numpy() if weights.has_output_scales else None,
    )
    return Quantised(made, error_square, size_square)


_Parts = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor]
"""Of groups [outputs, groups, inputs]: codes, scales, zero points, output scales, values."""


def _int8(weights: WeightFormat, groups: torch.Tensor) -> _Parts:
    scales = (_largest(groups) / 127).to(_SCALE_DTYPE[weights.scale])
    step = scales.float().unsqueeze(2)
    rounded = (groups * _inverse(step)).round_().clamp_(-127, 127)
    codes = rounded.to(torch.int8).view(torch.uint8)
    return codes, scales, None, None, rounded.mul_(step)


def _int4(weights: WeightFormat, groups: torch.Tensor) -> _Parts:
    low, high = torch.aminmax(groups, dim=2)
    dtype = _SCALE_DTYPE[weights.scale]
    if weights.has_zero_points:
        low, high = low.clamp_(max=0), high.clamp_(min=0)
        scales = ((high - low) / 15).to(dtype)
        step = scales.float().unsqueeze(2)
        inverse = _inverse(step)
        zeros = (-low.unsqueeze(2) * inverse).round_().clamp_(0, 15)
        rounded = (groups * inverse).add_(zeros).round_().clamp_(0, 15)
        codes = rounded.to(torch.uint8)
        return codes, scales, zeros.squeeze(2).to(torch.uint8), None, (rounded - zeros).mul_(step)
    scales = (torch.where(high > -low, high, low) / -8).to(dtype)
    step = scales.float().unsqueeze(2)
    rounded = (groups * _inverse(step)).round_().clamp_(-8, 7)
    codes = (rounded + 8).to(torch.uint8)
    return codes, scales, None, None, rounded.mul_(step)


def _fp8(weights: WeightFormat, groups: torch.Tensor) -> _Parts:
    scales = _largest(groups) / 448
    step = scales.unsqueeze(2)
    rounded = (groups * _inverse(step)).clamp_(-448, 448).to(torch.float8_e4m3fn)
    return rounded.view(torch.uint8), scales, None, None, rounded.float().mul_(step)


def _mxfp4(weights: WeightFormat, groups: torch.Tensor) -> _Parts:
    fraction, exponent = torch.frexp(_largest(groups))  # largest = fraction * 2 ** exponent
    # fraction is 0.5 .. 1: 0.875 is where 4 * 2 * fraction passes 7, and half of it is better.
    exponent = exponent - 3 + (fraction > 0.875).int()
    exponent = exponent.clamp_(_LEAST_EXPONENT, _LARGEST_EXPONENT)
    scales = (exponent + 127).to(torch.uint8)
    codes, values = _e2m1(groups, torch.exp2(exponent.float()).unsqueeze(2))
    return codes, scales, None, None, values


def _nvfp4(weights: WeightFormat, groups: torch.Tensor) -> _Parts:
    largest = _largest(groups)
    output_scales = largest.amax(1) / (6 * 448)
    relative = (largest * _inverse(6 * output_scales).unsqueeze(1)).clamp_(max=448)
    scales = relative.to(torch.float8_e4m3fn)
    codes, values = _e2m1(groups, (scales.float() * output_scales.unsqueeze(1)).unsqueeze(2))
    return codes, scales.view(torch.uint8), None, output_scales, values


def _e2m1(groups: torch.Tensor, step: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and values of groups in multiples of `step` [outputs, groups, 1]."""
    scaled = groups * _inverse(step)
    size = scaled.abs()
    codes = (scaled < 0).to(torch.uint8).mul_(8)
    for border, is_included in _E2M1_BORDERS:
        codes += (size >= border) if is_included else (size > border)
    values = _E2M1_VALUES[codes.int()]
    return codes, values.mul_(step)


def _largest(groups: torch.Tensor) -> torch.Tensor:
    low, high = torch.aminmax(groups, dim=2)
    return torch.maximum(high, -low).abs_()  # of two zeros the positive one


def _inverse(step: torch.Tensor) -> torch.Tensor:
    """1 / step, and 0 where that may not be finite: what it would divide counts as 0."""
    return torch.where(step.abs() < _LEAST_STEP, 0.0, 1 / step)


def _stored(scales: torch.Tensor) -> np.ndarray[tuple[int, ...], np.dtype[np.generic]]:
    if scales.dtype is torch.bfloat16:
        return scales.view(torch.uint16).numpy()
    return scales.numpy()


_SCALE_DTYPE = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "e8m0": torch.uint8,
    "e4m3": torch.uint8,
}
_QUANTISERS = {"int8": _int8, "int4": _int4, "fp8": _fp8, "mxfp4": _mxfp4, "nvfp4": _nvfp4}
