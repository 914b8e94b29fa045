"""Quantised experts in the native kernels: right by the definition, the same bits everywhere."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from expert_kernels.native import NativeExpertFunction
from expert_store.gates import expert_rows
from expert_store.layout import StoreLayout, make_layout
from expert_store.packing import QuantisedMatrix, dequantise, interleave_tiles, pack
from tests.expert_kernels.test_native import (
    ISAS,
    LAID_ISAS,
    assert_nearly_equal,
    bits,
    needs_library,
    relative_error,
)
from tests.expert_kernels.test_reference import form_of, input_of, moved
from tests.expert_store.test_packing import FORMATS, random_matrix

if TYPE_CHECKING:
    from expert_store.formats import WeightFormat
    from expert_store.layout import Dtype, ExpertForm

pytestmark = needs_library

FORMS = {
    "plain": form_of(),
    "one wide": form_of(hidden_size=1, intermediate_size=1, has_bias=True),
    "gpt-oss": form_of("alpha_swiglu", hidden_size=37, intermediate_size=21, has_bias=True),
    "clamped": form_of("clamped_act_mul", hidden_size=131, intermediate_size=67),
    "no gate": form_of("act", hidden_size=301, intermediate_size=97, activation="relu2"),
    "several tiles": form_of(hidden_size=531, intermediate_size=433, activation="gelu"),
}
NUM_ROWS = (1, 2, 3, 7, 8, 13, 16, 17, 33)
SOME_FORMATS = ("int8-g128", "int8-g32", "int4-g32", "int4-g64-zero", "mxfp4", "nvfp4", "fp8")


def quantised_layout(form: ExpertForm, weights: WeightFormat, dtype: Dtype) -> StoreLayout:
    return make_layout(
        model_name="m",
        checkpoint_fingerprint="",
        form=form,
        dtype=dtype,
        model_layer_ids=(0,),
        num_experts=(4,),
        top_k=2,
        weights=weights,
    )


class Quantised:
    """One expert with random codes: its block, and its weights in float64."""

    def __init__(self, layout: StoreLayout) -> None:
        form, weights = layout.form, layout.weights
        assert weights is not None
        shape = (form.intermediate_size, form.hidden_size)
        generator = torch.Generator().manual_seed(5)
        matrices: dict[str, list[QuantisedMatrix]] = {
            "gate_up" if form.has_gate else "up": [
                random_matrix(weights, *shape, seed=way) for way in range(1 + form.has_gate)
            ],
            "down": [random_matrix(weights, *shape[::-1], seed=2)],
        }
        self.block = torch.zeros(layout.block_bytes, dtype=torch.uint8)
        self.weights: dict[str, torch.Tensor] = {}
        for tensor in layout.tensors:
            part = self.block[tensor.offset_bytes : tensor.offset_bytes + tensor.num_bytes]
            name = tensor.name if "bias" not in tensor.name else tensor.name.removesuffix("_bias")
            key = f"{name}_proj" + tensor.name[len(name) :]
            if tensor.dtype == "uint8":
                halves = matrices[tensor.name]
                packed = [pack(weights, half) for half in halves]
                tiles = interleave_tiles(*packed) if len(packed) == 2 else packed[0]
                part.copy_(torch.from_numpy(tiles).view(-1))
                exact = np.concatenate([dequantise(weights, half) for half in halves])
                self.weights[key] = torch.from_numpy(exact).double()
            else:
                values = torch.randn(tensor.shape, generator=generator) * 0.3
                bias = values.to(getattr(torch, tensor.dtype))
                part.copy_(bias.view(torch.uint8))
                self.weights[key] = bias.double()


def rows_for(function: NativeExpertFunction, num_rows: int) -> torch.Tensor:
    x = input_of(function, num_rows)
    x[0, 0] = 40  # an outlier: what lies beside it must keep its precision
    return x


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("weights", FORMATS)
def test_right_by_the_definition_in_float64(name: str, weights: str) -> None:
    """The rows' 16-bit codes cost far less than bfloat16 would, even beside an outlier."""
    layout = quantised_layout(FORMS[name], FORMATS[weights], "float32")
    function, expert = NativeExpertFunction(layout, num_threads=2), Quantised(layout)
    tensors = function.tensors_of(expert.block)
    for num_rows in (1, 3, 17):
        for x, limit in (
            (input_of(function, num_rows), 1e-3),
            (rows_for(function, num_rows), 4e-3),
        ):
            expected = expert_rows(layout.form, expert.weights, x.double())
            assert relative_error(function(tensors, x), expected) < limit


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("weights", SOME_FORMATS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_rounded_where_the_model_rounds(name: str, weights: str, dtype: Dtype) -> None:
    layout = quantised_layout(FORMS[name], FORMATS[weights], dtype)
    function, expert = NativeExpertFunction(layout), Quantised(layout)
    x = rows_for(function, 3)
    expected = expert_rows(layout.form, expert.weights, x.double())
    found = function(function.tensors_of(expert.block), x)
    assert torch.equal(found, found.to(function.dtype).float())
    limit = {"bfloat16": 3e-2, "float16": 4e-3}[dtype]
    is_finite = expected.abs() < torch.finfo(function.dtype).max / 2
    assert is_finite.float().mean() > 0.5
    assert relative_error(found[is_finite], expected[is_finite]) < limit


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("weights", FORMATS)
def test_same_bits_on_every_isa_for_any_threads_rows_and_address(name: str, weights: str) -> None:
    layout = quantised_layout(FORMS[name], FORMATS[weights], "bfloat16")
    expert = Quantised(layout)
    expected: torch.Tensor | None = None
    for number, isa in enumerate(ISAS):
        function = NativeExpertFunction(layout, max_isa=isa, num_threads=1 + 2 * number)  # type: ignore[arg-type]
        assert function.isa == isa
        tensors = function.tensors_of(moved(expert.block, 64 * number))
        x = rows_for(function, max(NUM_ROWS))
        together = function(tensors, x)
        expected = together if expected is None else expected
        if weights == "fp8" and isa in LAID_ISAS:  # products of pairs add in an order of their own
            assert_nearly_equal(together, expected)
        else:
            assert torch.equal(bits(together), bits(expected))
        for num_rows in NUM_ROWS if isa != "scalar" else NUM_ROWS[:1]:
            assert torch.equal(bits(function(tensors, x[-num_rows:])), bits(together[-num_rows:]))


@pytest.mark.parametrize("name", ["clamped", "several tiles"])
@pytest.mark.parametrize("weights", SOME_FORMATS)
def test_a_row_among_more_than_one_pass_has_the_bits_it_has_alone(weights: str, name: str) -> None:
    layout = quantised_layout(FORMS[name], FORMATS[weights], "bfloat16")
    function = NativeExpertFunction(layout, num_threads=3)
    tensors = function.tensors_of(Quantised(layout).block)
    x = rows_for(function, 131)
    alone = torch.cat([function(tensors, row) for row in x.split(1)])
    for num_rows in (131, 128, 84, 71, 65, 64, 40, 20, 12, 9, 6, 5):
        assert torch.equal(bits(function(tensors, x[:num_rows])), bits(alone[:num_rows]))


@pytest.mark.parametrize("weights", SOME_FORMATS)
def test_no_number_stays_none_and_zeros_stay_zero(weights: str) -> None:
    form = form_of(hidden_size=300, intermediate_size=40)
    layout = quantised_layout(form, FORMATS[weights], "float32")
    function, expert = NativeExpertFunction(layout), Quantised(layout)
    x = torch.zeros(4, 300)
    x[1, 290], x[2, 3], x[3, 7] = float("nan"), float("inf"), 1e-38
    found = function(function.tensors_of(expert.block), x)
    assert (found[0] == 0).all()
    assert found[1].isnan().all()
    assert not found[2].isfinite().any()
    assert (found[3].abs() < 1e-30).all()


@pytest.mark.skipif(not set(LAID_ISAS) & set(ISAS), reason="neither AVX512_BF16 nor AMX here")
@pytest.mark.parametrize("name", FORMS)
def test_fp8_with_rows_of_bfloat16_is_as_exact_in_products_of_pairs(name: str) -> None:
    """Nothing is rounded before it is multiplied: weights and rows are bfloat16 numbers."""
    layout = quantised_layout(FORMS[name], FORMATS["fp8"], "bfloat16")
    expert = Quantised(layout)
    x = input_of(NativeExpertFunction(layout), 33)
    exact = expert_rows(layout.form, expert.weights, x.double())
    errors = []
    for isa in ("avx512_vnni", "best"):
        function = NativeExpertFunction(layout, max_isa=isa)  # type: ignore[arg-type]
        errors.append(relative_error(function(function.tensors_of(expert.block), x), exact))
    assert errors[1] < 1.05 * errors[0] + 1e-4


@pytest.mark.parametrize("weights", SOME_FORMATS)
def test_no_rows_give_no_rows(weights: str) -> None:
    layout = quantised_layout(FORMS["plain"], FORMATS[weights], "float32")
    function = NativeExpertFunction(layout)
    found = function(function.tensors_of(Quantised(layout).block), torch.empty(0, 48))
    assert found.shape == (0, 48)


def test_large_steps_over_many_threads_change_no_bit() -> None:
    """Big enough for every helper to be woken, with more threads than cores."""
    form = form_of(hidden_size=512, intermediate_size=300)
    layout = quantised_layout(form, FORMATS["mxfp4"], "bfloat16")
    alone, many = NativeExpertFunction(layout), NativeExpertFunction(layout, num_threads=7)
    block = Quantised(layout).block
    tensors = [alone.tensors_of(block)] * 12
    x = rows_for(alone, 3)
    expected = alone.run_each(tensors, x)
    for _ in range(40):
        assert torch.equal(bits(many.run_each(tensors, x)), bits(expected))
