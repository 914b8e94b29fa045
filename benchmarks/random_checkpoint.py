"""Writes a random Qwen3-MoE checkpoint of any shape, for measurements that need bytes, not sense.

    python -m benchmarks.random_checkpoint DIR --layers 4 --experts 64 --hidden 2048 --moe 768

Tensors are written shard by shard (one layer each) from one block of random bfloat16 values, so
that tens of GB need neither time nor memory to make. The tokenizer knows one token per byte.
"""

from __future__ import annotations

import argparse
import json
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.progress import track
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

if TYPE_CHECKING:
    from collections.abc import Iterator

Shapes = dict[str, tuple[int, ...]]
_NUM_BYTES = 256


def make_random_checkpoint(
    path: Path,
    *,
    num_layers: int,
    num_experts: int,
    hidden_size: int,
    intermediate_size: int,
    top_k: int = 8,
    num_heads: int = 32,
    num_kv_heads: int = 4,
    vocab_size: int = 1024,
    seed: int = 0,
) -> Path:
    """Write a bfloat16 Qwen3-MoE model with random weights into `path` (made if missing)."""
    path.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "dtype": "bfloat16",
        "hidden_size": hidden_size,
        "intermediate_size": 2 * hidden_size,
        "moe_intermediate_size": intermediate_size,
        "num_hidden_layers": num_layers,
        "num_experts": num_experts,
        "num_experts_per_tok": top_k,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": hidden_size // num_heads,
        "vocab_size": vocab_size,
        "max_position_embeddings": 4096,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    }
    (path / "config.json").write_text(json.dumps(config, indent=2))
    (path / "generation_config.json").write_text(json.dumps({"do_sample": False}))
    _write_tokenizer(path)
    rng = np.random.default_rng(seed)
    weight_map: dict[str, str] = {}
    total_bytes = 0
    shards = list(_shards(config))
    for number, shapes in enumerate(track(shards, "writing", transient=True)):
        name = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        total_bytes += _write_shard(path / name, shapes, rng)
        weight_map |= dict.fromkeys(shapes, name)
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return path


def _shards(config: dict[str, Any]) -> Iterator[Shapes]:
    """Names and shapes, a shard for what is outside the layers and one per layer."""
    hidden, moe = config["hidden_size"], config["moe_intermediate_size"]
    head_dim, vocab = config["head_dim"], config["vocab_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    yield {
        "model.embed_tokens.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (vocab, hidden),
    }
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        shapes: Shapes = {
            f"{prefix}.input_layernorm.weight": (hidden,),
            f"{prefix}.post_attention_layernorm.weight": (hidden,),
            f"{prefix}.self_attn.q_proj.weight": (heads * head_dim, hidden),
            f"{prefix}.self_attn.k_proj.weight": (kv_heads * head_dim, hidden),
            f"{prefix}.self_attn.v_proj.weight": (kv_heads * head_dim, hidden),
            f"{prefix}.self_attn.o_proj.weight": (hidden, heads * head_dim),
            f"{prefix}.self_attn.q_norm.weight": (head_dim,),
            f"{prefix}.self_attn.k_norm.weight": (head_dim,),
            f"{prefix}.mlp.gate.weight": (config["num_experts"], hidden),
        }
        for expert in range(config["num_experts"]):
            for name, shape in (
                ("gate_proj", (moe, hidden)),
                ("up_proj", (moe, hidden)),
                ("down_proj", (hidden, moe)),
            ):
                shapes[f"{prefix}.mlp.experts.{expert}.{name}.weight"] = shape
        yield shapes


def _write_shard(path: Path, shapes: Shapes, rng: np.random.Generator) -> int:
    """One safetensors file; the bytes of its tensors."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in shapes.items():
        num_bytes = 2 * int(np.prod(shape))
        header[name] = {
            "dtype": "BF16",
            "shape": list(shape),
            "data_offsets": [offset, offset + num_bytes],
        }
        offset += num_bytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    # One block of noise serves all: drawing tens of GB of fresh numbers would take minutes.
    noise = rng.standard_normal(1 << 22, dtype=np.float32)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for shape in shapes.values():
            count = int(np.prod(shape))
            scale = 1.0 if len(shape) == 1 else shape[-1] ** -0.5
            if len(shape) == 1:
                values = np.ones(count, np.float32)
            else:
                start = int(rng.integers(noise.size))
                values = np.resize(np.roll(noise, -start), count) * scale
            # bfloat16 is the upper half of a float32; cutting is near enough for noise.
            file.write((values.astype(np.float32).view(np.uint32) >> 16).astype("<u2").tobytes())
    return offset


def _write_tokenizer(path: Path) -> None:
    tokenizer = Tokenizer(
        models.BPE(
            vocab={character: number for number, character in enumerate(sorted(_byte_alphabet()))},
            merges=[],
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"})
    )


def _byte_alphabet() -> list[str]:
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    assert len(alphabet) == _NUM_BYTES
    return alphabet


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("path", type=Path)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--moe", type=int, default=768, help="intermediate size of an expert")
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=4)
    parser.add_argument("--vocab", type=int, default=1024)
    args = parser.parse_args()
    make_random_checkpoint(
        args.path,
        num_layers=args.layers,
        num_experts=args.experts,
        hidden_size=args.hidden,
        intermediate_size=args.moe,
        top_k=args.top_k,
        num_heads=args.heads,
        num_kv_heads=args.kv_heads,
        vocab_size=args.vocab,
    )
    print(args.path)


if __name__ == "__main__":
    main()
