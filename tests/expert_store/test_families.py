"""Every family: its form, its keys, its bytes; and the refusal of those that cannot run."""

from __future__ import annotations

import json
import warnings
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.integrations.moe import use_experts_implementation

from expert_store.checkpoint import Checkpoint, open_checkpoint
from expert_store.families import kv_bytes_per_token, read_model_shape, resolve_model_class
from expert_store.gates import (
    UnsupportedModelError,
    derive_form,
    expert_rows,
    is_experts,
    prove_form,
)
from expert_store.loader import Plan
from expert_store.segment import StoreView
from tests.checkpoints import BASE, FAMILIES, MORE_FAMILIES, fill_weights

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from expert_store.layout import StoreLayout

MODEL_NAMES = {
    "gate_up": "gate_up_proj",
    "up": "up_proj",
    "down": "down_proj",
    "gate_up_bias": "gate_up_proj_bias",
    "down_bias": "down_proj_bias",
}
W123 = ("w1.weight", "w2.weight", "w3.weight")
GATE_UP_DOWN = ("gate_proj.weight", "up_proj.weight", "down_proj.weight")
ON_DISK = {
    # How the family's makers store one layer's experts; all others: mlp, GATE_UP_DOWN.
    "mixtral": ("block_sparse_moe", W123),
    "phimoe": ("block_sparse_moe", W123),
    "minimax_m2": ("block_sparse_moe", W123),
    "lfm2_moe": ("feed_forward", W123),
    "jamba": ("feed_forward", GATE_UP_DOWN),
    "nemotron_h": ("mixer", ("up_proj.weight", "down_proj.weight")),
    "deepseek_v4": ("ffn", W123),
}
FUSED_ON_DISK = {
    "gpt_oss": "mlp.experts.gate_up_proj_bias",
    "granitemoe": "block_sparse_moe.input_linear.weight",
    "aria_text": "mlp.experts.fc1.weight",
    "minimax_m3_vl_text": "mlp.experts.gate_up_proj",
}


def load_model(directory: Path) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return AutoModelForCausalLM.from_pretrained(directory)


def assert_store_equals_model(fd: int, directory: Path) -> None:
    modules = [module for module in load_model(directory).modules() if is_experts(module)]
    with StoreView(fd) as view:
        layout = view.layout
        assert layout.num_experts == tuple(module.num_experts for module in modules)
        for layer, module in enumerate(modules):
            for expert in range(layout.num_experts[layer]):
                tensors = view.tensors(layer, expert)
                assert len(tensors) == len(list(module.parameters()))
                for name, array in tensors.items():
                    expected = getattr(module, MODEL_NAMES[name])[expert].detach()
                    found = torch.from_numpy(array.copy())
                    if layout.dtype == "bfloat16":
                        found = found.view(torch.bfloat16)
                    assert found.dtype == expected.dtype
                    assert torch.equal(found, expected), (layer, expert, name)


@pytest.mark.parametrize("family", [*FAMILIES, *MORE_FAMILIES])
def test_blocks_equal_the_models_parameters(
    family: str,
    checkpoint_of: Callable[..., Path],
    load_into: Callable[..., StoreLayout],
    segment: int,
) -> None:
    directory = checkpoint_of(family)
    layout = load_into(directory)
    assert layout.dtype == "float32"
    assert_store_equals_model(segment, directory)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "granitemoe", "mixtral"])
def test_bfloat16_blocks_equal_too(
    family: str,
    checkpoint_of: Callable[..., Path],
    load_into: Callable[..., StoreLayout],
    segment: int,
) -> None:
    directory = checkpoint_of(family, dtype="bfloat16")
    assert load_into(directory).dtype == "bfloat16"
    assert_store_equals_model(segment, directory)


