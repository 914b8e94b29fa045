"""Which tensor of the checkpoint goes where in the model: transformers' own mapping, checked.

transformers renames each checkpoint key and, where a family's experts are stored one by one, names
a converter that fuses them. This module applies the same rules to the names alone and sorts the
checkpoint into expert tensors, dense tensors and tensors without a use, so that everything missing,
left over or given twice is known before any data is read.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from expert_store.checkpoint import Checkpoint, CheckpointError, TensorEntry
from expert_store.packed import PackedTensor
from expert_store.quantisation_config import stated_quantisation

if TYPE_CHECKING:
    from expert_store.families import ModelShape
    from expert_store.layout import TensorName

_STORE_NAMES: dict[str, TensorName] = {
    "gate_up_proj": "gate_up",
    "up_proj": "up",
    "down_proj": "down",
    "gate_up_proj_bias": "gate_up_bias",
    "up_proj_bias": "up_bias",
    "down_proj_bias": "down_bias",
}
_FLOAT_DTYPES = ("F32", "BF16", "F16")
_WHOLE = ("I", "U", "BOOL")


@dataclass
class ExpertParameter:
    """One fused parameter of one MoE layer ([num_experts, ...]) and the tensors that make it."""

    path: str
    """Name in the model, e.g. "model.layers.3.mlp.experts.gate_up_proj"."""
    layer: int
    name: TensorName
    converter: Any = None
    """transformers' WeightConverter, or None when the tensor is stored as the model has it."""
    sources: dict[str, list[TensorEntry]] = field(default_factory=dict)
    """Converter's source pattern -> tensors, expert by expert when they are stored one by one."""


@dataclass
class KeyMap:
    """The checkpoint, sorted. Every parameter of the model is covered."""

    experts: list[ExpertParameter]
    dense: dict[str, str]
    """Checkpoint tensor -> name in the model."""
    ignored: list[str]
    """Tensors without a use: other modalities, layers for multi-token prediction, ..."""


def map_keys(shape: ModelShape, checkpoint: Checkpoint) -> KeyMap:
    """Sort the checkpoint's tensors. Raises CheckpointError naming the first tensor at fault."""
    refuse_integers(checkpoint)
    model: Any = shape.meta_model
    mapping = get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    converter_of = {
        pattern: converter for converter in converters for pattern in converter.source_patterns
    }
    state = model.state_dict()
    layer_of = {module.path: layer for layer, module in enumerate(shape.experts)}
    parameters = {
        f"{module}.{name}": ExpertParameter(f"{module}.{name}", layer, _STORE_NAMES[name])
        for module, layer in layer_of.items()
        for name, _ in model.get_submodule(module).named_parameters()
    }
    keys = KeyMap(list(parameters.values()), {}, [])
    owner: dict[str, str] = {}  # plain target -> the tensor that provides it
    for key in sorted(checkpoint.tensors, key=dot_natural_key):
        target, pattern = rename_source_key(
            key, renamings, converters, model.base_model_prefix, state
        )
        if target not in state and key in state:
            target, pattern = key, None
        entry = checkpoint.tensors[key]
        if target not in state:
            _refuse_leftover(key, target, shape, checkpoint)
            keys.ignored.append(key)
            continue
        if pattern is None:
            if target in owner:
                raise CheckpointError(
                    f"{checkpoint.directory / entry.file_name}: tensors {owner[target]} and {key}"
                    f" are both {target} of the model; remove one of them"
                )
            owner[target] = key
        if target in parameters:
            _require_float(entry, checkpoint)
            parameter = parameters[target]
            converter = converter_of[pattern] if pattern is not None else None
            if parameter.sources and parameter.converter is not converter:
                raise CheckpointError(
                    f"{checkpoint.directory / entry.file_name}: tensor {key} gives {target} a"
                    " second time, in another form; remove one of the two"
                )
            parameter.converter = converter
            parameter.sources.setdefault(pattern or key, []).append(entry)
        else:
            keys.dense[key] = target
            if pattern is None:
                _check_shape(entry, target, tuple(state[target].shape), checkpoint)
    _require_complete(shape, checkpoint, keys, state, converter_of)
    return keys


def _check_shape(
    entry: TensorEntry, target: str, expected: tuple[int, ...], checkpoint: Checkpoint
) -> None:
    if entry.shape != expected:
        raise CheckpointError(
            f"{checkpoint.directory / entry.file_name}: tensor {entry.name} has shape"
            f" {list(entry.shape)} where the model ({target}) has {list(expected)};"
            " config.json and weights belong to different models"
        )


def refuse_integers(checkpoint: Checkpoint) -> None:
    """Whole numbers where weights belong, in a checkpoint that says nothing of being quantised:
    they would be converted, and the model would talk nonsense. Tables of other names may hold some.

    Raises:
        CheckpointError: names the first such tensor.
    """
    if stated_quantisation(checkpoint.directory, checkpoint.config) is not None:
        return
    for entry in checkpoint.tensors.values():
        if entry.name.endswith((".weight", ".bias")) and entry.dtype.startswith(_WHOLE):
            _refuse_dtype(entry, checkpoint)


