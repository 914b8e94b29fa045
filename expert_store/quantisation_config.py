"""What a checkpoint says about how it is quantised, in config.json or a file beside it.

Only what the shapes of tensors cannot tell is asked here, and all of it is written by others: a
field may have any JSON type, and what is in no form that can be read is refused with what was
found. Headers and JSON only, neither torch nor numpy.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NoReturn

from expert_store.checkpoint import Checkpoint, CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

METHODS = ("mxfp4", "fp8", "awq", "gptq", "compressed-tensors", "modelopt")
FLOATS = ("F32", "BF16", "F16")
ADVICE = "; a float32, bfloat16 or float16 checkpoint with --expert-dtype would work"
_READ_BITS = 4
#: As much of a foreign value as a sentence repeats.
_TOLD_CHARACTERS = 40


def stated_quantisation(directory: Path, config: dict[str, Any]) -> dict[str, Any] | None:
    """What a checkpoint says about how it is quantised; None for a plain one.

    Raises CheckpointError when it says it in no form that can be read.
    """
    for part in (config, config.get("text_config")):
        stated = part.get("quantization_config") if isinstance(part, dict) else None
        if stated:
            if not isinstance(stated, dict):
                raise CheckpointError(
                    f"{directory / 'config.json'}: its quantization_config is no object;"
                    " download the file again"
                )
            return stated
    path = directory / "hf_quant_config.json"  # modelopt's older exports
    try:
        stated = json.loads(path.read_text())["quantization"]
    except RecursionError:
        raise CheckpointError(
            f"{path}: is nested too deeply to be read; download the file again"
        ) from None
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return {"quant_method": "modelopt", **stated} if isinstance(stated, dict) else None


def stated_method(checkpoint: Checkpoint, config: Mapping[str, Any]) -> str:
    """The one of METHODS that a stated quantisation is of.

    Raises CheckpointError: it is of none, or of a kind of it that is not read.
    """
    method = str(config.get("quant_method", "unknown")).lower().replace("_", "-")
    if method not in METHODS:
        _refuse_method(checkpoint, method)
    fault = next(_faults(method, config), None)
    if fault is not None:
        raise CheckpointError(
            f"{checkpoint.directory / 'config.json'}: the model is quantised by {method} with"
            f" {fault} (tensors like {_example(checkpoint)}){ADVICE}"
        )
    return method


def _faults(method: str, config: Mapping[str, Any]) -> Iterator[str]:
    if method in ("awq", "gptq"):
        bits = config.get("bits", config.get("w_bit", _READ_BITS))
        if not _is_number(bits):
            yield f"bits that are {_told(bits)}, where the number {_READ_BITS} is read"
        elif bits != _READ_BITS:
            yield f"{str(bits)[:_TOLD_CHARACTERS]}-bit weights, where {_READ_BITS} bits are read"
        order = config.get("desc_act")
        if order is not None and not isinstance(order, bool):
            yield f"a desc_act that is {_told(order)}, where true or false is read"
    version = str(config.get("version") or config.get("format") or "gemm").lower()
    if method == "awq" and version != "gemm":
        yield f"version {version[:_TOLD_CHARACTERS]!r}, where gemm is read"
    if method == "compressed-tensors":
        yield from _faults_of_schemes(config)
        sparsity = config.get("sparsity_config")
        if sparsity is not None and not isinstance(sparsity, dict):
            yield f"a sparsity_config that is {_told(sparsity)}, where an object is read"
        elif sparsity and sparsity.get("format", "dense") != "dense":
            yield f"sparse weights ({_told(sparsity['format'])})"
        if config.get("transform_config"):
            yield "rotated weights (transform_config)"


def _faults_of_schemes(config: Mapping[str, Any]) -> Iterator[str]:
    """The config_groups of compressed-tensors: names of groups -> how their weights are stored."""
    groups = config.get("config_groups")
    if groups is not None and not isinstance(groups, dict):
        yield f"config_groups that are {_told(groups)}, where an object is read"
        return
    for name, scheme in (groups or {}).items():
        if isinstance(scheme, list):  # the name of a scheme, and the layers that have it
            continue
        if not isinstance(scheme, dict):
            yield f"a group {name[:_TOLD_CHARACTERS]!r} that is {_told(scheme)}, no object"
            continue
        weights = scheme.get("weights")
        if weights is not None and not isinstance(weights, dict):
            yield (
                f"weights of group {name[:_TOLD_CHARACTERS]!r} that are {_told(weights)}, where an"
                " object is read"
            )
            continue
        form = scheme.get("format") or config.get("format")
        if form == "pack-quantized" and weights:
            bits = weights.get("num_bits")
            if not _is_number(bits):
                yield f"pack-quantized weights whose num_bits are {_told(bits)}, no number"
            elif bits != _READ_BITS:
                num_bits = str(bits)[:_TOLD_CHARACTERS]
                yield f"pack-quantized weights of {num_bits} bits, {_READ_BITS} are read"


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _told(value: object) -> str:
    """A JSON value of the wrong type, in the words that JSON has for it."""
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case str():
            return f"the string {value[:_TOLD_CHARACTERS]!r}"
        case list():
            return "a list"
        case dict():
            return "an object"
        case _:
            return f"the number {str(value)[:_TOLD_CHARACTERS]}"


def _refuse_method(checkpoint: Checkpoint, method: str) -> NoReturn:
    raise CheckpointError(
        f"{checkpoint.directory / 'config.json'}: the model is quantised by"
        f" {method[:_TOLD_CHARACTERS]!r} (tensors like {_example(checkpoint)}), which is not read;"
        f" {', '.join(METHODS)} are{ADVICE}"
    )


def _example(checkpoint: Checkpoint) -> str:
    """The first tensor, experts first, that is no plain float."""
    names = sorted(checkpoint.tensors, key=lambda name: (".experts." not in name, name))
    for name in names:
        entry = checkpoint.tensors[name]
        if entry.dtype not in FLOATS:
            return f"{name}, {entry.dtype} {list(entry.shape)}"
    return "none that is no float"
