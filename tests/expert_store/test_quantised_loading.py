"""Stores of quantised experts: kept as a checkpoint has them, or quantised while loading."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from expert_kernels.dequantising import DequantisingExpertFunction, dequantise_tiles
from expert_kernels.native import make_expert_function
from expert_store.checkpoint import CheckpointError, open_checkpoint
from expert_store.expert_dtype import EXPERT_DTYPES, parse_expert_dtype
from expert_store.formats import NAMED_FORMATS, WeightFormat
from expert_store.gates import expert_rows
from expert_store.loader import Plan, load
from expert_store.native_quantising import load_library, quantise_into
from expert_store.packing import QuantisedMatrix, dequantise, pack
from expert_store.quantising import quantise
from expert_store.segment import StoreView, create_segment
from protocol.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

#: What rounding to a format costs a matrix of normal random numbers, at most.
MOST_ERROR = {"int8": 0.01, "int4": 0.1, "mxfp4": 0.13, "nvfp4": 0.11, "fp8": 0.03}
FORMATS = [
    *NAMED_FORMATS.values(),
    WeightFormat(kind="int4", group_size=64, scale="float16", has_zero_points=True),
    WeightFormat(kind="int4", group_size=128, scale="bfloat16"),
    WeightFormat(kind="int8", group_size=32, scale="float32"),
]
NAMES = [weights.name for weights in FORMATS]


def random_matrix(outputs: int, inputs: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(outputs + inputs)
    matrix = torch.randn(outputs, inputs, generator=generator)
    matrix[1] = 0.0
    matrix[2, : inputs // 2] = 0.0
    return matrix.bfloat16()


@pytest.mark.parametrize("weights", FORMATS, ids=NAMES)
def test_quantising_is_near_and_says_how_near(weights: WeightFormat) -> None:
    matrix = random_matrix(67, 272)
    made = quantise(weights, matrix)
    found = dequantise(weights, made.matrix)
    exact = matrix.float().numpy()
    error = float(np.linalg.norm(found - exact) / np.linalg.norm(exact))
    assert error <= MOST_ERROR[weights.kind] * (1.2 if weights.group_size > 32 else 1)
    assert error == pytest.approx((made.error_square / made.size_square) ** 0.5, rel=1e-3)
    assert not found[1].any()
    assert not found[2, :136].any()


@pytest.mark.parametrize("weights", FORMATS, ids=NAMES)
def test_codes_are_the_nearest(weights: WeightFormat) -> None:
    """No other code of the format, with the scale that was chosen, is nearer to the weight."""
    matrix = random_matrix(16, 128)
    made = quantise(weights, matrix).matrix
    exact = matrix.float().numpy()
    best = np.full(exact.shape, np.inf)
    for code in range(256 if weights.code_bits == 8 else 16):
        if weights.kind == "fp8" and code & 127 == 127:
            continue
        other = QuantisedMatrix(
            np.full_like(made.codes, code), made.scales, made.zero_points, made.output_scales
        )
        best = np.minimum(best, np.abs(dequantise(weights, other) - exact))
    found = np.abs(dequantise(weights, made) - exact)
    np.testing.assert_allclose(found, best, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("weights", FORMATS, ids=NAMES)
def test_torch_reads_tiles_as_numpy_does(weights: WeightFormat) -> None:
    made = quantise(weights, random_matrix(67, 272)).matrix
    tiles = torch.from_numpy(pack(weights, made))
    found = dequantise_tiles(weights, tiles, 67, 272)
    assert np.array_equal(found.numpy(), dequantise(weights, made))


@pytest.mark.parametrize("is_plain", [False, True])
@pytest.mark.parametrize("weights", FORMATS, ids=NAMES)
def test_the_native_library_makes_the_same_bytes(weights: WeightFormat, is_plain: bool) -> None:
    library = load_library()
    if library is None:
        pytest.skip("the native library is not built here")
    for outputs, inputs, dtype, size in (
        (67, 272, torch.bfloat16, 1.0),
        (33, 301, torch.float32, 1e-5),
        (16, 96, torch.float32, 1e-30),
    ):
        matrix = (random_matrix(outputs, inputs).float() * size).to(dtype)
        made = quantise(weights, matrix)
        expected = pack(weights, made.matrix)
        # As in a block: this way's tiles lie between those of another.
        block = np.zeros((expected.shape[0], 2, expected.shape[1]), np.uint8)
        error, total = quantise_into(library, weights, matrix, block[:, 1], is_plain=is_plain)
        assert np.array_equal(block[:, 1], expected)
        assert not block[:, 0].any()
        assert error == pytest.approx(made.error_square, rel=1e-4)
        assert total == pytest.approx(made.size_square, rel=1e-4)


# --- through a checkpoint -------------------------------------------------------------------


class Store:
    """A loaded store and the weights in it, under the names of the model's parameters."""

    def __init__(self, directory: Path, dtype: str = "auto", expert_dtype: str = "auto") -> None:
        self.fd = create_segment("test")
        self.plan = Plan(open_checkpoint(directory), dtype, expert_dtype)
        self.loaded = load(self.plan, self.fd, lambda _: None)
        self.layout = self.loaded.layout
        assert os.fstat(self.fd).st_size == self.layout.total_bytes
        self.function = DequantisingExpertFunction(self.layout)

    def tensors(self, layer: int, expert: int) -> dict[str, torch.Tensor]:
        block = os.pread(self.fd, self.layout.block_bytes, self.layout.block_offset(layer, expert))
        return self.function.tensors_of(torch.frombuffer(bytearray(block), dtype=torch.uint8))

    def weights(self, layer: int, expert: int) -> dict[str, torch.Tensor]:
        """Names as in transformers' modules, matrices [outputs, inputs], gates before ups."""
        tensors = self.tensors(layer, expert)
        first = "gate_up" if self.layout.form.has_gate else "up"
        found = {f"{name}_proj": self.function.matrix(tensors, name) for name in (first, "down")}
        for name in (first, "down"):
            if f"{name}_bias" in tensors:
                found[f"{name}_proj_bias"] = tensors[f"{name}_bias"]
        return found


