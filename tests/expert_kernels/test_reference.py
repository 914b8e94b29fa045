"""The expert function: equal to transformers' experts, and equal to itself wherever it runs."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import threading
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch

from expert_kernels.activations import activation
from expert_kernels.reference import TORCH_DTYPE, ExpertFunction, use_one_thread
from expert_store.layout import Dtype, ExpertForm, GateKind, StoreLayout, make_layout
from protocol.errors import UserError

DTYPES = get_args(Dtype)
NUM_ROWS = (1, 2, 3, 17)


def form_of(gate: GateKind = "act_mul", **changes: Any) -> ExpertForm:
    values: dict[str, Any] = {
        "hidden_size": 48,
        "intermediate_size": 40,
        "has_gate": gate != "act",
        "has_bias": False,
        "is_transposed": False,
        "is_interleaved": False,
        "activation": "silu",
        "gate": gate,
        "alpha": 1.702 if gate == "alpha_swiglu" else None,
        "limit": 0.5 if gate in ("alpha_swiglu", "clamped_act_mul") else None,
    }
    return ExpertForm(**{**values, **changes})


FORMS = {
    "plain": form_of(),
    "bias": form_of(has_bias=True),
    "transposed": form_of(is_transposed=True, activation="gelu_new"),
    "gpt-oss": form_of("alpha_swiglu", has_bias=True, is_transposed=True, is_interleaved=True),
    "interleaved": form_of("clamped_act_mul", is_interleaved=True),
    "no gate": form_of("act", activation="relu2"),
}


def layout_of(form: ExpertForm, dtype: Dtype) -> StoreLayout:
    return make_layout(
        model_name="m",
        checkpoint_fingerprint="",
        form=form,
        dtype=dtype,
        model_layer_ids=(0,),
        num_experts=(4,),
        top_k=2,
    )


def block_of(function: ExpertFunction, seed: int = 0) -> torch.Tensor:
    block = torch.zeros(function.layout.block_bytes, dtype=torch.uint8)
    generator = torch.Generator().manual_seed(seed)
    for tensor in function.tensors_of(block).values():
        tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.3)
    return block


def input_of(function: ExpertFunction, num_rows: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(num_rows)
    return torch.randn(num_rows, function.hidden_size, generator=generator).to(function.dtype)


def moved(block: torch.Tensor, shift_bytes: int) -> torch.Tensor:
    """A copy at another address: 64-byte aligned, not page aligned."""
    room = torch.zeros(block.numel() + 4096 + shift_bytes, dtype=torch.uint8)
    start = -room.data_ptr() % 4096 + shift_bytes
    copy = room[start : start + block.numel()]
    copy.copy_(block)
    assert copy.data_ptr() % 4096 == shift_bytes
    return copy


def digest(dtype: Dtype) -> str:
    """Hash of results for all forms and row numbers; another process must find the same."""
    use_one_thread()
    total = hashlib.sha256()
    for form in FORMS.values():
        function = ExpertFunction(layout_of(form, dtype))
        tensors = function.tensors_of(block_of(function))
        for num_rows in NUM_ROWS:
            total.update(function(tensors, input_of(function, num_rows)).numpy().tobytes())
    return total.hexdigest()


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_same_bits_in_a_slot_and_in_a_thread(name: str, dtype: Dtype) -> None:
    use_one_thread()
    function = ExpertFunction(layout_of(FORMS[name], dtype))
    block = block_of(function)
    tensors = function.tensors_of(block)
    slots = [function.tensors_of(moved(block, shift)) for shift in (64, 1984)]
    for num_rows in NUM_ROWS:
        x = input_of(function, num_rows)
        result = function(tensors, x)
        assert result.shape == (num_rows, function.hidden_size)
        assert result.dtype is torch.float32
        assert result.is_contiguous()
        assert torch.isfinite(result).all()
        assert result.abs().max() > 0
        others = [function(slot, x.clone()) for slot in slots]

        def compute(x: torch.Tensor = x, others: list[torch.Tensor] = others) -> None:
            use_one_thread()
            with torch.inference_mode():
                others.append(function(tensors, x).clone())

        threads = [threading.Thread(target=compute) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(others) == 4
        for other in others:
            assert torch.equal(other.view(torch.int32), result.view(torch.int32))


@pytest.mark.process
def test_same_bits_in_another_process(tiny_env: dict[str, str]) -> None:
    code = (
        "from tests.expert_kernels.test_reference import digest, DTYPES\n"
        "print(*(digest(dtype) for dtype in DTYPES))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        env=tiny_env,
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    assert result.stdout.split() == [digest(dtype) for dtype in DTYPES]


def test_tensors_are_views_of_the_block() -> None:
    function = ExpertFunction(layout_of(FORMS["gpt-oss"], "bfloat16"))
    block = block_of(function)
    tensors = function.tensors_of(block)
    assert set(tensors) == {"gate_up", "down", "gate_up_bias", "down_bias"}
    for tensor in function.layout.tensors:
        view = tensors[tensor.name]
        assert view.data_ptr() == block.data_ptr() + tensor.offset_bytes
        assert tuple(view.shape) == tensor.shape
        assert view.dtype is TORCH_DTYPE[tensor.dtype]


@pytest.mark.parametrize("name", FORMS)
def test_no_rows_give_no_rows(name: str) -> None:
    function = ExpertFunction(layout_of(FORMS[name], "float32"))
    result = function(function.tensors_of(block_of(function)), torch.empty(0, 48))
    assert result.shape == (0, 48)


def test_unknown_activation_is_named() -> None:
    with pytest.raises(UserError, match=r"'swoosh'.*known are .*silu"):
        ExpertFunction(layout_of(form_of(activation="swoosh"), "float32"))


def test_activations_are_transformers_own() -> None:
    from transformers.activations import ACT2CLS, ACT2FN

    x = torch.linspace(-12, 12, 301)
    with_parameters = {"prelu", "xielu"}
    other_spellings = {"gelu_python", "gelu_python_tanh", "laplace"}
    for name in set(ACT2CLS) - with_parameters - other_spellings:
        for dtype in (torch.float32, torch.bfloat16):
            assert torch.equal(activation(name)(x.to(dtype)), ACT2FN[name](x.to(dtype))), name


def _against(experts: torch.nn.Module, form: ExpertForm, dtype: Dtype) -> None:
    """Every expert of a transformers module against ours, one expert with weight 1 at a time."""
    layout = layout_of(form, dtype)
    function = ExpertFunction(layout)
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.3)
    for expert in range(4):
        block = torch.zeros(layout.block_bytes, dtype=torch.uint8)
        tensors = function.tensors_of(block)
        for name, tensor in tensors.items():
            attribute = name.replace("gate_up", "gate_up_proj").replace("down", "down_proj")
            tensor.copy_(getattr(experts, attribute)[expert].detach())
        for num_rows in NUM_ROWS:
            x = input_of(function, num_rows)
            index = torch.full((num_rows, 1), expert)
            with torch.no_grad():
                theirs = experts(x, index, torch.ones(num_rows, 1, dtype=function.dtype))
            tolerance = 1e-5 if dtype == "float32" else 2e-2
            torch.testing.assert_close(
                function(tensors, x), theirs.float(), rtol=tolerance, atol=tolerance
            )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_equals_qwen3_moe(dtype: Dtype) -> None:
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    config = Qwen3MoeConfig(
        num_experts=4, hidden_size=48, moe_intermediate_size=40, hidden_act="silu"
    )
    config._experts_implementation = "eager"
    _against(Qwen3MoeExperts(config).to(TORCH_DTYPE[dtype]), FORMS["plain"], dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_equals_gpt_oss(dtype: Dtype) -> None:
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    config = SimpleNamespace(
        num_local_experts=4,
        hidden_size=48,
        intermediate_size=40,
        swiglu_alpha=1.702,
        swiglu_limit=0.5,
        _experts_implementation="eager",
    )
    _against(GptOssExperts(config).to(TORCH_DTYPE[dtype]), FORMS["gpt-oss"], dtype)
