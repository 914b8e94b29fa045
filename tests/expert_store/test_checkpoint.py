"""Bad files, told by name within milliseconds; no torch needed here."""

from __future__ import annotations

import json
import struct
from typing import TYPE_CHECKING, Any

import pytest

from expert_store.checkpoint import CheckpointError, open_checkpoint, refuse_dense
from protocol.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

Header = dict[str, dict[str, Any]]


def write_shard(path: Path, tensors: dict[str, list[int]]) -> None:
    """F32 tensors of the given shapes, filled with their position in the file."""
    header: Header = {}
    data = bytearray()
    for number, (name, shape) in enumerate(tensors.items()):
        count = 1
        for size in shape:
            count *= size
        begin = len(data)
        data += struct.pack("<f", number) * count
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [begin, len(data)]}
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


@pytest.fixture
def single(tmp_path: Path) -> Path:
    directory = tmp_path / "single"
    directory.mkdir()
    (directory / "config.json").write_text('{"model_type": "qwen3_moe"}')
    write_shard(directory / "model.safetensors", {"a": [2, 3], "b": [4], "c": []})
    return directory


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    directory = tmp_path / "sharded"
    directory.mkdir()
    (directory / "config.json").write_text('{"model_type": "qwen3_moe"}')
    write_shard(directory / "one.safetensors", {"a": [2, 3], "b": [4]})
    write_shard(directory / "two.safetensors", {"c": [5]})
    weight_map = {"a": "one.safetensors", "b": "one.safetensors", "c": "two.safetensors"}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return directory


def refusal(directory: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(directory)
    message = str(caught.value)
    assert isinstance(caught.value, UserError)
    assert "\n" not in message
    return message


def test_extents_are_absolute(single: Path, sharded: Path) -> None:
    checkpoint = open_checkpoint(single)
    raw = (single / "model.safetensors").read_bytes()
    for number, name in enumerate("abc"):
        entry = checkpoint.tensors[name]
        part = raw[entry.offset_bytes : entry.offset_bytes + entry.num_bytes]
        assert part == struct.pack("<f", number) * (entry.num_bytes // 4)
    assert checkpoint.tensors["a"].shape == (2, 3)
    assert checkpoint.data_bytes == 44
    assert open_checkpoint(sharded).tensors["c"].file_name == "two.safetensors"


def test_fingerprint_follows_config_and_headers(single: Path) -> None:
    before = open_checkpoint(single).fingerprint
    assert open_checkpoint(single).fingerprint == before
    write_shard(single / "model.safetensors", {"a": [3, 2], "b": [4], "c": []})
    assert open_checkpoint(single).fingerprint != before


def test_directory_faults(tmp_path: Path) -> None:
    assert "no such directory" in refusal(tmp_path / "absent")
    assert "is empty" in refusal(tmp_path)
    (tmp_path / "readme").write_text("x")
    assert "no config.json" in refusal(tmp_path)
    assert "is a file" in refusal(tmp_path / "readme")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{", "not valid JSON"),
        ("[]", "not a JSON object"),
        ("\xff", "not valid JSON"),
        ("{}", "model_type"),
        ('{"model_type": "a", "model_type": "b"}', "model_type twice"),
        ('{"model_type": "a", "text_config": {"quantization_config": {}, "x": 1}}', None),
        ('{"model_type": "a", "rms_norm_eps": NaN}', "rms_norm_eps is nan, which is no number"),
        ('{"model_type": "a", "rms_norm_eps": 1e999}', "rms_norm_eps is inf, which is no number"),
        ('{"model_type": "a", "rms_norm_eps": -1e-6}', "rms_norm_eps is -1e-06 and must be from 0"),
        (
            '{"model_type": "a", "text_config": {"rms_norm_eps": 3}}',
            "text_config.rms_norm_eps is 3",
        ),
        (
            '{"model_type": "a", "rope_parameters": {"rope_theta": 0}}',
            "rope_theta is 0 and must be",
        ),
        ('{"model_type": "a", "eps": 1' + 400 * "0" + "}", "eps is 1000000000"),
        ('{"model_type": "a", "x": 1' + 400 * "0" + "}", None),
        ('{"model_type": "a", "long_factor": [1, NaN]}', "long_factor[1] is nan"),
        ('{"model_type": "a", "max_position_embeddings": -1}', "max_position_embeddings is -1"),
        ('{"model_type": "a", "time_step_limit": [0.0, Infinity], "x_steps": -1, "eps": 0}', None),
    ],
)
def test_config_faults(single: Path, text: str, expected: str | None) -> None:
    (single / "config.json").write_bytes(text.encode("latin-1"))
    if expected is None:
        open_checkpoint(single)
    else:
        message = refusal(single)
        assert expected in message
        assert "config.json" in message


def test_no_weights_or_other_formats(single: Path) -> None:
    (single / "model.safetensors").rename(single / "pytorch_model.bin")
    assert "pytorch_model.bin" in refusal(single)
    (single / "pytorch_model.bin").unlink()
    assert "neither" in refusal(single)


@pytest.mark.parametrize("missing", [1, 3, 4, 43, 44])
def test_truncated(single: Path, missing: int) -> None:
    path = single / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-missing])
    message = refusal(single)
    assert "truncated" in message
    assert "model.safetensors" in message