@pytest.fixture
def store() -> Iterator[Callable[..., Store]]:
    made: list[Store] = []

    def get(*arguments: Any, **options: Any) -> Store:
        made.append(Store(*arguments, **options))
        return made[-1]

    yield get
    for one in made:
        os.close(one.fd)


@pytest.mark.parametrize(
    ("family", "expert_dtype"),
    [
        ("qwen3_moe", "int8"),
        ("qwen3_moe", "int4-g64-zero"),
        ("gpt_oss", "mxfp4"),  # transposed, interleaved, with biases
        ("aria_text", "nvfp4"),  # transposed
        ("nemotron_h", "fp8"),  # no gate
        ("jamba", "int4"),
        ("phimoe", "int4"),
        ("granitemoe", "int8"),  # experts fused in another order: transformers' converter
    ],
)
def test_quantised_while_loading(
    family: str,
    expert_dtype: str,
    checkpoint_of: Callable[..., Path],
    load_into: Callable[..., Any],
    segment: int,
    store: Callable[..., Store],
) -> None:
    """What lies in the store is the plain store's experts, each matrix rounded to the format."""
    directory = checkpoint_of(family, dtype="bfloat16")
    plain = load_into(directory)
    found = store(directory, expert_dtype=expert_dtype)
    weights = parse_expert_dtype(expert_dtype)
    assert found.layout.weights == weights
    assert weights is not None
    assert found.layout.dtype == "bfloat16"
    errors = found.loaded.errors
    assert errors is not None
    assert errors.num_tensors == 2 * found.layout.total_experts
    assert 0 < errors.relative_error <= errors.worst[0].relative_error < 0.2
    assert errors.worst == sorted(errors.worst, key=lambda error: -error.relative_error)
    form = plain.form
    with StoreView(segment) as view:
        for layer, expert in ((0, 0), (found.layout.num_layers - 1, 5)):
            ours = found.weights(layer, expert)
            for name, raw in view.tensors(layer, expert).items():
                exact = torch.from_numpy(raw.copy()).view(torch.bfloat16)
                if name.endswith("bias"):
                    if name == "gate_up_bias" and form.is_interleaved:
                        exact = torch.cat([exact[::2], exact[1::2]])
                    assert torch.equal(ours[name.replace("_bias", "_proj_bias")], exact)
                    continue
                matrix = exact.T if form.is_transposed else exact
                if name == "gate_up" and form.is_interleaved:
                    matrix = torch.cat([matrix[::2], matrix[1::2]])
                halves = matrix.chunk(2) if name == "gate_up" else [matrix]
                expected = [dequantise(weights, quantise(weights, half).matrix) for half in halves]
                assert np.array_equal(ours[f"{name}_proj"].numpy(), np.concatenate(expected))


