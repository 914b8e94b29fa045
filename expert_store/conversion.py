"""How each expert parameter gets from the checkpoint's tensors into its blocks.

Most families need no arithmetic: experts stored one by one (gate, up and down of each) are stacked
and gate and up concatenated, or the fused tensor is stored as the model has it. Then every byte of
the file has its place in some block, and the plan is a list of copies (`direct_copies`). All other
converters are transformers' own code, run on one expert at a time where that is known to give
the same result, else on the whole layer (`converted_experts`).
"""

from __future__ import annotations

import copy
import math
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers.core_model_loading import (
    Concatenate,
    Interleave,
    MergeModulelist,
    Transpose,
)

from expert_store.checkpoint import Checkpoint, CheckpointError, TensorEntry
from expert_store.layout import ITEM_BYTES, StoreLayout
from expert_store.packed import PackedTensor
from expert_store.reading import TORCH_DTYPE, Copy, SourceFiles
from expert_store.unpacking import read_floats

if TYPE_CHECKING:
    from collections.abc import Iterator

    from expert_store.families import ModelShape
    from expert_store.keys import ExpertParameter


def direct_copies(
    parameter: ExpertParameter, layout: StoreLayout, checkpoint: Checkpoint
) -> list[Copy] | None:
    """Copies that build the parameter byte for byte, or None when it needs a converter.

    Raises CheckpointError when a source has a shape that does not fit.
    """
    tensor = layout.tensor(parameter.name)
    num_experts = layout.num_experts[parameter.layer]

    def place(expert: int, skip_elements: int) -> int:
        return (
            layout.block_offset(parameter.layer, expert)
            + tensor.offset_bytes
            + skip_elements * ITEM_BYTES[layout.dtype]
        )

    if parameter.converter is None:
        (source,) = next(iter(parameter.sources.values()))
        require_shape(source, (num_experts, *tensor.shape), parameter, checkpoint)
        slice_bytes = source.num_bytes // num_experts
        return [
            Copy(source, expert * slice_bytes, slice_bytes, place(expert, 0), parameter.path)
            for expert in range(num_experts)
        ]
    if not stacks(parameter.converter.operations):
        return None
    groups = [parameter.sources[pattern] for pattern in parameter.converter.source_patterns]
    if any(len(group) != num_experts for group in groups):
        return None
    copies: list[Copy] = []
    rows, *others = tensor.shape
    for expert in range(num_experts):
        parts = [group[expert] for group in groups]
        for part in parts:
            require_shape(part, (rows // len(parts), *others), parameter, checkpoint)
        skip_elements = 0
        for part in parts:
            copies.append(
                Copy(part, 0, part.num_bytes, place(expert, skip_elements), parameter.path)
            )
            skip_elements += math.prod(part.shape)
    return copies


def converted_experts(
    parameter: ExpertParameter,
    shape: ModelShape,
    layout: StoreLayout,
    checkpoint: Checkpoint,
    files: SourceFiles,
) -> Iterator[tuple[str, int, torch.Tensor, TensorEntry]]:
    """Run the family's converter: yields (parameter path, expert, tensor, one of its sources).

    The path is the parameter's own, or a further target of a converter that has several. Raises
    CheckpointError when the converter fails or its result has another shape than the model's.
    """
    num_experts = layout.num_experts[parameter.layer]
    groups = parameter.sources
    example = next(iter(groups.values()))[0]
    one_by_one = all(len(group) == num_experts for group in groups.values())
    fused = all(len(group) == 1 and group[0].shape[0] == num_experts for group in groups.values())
    steps: list[tuple[int, int]] = [(0, num_experts)]
    if _is_per_expert(parameter.converter.operations) and (one_by_one or fused):
        steps = [(expert, expert + 1) for expert in range(num_experts)]
    for begin, end in steps:
        converter: Any = copy.deepcopy(parameter.converter)
        for pattern, group in groups.items():
            selected = group[begin:end] if one_by_one else group
            rows = (begin, end) if fused and not one_by_one and len(steps) > 1 else None
            for source in selected:
                value = read_tensor(source, rows, files)
                converter.add_tensor(parameter.path, source.name, pattern, value)
        try:
            results = converter.convert(
                parameter.path, model=shape.meta_model, config=shape.meta_model.config
            )
        except Exception as error:
            raise CheckpointError(
                f"{checkpoint.directory / example.file_name}: tensors like {example.name} cannot be"
                f" converted to {parameter.path} ({type(error).__name__}: {error});"
                " config.json and weights belong to different models"
            ) from error
        for path, made in results.items():
            result = made[0] if isinstance(made, list) else made
            expected = shape.meta_model.get_parameter(path).shape
            if tuple(result.shape) != (end - begin, *expected[1:]):
                raise CheckpointError(
                    f"{checkpoint.directory / example.file_name}: tensors like {example.name} make"
                    f" {path} of shape {list(result.shape)} where the model has"
                    f" {[end - begin, *expected[1:]]};"
                    " config.json and weights belong to different models"
                )
            for expert in range(begin, end):
                yield path, expert, result[expert - begin], example


def stacks(operations: list[Any]) -> bool:
    """True for: stack experts, perhaps then concatenate along their tensors' first dimension."""
    match operations:
        case [MergeModulelist(dim=0)] | [MergeModulelist(dim=0), Concatenate(dim=1)]:
            return True
    return False


def _is_per_expert(operations: list[Any]) -> bool:
    """True when converting experts one at a time gives the same as all at once."""
    for operation in operations:
        match operation:
            case MergeModulelist(dim=0) | Transpose(dim0=1 | 2, dim1=1 | 2, check_dims=False):
                continue
            case Concatenate(dim=1 | 2) | Interleave(dim=1 | 2):
                continue
        return False
    return True


def read_tensor(
    source: TensorEntry, rows: tuple[int, int] | None, files: SourceFiles
) -> torch.Tensor:
    """A tensor, or the given range of its first dimension; a quantised one as float32.

    Raises CheckpointError: not readable, or values that are not finite.
    """
    if isinstance(source, PackedTensor):
        if rows is None and len(source.shape) == 2:
            return torch.from_numpy(read_floats(source, files))
        experts = range(*(rows or (0, source.shape[0])))
        return torch.stack([torch.from_numpy(read_floats(source, files, e)) for e in experts])
    shape = source.shape if rows is None else (rows[1] - rows[0], *source.shape[1:])
    row_bytes = source.num_bytes // source.shape[0] if source.shape else source.num_bytes
    num_bytes = source.num_bytes if rows is None else (rows[1] - rows[0]) * row_bytes
    raw = np.empty(num_bytes, dtype=np.uint8)
    files.read(source, 0 if rows is None else rows[0] * row_bytes, raw.data)
    files.require_finite(raw, TORCH_DTYPE[source.dtype], source)
    return torch.from_numpy(raw).view(TORCH_DTYPE[source.dtype]).reshape(shape)


def require_shape(
    source: TensorEntry,
    expected: tuple[int, ...],
    parameter: ExpertParameter,
    checkpoint: Checkpoint,
) -> None:
    """Raises CheckpointError when a source has another shape."""
    if source.shape != expected:
        raise CheckpointError(
            f"{checkpoint.directory / source.file_name}: tensor {source.name} has shape"
            f" {list(source.shape)} where the model ({parameter.path}) needs {list(expected)};"
            " config.json and weights belong to different models"
        )