def _require_float(entry: TensorEntry, checkpoint: Checkpoint) -> None:
    if entry.dtype not in _FLOAT_DTYPES and not isinstance(entry, PackedTensor):
        _refuse_dtype(entry, checkpoint)


def _refuse_dtype(entry: TensorEntry, checkpoint: Checkpoint) -> NoReturn:
    raise CheckpointError(
        f"{checkpoint.directory / entry.file_name}: tensor {entry.name} has dtype"
        f" {entry.dtype} where F32, BF16 or F16, or a quantised weight with its scales beside"
        " it, is expected; take another checkpoint of this model"
    )


def _refuse_leftover(key: str, target: str, shape: ModelShape, checkpoint: Checkpoint) -> None:
    """A tensor under an experts module that the module has no place for is an error."""
    for module in shape.experts:
        for name in (key, target):
            if name.startswith(f"{module.path}."):
                entry = checkpoint.tensors[key]
                what = (
                    "; config.json and weights belong to different models"
                    if entry.dtype in _FLOAT_DTYPES
                    else f" ({entry.dtype} {list(entry.shape)}, which looks quantised in a way that"
                    " config.json does not state); take another checkpoint of this model"
                )
                raise CheckpointError(
                    f"{checkpoint.directory / entry.file_name}: tensor {key} belongs to the experts"
                    f" of {module.path} but the model has no place for it{what}"
                )


def _require_complete(
    shape: ModelShape,
    checkpoint: Checkpoint,
    keys: KeyMap,
    state: dict[str, Any],
    converter_of: dict[str, Any],
) -> None:
    """Raises CheckpointError when a parameter of the model has no tensor, or not all of its own."""
    # One converter may give several parameters (its further targets): follow them.
    provided = set(keys.dense.values()) | {p.path for p in keys.experts if p.sources}
    for converter in {id(c): c for c in converter_of.values()}.values():
        first, *others = converter.target_patterns
        for target in list(provided):
            provided |= {target.replace(first, other) for other in others if first in target}
    model: Any = shape.meta_model
    tied = set(getattr(model, "all_tied_weights_keys", None) or {})
    optional = [re.compile(p) for p in (model._keys_to_ignore_on_load_missing or ())]
    missing = [
        name
        for name in state
        if name not in provided
        and name not in tied
        and not any(pattern.search(name) for pattern in optional)
    ]
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise CheckpointError(
            f"{checkpoint.directory}: lacks the weights of {', '.join(missing[:3])}{more};"
            " download the checkpoint again"
        )
    for parameter in keys.experts:
        if parameter.converter is not None:
            _require_all_experts(parameter, shape.experts[parameter.layer].num_experts, checkpoint)


def _require_all_experts(
    parameter: ExpertParameter, num_experts: int, checkpoint: Checkpoint
) -> None:
    """Where experts are stored one by one, exactly experts 0 .. num_experts-1 must be there."""
    one_by_one = {
        pattern: numbers
        for pattern, entries in parameter.sources.items()
        if (numbers := _expert_numbers(entries)) is not None
    }
    if not one_by_one:
        return
    absent = set(parameter.converter.source_patterns) - set(parameter.sources)
    if absent:
        raise CheckpointError(
            f"{checkpoint.directory}: no tensor like {sorted(absent)[0]} for {parameter.path};"
            " download the checkpoint again"
        )
    for pattern, numbers in one_by_one.items():
        wanted = list(range(num_experts))
        if numbers == wanted:
            continue
        example = parameter.sources[pattern][0].name
        if len(set(numbers)) < len(numbers):
            twice = next(number for number in numbers if numbers.count(number) > 1)
            raise CheckpointError(
                f"{checkpoint.directory}: gives expert {twice} of {parameter.path} twice, by two"
                f" tensors like {example}; remove one of them"
            )
        lacking = sorted(set(wanted) - set(numbers))
        if lacking:
            name = re.sub(r"(experts\.)\d+", rf"\g<1>{lacking[0]}", example)
            raise CheckpointError(
                f"{checkpoint.directory}: lacks {name}"
                + (f" and {len(lacking) - 1} more of that kind" if len(lacking) > 1 else "")
                + f" (experts {', '.join(map(str, lacking[:8]))} of {parameter.path});"
                " download the checkpoint again"
            )
        raise CheckpointError(
            f"{checkpoint.directory}: has {len(numbers)} tensors like {example} where config.json"
            f" says {num_experts} experts; config.json and weights belong to different models"
        )


def _expert_numbers(entries: list[TensorEntry]) -> list[int] | None:
    numbers = [re.search(r"experts\.(\d+)\.", entry.name) for entry in entries]
    return [int(number[1]) for number in numbers if number] if all(numbers) else None
