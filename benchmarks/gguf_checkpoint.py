"""Writes a Qwen3-MoE checkpoint as GGUF, so that llama.cpp can be measured on the same weights.

    python -m benchmarks.gguf_checkpoint DIR FILE --bits q4_0

Experts, attention and head get the same bits, as `headrace --dense-dtype` gives them. What neither
program quantises: the embedding stays bfloat16 (a token reads one row of it), norms and router
become float32, as llama.cpp's own converter has them. q4_k is quantised by llama.cpp from the bf16
file, the others by the gguf package. The file has no tokenizer: prompts are given as token ids.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import gguf
import numpy as np
import torch
from rich.progress import track
from safetensors import safe_open

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parent.parent
BITS = {
    "f32": gguf.GGMLQuantizationType.F32,
    "bf16": gguf.GGMLQuantizationType.BF16,
    "q8_0": gguf.GGMLQuantizationType.Q8_0,
    "q4_0": gguf.GGMLQuantizationType.Q4_0,
    "q4_k": gguf.GGMLQuantizationType.Q4_K,
}
_ARCH = gguf.MODEL_ARCH.QWEN3MOE
_EXPERT = re.compile(r"(model\.layers\.\d+\.mlp\.experts)\.(\d+)\.(\w+\.weight)")


class _Tensor(NamedTuple):
    name: str
    sources: list[str]  # names in the checkpoint; of experts one each, in the experts' order
    shape: tuple[int, ...]
    type: gguf.GGMLQuantizationType

    @property
    def byte_shape(self) -> tuple[int, ...]:
        return gguf.quant_shape_to_byte_shape(self.shape, self.type)


class _Checkpoint:
    """A folder of safetensors files, read tensor by tensor."""

    def __init__(self, path: Path) -> None:
        self.config: dict[str, Any] = json.loads((path / "config.json").read_text())
        self._files = [safe_open(file, "pt") for file in sorted(path.glob("*.safetensors"))]
        self._file_of = {name: file for file in self._files for name in file.keys()}  # noqa: SIM118

    def names(self) -> Iterator[str]:
        yield from self._file_of

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._file_of[name].get_slice(name).get_shape())

    def read(self, name: str) -> torch.Tensor:
        return self._file_of[name].get_tensor(name)


def gguf_file(model: Path, bits: str) -> Path:
    """The model at these bits, a file beside its folder; made unless it is there and newer."""
    path = model.with_name(f"{model.name}-{bits}.gguf")
    if path.is_file() and path.stat().st_mtime >= (model / "config.json").stat().st_mtime:
        return path
    # An interrupted run leaves no file under the name that is looked for.
    part = path.with_suffix(".part")
    if bits == "q4_k":
        _let_llama_quantise(gguf_file(model, "bf16"), part)
    else:
        write_gguf(model, part, bits)
    os.replace(part, path)
    return path


def write_gguf(model: Path, path: Path, bits: str) -> None:
    """Write the checkpoint in `model` to `path`, at any bits but q4_k."""
    checkpoint = _Checkpoint(model)
    if checkpoint.config["model_type"] != "qwen3_moe":
        raise SystemExit(f"gguf_checkpoint: {model} is no qwen3_moe model")
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[_ARCH])
    _write_config(writer, checkpoint.config)
    tensors = list(_tensors(checkpoint, BITS[bits]))
    for tensor in tensors:
        writer.add_tensor_info(
            tensor.name,
            tensor.byte_shape,
            np.dtype(np.uint8),
            int(np.prod(tensor.byte_shape)),
            tensor.type,
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor in track(tensors, f"writing {bits}", transient=True):
        parts = [_encode(checkpoint.read(name), tensor.type) for name in tensor.sources]
        writer.write_tensor_data(np.stack(parts).reshape(tensor.byte_shape))
    writer.close()


def bytes_per_token(path: Path) -> int:
    """Bytes of weights that a token needs: of the experts its top_k, of the rest everything."""
    reader = gguf.GGUFReader(path)
    arch = gguf.MODEL_ARCH_NAMES[_ARCH]
    top_k, num_experts = (
        int(reader.fields[key.format(arch=arch)].contents())
        for key in (gguf.Keys.LLM.EXPERT_USED_COUNT, gguf.Keys.LLM.EXPERT_COUNT)
    )
    experts = sum(int(tensor.n_bytes) for tensor in reader.tensors if "_exps." in tensor.name)
    return (
        sum(int(tensor.n_bytes) for tensor in reader.tensors)
        - experts
        + (experts * top_k // num_experts)
    )


def _tensors(checkpoint: _Checkpoint, bits: gguf.GGMLQuantizationType) -> Iterator[_Tensor]:
    names = gguf.get_tensor_name_map(_ARCH, checkpoint.config["num_hidden_layers"])
    stacks: dict[str, dict[int, str]] = {}
    for name in checkpoint.names():
        match = _EXPERT.fullmatch(name)
        if match:
            stacks.setdefault(f"{match[1]}.{match[3]}", {})[int(match[2])] = name
        else:
            stacks[name] = {0: name}
    for stack, members in stacks.items():
        name = names.get_name(stack, try_suffixes=(".weight",))
        if name is None:
            raise SystemExit(f"gguf_checkpoint: llama.cpp has no tensor for {stack}")
        sources = [members[number] for number in sorted(members)]
        shape = checkpoint.shape(sources[0])
        tensor_type = bits
        if len(shape) == 1 or stack.endswith("mlp.gate.weight"):
            tensor_type = gguf.GGMLQuantizationType.F32
        elif stack == "model.embed_tokens.weight" and bits != gguf.GGMLQuantizationType.F32:
            tensor_type = gguf.GGMLQuantizationType.BF16
        if _EXPERT.fullmatch(sources[0]):
            shape = (len(sources), *shape)
        yield _Tensor(name, sources, shape, tensor_type)


def _encode(tensor: torch.Tensor, bits: gguf.GGMLQuantizationType) -> np.ndarray:
    """Bytes of a matrix [outputs, inputs] or a vector; a row's last dimension counts bytes."""
    if bits == gguf.GGMLQuantizationType.BF16:
        return tensor.to(torch.bfloat16).view(torch.uint8).numpy()
    return gguf.quantize(tensor.float().numpy(), bits).view(np.uint8)


def _write_config(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_expert_count(config["num_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)


def _let_llama_quantise(source: Path, path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.llama_process", "quantise", source, path]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"gguf_checkpoint: {done.stderr.strip()}")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gguf_checkpoint",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", type=Path, metavar="DIR")
    parser.add_argument("path", type=Path, metavar="FILE")
    parser.add_argument("--bits", choices=[name for name in BITS if name != "q4_k"], default="bf16")
    args = parser.parse_args()
    write_gguf(args.model, args.path, args.bits)
    print(args.path)


if __name__ == "__main__":
    main()
