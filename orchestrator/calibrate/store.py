"""Made-up experts: as many as a cache cannot hold, of the format that is to be measured.

Every byte is the same. What a kernel reads depends on addresses and not on values, as long as no
value is slow: this byte is an ordinary number in every format, neither denormal nor infinite.
"""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING

from expert_store.layout import ExpertForm, encode_header, make_layout

if TYPE_CHECKING:
    from collections.abc import Callable

    from expert_store.formats import WeightFormat
    from expert_store.layout import Dtype, StoreLayout

#: 0.0115 as bfloat16 and float32, 1.06 as float16.
FILL_BYTE = 0x3C
TOP_K = 8
_CHUNK_BYTES = 64 * 1024 * 1024


def gated_form(hidden_size: int, intermediate_size: int) -> ExpertForm:
    """The experts of most models: gate and up, SiLU, down."""
    return ExpertForm(
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        has_gate=True,
        has_bias=False,
        is_transposed=False,
        is_interleaved=False,
        activation="silu",
        gate="act_mul",
    )


def bench_layout(
    form: ExpertForm, dtype: Dtype, weights: WeightFormat | None, total_bytes: int
) -> StoreLayout:
    """One layer of as many experts as fit into `total_bytes`, but twice TOP_K at least."""
    one = _layout(form, dtype, weights, TOP_K)
    return _layout(form, dtype, weights, max(total_bytes // one.block_bytes, 2 * TOP_K))


def _layout(
    form: ExpertForm, dtype: Dtype, weights: WeightFormat | None, num_experts: int
) -> StoreLayout:
    return make_layout(
        model_name="calibration",
        checkpoint_fingerprint="0" * 32,
        form=form,
        dtype=dtype,
        model_layer_ids=(0,),
        num_experts=(num_experts,),
        top_k=TOP_K,
        weights=weights,
    )


def fill_store(fd: int, layout: StoreLayout, report: Callable[[int, int], None]) -> None:
    """Write header and experts into `fd`, which has the size; `report(done, total)` in bytes."""
    with mmap.mmap(fd, layout.total_bytes) as memory:
        chunk = bytes([FILL_BYTE]) * _CHUNK_BYTES
        for start in range(0, layout.total_bytes, _CHUNK_BYTES):
            end = min(start + _CHUNK_BYTES, layout.total_bytes)
            memory[start:end] = chunk[: end - start]
            report(end, layout.total_bytes)
        header = encode_header(layout)
        memory[: len(header)] = header
