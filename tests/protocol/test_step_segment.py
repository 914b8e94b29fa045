"""Where the arrays of the activation segment lie."""

from __future__ import annotations

import math

import pytest

from protocol.step_segment import ACTIVATIONS, activation_grant

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int32": 4, "int64": 8}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(
    ("max_rows", "top_k", "hidden_size"), [(1, 1, 1), (8, 2, 64), (512, 8, 2880), (3, 6, 1025)]
)
def test_fields_follow_each_other_on_pages(
    max_rows: int, top_k: int, hidden_size: int, dtype: str
) -> None:
    grant = activation_grant(max_rows, top_k, hidden_size, dtype)
    assert grant.name == ACTIVATIONS
    assert {name: (field.dtype, field.shape) for name, field in grant.fields.items()} == {
        "header": ("int64", [8]),
        "hidden": (dtype, [max_rows, hidden_size]),
        "choices": ("int32", [max_rows, top_k]),
        "rows": ("float32", [max_rows, top_k, hidden_size]),
    }
    end = 0
    for field in grant.fields.values():
        assert field.offset_bytes % 4096 == 0
        assert end <= field.offset_bytes < end + 4096
        end = field.offset_bytes + math.prod(field.shape) * ITEM_BYTES[field.dtype]
    assert end <= grant.num_bytes < end + 4096


def test_known_offsets() -> None:
    grant = activation_grant(8, 2, 64, "bfloat16")
    offsets = {name: field.offset_bytes for name, field in grant.fields.items()}
    assert offsets == {"header": 0, "hidden": 4096, "choices": 8192, "rows": 12288}
    assert grant.num_bytes == 16384


def test_unknown_dtype_is_refused() -> None:
    with pytest.raises(KeyError):
        activation_grant(8, 2, 64, "int4")
