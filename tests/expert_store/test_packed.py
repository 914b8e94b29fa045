"""Quantised layouts of other makers: found in the headers, read to what their codes mean."""

from __future__ import annotations

import json
import struct
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from expert_store.checkpoint import CheckpointError, open_checkpoint
from expert_store.packed import PackedTensor, gather_packed
from expert_store.packing import E2M1_VALUES, E4M3_VALUES
from expert_store.reading import SourceFiles
from expert_store.unpacking import read_floats

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
from tests import native_checkpoints as native

EXPERT = "model.layers.1.mlp.experts.3.down_proj"


def make(layout: str, plain: Path, path: Path, **options: Any) -> tuple[Path, Path]:
    quantised, meaning = path / "native", path / "meaning"
    native.quantise_checkpoint(plain, quantised, meaning, layout, **options)
    return quantised, meaning


def values(directory: Path, name: str, expert: int | None = None) -> np.ndarray[Any, Any]:
    checkpoint = gather_packed(open_checkpoint(directory))
    entry = checkpoint.tensors[name]
    assert isinstance(entry, PackedTensor)
    files = SourceFiles(checkpoint, drop_cache=False)
    try:
        return read_floats(entry, files, expert)
    finally:
        files.close()


def rewrite(directory: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    path = directory / "model.safetensors"
    state = {name: tensor.clone() for name, tensor in load_file(path).items()}
    change(state)
    save_file(state, path)


@pytest.mark.parametrize(
    ("layout", "options"),
    [
        *((layout, {}) for layout in native.LAYOUTS),
        ("gptq", {"symmetric": True}),
        ("compressed int4", {"symmetric": False}),
        ("compressed fp8", {"strategy": "tensor"}),
    ],
)
def test_every_weight_means_what_an_outside_implementation_says(
    layout: str, options: dict[str, Any], checkpoint_of: Callable[..., Path], tmp_path: Path
) -> None:
    plain = checkpoint_of("qwen3_moe", num_hidden_layers=2)
    quantised, meaning = make(layout, plain, tmp_path, **options)
    theirs = load_file(meaning / "model.safetensors")
    tensors = gather_packed(open_checkpoint(quantised)).tensors
    assert set(tensors) == set(theirs)
    packed = [name for name, entry in tensors.items() if isinstance(entry, PackedTensor)]
    assert len(packed) == 2 * (4 + 3 * 8)
    for name in packed[::5]:
        assert tensors[name].shape == theirs[name].shape
        np.testing.assert_allclose(values(quantised, name), theirs[name].numpy(), rtol=3e-7)


def test_gpt_oss_blocks_mean_what_transformers_says(
    checkpoint_of: Callable[..., Path], tmp_path: Path
) -> None:
    quantised, meaning = tmp_path / "native", tmp_path / "meaning"
    native.quantise_gpt_oss(checkpoint_of("gpt_oss"), quantised, meaning)
    theirs = load_file(meaning / "model.safetensors")
    for leaf in ("gate_up_proj", "down_proj"):
        name = f"model.layers.1.mlp.experts.{leaf}"
        for expert in (0, 5):
            found = values(quantised, name, expert)
            assert np.array_equal(found.T, theirs[name][expert].numpy())


def test_tables_of_small_floats() -> None:
    every = torch.arange(256, dtype=torch.uint8)
    theirs = every.view(torch.float8_e4m3fn).float().numpy()
    assert np.array_equal(E4M3_VALUES, theirs, equal_nan=True)
    from transformers.integrations.mxfp4 import FP4_VALUES

    assert E2M1_VALUES.tolist() == FP4_VALUES


def test_qwen_scales_in_bfloat16(checkpoint_of: Callable[..., Path], tmp_path: Path) -> None:
    quantised, _ = make("fp8", checkpoint_of("qwen3_moe", num_hidden_layers=2), tmp_path)
    name = f"{EXPERT}.weight_scale_inv"
    rewrite(quantised, lambda state: state.update({name: state[name].bfloat16()}))
    state = load_file(quantised / "model.safetensors")
    expected = state[f"{EXPERT}.weight"].float() * state[name].float()
    assert np.array_equal(values(quantised, f"{EXPERT}.weight"), expected.numpy())


# --- what is refused ------------------------------------------------------------------------


def refusal(directory: Path, name: str = f"{EXPERT}.weight") -> str:
    with pytest.raises(CheckpointError) as caught:
        values(directory, name)
    message = str(caught.value)
    assert str(directory) in message
    assert "\n" not in message
    return message


def test_inputs_out_of_order_mean_what_they_say(
    checkpoint_of: Callable[..., Path], tmp_path: Path
) -> None:
    quantised, meaning = make(
        "gptq", checkpoint_of("qwen3_moe", num_hidden_layers=2), tmp_path, desc_act=True
    )
    theirs = load_file(meaning / "model.safetensors")
    checkpoint = gather_packed(open_checkpoint(quantised))
    files = SourceFiles(checkpoint, drop_cache=False)
    for name in (
        f"{EXPERT.replace('down', 'gate')}.weight",
        "model.layers.1.self_attn.q_proj.weight",
    ):
        entry = checkpoint.tensors[name]
        assert isinstance(entry, PackedTensor)
        np.testing.assert_allclose(read_floats(entry, files), theirs[name].numpy(), rtol=3e-7)
    files.close()


def test_groups_of_unlike_sizes_are_no_order(
    checkpoint_of: Callable[..., Path], tmp_path: Path
) -> None:
    quantised, _ = make("gptq", checkpoint_of("qwen3_moe"), tmp_path, desc_act=True)
    name = EXPERT.replace("down", "gate")
    rewrite(quantised, lambda state: state[f"{name}.g_idx"].fill_(0))
    assert "into each group" in refusal(quantised, f"{name}.weight")


@pytest.mark.parametrize(
    ("layout", "part", "replacement", "expected"),
    [
        ("awq", "qzeros", None, "qzeros"),
        ("awq", "scales", torch.ones(1, 8), "[1, 64]"),
        ("gptq", "scales", torch.ones(3, 64), "whole groups of 32"),
        ("fp8", "weight_scale_inv", torch.ones(2, 2), "128 x 128"),
        ("compressed int4", "weight_scale", torch.ones(64, 1, dtype=torch.int8), "I8"),
        ("modelopt nvfp4", "weight_scale_2", torch.ones(3), "single number"),
        ("modelopt nvfp4", "weight_scale", torch.ones(64, 1).to(torch.float8_e4m3fn), "16"),
    ],
)
def test_parts_that_do_not_belong_together(
    layout: str,
    part: str,
    replacement: torch.Tensor | None,
    expected: str,
    checkpoint_of: Callable[..., Path],
    tmp_path: Path,
) -> None:
    quantised, _ = make(layout, checkpoint_of("qwen3_moe"), tmp_path)

    def change(state: dict[str, torch.Tensor]) -> None:
        del state[f"{EXPERT}.{part}"]
        if replacement is not None:
            state[f"{EXPERT}.{part}"] = replacement

    rewrite(quantised, change)
    message = refusal(quantised)
    assert f"{EXPERT}.{part}" in message
    assert expected in message


@pytest.mark.parametrize(
    ("layout", "part", "byte"),
    [("fp8", "weight", 0x7F), ("modelopt nvfp4", "weight_scale", 0xFF)],
)
def test_codes_of_nan(
    layout: str, part: str, byte: int, checkpoint_of: Callable[..., Path], tmp_path: Path
) -> None:
    quantised, _ = make(layout, checkpoint_of("qwen3_moe"), tmp_path)
    rewrite(
        quantised,
        lambda state: state[f"{EXPERT}.{part}"].view(torch.uint8)[1].fill_(byte),
    )
    assert f"{EXPERT}.{part}" in refusal(quantised)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"quant_method": "bitsandbytes"}, "'bitsandbytes'"),
        ({"bits": 4}, "'unknown'"),
        ({"quant_method": "awq", "bits": 8}, "8-bit"),
        ({"quant_method": "awq", "bits": 4, "version": "marlin"}, "'marlin'"),
        ("mxfp4", "no object"),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "pack-quantized",
                "config_groups": {"group_0": {"weights": {"num_bits": 3}}},
            },
            "3 bits",
        ),
    ],
)
def test_methods_that_are_not_read(
    config: Any, expected: str, checkpoint_of: Callable[..., Path], tmp_path: Path
) -> None:
    quantised, _ = make("awq", checkpoint_of("qwen3_moe"), tmp_path)
    stated = json.loads((quantised / "config.json").read_text())
    (quantised / "config.json").write_text(json.dumps({**stated, "quantization_config": config}))
    message = refusal(quantised)
    assert expected in message
    assert expected == "no object" or "experts.0.down_proj" in message


def test_a_weight_both_plain_and_quantised(
    checkpoint_of: Callable[..., Path], tmp_path: Path
) -> None:
    quantised, _ = make("awq", checkpoint_of("qwen3_moe"), tmp_path)
    rewrite(quantised, lambda state: state.update({f"{EXPERT}.weight": torch.ones(64, 32)}))
    assert "both" in refusal(quantised)


def test_headers_alone_decide(checkpoint_of: Callable[..., Path], tmp_path: Path) -> None:
    """A shard that ends early is told before anything of it is read as codes."""
    quantised, _ = make("awq", checkpoint_of("qwen3_moe"), tmp_path)
    path = quantised / "model.safetensors"
    raw = path.read_bytes()
    assert struct.unpack("<Q", raw[:8])[0] < len(raw)
    path.write_bytes(raw[:-1])
    assert "truncated" in refusal(quantised)