def test_the_text_half_of_a_multimodal_model(
    tmp_path: Path, load_into: Callable[..., StoreLayout], segment: int
) -> None:
    """Its text model is loaded; the tensors of its eyes are left where they are."""
    text = {**BASE, **FAMILIES["qwen3_next"]}
    vision = {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32}
    config = AutoConfig.for_model(
        "qwen3_5_moe", text_config=text, vision_config={**vision, "out_hidden_size": 64}
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = AutoModelForImageTextToText.from_config(config)
        fill_weights(model, 0)
        model.save_pretrained(tmp_path)
    plan = Plan(open_checkpoint(tmp_path), "auto")
    assert plan.inspection().architecture == "Qwen3_5MoeForCausalLM"
    assert plan.keys.ignored
    assert all("visual" in name for name in plan.keys.ignored)
    load_into(tmp_path)
    assert_store_equals_model(segment, tmp_path)


@pytest.mark.parametrize("family", [*FAMILIES, *MORE_FAMILIES])
def test_names_on_disk_are_the_familys_own(family: str, checkpoint_of: Callable[..., Path]) -> None:
    names = set(open_checkpoint(checkpoint_of(family)).tensors)
    if family in FUSED_ON_DISK:
        assert any(name.endswith(FUSED_ON_DISK[family]) for name in names)
        return
    block, parts = ON_DISK.get(family, ("mlp", GATE_UP_DOWN))
    for expert in range(8):
        for part in parts:
            suffix = f".{block}.experts.{expert}.{part}"
            assert any(name.endswith(suffix) for name in names), suffix


def test_the_form_says_what_the_family_is(checkpoint_of: Callable[..., Path]) -> None:
    def shape_of(family: str) -> Any:
        return read_model_shape(open_checkpoint(checkpoint_of(family)))

    gpt_oss = shape_of("gpt_oss").form
    assert (gpt_oss.gate, gpt_oss.has_bias, gpt_oss.is_transposed, gpt_oss.is_interleaved) == (
        "alpha_swiglu",
        True,
        True,
        True,
    )
    assert (gpt_oss.alpha, gpt_oss.limit) == (1.702, 7.0)
    deepseek = shape_of("deepseek_v3")
    assert (deepseek.form.gate, deepseek.form.activation) == ("act_mul", "silu")
    assert deepseek.top_k == 3
    assert [module.model_layer_id for module in deepseek.experts] == [1, 2]
    assert shape_of("nemotron_h").form.activation == "relu2"
    assert shape_of("deepseek_v4").form.gate == "clamped_act_mul"
    m3 = shape_of("minimax_m3_vl_text").form
    assert (m3.gate, m3.is_interleaved, m3.has_bias) == ("alpha_swiglu", False, False)


def test_kv_bytes_count_attention_layers_and_latent_heads(
    checkpoint_of: Callable[..., Path],
) -> None:
    def kv_bytes(family: str) -> int:
        config, _ = resolve_model_class(open_checkpoint(checkpoint_of(family)))
        return kv_bytes_per_token(config, "float32")

    assert kv_bytes("qwen3_moe") == 3 * 2 * 2 * 16 * 4  # layers, k and v, heads, size, bytes
    assert kv_bytes("qwen3_next") == 1 * 2 * 2 * 16 * 4
    assert kv_bytes("deepseek_v3") == 3 * 4 * (16 + 8 + 16) * 4


# --- what is refused ------------------------------------------------------------------------


def checkpoint_with(config: dict[str, Any], tmp_path: Path) -> Checkpoint:
    (tmp_path / "config.json").write_text(json.dumps(config))
    return Checkpoint(tmp_path, config, {}, {}, "none")


def refusal(config: dict[str, Any], tmp_path: Path) -> str:
    with pytest.raises(UnsupportedModelError) as caught:
        read_model_shape(checkpoint_with(config, tmp_path))
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_dense_models(tmp_path: Path) -> None:
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "vocab_size": 32, "intermediate_size": 16}
    config = {"model_type": "llama", "num_attention_heads": 4, **sizes}
    assert "dense model" in refusal(config, tmp_path)
    message = refusal({**config, "num_attention_heads": 3}, tmp_path)
    assert "not a valid llama config" in message
    assert "3" in message


def test_unknown_architecture(tmp_path: Path) -> None:
    message = refusal({"model_type": "no_such_moe"}, tmp_path)
    assert "unknown architecture 'no_such_moe'" in message


def test_invalid_config(tmp_path: Path) -> None:
    assert "qwen3_moe" in refusal({"model_type": "qwen3_moe", "hidden_size": "wide"}, tmp_path)


def test_more_layers_than_the_files_can_hold(tmp_path: Path) -> None:
    message = refusal({"model_type": "qwen3_moe", "num_hidden_layers": 10**9}, tmp_path)
    assert "1000000000 layers" in message
    assert "different models" in message


def test_more_experts_per_token_than_there_are(tmp_path: Path) -> None:
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "vocab_size": 32, "head_dim": 8}
    experts = {"num_experts": 4, "num_experts_per_tok": 5, "moe_intermediate_size": 8}
    message = refusal({"model_type": "qwen3_moe", **sizes, **experts}, tmp_path)
    assert "5 of 4 experts" in message


def test_experts_of_no_size(tmp_path: Path) -> None:
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "vocab_size": 32, "head_dim": 8}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 0}
    message = refusal({"model_type": "qwen3_moe", **sizes, **experts}, tmp_path)
    assert "an expert is of 16 x 0 numbers" in message


def test_no_text_generation(tmp_path: Path) -> None:
    assert "no text generation for 'vit'" in refusal({"model_type": "vit"}, tmp_path)