@pytest.mark.parametrize("length", [0, 1, 7, 8, 9, 40])
def test_truncated_in_the_header(single: Path, length: int) -> None:
    path = single / "model.safetensors"
    path.write_bytes(path.read_bytes()[:length])
    assert "not a complete safetensors file" in refusal(single)


def test_one_byte_too_many(single: Path) -> None:
    path = single / "model.safetensors"
    path.write_bytes(path.read_bytes() + b"\0")
    assert "1 bytes more" in refusal(single)


def set_entry(name: str, **fields: Any) -> Callable[[Header, bytearray], None]:
    return lambda header, data: header[name].update(fields)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (set_entry("b", data_offsets=[23, 39]), "tensor b overlaps tensor a (1 bytes)"),
        (set_entry("b", data_offsets=[25, 41]), "tensor b leaves a gap after tensor a (1 bytes)"),
        (set_entry("a", data_offsets=[1, 25]), "tensor a leaves a gap after the header (1 bytes)"),
        (set_entry("c", data_offsets=[41, 45]), "tensor c leaves a gap"),
        (set_entry("b", data_offsets=[24, 39]), "tensor b has 15 bytes where F32 [4] needs 16"),
        (set_entry("b", shape=[5]), "tensor b has 16 bytes where F32 [5] needs 20"),
        (set_entry("b", shape=[-4]), "tensor b has shape [-4]"),
        (set_entry("b", shape=[4.0]), "tensor b has shape"),
        (set_entry("b", shape=[True, 4]), "tensor b has shape"),
        (set_entry("b", shape=4), "tensor b has no proper"),
        (set_entry("b", data_offsets=[24]), "tensor b has no proper"),
        (set_entry("b", data_offsets=[40, 24]), "tensor b has shape"),
        (set_entry("b", dtype="F33"), "unknown dtype 'F33'"),
        (set_entry("b", dtype="BF16"), "tensor b has 16 bytes where BF16 [4] needs 8"),
        (lambda header, data: header.update(b=3), "tensor b has no proper"),
        (lambda header, data: header.pop("c"), "4 bytes more"),
    ],
)
def test_header_faults(
    single: Path,
    edit_shard: Callable[..., None],
    change: Callable[[Header, bytearray], None],
    expected: str,
) -> None:
    edit_shard(single / "model.safetensors", change)
    message = refusal(single)
    assert expected in message
    assert "model.safetensors" in message


def test_duplicate_keys_in_a_header(single: Path) -> None:
    path = single / "model.safetensors"
    raw = path.read_bytes()
    path.write_bytes(raw.replace(b'"c"', b'"b"'))
    assert "names b twice" in refusal(single)


def test_header_of_absurd_length(single: Path) -> None:
    path = single / "model.safetensors"
    path.write_bytes(struct.pack("<Q", 2**60) + path.read_bytes()[8:])
    assert "not a complete safetensors file" in refusal(single)


def test_missing_shard(sharded: Path) -> None:
    (sharded / "two.safetensors").unlink()
    message = refusal(sharded)
    assert "two.safetensors" in message
    assert "missing" in message


def test_missing_index(sharded: Path) -> None:
    (sharded / "model.safetensors.index.json").unlink()
    assert "model.safetensors.index.json" in refusal(sharded)


def test_tensor_missing_from_its_shard(sharded: Path) -> None:
    write_shard(sharded / "two.safetensors", {"d": [5]})
    assert "two.safetensors: lacks tensor c" in refusal(sharded)


def test_tensor_in_two_shards(sharded: Path) -> None:
    write_shard(sharded / "two.safetensors", {"c": [5], "a": [1]})
    message = refusal(sharded)
    assert "tensor a is also in one.safetensors" in message


@pytest.mark.parametrize("name", ["../one.safetensors", "sub/x.safetensors", "", "..", 7])
def test_index_may_not_leave_the_directory(sharded: Path, name: object) -> None:
    (sharded / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    assert "no file of this directory" in refusal(sharded)


def test_index_without_a_map(sharded: Path) -> None:
    (sharded / "model.safetensors.index.json").write_text("{}")
    assert "no weight_map" in refusal(sharded)


@pytest.mark.parametrize(
    ("config", "tensor", "is_dense"),
    [
        ({"model_type": "qwen3", "num_experts": 0}, "model.layers.0.mlp.down_proj.weight", True),
        ({"model_type": "x", "text_config": {"a": [1]}}, "model.layers.0.mlp.up_proj", True),
        ({"model_type": "qwen3_moe"}, "a", False),
        ({"model_type": "mixtral"}, "layers.0.block_sparse_moe.w1", False),
        ({"model_type": "dbrx"}, "transformer.blocks.0.ffn.experts.mlp.w1", False),
        ({"model_type": "x", "ffn_config": {"moe_num_experts": 4}}, "a", False),
        ({"model_type": "x", "text_config": {"model_type": "y_moe"}}, "a", False),
        ({"model_type": "x", "blocks": [{"num_local_experts": 8}]}, "a", False),
    ],
)
def test_only_what_is_plainly_dense_is_refused(
    config: dict[str, Any], tensor: str, is_dense: bool, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    write_shard(tmp_path / "model.safetensors", {tensor: [2, 3]})
    checkpoint = open_checkpoint(tmp_path)
    if is_dense:
        with pytest.raises(CheckpointError, match="is a dense model") as caught:
            refuse_dense(checkpoint)
        assert str(tmp_path) in str(caught.value)
    else:
        refuse_dense(checkpoint)
