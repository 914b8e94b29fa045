"""A checkpoint directory as it lies on disk: config.json, safetensors headers, nothing of the data.

Everything here is cheap and suspicious, and needs neither torch nor transformers: a missing
directory, a truncated shard or a header that does not add up is found within milliseconds, before
anything heavy is imported. A shard must be exactly ``8 + header + data`` bytes long and its tensors
must tile the data without gap or overlap, so that later reads can neither run short nor see
bytes of another tensor.

File layout (safetensors): u64 little-endian header length, JSON header, data. In the header each
tensor names its dtype, its shape and its ``[begin, end)`` within the data.
"""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from expert_store.config_numbers import why_no_number
from protocol.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Iterable

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

ITEM_BITS = {
    "BOOL": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8,
    "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16,
    "I32": 32, "U32": 32, "F32": 32, "I64": 64, "U64": 64, "F64": 64, "C64": 64,
}  # fmt: skip

_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors format itself


class CheckpointError(UserError):
    """A checkpoint that cannot be loaded: which file or tensor, what was found, what to do."""


class TensorEntry(msgspec.Struct, frozen=True):
    """One tensor of the checkpoint: where its bytes are."""

    name: str
    dtype: str
    """The safetensors name: "BF16", "F32", ..."""
    shape: tuple[int, ...]
    file_name: str
    offset_bytes: int
    """From the start of the file."""
    num_bytes: int


class Checkpoint(msgspec.Struct, frozen=True):
    """All that the headers say. Every extent in it has been checked against its file's size."""

    directory: Path
    config: dict[str, Any]
    tensors: dict[str, TensorEntry]
    file_bytes: dict[str, int]
    fingerprint: str

    @property
    def name(self) -> str:
        """What to call the model: the last part of its directory."""
        return self.directory.resolve().name

    @property
    def data_bytes(self) -> int:
        return sum(tensor.num_bytes for tensor in self.tensors.values())


def open_checkpoint(directory: Path) -> Checkpoint:
    """Read and check config and headers. Raises CheckpointError for the first fault."""
    config, config_bytes = read_config(directory)
    digest = hashlib.sha256(config_bytes)
    tensors: dict[str, TensorEntry] = {}
    file_bytes: dict[str, int] = {}
    weight_map = _weight_map(directory)
    for file_name in sorted(set(weight_map.values())) if weight_map else [SINGLE_FILE]:
        path = directory / file_name
        entries, header, size_bytes = read_shard(path)
        for entry in entries:
            if entry.name in tensors:
                raise CheckpointError(
                    f"{path}: tensor {entry.name} is also in {tensors[entry.name].file_name};"
                    " remove one of the two, or download the checkpoint again"
                )
            tensors[entry.name] = entry
        file_bytes[file_name] = size_bytes
        digest.update(f"\n{file_name} {size_bytes}\n".encode() + header)
    for name, file_name in (weight_map or {}).items():
        if name not in tensors or tensors[name].file_name != file_name:
            raise CheckpointError(
                f"{directory / file_name}: lacks tensor {name}, which {INDEX_FILE} places there;"
                " download this shard again"
            )
    return Checkpoint(directory, config, tensors, file_bytes, digest.hexdigest()[:32])


def refuse_dense(checkpoint: Checkpoint) -> None:
    """Tell a model that is plainly dense before anything is imported or started for it. Whatever
    speaks of experts, in its config or by a tensor's name, is left for `families` to judge.

    Raises:
        CheckpointError: neither does.
    """
    config = checkpoint.config
    if _speaks_of_experts(config) or any(map(_names_experts, checkpoint.tensors)):
        return
    raise CheckpointError(
        f"{checkpoint.directory}: {config['model_type']} is a dense model without routed experts;"
        " give the directory of a Mixture-of-Experts model"
    )


def _names_experts(name: str) -> bool:
    return "expert" in name.lower() or "moe" in name.lower()


def _speaks_of_experts(value: object) -> bool:
    """Whether a part of a config has a setting about experts that says more than none."""
    if isinstance(value, dict):
        return _names_experts(str(value.get("model_type", ""))) or any(
            (bool(part) and _names_experts(name)) or _speaks_of_experts(part)
            for name, part in value.items()
        )
    return isinstance(value, list) and any(map(_speaks_of_experts, value))


def read_config(directory: Path) -> tuple[dict[str, Any], bytes]:
    """config.json as an object, and its bytes. Raises CheckpointError."""
    if not directory.exists():
        raise CheckpointError(f"{directory}: no such directory; give the path of a local model")
    if not directory.is_dir():
        raise CheckpointError(f"{directory}: is a file; give the directory that holds config.json")
    path = directory / "config.json"
    if not path.is_file():
        what = "holds no config.json" if any(directory.iterdir()) else "is empty"
        raise CheckpointError(
            f"{directory}: {what}; a model directory holds config.json, safetensors and a tokenizer"
        )
    raw = _read_bytes(path)
    config = _parse_object(raw, path)
    if not isinstance(config.get("model_type"), str):
        raise CheckpointError(
            f"{path}: names no model_type, so its architecture is unknown; complete the file"
        )
    sentence = why_no_number(config)
    if sentence is not None:
        raise CheckpointError(f"{path}: {sentence}; correct the file, or download it again")
    return config, raw


