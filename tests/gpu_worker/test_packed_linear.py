"""Linear layers of the dense part with quantised weights."""

from __future__ import annotations

import argparse
import weakref
from typing import TYPE_CHECKING

import pytest
import torch

from expert_kernels.native_dense import DenseKernels
from expert_kernels.native_library import NativeLibraryError
from expert_store.dense_linears import large_linears, pack_matrix
from gpu_worker import packed_linear
from gpu_worker.dense_path import quantise_dense
from gpu_worker.model import load_dense_model
from gpu_worker.packed_linear import PackedLinear, pack_linears
from orchestrator.cli.options import dense_dtype
from protocol.errors import UserError
from tests.checkpoints import make_checkpoint
from tests.gpu_worker.test_native_ops import run_natively

if TYPE_CHECKING:
    from pathlib import Path

    from expert_store.formats import WeightFormat

#: Largest difference from the float layer, relative to the largest value, that a format may make.
FORMATS = {
    "int8": 0.02,
    "fp8": 0.08,
    "int4": 0.25,
    "nvfp4": 0.25,
    "mxfp4": 0.3,
    "int4-g64-zero": 0.3,
}


@pytest.mark.parametrize("name", FORMATS)
@torch.inference_mode()
def test_a_packed_layer_is_near_and_its_rows_are_apart(name: str) -> None:
    """A row has the same bits alone and among others, for any threads and instruction sets."""
    torch.manual_seed(1)
    for inputs, outputs, has_bias in ((160, 300, True), (1024, 40, False)):
        model = torch.nn.Sequential(torch.nn.Linear(inputs, outputs, bias=has_bias)).bfloat16()
        x = torch.randn(2, 35, inputs).bfloat16()
        expected = model(x).float()
        assert pack_linears(model, name, DenseKernels(num_threads=2)) == 1
        found = model(x)
        assert found.dtype == torch.bfloat16
        assert float((found.float() - expected).abs().max()) < FORMATS[name] * float(
            expected.abs().max()
        )
        packed = model[0]
        assert isinstance(packed, PackedLinear)
        by_values = torch.nn.functional.linear(
            x.float(), packed.weight.float(), None if packed.bias is None else packed.bias.float()
        )
        torch.testing.assert_close(found.float(), by_values, rtol=0.02, atol=0.02)
        assert torch.equal(model(x[1, 7]), found[1, 7])
        pack_linears(torch.nn.Sequential(), name, DenseKernels(max_isa="scalar"))
        assert torch.equal(model(x[:1, 3:9]), found[:1, 3:9])


@pytest.mark.parametrize("name", FORMATS)
@torch.inference_mode()
def test_layers_of_the_same_rows_are_one_job_with_the_bits_of_each(name: str) -> None:
    """Tiles of several matrices, of which none is a whole number, shared out among threads."""
    torch.manual_seed(2)
    layers = torch.nn.ModuleList(
        torch.nn.Linear(288, outputs, bias=outputs < 99) for outputs in (400, 33, 150, 16)
    ).bfloat16()
    pack_linears(layers, name, DenseKernels())

    def run(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(layer(x).abs() for layer in layers)

    for num_rows in (1, 3):
        x = torch.randn(num_rows, 288).bfloat16()
        for threads in (1, 4):
            names: list[str] = []
            found = run_natively(run, x, threads=threads, names=names)
            assert names == ["packed_linear"] * 4 + ["abs"] * 4
            assert all(torch.equal(a, b) for a, b in zip(found, run(x), strict=True))


def test_floats_are_let_go_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 32 + 16 * n) for n in range(4)))
    floats = [weakref.ref(linear.weight) for linear in model]
    num_alive: list[int] = []

    def count(weights: WeightFormat, matrix: torch.Tensor) -> object:
        num_alive.append(sum(weight() is not None for weight in floats))
        return pack_matrix(weights, matrix)

    monkeypatch.setattr(packed_linear, "pack_matrix", count)
    assert pack_linears(model, "int8", DenseKernels()) == 4
    assert num_alive == [4, 3, 2, 1]


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
@torch.inference_mode()
def test_native_steps_run_packed_layers(family: str, tmp_path: Path) -> None:
    model = load_dense_model(
        make_checkpoint(family, tmp_path, dtype="bfloat16"), torch.bfloat16, torch.device("cpu"), 99
    )
    names = [name for name, _ in large_linears(model._model)]
    assert "lm_head" in names
    assert not any("gate." in name or name.endswith("gate") for name in names)
    quantise_dense(model, "int8", DenseKernels)
    assert not list(large_linears(model._model))
    model.warm_up()
    assert model.prepare_decode() is None
    assert model.use_native(DenseKernels()) is None
    native, traced = model.native_step, model.decode_step
    assert native is not None
    assert traced is not None
    assert not native.reasons


@torch.inference_mode()
def test_what_cannot_be_had_is_said(tmp_path: Path) -> None:
    def none_there() -> DenseKernels:
        raise NativeLibraryError("they have not been built")

    model = load_dense_model(
        make_checkpoint("mixtral", tmp_path), torch.float32, torch.device("cpu"), 99
    )
    quantise_dense(model, "auto", None)
    with pytest.raises(UserError, match="is for --device cpu"):
        quantise_dense(model, "int8", None)
    with pytest.raises(UserError, match="have not been built; leave the flag out"):
        quantise_dense(model, "int8", none_there)
    assert dense_dtype("int4-g64") == "int4-g64"
    for text in ("bf16", "int3"):
        with pytest.raises(argparse.ArgumentTypeError):
            dense_dtype(text)
