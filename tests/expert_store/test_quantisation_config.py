"""What strangers write about quantisation: any JSON type anywhere, and tensors that do not fit."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from expert_store.checkpoint import CheckpointError, open_checkpoint
from expert_store.packed import gather_packed

if TYPE_CHECKING:
    from pathlib import Path

STEM = "model.layers.0.mlp.experts.0.down_proj"
#: Inputs, outputs and inputs of a group.
INPUTS, OUTPUTS, GROUP = 64, 16, 32
PACKED = {"quant_method": "compressed-tensors", "format": "pack-quantized"}


def gptq_tensors() -> dict[str, Any]:
    return {
        "qweight": np.zeros((INPUTS // 8, OUTPUTS), np.int32),
        "qzeros": np.zeros((INPUTS // GROUP, OUTPUTS // 8), np.int32),
        "scales": np.ones((INPUTS // GROUP, OUTPUTS), np.float16),
        "g_idx": np.arange(INPUTS, dtype=np.int32) // GROUP,
    }


def packed_tensors() -> dict[str, Any]:
    return {
        "weight_packed": np.zeros((OUTPUTS, INPUTS // 8), np.int32),
        "weight_scale": np.ones((OUTPUTS, INPUTS // GROUP), np.float16),
        "weight_g_idx": np.arange(INPUTS, dtype=np.int32) // GROUP,
    }


def gather(directory: Path, config: Any, tensors: dict[str, Any]) -> Any:
    """The weight that one expert's tensors are read as."""
    save_file({f"{STEM}.{leaf}": t for leaf, t in tensors.items()}, directory / "model.safetensors")
    stated = {"model_type": "made-up", "quantization_config": config}
    (directory / "config.json").write_text(json.dumps(stated))
    return gather_packed(open_checkpoint(directory)).tensors[f"{STEM}.weight"]


def refusal(directory: Path, config: Any, tensors: dict[str, Any]) -> str:
    with pytest.raises(CheckpointError) as caught:
        gather(directory, config, tensors)
    message = str(caught.value)
    assert str(directory) in message
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    ("more", "found"),
    [
        ({"sparsity_config": "dense"}, "a sparsity_config that is the string 'dense'"),
        ({"sparsity_config": ["dense"]}, "a sparsity_config that is a list"),
        ({"sparsity_config": 3}, "a sparsity_config that is the number 3"),
        ({"sparsity_config": {"format": "sparse-24"}}, "sparse weights (the string 'sparse-24')"),
        ({"sparsity_config": {"format": None}}, "sparse weights (null)"),
        ({"config_groups": [{}]}, "config_groups that are a list"),
        ({"config_groups": "group_0"}, "config_groups that are the string 'group_0'"),
        ({"config_groups": 7}, "config_groups that are the number 7"),
        ({"config_groups": {"group_0": "Linear"}}, "a group 'group_0' that is the string 'Linear'"),
        ({"config_groups": {"g": {"weights": "int4"}}}, "that are the string 'int4'"),
        ({"config_groups": {"g": {"weights": [4]}}}, "weights of group 'g' that are a list"),
        ({"config_groups": {"g": {"weights": {"num_bits": "4"}}}}, "num_bits are the string '4'"),
        ({"config_groups": {"g": {"weights": {"num_bits": 8}}}}, "weights of 8 bits"),
    ],
)
def test_a_config_of_the_wrong_form_is_told(
    more: dict[str, Any], found: str, tmp_path: Path
) -> None:
    message = refusal(tmp_path, {**PACKED, **more}, packed_tensors())
    assert found in message
    assert "config.json" in message


@pytest.mark.parametrize(
    "more",
    [
        {"sparsity_config": None},
        {"sparsity_config": {}},
        {"sparsity_config": {"format": "dense"}},
        {"config_groups": None},
        {"config_groups": {"W4A16": ["Linear"]}},
        {"config_groups": {"g": {"weights": None}}},
        {"config_groups": {"g": {"weights": {"num_bits": 4}}}},
    ],
)
def test_what_means_none_is_read(more: dict[str, Any], tmp_path: Path) -> None:
    entry = gather(tmp_path, {**PACKED, **more}, packed_tensors())
    assert (entry.kind, entry.shape, entry.group) == ("int4", (OUTPUTS, INPUTS), GROUP)


@pytest.mark.parametrize(
    ("more", "found"),
    [
        ({"bits": "4"}, "bits that are the string '4', where the number 4 is read"),
        ({"bits": None}, "bits that are null"),
        ({"bits": True}, "bits that are true"),
        ({"bits": [4]}, "bits that are a list"),
        ({"bits": 8}, "8-bit weights"),
        ({"bits": 10**400}, "0" * 30 + "-bit weights"),
        ({"bits": 4, "desc_act": "false"}, "a desc_act that is the string 'false'"),
    ],
)
def test_bits_and_order_of_the_wrong_type_are_told(
    more: dict[str, Any], found: str, tmp_path: Path
) -> None:
    message = refusal(tmp_path, {"quant_method": "gptq", **more}, gptq_tensors())
    assert found in message
    assert len(message) < 500


def test_modelopts_own_file_nested_too_deeply(tmp_path: Path) -> None:
    (tmp_path / "hf_quant_config.json").write_text("[" * 100_000)
    message = refusal(tmp_path, None, packed_tensors())
    assert "hf_quant_config.json" in message
    assert "too deeply" in message


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.uint8])
def test_groups_of_inputs_are_whole_numbers(dtype: Any, tmp_path: Path) -> None:
    wrong = {"g_idx": gptq_tensors()["g_idx"].astype(dtype)}
    message = refusal(tmp_path, {"quant_method": "gptq"}, gptq_tensors() | wrong)
    assert f"{STEM}.g_idx" in message
    assert "I32 or I64 is expected" in message
    wrong = {"weight_g_idx": wrong["g_idx"]}
    assert f"{STEM}.weight_g_idx" in refusal(tmp_path, PACKED, packed_tensors() | wrong)


def test_groups_of_inputs_may_be_long_numbers(tmp_path: Path) -> None:
    long = {"g_idx": gptq_tensors()["g_idx"].astype(np.int64)}
    assert "order" in gather(tmp_path, {"quant_method": "gptq"}, gptq_tensors() | long).parts


def test_no_inputs_at_all_are_no_groups(tmp_path: Path) -> None:
    nothing = {"qweight": np.zeros((0, OUTPUTS), np.int32), "g_idx": np.zeros(0, np.int32)}
    message = refusal(tmp_path, {"quant_method": "gptq"}, gptq_tensors() | nothing)
    assert f"{STEM}.scales" in message
    nothing = {"weight_packed": np.zeros((OUTPUTS, 0), np.int32)}
    message = refusal(tmp_path, PACKED, packed_tensors() | nothing)
    assert f"{STEM}.weight_scale" in message


def test_an_order_that_is_stated_must_be_there(tmp_path: Path) -> None:
    config = {"quant_method": "gptq", "desc_act": True}
    assert "order" in gather(tmp_path, config, gptq_tensors()).parts
    lacking = {leaf: tensor for leaf, tensor in gptq_tensors().items() if leaf != "g_idx"}
    message = refusal(tmp_path, config, lacking)
    assert f"{STEM}.g_idx" in message
    assert "desc_act" in message
    assert "order" not in gather(tmp_path, {**config, "desc_act": False}, lacking).parts
    # One group has one order.
    lacking["scales"], lacking["qzeros"] = lacking["scales"][:1], lacking["qzeros"][:1]
    assert gather(tmp_path, config, lacking).group == INPUTS