def read_shard(path: Path) -> tuple[list[TensorEntry], bytes, int]:
    """One file's tensors in file order, its raw header and its size. Raises CheckpointError."""
    try:
        with path.open("rb") as file:
            size_bytes = file.seek(0, 2)
            file.seek(0)
            prefix = file.read(_LENGTH_BYTES)
            header_bytes = int.from_bytes(prefix, "little")
            room_bytes = min(size_bytes - _LENGTH_BYTES, _MAX_HEADER_BYTES)
            if len(prefix) < _LENGTH_BYTES or not 2 <= header_bytes <= room_bytes:
                raise CheckpointError(
                    f"{path}: not a complete safetensors file: {size_bytes} bytes,"
                    f" a header of {header_bytes} claimed; download it again"
                )
            header = file.read(header_bytes)
    except FileNotFoundError:
        raise CheckpointError(f"{path}: this shard is missing; download it") from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
    data_start = _LENGTH_BYTES + header_bytes
    entries = [
        _entry(name, fields, path, data_start)
        for name, fields in _parse_object(header, path).items()
        if name != "__metadata__"
    ]
    entries.sort(key=lambda entry: (entry.offset_bytes, entry.num_bytes))
    _check_tiling(entries, path, data_start, size_bytes)
    return entries, header, size_bytes


def _check_tiling(
    entries: Iterable[TensorEntry], path: Path, data_start: int, size_bytes: int
) -> None:
    """Raises CheckpointError unless the tensors cover [data_start, size_bytes) exactly."""
    end, before = data_start, "the header"
    for entry in entries:
        if entry.offset_bytes != end:
            what = "overlaps" if entry.offset_bytes < end else "leaves a gap after"
            raise CheckpointError(
                f"{path}: tensor {entry.name} {what} {before}"
                f" ({abs(entry.offset_bytes - end)} bytes); download the file again"
            )
        end, before = end + entry.num_bytes, f"tensor {entry.name}"
    if end > size_bytes:
        raise CheckpointError(
            f"{path}: truncated: {size_bytes} bytes where the header needs {end};"
            " download the file again"
        )
    if end < size_bytes:
        raise CheckpointError(
            f"{path}: {size_bytes - end} bytes more than the {end} that the header accounts for;"
            " download the file again"
        )


def _entry(name: str, fields: object, path: Path, data_start: int) -> TensorEntry:
    match fields:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [begin, end]}:
            numbers = [*shape, begin, end]
        case _:
            raise CheckpointError(
                f"{path}: tensor {name} has no proper dtype, shape and data_offsets in the header;"
                " download the file again"
            )
    if not all(type(number) is int and number >= 0 for number in numbers) or end < begin:
        raise CheckpointError(
            f"{path}: tensor {name} has shape {shape} and data_offsets [{begin}, {end}],"
            " which cannot be; download the file again"
        )
    if dtype not in ITEM_BITS:
        raise CheckpointError(f"{path}: tensor {name} has the unknown dtype {dtype!r}")
    needed_bits = math.prod(shape) * ITEM_BITS[dtype]
    if needed_bits != 8 * (end - begin):
        raise CheckpointError(
            f"{path}: tensor {name} has {end - begin} bytes where {dtype} {shape} needs"
            f" {needed_bits // 8}; download the file again"
        )
    return TensorEntry(name, dtype, tuple(shape), path.name, data_start + begin, end - begin)


def _weight_map(directory: Path) -> dict[str, str] | None:
    """Tensor name -> shard of a sharded checkpoint; None for a single file."""
    if (directory / SINGLE_FILE).is_file():
        return None
    path = directory / INDEX_FILE
    if not path.is_file():
        found = sorted(
            entry.name
            for entry in directory.iterdir()
            if entry.suffix in (".safetensors", ".bin", ".pt", ".pth", ".gguf")
        )
        hint = f" (found {', '.join(found[:3])})" if found else ""
        raise CheckpointError(
            f"{directory}: holds neither {SINGLE_FILE} nor {INDEX_FILE}{hint};"
            " only safetensors checkpoints are read"
        )
    weight_map = _parse_object(_read_bytes(path), path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path}: has no weight_map; download the file again")
    for name, file_name in weight_map.items():
        if not isinstance(file_name, str) or "/" in file_name or file_name in ("", ".", ".."):
            raise CheckpointError(
                f"{path}: places tensor {name} in {file_name!r}, which is no file of this directory"
            )
    return weight_map


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error


def _parse_object(raw: bytes, path: Path) -> dict[str, Any]:
    """A JSON object without duplicate keys: two readers must not see two different files."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) < len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise CheckpointError(f"{path}: names {twice} twice; download the file again")
        return result

    try:
        value = json.loads(raw.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not valid JSON: {error}; download it again") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: not a JSON object; download the file again")
    return value
