"""The activation segment: what a layer-step hands from the router to the experts and back.

    header   int64 [8]                     step, layer, num_rows, rows_apart, 0...
                                                                         written by gpu_worker
    hidden   dtype [max_rows, hidden]      rows that enter the experts   written by gpu_worker
    choices  int32 [max_rows, top_k]       the router's choice, best first
    rows     float32 [max_rows, top_k, hidden]   result of choice k of row r; whoever computed it

A result row has one place whoever computes it, so the layer is joined by reading `rows` in the
router's own order: where an expert ran cannot change the order of the additions.

`header` is written last, before `Routed` is sent; a worker that finds another step or layer there
than its command names has a stale command and drops it.
"""

from __future__ import annotations

from protocol.lifeline import FieldLayout, SegmentGrant

ACTIVATIONS = "activations"
WEIGHTS = "weights"
ARENA = "arena"

HEADER_STEP = 0
HEADER_LAYER = 1
HEADER_NUM_ROWS = 2
#: 1: each row belongs to another sequence, and its result must have the bits it would have alone.
HEADER_ROWS_APART = 3

_ITEM_BYTES = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "uint8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
}
#: Every field starts on a page: whole-page alignment keeps vector loads and mlock simple.
_ALIGN_BYTES = 4096


def activation_grant(max_rows: int, top_k: int, hidden_size: int, dtype: str) -> SegmentGrant:
    """Layout of the activation segment for at most `max_rows` rows per step."""
    return segment_of(
        ACTIVATIONS,
        ("header", "int64", [8]),
        ("hidden", dtype, [max_rows, hidden_size]),
        ("choices", "int32", [max_rows, top_k]),
        ("rows", "float32", [max_rows, top_k, hidden_size]),
    )


def segment_of(name: str, *fields: tuple[str, str, list[int]]) -> SegmentGrant:
    """A segment of arrays (name, dtype, shape), one after the other, each on pages of its own."""
    offset_bytes = 0
    layouts: dict[str, FieldLayout] = {}
    for field, dtype, shape in fields:
        layouts[field] = FieldLayout(dtype, shape, offset_bytes)
        num_bytes = _ITEM_BYTES[dtype]
        for extent in shape:
            num_bytes *= extent
        offset_bytes += -(-num_bytes // _ALIGN_BYTES) * _ALIGN_BYTES
    return SegmentGrant(name, offset_bytes, layouts)
