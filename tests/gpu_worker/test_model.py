"""The dense half: no expert is read or allocated, and a checkpoint with holes is refused."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from gpu_worker.model import load_dense_model
from protocol.errors import UserError
from tests.gpu_worker.pipeline import experts_of, make_model

CPU = torch.device("cpu")


def _peak_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def test_experts_are_neither_read_nor_allocated(tmp_path: Path) -> None:
    model = make_model("qwen3_moe", num_experts=64, moe_intermediate_size=1024, hidden_size=256)
    expert_bytes = sum(p.numel() * 4 for module in experts_of(model) for p in module.parameters())
    dense_names = {name for name, _ in model.named_parameters() if ".experts." not in name}
    model.save_pretrained(tmp_path)
    del model
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts here
    before_bytes = _peak_bytes()
    dense = load_dense_model(tmp_path, torch.float32, CPU)
    grown_bytes = _peak_bytes() - before_bytes
    assert expert_bytes > 500e6
    assert grown_bytes < 0.2 * expert_bytes
    assert set(dense.parameter_names()) == dense_names


def _damage(directory: Path, change: Any) -> None:
    path = directory / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def test_a_missing_dense_weight_is_refused_by_name(tmp_path: Path) -> None:
    make_model("mixtral").save_pretrained(tmp_path)
    _damage(tmp_path, lambda tensors: tensors.pop("model.layers.1.self_attn.q_proj.weight"))
    with pytest.raises(UserError, match=r"missing, among them model\.layers\.1\.self_attn\.q_proj"):
        load_dense_model(tmp_path, torch.float32, CPU)


def test_a_nan_in_a_dense_weight_is_refused_by_name(tmp_path: Path) -> None:
    make_model("mixtral").save_pretrained(tmp_path)

    def put_nan(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.2.self_attn.o_proj.weight"][3, 5] = float("nan")

    _damage(tmp_path, put_nan)
    with pytest.raises(UserError, match=r"model\.layers\.2\.self_attn\.o_proj\.weight holds NaN"):
        load_dense_model(tmp_path, torch.float32, CPU)


def test_a_dense_weight_of_another_shape_is_refused(tmp_path: Path) -> None:
    make_model("mixtral").save_pretrained(tmp_path)

    def cut(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.norm.weight"] = tensors["model.norm.weight"][:-1].clone()

    _damage(tmp_path, cut)
    with pytest.raises(UserError, match="dense weights do not load"):
        load_dense_model(tmp_path, torch.float32, CPU)


def test_a_model_without_experts_is_refused(tmp_path: Path) -> None:
    config = AutoConfig.for_model(
        "llama", hidden_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=32,
        intermediate_size=16, num_key_value_heads=2,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="'llama' has no routed experts"):
        load_dense_model(tmp_path, torch.float32, CPU)


def test_an_experts_module_that_runs_in_another_way_is_refused(tmp_path: Path) -> None:
    make_model("mixtral").save_pretrained(tmp_path)
    dense = load_dense_model(tmp_path, torch.float32, CPU)
    dense.warm_up()
    dense._experts.reverse()
    with torch.inference_mode(), pytest.raises(UserError, match="'mixtral' run in another way"):
        dense.warm_up()
