"""Values of quantised checkpoint tensors, from each maker's order to the store's.

`read_matrix` turns the parts of a PackedTensor into a `packing.QuantisedMatrix`, the same for every
maker: outputs are rows, inputs run along them, a byte for each code, scales for groups of inputs of
one output. No value changes on the way; a scale that covers more than a group is repeated.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from expert_store.checkpoint import CheckpointError
from expert_store.packing import SCALE_DTYPE, QuantisedMatrix, dequantise, scale_values

if TYPE_CHECKING:
    from expert_store.checkpoint import TensorEntry
    from expert_store.formats import WeightFormat
    from expert_store.packed import PackedTensor
    from expert_store.reading import SourceFiles

Array = npt.NDArray[Any]

#: Order in which AutoAWQ puts eight neighbouring outputs into the nibbles of a word, lowest first.
_AWQ_OUTPUTS = (0, 2, 4, 6, 1, 3, 5, 7)
_NUMPY: dict[str, Any] = {
    "F32": np.float32, "F16": np.float16, "BF16": np.uint16, "U8": np.uint8, "I8": np.uint8,
    "F8_E4M3": np.uint8, "F8_E8M0": np.uint8, "I32": np.int32, "I64": np.int64,
}  # fmt: skip


def read_matrix(
    packed: PackedTensor,
    files: SourceFiles,
    expert: int | None = None,
    wanted: WeightFormat | None = None,
    inputs_in_turn: Array | None = None,
) -> tuple[WeightFormat, QuantisedMatrix]:
    """The values of a packed weight, or of one expert of a fused one, and their format: `wanted`
    where it holds them as they are. `inputs_in_turn`: the inputs in an order in which groups lie
    side by side, for the matrix to have them in; None: they lie so as they are.

    Raises CheckpointError: not readable, scales that are not finite, an order or size of groups
    that no format has.
    """

    def part(role: str) -> Array:
        return _read(packed.parts[role], files, expert)

    formats = packed.formats
    if not formats:
        entry = packed.parts["scales"]
        raise CheckpointError(
            f"{files.path(entry)}: tensor {entry.name} ({entry.dtype} {list(entry.shape)}) has"
            f" scales for {packed.group} inputs of {packed.name}; groups of a multiple of 32 with"
            " scales in F32, F16 or BF16 are read; a 16-bit checkpoint with --expert-dtype would"
            " work"
        )
    weights = wanted if wanted in formats else formats[0]
    assert weights is not None, "there is a first format"
    if inputs_in_turn is None and _inputs_in_turn(packed, files, expert) is not None:
        entry = packed.parts["order"]
        raise CheckpointError(
            f"{files.path(entry)}: tensor {entry.name} puts the inputs of {packed.name} into groups"
            " out of order (desc_act), and such weights cannot be kept as they are: kernels take"
            " groups of neighbouring inputs; say --expert-dtype bf16, int8 or another format to"
            " have them converted, or take a checkpoint quantised without desc_act"
        )
    outputs, inputs = packed.shape[-2:]
    scales = _scales(packed, part("scales"), weights)
    num_groups = weights.num_groups(inputs)
    zero_points = output_scales = None
    if packed.kind in ("fp8", "int8"):
        codes = part("codes")
        scales = scales.reshape(-(-outputs // packed.block_rows), -1)
        scales = np.repeat(scales, packed.block_rows, axis=0)[:outputs]
    elif packed.kind == "mxfp4":
        codes = _nibbles(part("codes").reshape(outputs, -1))
    elif packed.kind == "nvfp4":
        codes = _nibbles(part("codes"))
        factor = part("global").reshape(1)
        with np.errstate(divide="ignore"):
            factor = np.float32(1) / factor if packed.is_reciprocal else factor
        output_scales = np.repeat(factor, outputs).astype(np.float32)
    else:
        if packed.kind == "int4":
            codes = _nibbles(part("codes").view(np.uint8))
            if "zeros" in packed.parts:
                zero_points = _from_columns(part("zeros"))[:outputs]
        elif packed.kind == "gptq":
            codes, scales = _nibbles(_words(part("codes").T)), scales.T
            zero_points = ((_nibbles(_words(part("zeros"))) + np.uint8(packed.zero_shift)) & 15).T[
                :outputs
            ]
        else:
            codes, scales = _awq_outputs(part("codes")).T, scales.T
            zero_points = _awq_outputs(part("zeros")).T
    if inputs_in_turn is not None:
        codes = codes[:, inputs_in_turn]
    repeat = -(-packed.group // weights.group_size)
    matrix = QuantisedMatrix(
        np.ascontiguousarray(codes),
        np.ascontiguousarray(np.repeat(scales, repeat, axis=1)[:, :num_groups]),
        None
        if zero_points is None
        else np.ascontiguousarray(np.repeat(zero_points, repeat, axis=1)[:, :num_groups]),
        output_scales,
    )
    _require_finite(packed, files, weights, matrix)
    return weights, matrix


def read_floats(
    packed: PackedTensor, files: SourceFiles, expert: int | None = None
) -> npt.NDArray[np.float32]:
    """float32 [outputs, inputs]: what the codes stand for. Raises CheckpointError."""
    in_turn = _inputs_in_turn(packed, files, expert)
    found = dequantise(*read_matrix(packed, files, expert, inputs_in_turn=in_turn))
    if in_turn is None:
        return found
    values = np.empty_like(found)
    values[:, in_turn] = found
    return values


def _read(entry: TensorEntry, files: SourceFiles, expert: int | None) -> Array:
    """The tensor, or its slice of one expert, in numpy's nearest type (BF16 as uint16)."""
    shape = entry.shape if expert is None else entry.shape[1:]
    num_bytes = entry.num_bytes if expert is None else entry.num_bytes // entry.shape[0]
    raw = np.empty(num_bytes, dtype=np.uint8)
    files.read(entry, 0 if expert is None else expert * num_bytes, raw.data)
    return raw.view(_NUMPY[entry.dtype]).reshape(shape)


