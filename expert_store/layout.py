"""Where every byte of the expert store lies: pure arithmetic and the header that says it.

One segment holds all routed experts of one model:

    offset 0                    header: magic, version, crc32, length; then StoreLayout as JSON
    blocks_offset_bytes         block of (layer 0, expert 0)
      + block_bytes             block of (layer 0, expert 1)
      ...                       layer after layer, each with its own number of experts
    total_bytes                 end of the segment

A block holds all tensors of one expert, each at an offset aligned to a cache line, and is itself
aligned to a page, so that a fill is one copy of ``block_bytes`` and a CPU kernel reads the weights
where they lie. Blocks of one model are all alike: a slot on the device fits any expert.

``layer`` means the index among the MoE layers, 0 .. num_layers-1, never the model's own layer
number, which is ``model_layer_ids[layer]``.

This module is imported by the orchestrator: standard library and msgspec only.
"""

from __future__ import annotations

import math
import struct
import zlib
from typing import Literal

import msgspec

from expert_store.formats import WeightFormat, find_format_fault, num_tiles
from protocol.errors import UserError

STORE_VERSION = 2
PAGE_BYTES = 4096
CACHE_LINE_BYTES = 64
HEADER_BYTES = 64 * 1024
"""Room for the header; fixed, because the JSON inside it names the offset of what follows."""

Dtype = Literal["float32", "bfloat16", "float16"]
ITEM_BYTES: dict[Dtype, int] = {"float32": 4, "bfloat16": 2, "float16": 2}

TensorDtype = Literal[Dtype, "uint8"]
"""Of a tensor in a block; ``uint8`` for quantised weights, whose bytes their format explains."""

TensorName = Literal["gate_up", "up", "down", "gate_up_bias", "up_bias", "down_bias"]

GateKind = Literal["act_mul", "clamped_act_mul", "alpha_swiglu", "act"]
"""How the first projection's output becomes the second's input.

g: gate half, u: up half, L: limit, a: alpha.

- ``act_mul``          act(g) * u
- ``clamped_act_mul``  act(min(g, L)) * clamp(u, -L, L)
- ``alpha_swiglu``     g' * sigmoid(a * g') * (u' + 1)   with g' = min(g, L), u' = clamp(u, -L, L)
- ``act``              act(x): no gate, the first projection is ``up`` alone
"""

_MAGIC = b"HRSTORE\0"
_PREFIX = struct.Struct("<8sIIQ")  # magic, version, crc32 of the JSON, length of the JSON


class StoreFormatError(UserError):
    """The bytes of a segment are not an expert store that this program can read."""


class WrongMagicError(StoreFormatError):
    """The segment does not begin as an expert store."""


class WrongVersionError(StoreFormatError):
    """The segment was written by another version of the store format."""


class DamagedHeaderError(StoreFormatError):
    """The header fails its checksum, or what it says contradicts itself or the segment's size."""


class ExpertForm(msgspec.Struct, frozen=True, kw_only=True):
    """What one expert computes; the same for every expert of a model.

    For a row x of hidden_size values: h = x @ W1 (+ b1), g = gate(h), y = g @ W2 (+ b2).
    W1 is ``gate_up`` when has_gate (2 * intermediate_size outputs) and ``up`` otherwise.
    """

    hidden_size: int
    intermediate_size: int
    has_gate: bool
    has_bias: bool
    is_transposed: bool
    """False: weights are [outputs, inputs] (y = x @ W.T); True: [inputs, outputs] (y = x @ W).
    Quantised weights are always the former, and never interleaved."""
    is_interleaved: bool
    """False: outputs are [all gates, all ups]; True: gate0, up0, gate1, up1, ..."""
    activation: str
    """Name in transformers' ACT2FN ("silu", "gelu", ...); unused by ``alpha_swiglu``."""
    gate: GateKind
    alpha: float | None = None
    limit: float | None = None

    @property
    def up_rows(self) -> int:
        """Number of outputs of the first projection."""
        return self.intermediate_size * (2 if self.has_gate else 1)