def test_experts_beside_the_interface(tmp_path: Path) -> None:
    config = {"model_type": "llama4_text", "num_hidden_layers": 1, "vocab_size": 32}
    message = refusal({**config, "hidden_size": 32, "intermediate_size": 16}, tmp_path)
    assert "Llama4TextExperts" in message
    assert "experts interface" in message


def test_a_gate_of_its_own(tmp_path: Path) -> None:
    config = AutoConfig.for_model("inkling2_text").to_diff_dict()
    message = refusal({**config, "model_type": "inkling2_text"}, tmp_path)
    assert "Inkling2Experts" in message
    assert "way of its own" in message


def make_experts(**options: bool) -> type[nn.Module]:
    """An experts class as families write them, on which each option can be made to lie."""

    @use_experts_implementation(**options)
    class Experts(nn.Module):
        def __init__(self, config: Any) -> None:
            super().__init__()
            self.num_experts = 4
            self.gate_up_proj = nn.Parameter(torch.empty(4, 32, 24))
            self.down_proj = nn.Parameter(torch.empty(4, 24, 16))
            self.act_fn = nn.functional.silu

        def forward(
            self, hidden_states: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
        ) -> torch.Tensor:
            output = torch.zeros_like(hidden_states)
            for row, (experts, parts) in enumerate(zip(index, weights, strict=True)):
                for expert, part in zip(experts, parts, strict=True):
                    x = self.scale_input(hidden_states[row], part)
                    gate, up = (self.gate_up_proj[expert] @ x).chunk(2)
                    y = self.down_proj[expert] @ (self.act_fn(gate) * up)
                    output[row] += self.scale_output(y, part)
            return output

        def scale_input(self, x: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
            return x

        def scale_output(self, y: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
            return y * part

    return Experts


def test_an_honest_module_is_proven() -> None:
    module = make_experts()(None)
    form = derive_form(module, "family")
    assert (form.hidden_size, form.intermediate_size, form.activation) == (24, 16, "silu")
    prove_form(module, form, "family")


@pytest.mark.parametrize(
    ("method", "replacement"),
    [
        ("scale_output", lambda self, y, part: y),
        ("scale_output", lambda self, y, part: y * part * 1.001),
        ("scale_input", lambda self, x, part: x * part),
        ("scale_output", lambda self, y, part: torch.relu(y) * part),
        ("scale_output", lambda self, y, part: y[:3]),
    ],
)
def test_a_forward_that_does_something_else_is_refused(method: str, replacement: Any) -> None:
    experts: Any = make_experts()
    setattr(experts, method, replacement)
    module = experts(None)
    with pytest.raises(UnsupportedModelError, match="family"):
        prove_form(module, derive_form(module, "family"), "family")


@pytest.mark.parametrize("field", ["is_interleaved", "activation", "gate"])
def test_a_form_that_lies_is_refused(field: str) -> None:
    module = make_experts()(None)
    form = derive_form(module, "family")
    lies = {
        "is_interleaved": {"is_interleaved": True},
        "activation": {"activation": "gelu"},
        "gate": {"gate": "clamped_act_mul", "limit": 0.5},
    }
    with pytest.raises(UnsupportedModelError, match="something other"):
        prove_form(module, msgspec.structs.replace(form, **lies[field]), "family")


def test_norm_after_experts_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="norm follows"):
        derive_form(make_experts(has_post_expert_norm=True)(None), "family")


@pytest.mark.parametrize("option", ["has_bias", "is_transposed"])
def test_flags_that_contradict_the_parameters_are_refused(option: str) -> None:
    with pytest.raises(UnsupportedModelError, match="not supported"):
        derive_form(make_experts(**{option: True})(None), "family")


def test_a_forward_with_another_signature_is_refused() -> None:
    experts: Any = make_experts()
    experts.forward = lambda self, hidden_states: hidden_states
    module = experts(None)
    with pytest.raises(UnsupportedModelError, match="not hidden states with"):
        prove_form(module, derive_form(module, "family"), "family")


def test_expert_rows_by_hand() -> None:
    """One number through each gate, computed on paper."""
    form = derive_form(make_experts()(None), "family")
    one = msgspec.structs.replace(form, hidden_size=1, intermediate_size=1, activation="relu")
    weights = {
        "gate_up_proj": torch.tensor([[2.0], [-3.0]]),
        "down_proj": torch.tensor([[0.5]]),
    }
    x = torch.tensor([[4.0]])
    assert expert_rows(one, weights, x).item() == 8 * -12 * 0.5
    clamped = msgspec.structs.replace(one, gate="clamped_act_mul", limit=5.0)
    assert expert_rows(clamped, weights, x).item() == 5 * -5 * 0.5
    swiglu = msgspec.structs.replace(one, gate="alpha_swiglu", limit=5.0, alpha=0.0)
    assert expert_rows(swiglu, weights, x).item() == (-5 + 1) * 5 * 0.5 * 0.5
