"""Quantised matrices: every byte where docs/expert-formats.md says, and back again."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import numpy as np
import pytest

from expert_store.formats import (
    NAMED_FORMATS,
    SCALE_BYTES,
    WeightFormat,
    find_format_fault,
    num_tiles,
)
from expert_store.layout import (
    ExpertForm,
    StoreLayout,
    decode_header,
    encode_header,
    find_fault,
    make_layout,
)
from expert_store.packing import (
    E2M1_VALUES,
    E4M3_VALUES,
    SCALE_DTYPE,
    QuantisedMatrix,
    dequantise,
    pack,
    packed_shape,
    unpack,
)


def int_format(kind: Any, group_size: int, scale: Any, zero: bool = False) -> WeightFormat:
    return WeightFormat(kind=kind, group_size=group_size, scale=scale, has_zero_points=zero)


FORMATS = {
    weights.name: weights
    for weights in [
        *NAMED_FORMATS.values(),
        *(
            int_format("int8", size, scale)
            for size in (32, 64, 128)
            for scale in ("float16", "bfloat16", "float32")
        ),
        *(
            int_format("int4", size, scale, zero)
            for size in (32, 64, 128)
            for scale in ("float16", "bfloat16", "float32")
            for zero in (False, True)
        ),
    ]
}
SHAPES = ((1, 1), (16, 32), (37, 131), (48, 512), (5, 300))


def random_matrix(
    weights: WeightFormat, num_outputs: int, num_inputs: int, seed: int = 0
) -> QuantisedMatrix:
    """Any codes at all, with scales that keep products well within float32."""
    random = np.random.default_rng(seed)
    shape, groups = (num_outputs, num_inputs), (num_outputs, weights.num_groups(num_inputs))
    codes = random.integers(0, 2**weights.code_bits, shape, np.uint8)
    if weights.kind == "fp8":
        codes[codes & 0x7F == 0x7F] = 0x42
    if weights.scale == "e8m0":
        scales = random.integers(118, 126, groups).astype(np.uint8)
    elif weights.scale == "e4m3":
        scales = random.integers(0x18, 0x40, groups).astype(np.uint8)
    else:
        values = random.uniform(0.001, 0.02, groups).astype(np.float32)
        if weights.scale == "bfloat16":
            scales = (values.view(np.uint32) >> 16).astype(np.uint16)
        else:
            scales = values.astype(SCALE_DTYPE[weights.scale])
    return QuantisedMatrix(
        codes,
        scales,
        random.integers(0, 16, groups).astype(np.uint8) if weights.has_zero_points else None,
        random.uniform(0.0001, 0.01, num_outputs).astype(np.float32)
        if weights.has_output_scales
        else None,
    )


@pytest.mark.parametrize("name", FORMATS)
def test_what_is_packed_comes_back(name: str) -> None:
    weights = FORMATS[name]
    assert find_format_fault(weights) is None
    for num_outputs, num_inputs in SHAPES:
        matrix = random_matrix(weights, num_outputs, num_inputs)
        tiles = pack(weights, matrix)
        assert tiles.shape == packed_shape(weights, num_outputs, num_inputs)
        assert tiles.shape[1] % 64 == 0
        found = unpack(weights, tiles, num_outputs, num_inputs)
        for one, other in zip(
            vars(found).values(),
            vars(matrix).values(),
            strict=True,
        ):
            assert (one is None) is (other is None)
            if one is not None:
                np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("name", FORMATS)
def test_every_code_and_scale_lies_where_the_formula_says(name: str) -> None:
    """The place of a code from output, input and group alone, without any array arithmetic."""
    weights = FORMATS[name]
    num_outputs, num_inputs = 19, 3 * weights.group_size + 5
    matrix = random_matrix(weights, num_outputs, num_inputs)
    tiles = pack(weights, matrix)
    per_record, item = weights.groups_per_record, SCALE_BYTES[weights.scale]
    for output, k in itertools.product((0, 3, 15, 16, 18), range(0, num_inputs, 3)):
        tile, lane = tiles[output // 16], output % 16
        group = k // weights.group_size
        record, within = divmod(group, per_record)
        at = weights.header_bytes + record * (
            weights.record_scale_bytes + per_record * weights.group_code_bytes
        )
        scale = tile[at + (within * 16 + lane) * item :][:item].tobytes()
        assert scale == matrix.scales[output, group].tobytes()
        if matrix.zero_points is not None:
            zero_at = at + per_record * 16 * item + within * 16 + lane
            assert tile[zero_at] == matrix.zero_points[output, group]
        codes_at = at + weights.record_scale_bytes + within * weights.group_code_bytes
        inner = k % weights.group_size
        if weights.code_bits == 8:
            found = tile[codes_at + inner // 4 * 64 + lane * 4 + inner % 4]
        else:
            byte = tile[codes_at + inner // 8 * 64 + lane * 4 + inner % 4]
            found = byte >> 4 if inner % 8 >= 4 else byte & 15
        assert found == matrix.codes[output, k]


def test_numbers_are_torchs() -> None:
    import torch

    codes = torch.arange(256, dtype=torch.uint8)
    np.testing.assert_array_equal(codes.view(torch.float8_e4m3fn).float().numpy(), E4M3_VALUES)
    assert E2M1_VALUES.tolist()[:8] == [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    assert (E2M1_VALUES[8:] == -E2M1_VALUES[:8]).all()


def test_dequantised_by_hand() -> None:
    codes = np.array([[0, 8, 15] + [8] * 29], np.uint8)
    scales = np.array([[0.5]], np.float16)
    weights = FORMATS["int4-g32"]
    assert dequantise(weights, QuantisedMatrix(codes, scales))[0, :3].tolist() == [-4, 0, 3.5]
    zero = QuantisedMatrix(codes, scales, np.array([[3]], np.uint8))
    found = dequantise(FORMATS["int4-g32-zero"], zero)
    assert found[0, :3].tolist() == [-1.5, 2.5, 6]
    mx = QuantisedMatrix(np.array([[7, 9]], np.uint8), np.array([[126]], np.uint8))
    assert dequantise(FORMATS["mxfp4"], mx).tolist() == [[3, -0.25]]
    nv = QuantisedMatrix(
        np.array([[7, 9]], np.uint8),
        np.array([[0x40]], np.uint8),  # 2
        output_scales=np.array([0.25], np.float32),
    )
    assert dequantise(FORMATS["nvfp4"], nv).tolist() == [[3, -0.25]]
    fp8 = QuantisedMatrix(np.array([[0x7E, 0x81]], np.uint8), np.array([[0.5]], np.float32))
    assert dequantise(FORMATS["fp8"], fp8).tolist() == [[224, -(2.0**-10)]]
    int8 = QuantisedMatrix(np.array([[0x80, 0x7F]], np.uint8), np.array([[2]], np.float16))
    assert dequantise(FORMATS["int8-g128"], int8).tolist() == [[-256, 254]]


@pytest.mark.parametrize(
    ("weights", "fault"),
    [
        (int_format("int8", 16, "float16"), "int8 in groups of 16"),
        (int_format("mxfp4", 32, "float16"), "mxfp4 with scales in float16"),
        (int_format("int8", 32, "float16", True), "int8 with zero points"),
    ],
)
def test_formats_that_are_none_are_named(weights: WeightFormat, fault: str) -> None:
    assert find_format_fault(weights) == fault
    with pytest.raises(ValueError, match=fault):
        quantised_layout(weights)


def test_arrays_that_do_not_fit_are_named() -> None:
    weights = FORMATS["int4-g32-zero"]
    matrix = random_matrix(weights, 16, 64)
    with pytest.raises(ValueError, match=r"zero points are missing"):
        pack(weights, QuantisedMatrix(matrix.codes, matrix.scales))
    with pytest.raises(ValueError, match=r"scales are float16 \[16, 1\], not float16 \[16, 2\]"):
        pack(weights, QuantisedMatrix(matrix.codes, matrix.scales[:, :1]))
    with pytest.raises(ValueError, match=r"tiles are uint8"):
        unpack(weights, pack(weights, matrix), 17, 64)


def quantised_layout(weights: WeightFormat, **changes: Any) -> StoreLayout:
    form: dict[str, Any] = {
        "hidden_size": 70,
        "intermediate_size": 37,
        "has_gate": True,
        "has_bias": True,
        "is_transposed": False,
        "is_interleaved": False,
        "activation": "silu",
        "gate": "act_mul",
    }
    return make_layout(
        model_name="m",
        checkpoint_fingerprint="",
        form=ExpertForm(**(form | changes)),
        dtype="bfloat16",
        model_layer_ids=(0,),
        num_experts=(4,),
        top_k=2,
        weights=weights,
    )


@pytest.mark.parametrize("name", FORMATS)
def test_a_block_of_quantised_experts(name: str) -> None:
    weights = FORMATS[name]
    layout = quantised_layout(weights)
    shapes = {tensor.name: tensor.shape for tensor in layout.tensors}
    assert shapes["gate_up"] == (num_tiles(37), 2, weights.tile_bytes(70))
    assert shapes["down"] == (num_tiles(70), 1, weights.tile_bytes(37))
    assert shapes["gate_up_bias"] == (74,)
    assert decode_header(encode_header(layout)) == layout
    assert find_fault(msgspec.structs.replace(layout, weights=None)) is not None
    one_way = quantised_layout(weights, has_gate=False, gate="act")
    assert one_way.tensor("up").shape == (num_tiles(37), 1, weights.tile_bytes(70))
    with pytest.raises(ValueError, match="transposed or interleaved"):
        quantised_layout(weights, is_interleaved=True)
