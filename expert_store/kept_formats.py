"""Which format experts of a quantised checkpoint keep: one that holds all values as they are."""

from __future__ import annotations

from typing import TYPE_CHECKING

from expert_store.checkpoint import Checkpoint, CheckpointError, TensorEntry
from expert_store.expert_dtype import parse_expert_dtype
from expert_store.packed import PackedTensor

if TYPE_CHECKING:
    from expert_store.formats import WeightFormat
    from expert_store.keys import ExpertParameter, KeyMap


def packed_sources(parameter: ExpertParameter) -> list[PackedTensor]:
    """The quantised tensors that a parameter is made of."""
    return [
        source
        for group in parameter.sources.values()
        for source in group
        if isinstance(source, PackedTensor)
    ]


def choose_weights(keys: KeyMap, checkpoint: Checkpoint, wanted: str) -> WeightFormat | None:
    """The format of the store; None for plain floats.

    Raises:
        UserError: no such format.
        CheckpointError: "auto" of a checkpoint whose experts share no format that can be kept.
    """
    weights = parse_expert_dtype(wanted)
    if weights is not None or wanted != "auto":
        return weights
    first: TensorEntry | None = None
    common: tuple[WeightFormat | None, ...] = ()
    for parameter in keys.experts:
        if parameter.name.endswith("bias"):
            continue
        for source in (source for group in parameter.sources.values() for source in group):
            formats = _formats(source, checkpoint)
            if first is None:
                first, common = source, formats
            left = tuple(weights for weights in common if weights in formats)
            if not left:
                raise CheckpointError(
                    f"{checkpoint.directory}: experts of unlike formats ({_what(first)} beside"
                    f" {_what(source)}) cannot share slots as they are; say --expert-dtype with the"
                    " format that all of them are to have"
                )
            common = left
    return common[0] if common else None


def _formats(source: TensorEntry, checkpoint: Checkpoint) -> tuple[WeightFormat | None, ...]:
    """What holds the tensor's values as they are; None for plain floats."""
    if not isinstance(source, PackedTensor):
        return (None,)
    if not source.formats:
        scales = source.parts["scales"]
        raise CheckpointError(
            f"{checkpoint.directory / source.file_name}: tensor {source.name} is quantised with"
            f" scales for {source.group} inputs ({scales.dtype} {list(scales.shape)}), where groups"
            " of a multiple of 32 with scales in F32, F16 or BF16 are kept; take a 16-bit"
            " checkpoint with --expert-dtype"
        )
    return source.formats


def _what(source: TensorEntry) -> str:
    if isinstance(source, PackedTensor):
        return f"{source.name} in {source.formats[0].name}"
    return f"{source.name} in {source.dtype}"
