"""The converter to GGUF: what llama.cpp reads is what Headrace reads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from safetensors import safe_open

from benchmarks import end_to_end
from benchmarks.random_checkpoint import make_random_checkpoint

gguf = pytest.importorskip("gguf", reason="gguf is not installed")
from benchmarks import gguf_checkpoint  # noqa: E402

if TYPE_CHECKING:
    from pathlib import Path

VOCAB, HIDDEN, MOE, EXPERTS, LAYERS, TOP_K = 300, 128, 64, 16, 2, 4
Q_ROWS, KV_ROWS, HEAD_DIM = 128, 64, 32
#: Names and shapes [outputs, inputs] that llama.cpp's qwen3moe asks for, outside and in a layer.
OUTSIDE = {
    "token_embd.weight": (VOCAB, HIDDEN),
    "output_norm.weight": (HIDDEN,),
    "output.weight": (VOCAB, HIDDEN),
}
IN_LAYER = {
    "attn_norm.weight": (HIDDEN,),
    "attn_q.weight": (Q_ROWS, HIDDEN),
    "attn_k.weight": (KV_ROWS, HIDDEN),
    "attn_v.weight": (KV_ROWS, HIDDEN),
    "attn_output.weight": (HIDDEN, Q_ROWS),
    "attn_q_norm.weight": (HEAD_DIM,),
    "attn_k_norm.weight": (HEAD_DIM,),
    "ffn_norm.weight": (HIDDEN,),
    "ffn_gate_inp.weight": (EXPERTS, HIDDEN),
    "ffn_gate_exps.weight": (EXPERTS, MOE, HIDDEN),
    "ffn_up_exps.weight": (EXPERTS, MOE, HIDDEN),
    "ffn_down_exps.weight": (EXPERTS, HIDDEN, MOE),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_random_checkpoint(
        tmp_path_factory.mktemp("gguf") / "model",
        num_layers=LAYERS,
        num_experts=EXPERTS,
        hidden_size=HIDDEN,
        intermediate_size=MOE,
        top_k=TOP_K,
        num_heads=Q_ROWS // HEAD_DIM,
        num_kv_heads=KV_ROWS // HEAD_DIM,
        vocab_size=VOCAB,
    )


def weight(model: Path, name: str) -> np.ndarray:
    index = json.loads((model / "model.safetensors.index.json").read_text())
    with safe_open(model / index["weight_map"][name], "pt") as file:
        return file.get_tensor(name).float().numpy()


def values(path: Path, name: str) -> np.ndarray:
    (tensor,) = (tensor for tensor in gguf.GGUFReader(path).tensors if tensor.name == name)
    return gguf.dequantize(tensor.data, tensor.tensor_type)


@pytest.mark.parametrize("bits", ["bf16", "q8_0", "q4_0"])
def test_tensors_have_the_names_shapes_and_bits_that_llama_cpp_asks_for(
    model: Path, tmp_path: Path, bits: str
) -> None:
    gguf_checkpoint.write_gguf(model, tmp_path / "m.gguf", bits)
    expected = dict(OUTSIDE)
    for layer in range(LAYERS):
        expected |= {f"blk.{layer}.{name}": shape for name, shape in IN_LAYER.items()}
    reader = gguf.GGUFReader(tmp_path / "m.gguf")
    # GGUF counts dimensions from the innermost.
    found = {tensor.name: tuple(map(int, tensor.shape))[::-1] for tensor in reader.tensors}
    assert found == expected
    for tensor in reader.tensors:
        name = tensor.name
        if len(found[name]) == 1 or "gate_inp" in name:
            assert tensor.tensor_type.name == "F32", name
        elif name == "token_embd.weight":
            assert tensor.tensor_type.name == "BF16"
        else:
            assert tensor.tensor_type.name == bits.upper(), name
    assert reader.fields["general.architecture"].contents() == "qwen3moe"
    assert reader.fields["qwen3moe.expert_used_count"].contents() == TOP_K


def test_each_expert_lies_where_llama_cpp_looks(model: Path, tmp_path: Path) -> None:
    gguf_checkpoint.write_gguf(model, tmp_path / "m.gguf", "bf16")
    for projection in ("gate", "up", "down"):
        stack = values(tmp_path / "m.gguf", f"blk.1.ffn_{projection}_exps.weight")
        # 2 and 10 are out of order when names are sorted as text.
        for expert in (0, 2, 10, EXPERTS - 1):
            name = f"model.layers.1.mlp.experts.{expert}.{projection}_proj.weight"
            assert np.array_equal(stack[expert], weight(model, name)), name


@pytest.mark.parametrize(("bits", "steps"), [("q8_0", 127), ("q4_0", 8)])
def test_quantised_weights_are_within_a_step(
    model: Path, tmp_path: Path, bits: str, steps: int
) -> None:
    gguf_checkpoint.write_gguf(model, tmp_path / "m.gguf", bits)
    exact = weight(model, "model.layers.0.self_attn.o_proj.weight")
    close = values(tmp_path / "m.gguf", "blk.0.attn_output.weight")
    groups = np.abs(exact).reshape(-1, 32).max(1, keepdims=True)
    error = np.abs(close - exact).reshape(-1, 32)
    # q4_0 has a code less on one side, so its worst error is a whole step.
    assert (error <= groups / steps * 1.01 + 1e-6).all()
    assert error.max() > 0


def test_a_token_needs_its_top_k_and_everything_else(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    gguf_checkpoint.write_gguf(model, path, "q4_0")
    # 18 bytes for 32 weights of the large matrices, 2 a weight of the embedding, 4 of the rest.
    experts = LAYERS * 3 * MOE * HIDDEN * TOP_K
    dense = LAYERS * (2 * Q_ROWS + 2 * KV_ROWS) * HIDDEN + VOCAB * HIDDEN
    small = LAYERS * (2 * HIDDEN + 2 * HEAD_DIM + EXPERTS * HIDDEN) + HIDDEN
    expected = (experts + dense) * 18 // 32 + 2 * VOCAB * HIDDEN + 4 * small
    assert gguf_checkpoint.bytes_per_token(path) == expected


def test_a_file_is_made_once_and_again_for_a_new_checkpoint(model: Path) -> None:
    path = gguf_checkpoint.gguf_file(model, "bf16")
    assert path == model.parent / "model-bf16.gguf"
    path.write_bytes(b"as it was")
    assert gguf_checkpoint.gguf_file(model, "bf16").read_bytes() == b"as it was"
    made_at = (model / "config.json").stat().st_mtime
    os.utime(path, (made_at - 1, made_at - 1))
    assert gguf_checkpoint.gguf_file(model, "bf16").read_bytes().startswith(b"GGUF")
    assert sorted(file.name for file in model.parent.iterdir()) == ["model", "model-bf16.gguf"]


def test_other_families_are_refused(model: Path, tmp_path: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "mixtral"}))
    with pytest.raises(SystemExit, match="no qwen3_moe model"):
        gguf_checkpoint.write_gguf(tmp_path, tmp_path / "m.gguf", "bf16")
    assert not (tmp_path / "m.gguf").exists()


def test_greedy_tokens_are_those_of_transformers(model: Path, tmp_path: Path) -> None:
    pytest.importorskip("llama_cpp", reason="llama-cpp-python (the extra `peers`) is not installed")
    from transformers import AutoModelForCausalLM

    # In float32 nothing but the order of sums differs, so no near tie decides a token.
    gguf_checkpoint.write_gguf(model, tmp_path / "m.gguf", "f32")
    prompt = list(range(40, 60))
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.llama_process", "generate", str(tmp_path / "m.gguf"),
         "--prompt", *map(str, prompt), "--tokens", "12"],
        cwd=end_to_end.ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    with torch.inference_mode():
        tokens = reference.generate(
            torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=None
        )
    assert json.loads(done.stdout)["tokens"] == tokens[0, len(prompt) :].tolist()


def test_without_the_extra_a_sentence_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], model: Path
) -> None:
    monkeypatch.setattr(end_to_end, "missing_peers", lambda: ["llama_cpp"])
    monkeypatch.setattr(end_to_end, "measure", lambda args, model: [{"llama": args.llama}])
    monkeypatch.setattr(sys, "argv", ["end_to_end", "--llama", "--json", "--model", str(model)])
    assert end_to_end.main() == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["rows"] == [{"llama": False}]
    assert err.splitlines() == [
        "llama.cpp: skipped, llama_cpp not installed: pip install 'headrace[peers]'"
    ]


def test_llama_cpp_has_a_row_for_each_of_its_formats_and_a_ratio(model: Path) -> None:
    files = {"bf16": gguf_checkpoint.gguf_file(model, "bf16")}
    runs = [{"tokens_per_s": rate, "version": "1"} for rate in (10.0, 40.0, 20.0)]
    (row,) = end_to_end.llama_rows(files, {"bf16": runs}, [20.0, 20.0, 30.0])
    assert row["tokens_per_s"] == 20
    # Neighbours are compared: 2, 0.5 and 1.5.
    assert row["headrace_ratio"] == 1.5
    assert row["gbps"] == pytest.approx(20 * row["gb_per_token"])