@pytest.mark.parametrize("max_isa", ["torch", "best"])
def test_the_function_computes_what_the_form_means(
    max_isa: Any, checkpoint_of: Callable[..., Path], store: Callable[..., Store]
) -> None:
    found = store(checkpoint_of("gpt_oss", dtype="bfloat16"), "float32", "mxfp4")
    form = found.layout.form
    x = torch.randn(3, form.hidden_size, generator=torch.Generator().manual_seed(2))
    function = make_expert_function(found.layout, max_isa=max_isa)
    expected = expert_rows(form, found.weights(1, 2), x)
    result = function(found.tensors(1, 2), x)
    assert result.dtype is torch.float32
    error = (result - expected).norm() / expected.norm()
    assert error < (1e-6 if function.isa == "torch" else 0.02)  # native: inputs are rounded too


def test_layouts_of_others_keep_every_value(
    checkpoint_of: Callable[..., Path], tmp_path: Path, store: Callable[..., Store]
) -> None:
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    from tests import native_checkpoints as native

    plain = checkpoint_of("qwen3_moe")
    expected_names = {
        "awq": "int4-g32-zero",
        "gptq": "int4-g32-zero",
        "fp8": "fp8",
        "compressed int4": "int4-g32-float32",
        "compressed fp8": "fp8",
        "compressed nvfp4": "nvfp4",
        "modelopt nvfp4": "nvfp4",
    }
    for layout, name in expected_names.items():
        paths = tmp_path / layout / "native", tmp_path / layout / "meaning"
        native.quantise_checkpoint(plain, *paths, layout)
        found = store(paths[0])
        assert found.layout.weights is not None
        assert found.layout.weights.name == name
        assert found.loaded.errors is None
        meaning = load_file(paths[1] / "model.safetensors")
        ours = found.weights(2, 7)
        stem = "model.layers.2.mlp.experts.7"
        halves = [meaning[f"{stem}.{half}_proj.weight"] for half in ("gate", "up")]
        torch.testing.assert_close(ours["gate_up_proj"], torch.cat(halves), rtol=3e-7, atol=0)
        down = meaning[f"{stem}.down_proj.weight"]
        torch.testing.assert_close(ours["down_proj"], down, rtol=3e-7, atol=0)


def test_inputs_out_of_order_are_converted_or_refused(
    checkpoint_of: Callable[..., Path], tmp_path: Path, segment: int
) -> None:
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    from tests import native_checkpoints as native

    plain = checkpoint_of("qwen3_moe", num_hidden_layers=2)
    paths = tmp_path / "native", tmp_path / "meaning"
    native.quantise_checkpoint(plain, *paths, "gptq", desc_act=True)

    def floats(directory: Path, fd: int) -> np.ndarray[Any, Any]:
        layout = load(Plan(open_checkpoint(directory), "auto", "fp32"), fd, lambda _: None).layout
        start = layout.blocks_offset_bytes
        return np.frombuffer(os.pread(fd, layout.total_bytes - start, start), np.float32)

    found = floats(paths[0], segment)
    other = create_segment("meaning")
    np.testing.assert_allclose(found, floats(paths[1], other), rtol=3e-7)
    os.close(other)

    kept = create_segment("kept")
    with pytest.raises(CheckpointError, match=r"g_idx .*desc_act.* say --expert-dtype bf16"):
        load(Plan(open_checkpoint(paths[0]), "auto"), kept, lambda _: None)
    os.close(kept)