def _scales(packed: PackedTensor, scales: Array, weights: WeightFormat) -> Array:
    """Scales as read, in the type that the format stores."""
    if packed.kind != "fp8":
        return scales
    dtype = packed.parts["scales"].dtype
    if dtype in ("BF16", "F8_E8M0"):
        return scale_values("bfloat16" if dtype == "BF16" else "e8m0", scales)
    return scales.astype(SCALE_DTYPE[weights.scale])


def _words(words: Array) -> Array:
    """int32 [n, m] -> its bytes, [n, 4 m]."""
    return np.ascontiguousarray(words).view(np.uint8)


def _nibbles(pairs: Array) -> Array:
    """[n, m] bytes -> [n, 2 m] codes, low half first."""
    result = np.empty((pairs.shape[0], 2 * pairs.shape[1]), np.uint8)
    result[:, ::2] = pairs & 15
    result[:, 1::2] = pairs >> 4
    return result


def _from_columns(words: Array) -> Array:
    """int32 [n / 8, m], codes packed down the columns of a matrix [n, m] -> that matrix."""
    return _nibbles(_words(words.T)).T


def _awq_outputs(words: Array) -> Array:
    """int32 [n, outputs / 8] -> [n, outputs] codes in the outputs' own order."""
    found = _nibbles(_words(words)).reshape(len(words), -1, 8)
    ordered = np.empty_like(found)
    ordered[:, :, list(_AWQ_OUTPUTS)] = found
    return ordered.reshape(len(words), -1)


def _inputs_in_turn(packed: PackedTensor, files: SourceFiles, expert: int | None) -> Array | None:
    """The inputs sorted by their groups, or None when input i is of group i // group.

    Raises CheckpointError when the groups are not all of the same size.
    """
    entry = packed.parts.get("order")
    if entry is None:
        return None
    groups = _read(entry, files, expert)
    in_order = np.arange(len(groups)) // packed.group
    if np.array_equal(groups, in_order):
        return None
    in_turn = np.argsort(groups, kind="stable")
    if not np.array_equal(groups[in_turn], in_order):
        raise CheckpointError(
            f"{files.path(entry)}: tensor {entry.name} does not put {packed.group} inputs of"
            f" {packed.name} into each group; the checkpoint is damaged, download it again"
        )
    return in_turn


def _require_finite(
    packed: PackedTensor, files: SourceFiles, weights: WeightFormat, matrix: QuantisedMatrix
) -> None:
    """Raises CheckpointError when a code or scale means no finite number."""
    entry = packed.parts["scales"]
    if weights.scale == "e8m0":
        is_finite = not bool((matrix.scales == 255).any())
    elif weights.scale == "e4m3":
        is_finite = not bool(((matrix.scales & 127) == 127).any())
    else:
        is_finite = bool(np.isfinite(scale_values(weights.scale, matrix.scales)).all())
    if matrix.output_scales is not None and not np.isfinite(matrix.output_scales).all():
        is_finite, entry = False, packed.parts["global"]
    if is_finite and weights.kind == "fp8" and bool(((matrix.codes & 127) == 127).any()):
        is_finite, entry = False, packed.parts["codes"]
    if not is_finite:
        raise CheckpointError(
            f"{files.path(entry)}: tensor {entry.name} holds what is no finite number;"
            " the checkpoint is damaged, download it again"
        )
