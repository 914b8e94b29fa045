"""Arithmetic of the layout and its header, damaged byte by byte."""

from __future__ import annotations

import itertools
import math
import struct
import zlib
from typing import get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from expert_store.layout import (
    CACHE_LINE_BYTES,
    HEADER_BYTES,
    ITEM_BYTES,
    PAGE_BYTES,
    STORE_VERSION,
    DamagedHeaderError,
    Dtype,
    ExpertForm,
    StoreFormatError,
    StoreLayout,
    WrongMagicError,
    WrongVersionError,
    decode_header,
    encode_header,
    make_layout,
)
from protocol.errors import UserError

FORM = ExpertForm(
    hidden_size=24,
    intermediate_size=10,
    has_gate=True,
    has_bias=True,
    is_transposed=True,
    is_interleaved=True,
    activation="silu",
    gate="alpha_swiglu",
    alpha=1.702,
    limit=7.0,
)


def layout_of(form: ExpertForm = FORM, dtype: Dtype = "bfloat16", **changes: object) -> StoreLayout:
    values: dict[str, object] = {
        "model_name": "tiny",
        "checkpoint_fingerprint": "abc",
        "model_layer_ids": (1, 2, 5),
        "num_experts": (4, 6, 2),
        "top_k": 2,
    }
    return make_layout(form=form, dtype=dtype, **(values | changes))  # type: ignore[arg-type]


@given(
    hidden=st.integers(1, 200),
    middle=st.integers(1, 200),
    has_gate=st.booleans(),
    has_bias=st.booleans(),
    is_transposed=st.booleans(),
    dtype=st.sampled_from(get_args(Dtype)),
    num_experts=st.lists(st.integers(1, 9), min_size=1, max_size=5),
)
def test_every_byte_has_one_owner(
    hidden: int,
    middle: int,
    has_gate: bool,
    has_bias: bool,
    is_transposed: bool,
    dtype: Dtype,
    num_experts: list[int],
) -> None:
    form = ExpertForm(
        hidden_size=hidden,
        intermediate_size=middle,
        has_gate=has_gate,
        has_bias=has_bias,
        is_transposed=is_transposed,
        is_interleaved=False,
        activation="silu",
        gate="act_mul" if has_gate else "act",
    )
    layout = layout_of(
        form,
        dtype,
        num_experts=tuple(num_experts),
        model_layer_ids=tuple(range(len(num_experts))),
        top_k=1,
    )
    elements = hidden * middle * (3 if has_gate else 2)
    elements += (middle * (2 if has_gate else 1) + hidden) if has_bias else 0
    assert layout.expert_bytes == elements * ITEM_BYTES[dtype]
    end = 0
    for tensor in layout.tensors:
        assert tensor.offset_bytes >= end
        assert tensor.offset_bytes % CACHE_LINE_BYTES == 0
        assert tensor.num_bytes == math.prod(tensor.shape) * ITEM_BYTES[dtype]
        end = tensor.offset_bytes + tensor.num_bytes
    assert end <= layout.block_bytes < end + PAGE_BYTES
    offsets = [
        layout.block_offset(layer, expert)
        for layer, count in enumerate(num_experts)
        for expert in range(count)
    ]
    assert offsets[0] == layout.blocks_offset_bytes == HEADER_BYTES
    assert all(offset % PAGE_BYTES == 0 for offset in offsets)
    assert [b - a for a, b in itertools.pairwise(offsets)] == [layout.block_bytes] * (
        len(offsets) - 1
    )
    assert offsets[-1] + layout.block_bytes == layout.total_bytes
    assert decode_header(encode_header(layout)) == layout


def test_shapes_follow_orientation() -> None:
    by_name = {tensor.name: tensor.shape for tensor in layout_of().tensors}
    assert by_name == {
        "gate_up": (24, 20),
        "down": (10, 24),
        "gate_up_bias": (20,),
        "down_bias": (24,),
    }
    straight = msgspec.structs.replace(FORM, is_transposed=False)
    assert layout_of(straight).tensor("gate_up").shape == (20, 24)
    with pytest.raises(KeyError):
        layout_of().tensor("up")


@pytest.mark.parametrize(("layer", "expert"), [(-1, 0), (3, 0), (0, 4), (0, -1), (2, 2)])
def test_no_expert_beyond_the_last(layer: int, expert: int) -> None:
    with pytest.raises(IndexError):
        layout_of().block_offset(layer, expert)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_experts": ()},
        {"num_experts": (4, 0, 2)},
        {"model_layer_ids": (1, 2)},
        {"top_k": 0},
        {"top_k": 7},
        {"form": msgspec.structs.replace(FORM, limit=None)},
        {"form": msgspec.structs.replace(FORM, alpha=None)},
        {"form": msgspec.structs.replace(FORM, has_gate=False)},
        {"form": msgspec.structs.replace(FORM, hidden_size=0)},
    ],
)
def test_nonsense_is_not_laid_out(changes: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"."):
        layout_of(**changes)  # type: ignore[arg-type]


def test_every_flipped_byte_is_noticed() -> None:
    header = encode_header(layout_of())
    for position in range(len(header)):
        damaged = bytearray(header)
        damaged[position] ^= 0x20
        expected: type[StoreFormatError] = DamagedHeaderError
        if position < 8:
            expected = WrongMagicError
        elif position < 12:
            expected = WrongVersionError
        with pytest.raises(expected) as caught:
            decode_header(damaged)
        assert isinstance(caught.value, UserError)


def test_every_truncation_is_noticed() -> None:
    header = encode_header(layout_of())
    for length in range(len(header)):
        with pytest.raises(StoreFormatError):
            decode_header(header[:length])
    assert decode_header(header + bytes(1000)) == layout_of()


@pytest.mark.parametrize(
    "changes",
    [
        {"total_bytes": HEADER_BYTES},
        {"block_bytes": 8192 * 4},
        {"blocks_offset_bytes": 0},
        {"tensors": ()},
        {"version": STORE_VERSION + 1},
        {"num_experts": (4, 6)},
    ],
)
def test_a_sealed_lie_is_noticed(changes: dict[str, object]) -> None:
    """Checksum right, content contradictory."""
    body = msgspec.json.encode(msgspec.structs.replace(layout_of(), **changes))
    prefix = struct.pack("<8sIIQ", b"HRSTORE\0", STORE_VERSION, zlib.crc32(body), len(body))
    with pytest.raises(DamagedHeaderError, match="contradicts itself"):
        decode_header(prefix + body)


def test_an_index_too_long_for_its_room_is_refused() -> None:
    with pytest.raises(ValueError, match="does not fit"):
        encode_header(layout_of(model_name="x" * HEADER_BYTES))