def test_gpt_oss_keeps_every_value_and_may_be_converted(
    checkpoint_of: Callable[..., Path], tmp_path: Path, store: Callable[..., Store]
) -> None:
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    from tests import native_checkpoints as native

    paths = tmp_path / "native", tmp_path / "meaning"
    native.quantise_gpt_oss(checkpoint_of("gpt_oss"), *paths)
    found = store(paths[0])
    assert found.layout.weights == NAMED_FORMATS["mxfp4"]
    assert found.loaded.errors is None
    meaning = load_file(paths[1] / "model.safetensors")
    for expert in (0, 6):
        ours = found.weights(1, expert)
        stem = "model.layers.1.mlp.experts"
        gate_up = meaning[f"{stem}.gate_up_proj"][expert].T
        assert torch.equal(ours["gate_up_proj"], torch.cat([gate_up[::2], gate_up[1::2]]))
        assert torch.equal(ours["down_proj"], meaning[f"{stem}.down_proj"][expert].T)
        bias = meaning[f"{stem}.gate_up_proj_bias"][expert]
        assert torch.equal(ours["gate_up_proj_bias"], torch.cat([bias[::2], bias[1::2]]))
    # On demand the values are converted: to floats exactly, to another format with an error.
    fd = create_segment("plain")
    layout = load(Plan(open_checkpoint(paths[0]), "auto", "fp32"), fd, lambda _: None).layout
    assert layout.weights is None
    with StoreView(fd) as view:
        plain = view.tensors(1, 6)["gate_up"].copy()
    os.close(fd)
    assert np.array_equal(plain, meaning[f"{stem}.gate_up_proj"][6].numpy())
    errors = store(paths[0], expert_dtype="int8").loaded.errors
    assert errors is not None
    assert errors.format == "int8-g128"


# --- what is refused ------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["int5", "int4-g48", "fp8-g128", "int8-g64-zero", "", "INT4"])
def test_unknown_names(text: str) -> None:
    with pytest.raises(UserError, match="--expert-dtype"):
        parse_expert_dtype(text)


def test_every_name_that_is_listed_is_known() -> None:
    known = {name: parse_expert_dtype(name) for name in EXPERT_DTYPES}
    assert known["int4"] == parse_expert_dtype("int4-g32")
    assert known["auto"] is known["bf16"] is None


def test_floats_of_two_types(checkpoint_of: Callable[..., Path]) -> None:
    with pytest.raises(UserError, match="leave one of the two out"):
        Plan(open_checkpoint(checkpoint_of("qwen3_moe")), "float32", "bf16")


def test_experts_of_unlike_formats(
    checkpoint_of: Callable[..., Path], tmp_path: Path, store: Callable[..., Store]
) -> None:
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    from tests import native_checkpoints as native

    plain, quantised = checkpoint_of("qwen3_moe"), tmp_path / "native"
    native.quantise_checkpoint(plain, quantised, tmp_path / "meaning", "awq")
    stem = "model.layers.0.mlp.experts.0.up_proj"
    path = quantised / "model.safetensors"
    state = load_file(path)
    for part in ("qweight", "qzeros", "scales"):
        del state[f"{stem}.{part}"]
    state[f"{stem}.weight"] = load_file(plain / "model.safetensors")[f"{stem}.weight"]
    save_file(state, path)
    with pytest.raises(CheckpointError, match="unlike formats") as caught:
        Plan(open_checkpoint(quantised), "auto")
    assert f"{stem}.weight in F32" in str(caught.value)
    assert store(quantised, expert_dtype="int8").layout.weights == NAMED_FORMATS["int8"]