class TensorLayout(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor within a block: C order, little endian."""

    name: TensorName
    dtype: TensorDtype
    shape: tuple[int, ...]
    offset_bytes: int
    """From the start of the block; a multiple of CACHE_LINE_BYTES."""
    num_bytes: int


class StoreLayout(msgspec.Struct, frozen=True, kw_only=True):
    """The whole index of a store; the JSON in its header."""

    version: int
    model_name: str
    checkpoint_fingerprint: str
    """Hash of config, shard headers and shard sizes: equal hashes mean equal layouts on disk."""
    form: ExpertForm
    dtype: Dtype
    """Of hidden rows, of biases and, unless they are quantised, of weights."""
    weights: WeightFormat | None = None
    """How weights are quantised; None: they are row-major in `dtype`."""
    model_layer_ids: tuple[int, ...]
    """transformers' layer number of each MoE layer, ascending."""
    num_experts: tuple[int, ...]
    """Routed experts of each MoE layer."""
    top_k: int
    """Experts that the router picks per token."""
    tensors: tuple[TensorLayout, ...]
    block_bytes: int
    blocks_offset_bytes: int
    total_bytes: int

    @property
    def num_layers(self) -> int:
        """MoE layers, not layers of the model."""
        return len(self.num_experts)

    @property
    def total_experts(self) -> int:
        return sum(self.num_experts)

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert's weights: the sum of its tensors, without the block's padding."""
        return sum(tensor.num_bytes for tensor in self.tensors)

    def block_index(self, layer: int, expert: int) -> int:
        """Number of the block of (layer, expert), 0 .. total_experts-1.

        Raises IndexError when there is no such expert: a negative index is never meant here.
        """
        if not 0 <= layer < self.num_layers:
            raise IndexError(f"MoE layer {layer} of {self.num_layers}")
        if not 0 <= expert < self.num_experts[layer]:
            raise IndexError(f"expert {expert} of {self.num_experts[layer]} in MoE layer {layer}")
        return sum(self.num_experts[:layer]) + expert

    def block_offset(self, layer: int, expert: int) -> int:
        """Bytes from the segment's start to the block of (layer, expert). Raises IndexError."""
        return self.blocks_offset_bytes + self.block_index(layer, expert) * self.block_bytes

    def tensor(self, name: TensorName) -> TensorLayout:
        """The tensor of that name. Raises KeyError when the form has none."""
        for tensor in self.tensors:
            if tensor.name == name:
                return tensor
        raise KeyError(name)


def align_up(num_bytes: int, alignment: int) -> int:
    """The least multiple of ``alignment`` that is not below ``num_bytes``."""
    return -(-num_bytes // alignment) * alignment


def block_tensors(
    form: ExpertForm, dtype: Dtype, weights: WeightFormat | None = None
) -> tuple[TensorLayout, ...]:
    """The tensors of one block in the order the kernels touch them.

    Quantised weights are uint8 [tiles, 2 or 1, tile_bytes]: 2 (gate and up) in ``gate_up``.
    """
    inputs, outputs, middle = form.hidden_size, form.up_rows, form.intermediate_size
    first: TensorName = "gate_up" if form.has_gate else "up"
    first_bias: TensorName = "gate_up_bias" if form.has_gate else "up_bias"
    shapes: list[tuple[TensorName, TensorDtype, tuple[int, ...]]]
    if weights is not None:
        ways = 2 if form.has_gate else 1
        shapes = [
            (first, "uint8", (num_tiles(middle), ways, weights.tile_bytes(inputs))),
            ("down", "uint8", (num_tiles(inputs), 1, weights.tile_bytes(middle))),
        ]
    else:
        shapes = [
            (first, dtype, (inputs, outputs) if form.is_transposed else (outputs, inputs)),
            ("down", dtype, (middle, inputs) if form.is_transposed else (inputs, middle)),
        ]
    if form.has_bias:
        shapes += [(first_bias, dtype, (outputs,)), ("down_bias", dtype, (inputs,))]
    tensors: list[TensorLayout] = []
    offset_bytes = 0
    for name, tensor_dtype, shape in shapes:
        num_bytes = math.prod(shape) * (1 if tensor_dtype == "uint8" else ITEM_BYTES[tensor_dtype])
        tensors.append(
            TensorLayout(
                name=name,
                dtype=tensor_dtype,
                shape=shape,
                offset_bytes=offset_bytes,
                num_bytes=num_bytes,
            )
        )
        offset_bytes = align_up(offset_bytes + num_bytes, CACHE_LINE_BYTES)
    return tuple(tensors)


def make_layout(
    *,
    model_name: str,
    checkpoint_fingerprint: str,
    form: ExpertForm,
    dtype: Dtype,
    model_layer_ids: tuple[int, ...],
    num_experts: tuple[int, ...],
    top_k: int,
    weights: WeightFormat | None = None,
) -> StoreLayout:
    """Lay out a model's experts. Raises ValueError when the numbers describe no model."""
    tensors = block_tensors(form, dtype, weights)
    block_bytes = align_up(tensors[-1].offset_bytes + tensors[-1].num_bytes, PAGE_BYTES)
    layout = StoreLayout(
        version=STORE_VERSION,
        model_name=model_name,
        checkpoint_fingerprint=checkpoint_fingerprint,
        form=form,
        dtype=dtype,
        weights=weights,
        model_layer_ids=model_layer_ids,
        num_experts=num_experts,
        top_k=top_k,
        tensors=tensors,
        block_bytes=block_bytes,
        blocks_offset_bytes=HEADER_BYTES,
        total_bytes=HEADER_BYTES + sum(num_experts) * block_bytes,
    )
    fault = find_fault(layout)
    if fault is not None:
        raise ValueError(fault)
    return layout


def find_fault(layout: StoreLayout) -> str | None:
    """What in the layout contradicts itself, or None. Recounts everything from the form alone."""
    form = layout.form
    if min(form.hidden_size, form.intermediate_size) < 1:
        return f"expert of {form.hidden_size} x {form.intermediate_size}"
    if form.has_gate is (form.gate == "act"):
        return f"gate {form.gate!r} with has_gate={form.has_gate}"
    if form.gate in ("clamped_act_mul", "alpha_swiglu") and form.limit is None:
        return f"gate {form.gate!r} without a limit"
    if form.gate == "alpha_swiglu" and form.alpha is None:
        return f"gate {form.gate!r} without an alpha"
    if not layout.num_experts or min(layout.num_experts) < 1:
        return f"numbers of experts {layout.num_experts}"
    if len(layout.model_layer_ids) != len(layout.num_experts):
        return f"{len(layout.model_layer_ids)} layer ids for {len(layout.num_experts)} MoE layers"
    if not 1 <= layout.top_k <= max(layout.num_experts):
        return f"top_k {layout.top_k} of {max(layout.num_experts)} experts"
    if layout.weights is not None:
        if form.is_transposed or form.is_interleaved:
            return "quantised weights that are transposed or interleaved"
        fault = find_format_fault(layout.weights)
        if fault is not None:
            return fault
    if layout.tensors != block_tensors(form, layout.dtype, layout.weights):
        return "tensors that do not follow from the form"
    last = layout.tensors[-1]
    if layout.block_bytes != align_up(last.offset_bytes + last.num_bytes, PAGE_BYTES):
        return f"blocks of {layout.block_bytes} bytes"
    if layout.blocks_offset_bytes != HEADER_BYTES:
        return f"blocks at byte {layout.blocks_offset_bytes}"
    if layout.total_bytes != HEADER_BYTES + layout.total_experts * layout.block_bytes:
        return f"total of {layout.total_bytes} bytes"
    return None


def encode_header(layout: StoreLayout) -> bytes:
    """The first bytes of the segment. Raises ValueError when the index exceeds HEADER_BYTES."""
    body = msgspec.json.encode(layout)
    if _PREFIX.size + len(body) > HEADER_BYTES:
        raise ValueError(f"index of {len(body)} bytes does not fit in a header of {HEADER_BYTES}")
    return _PREFIX.pack(_MAGIC, layout.version, zlib.crc32(body), len(body)) + body


def decode_header(header: bytes | bytearray | memoryview) -> StoreLayout:
    """Read the index from the first bytes of a segment (at least the prefix and its JSON).

    Raises WrongMagicError, WrongVersionError or DamagedHeaderError; trusts no length unchecked.
    """
    view = memoryview(header)
    if view.nbytes < _PREFIX.size:
        raise WrongMagicError(
            f"expert store: a segment of {view.nbytes} bytes is too short for a header;"
            " load the model again"
        )
    magic, version, checksum, length = _PREFIX.unpack_from(view)
    if magic != _MAGIC:
        raise WrongMagicError(
            f"expert store: the segment begins with {bytes(magic)!r}, not {_MAGIC!r};"
            " it holds no expert store"
        )
    if version != STORE_VERSION:
        raise WrongVersionError(
            f"expert store: format version {version}, this program reads {STORE_VERSION};"
            " run all processes from the same release"
        )
    if length > min(HEADER_BYTES, view.nbytes) - _PREFIX.size:
        raise DamagedHeaderError(
            f"expert store: the header claims {length} bytes of index, more than there are;"
            " load the model again"
        )
    body = bytes(view[_PREFIX.size : _PREFIX.size + length])
    found = zlib.crc32(body)
    if found != checksum:
        raise DamagedHeaderError(
            f"expert store: the header's checksum is {found:#010x}, {checksum:#010x} was written;"
            " load the model again"
        )
    try:
        layout = msgspec.json.decode(body, type=StoreLayout)
    except msgspec.DecodeError as error:
        raise DamagedHeaderError(
            f"expert store: unreadable index in the header: {error}"
        ) from error
    fault = find_fault(layout)
    if fault is not None or layout.version != version:
        raise DamagedHeaderError(
            f"expert store: the header's index contradicts itself: {fault or 'version'}"
        )
    return layout
