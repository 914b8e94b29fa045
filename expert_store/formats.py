"""Quantised experts: which formats there are and how many bytes they take where.

A quantised matrix [outputs, inputs] lies in tiles of 16 outputs, one after the other. A tile is
read from its first byte to its last, once, by one thread: scales lie just before the codes they
belong to. docs/expert-formats.md shows the bytes; `expert_store.packing` packs, unpacks and
dequantises with numpy; expert_kernels/native computes with them in place.

    tile      [output scales: 16 float32, nvfp4 only]  records ...
    record    scales [groups, 16]  zero points uint8 [groups, 16], if any  codes of each group
    group     16 outputs x group_size inputs: lines of 64 bytes
    line      16 dwords, one per output: 4 inputs of a byte each, or 8 of 4 bits each

A record has the least number of groups (1, 2 or 4) whose scales fill whole lines of 64 bytes. The
last record of a tile may have fewer groups; room for their scales is kept, none for their codes.
Outputs beyond the last have scales of 0, inputs beyond the last have codes of 0.

The first projection's tiles alternate, 16 gates then 16 ups, so both halves of the same units lie
side by side.

This module is imported by the orchestrator: standard library and msgspec only.
"""

from __future__ import annotations

from typing import Literal

import msgspec

TILE_OUTPUTS = 16
LINE_BYTES = 64

FormatKind = Literal["int8", "int4", "mxfp4", "nvfp4", "fp8"]
"""What a code means; weight = value(code) * scale of its group (* scale of its output, nvfp4).

- ``int8``   two's complement, -128 .. 127
- ``int4``   0 .. 15 less the zero point of the group, which is 8 where none are stored
- ``mxfp4``  e2m1: sign, two bits of exponent, one of fraction; +-0 .5 1 1.5 2 3 4 6
- ``nvfp4``  e2m1 likewise
- ``fp8``    e4m3 with the codes 0x7f and 0xff for "no number", which no weight may be
"""

ScaleKind = Literal["float32", "float16", "bfloat16", "e8m0", "e4m3"]
"""``e8m0``: 2 ** (byte - 127); ``e4m3``: as fp8 codes."""

SCALE_BYTES: dict[ScaleKind, int] = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "e8m0": 1,
    "e4m3": 1,
}
_GROUP_SIZES: dict[FormatKind, tuple[int, ...]] = {
    "int8": (32, 64, 128),
    "int4": (32, 64, 128),
    "mxfp4": (32,),
    "nvfp4": (16,),
    "fp8": (128,),
}
_SCALES: dict[FormatKind, tuple[ScaleKind, ...]] = {
    "int8": ("float32", "float16", "bfloat16"),
    "int4": ("float32", "float16", "bfloat16"),
    "mxfp4": ("e8m0",),
    "nvfp4": ("e4m3",),
    "fp8": ("float32",),
}


class WeightFormat(msgspec.Struct, frozen=True, kw_only=True):
    """How the weights of all experts of a store are quantised."""

    kind: FormatKind
    group_size: int
    """Inputs that share a scale: of one output, counted from input 0."""
    scale: ScaleKind
    has_zero_points: bool = False
    """int4 only: a zero point 0 .. 15 per group and output, else it is 8."""

    @property
    def has_output_scales(self) -> bool:
        """A float32 factor per output: nvfp4's scale of the whole tensor."""
        return self.kind == "nvfp4"

    @property
    def code_bits(self) -> int:
        return 8 if self.kind in ("int8", "fp8") else 4

    @property
    def inputs_per_line(self) -> int:
        return 32 // self.code_bits

    @property
    def groups_per_record(self) -> int:
        if self.has_zero_points:
            return 4
        return 4 // SCALE_BYTES[self.scale]

    @property
    def record_scale_bytes(self) -> int:
        """Scales and zero points at the beginning of every record; whole lines."""
        per_output = SCALE_BYTES[self.scale] + self.has_zero_points
        return self.groups_per_record * TILE_OUTPUTS * per_output

    @property
    def group_code_bytes(self) -> int:
        return TILE_OUTPUTS * self.group_size * self.code_bits // 8

    @property
    def header_bytes(self) -> int:
        """Output scales at the beginning of every tile."""
        return TILE_OUTPUTS * 4 if self.has_output_scales else 0

    def num_groups(self, num_inputs: int) -> int:
        return -(-num_inputs // self.group_size)

    def tile_bytes(self, num_inputs: int) -> int:
        """Bytes of a tile of a matrix with that many inputs; a multiple of LINE_BYTES."""
        num_groups = self.num_groups(num_inputs)
        num_records = -(-num_groups // self.groups_per_record)
        return (
            self.header_bytes
            + num_records * self.record_scale_bytes
            + num_groups * self.group_code_bytes
        )

    @property
    def name(self) -> str:
        """Short and unambiguous: "mxfp4", "int4-g32", "int4-g128-zero", "int8-g64-float32"."""
        parts: list[str] = [self.kind]
        if self.kind in ("int8", "int4"):
            parts.append(f"g{self.group_size}")
            parts += ["zero"] * self.has_zero_points
            parts += [self.scale] * (self.scale != "float16")
        return "-".join(parts)


#: Formats by the names a user gives them.
NAMED_FORMATS: dict[str, WeightFormat] = {
    "int8": WeightFormat(kind="int8", group_size=128, scale="float16"),
    "int4": WeightFormat(kind="int4", group_size=32, scale="float16"),
    "mxfp4": WeightFormat(kind="mxfp4", group_size=32, scale="e8m0"),
    "nvfp4": WeightFormat(kind="nvfp4", group_size=16, scale="e4m3"),
    "fp8": WeightFormat(kind="fp8", group_size=128, scale="float32"),
}


def num_tiles(num_outputs: int) -> int:
    """Tiles of a matrix with that many outputs."""
    return -(-num_outputs // TILE_OUTPUTS)


def find_format_fault(weights: WeightFormat) -> str | None:
    """What makes this no format that is defined, or None."""
    if weights.group_size not in _GROUP_SIZES[weights.kind]:
        return f"{weights.kind} in groups of {weights.group_size}"
    if weights.scale not in _SCALES[weights.kind]:
        return f"{weights.kind} with scales in {weights.scale}"
    if weights.has_zero_points and weights.kind != "int4":
        return f"{weights.kind} with zero points"
    return None
