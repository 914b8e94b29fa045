"""Tiny random checkpoints of many model families, written as their makers write them.

`make_checkpoint(family, path)` builds the family's own transformers class with a small config,
gives it weights whose logits are worth comparing, and saves it with ``save_pretrained``: the
layout on disk (experts one by one, fused, interleaved, ...) is the family's real one. With it go a
byte-level tokenizer and a generation config, so that the directory is a complete model.

A few seconds each for the imports, then some tens of milliseconds: callers cache per session.
"""

from __future__ import annotations

import json
import math
import warnings
from typing import TYPE_CHECKING, Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

if TYPE_CHECKING:
    from pathlib import Path

NUM_BYTES = 256
SPECIAL_TOKENS = ("<bos>", "<eos>", "<pad>")
BOS_ID, EOS_ID, PAD_ID = range(NUM_BYTES, NUM_BYTES + 3)
VOCAB_SIZE = 272

BASE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": BOS_ID,
    "eos_token_id": EOS_ID,
    "pad_token_id": PAD_ID,
    "tie_word_embeddings": False,
}
_LATENT_ATTENTION = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "head_dim": 8,
}
_QWEN = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16}

FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 48},
    "qwen2_moe": {**_QWEN, "shared_expert_intermediate_size": 40, "norm_topk_prob": False},
    "qwen3_moe": {**_QWEN, "norm_topk_prob": True},
    "olmoe": {"num_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 32},
    "deepseek_v2": {
        **_LATENT_ATTENTION,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "n_shared_experts": 1,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
        "topk_method": "group_limited_greedy",
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 1.5,
    },
    "deepseek_v3": {
        **_LATENT_ATTENTION,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "n_shared_experts": 2,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
        "n_group": 4,
        "topk_group": 2,
    },
    "gpt_oss": {
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "intermediate_size": 32,
        "head_dim": 16,
        "sliding_window": 16,
        "num_hidden_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "glm4_moe": {
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
        "n_group": 2,
        "topk_group": 1,
        "head_dim": 16,
    },
    "granitemoe": {
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "intermediate_size": 32,
        "embedding_multiplier": 2.0,
        "residual_multiplier": 0.5,
        "logits_scaling": 2.0,
        "attention_multiplier": 0.25,
    },
    "phimoe": {
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "intermediate_size": 32,
        "lm_head_bias": True,
    },
    "dots1": {
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
        "n_group": 2,
        "topk_group": 1,
        "head_dim": 16,
    },
    "ernie4_5_moe": {
        "moe_num_experts": 8,
        "moe_k": 2,
        "moe_intermediate_size": 32,
        "moe_num_shared_experts": 1,
        "moe_layer_start_index": 1,
    },
    "minimax_m2": {
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "intermediate_size": 32,
        "head_dim": 16,
    },
    "qwen3_next": {
        **_QWEN,
        "shared_expert_intermediate_size": 40,
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
    },
    "hunyuan_v1_moe": {
        "num_experts": 8,
        "moe_topk": 2,
        "intermediate_size": 32,
        "head_dim": 16,
    },
    "flex_olmo": {"num_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 32},
    "lfm2_moe": {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "num_dense_layers": 1,
        "layer_types": ["conv", "full_attention", "conv"],
    },
    "jamba": {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "intermediate_size": 32,
        "num_hidden_layers": 4,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "mamba_d_state": 8,
        "mamba_dt_rank": 8,
        "use_mamba_kernels": False,
    },
}

MORE_FAMILIES: dict[str, dict[str, Any]] = {
    # Forms that none of FAMILIES has.
    "aria_text": {  # transposed weights without biases
        "moe_num_experts": 8,
        "moe_topk": 2,
        "moe_num_shared_experts": 1,
        "intermediate_size": 32,
    },
    "nemotron_h": {  # no gate, squared relu; attention, mamba and experts are layers of their own
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "moe_shared_expert_intermediate_size": 32,
        "layers_block_type": ["attention", "moe", "attention", "moe"],
        "num_hidden_layers": 4,
        "head_dim": 16,
        "n_group": 1,
        "topk_group": 1,
    },
    "minimax_m3_vl_text": {  # gpt-oss's gate on concatenated weights
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "intermediate_size": 32,
        "head_dim": 16,
    },
    "deepseek_v4": {  # clamped gate and up
        "n_routed_experts": 8,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
    },
}


def make_checkpoint(
    family: str,
    path: Path,
    *,
    dtype: str = "float32",
    sharded: bool = False,
    seed: int = 0,
    **overrides: Any,
) -> Path:
    """Write a complete tiny model of the family to ``path`` and return it.

    ``overrides`` change the config. ``sharded`` splits the weights over several files. The same
    arguments give the same bytes.
    """
    level = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            sizes = {**BASE, **(FAMILIES | MORE_FAMILIES)[family], **overrides}
            config = AutoConfig.for_model(family, **sizes)
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
            fill_weights(model, seed)
            model = model.to(getattr(torch, dtype))
            model.config.dtype = getattr(torch, dtype)
            size = sum(value.numel() * value.element_size() for value in model.parameters())
            # Thirds: enough shards that experts of one layer lie in several.
            model.save_pretrained(path, max_shard_size=size // 3 if sharded else "50GB")
    finally:
        transformers_logging.set_verbosity(level)
    write_tokenizer(path)
    return path


def fill_weights(model: torch.nn.Module, seed: int) -> None:
    """Random weights under which rows keep their scale, so that greedy tokens are well separated.

    Matrices get a standard deviation of 1/sqrt(inputs), biases and what routers add to their
    scores 0.1, norms stay near what their authors start them with.
    """
    generator = torch.Generator().manual_seed(seed)
    parameters = [*model.named_parameters(), *model.named_buffers()]
    with torch.no_grad():
        for name, value in parameters:
            owner = model.get_submodule(name.rpartition(".")[0])
            leaf = name.rpartition(".")[2]
            noise = torch.randn(value.shape, generator=generator)
            if isinstance(owner, torch.nn.Embedding):
                value.copy_(noise)
            elif leaf == "e_score_correction_bias" or leaf.endswith("bias"):
                value.copy_(0.1 * noise)
            elif leaf == "tid2eid":  # experts by token; a few tokens name one twice
                value.copy_(torch.randint(owner.num_experts, value.shape, generator=generator))
            elif name not in dict(model.named_parameters()) or "A_log" in leaf or leaf == "D":
                continue  # rotary tables, counters, decay rates: not for us to choose
            elif value.dim() >= 2:
                is_transposed = value.dim() == 3 and getattr(owner, "is_transposed", False)
                fan_in = value.shape[1] if is_transposed or leaf == "conv1d" else value.shape[-1]
                value.copy_(noise / math.sqrt(fan_in))
            else:
                value.add_(0.1 * noise)


def write_tokenizer(path: Path) -> None:
    """A byte-level tokenizer: token i is byte i, then the special tokens."""
    alphabet = _byte_characters()
    vocabulary = {character: number for number, character in enumerate(alphabet)}
    vocabulary |= {token: NUM_BYTES + number for number, token in enumerate(SPECIAL_TOKENS)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer.save(str(path / "tokenizer.json"))
    bos, eos, pad = SPECIAL_TOKENS
    _write_json(
        path / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": bos,
            "eos_token": eos,
            "pad_token": pad,
            "model_max_length": 512,
            "clean_up_tokenization_spaces": False,
        },
    )
    _write_json(
        path / "generation_config.json",
        {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID, "pad_token_id": PAD_ID},
    )


def _byte_characters() -> list[str]:
    """The printable character that byte-level tokenizers write for each byte (GPT-2's table)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(NUM_BYTES)]


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
