"""Quantised checkpoints as they lie on disk: which tensors together are one weight.

A quantised weight is stored as several tensors: packed codes, scales, perhaps zero points. This
module finds them in the headers, checks that their shapes belong together and puts one
`PackedTensor` in their place, named and shaped as the weight that they stand for. Everything after
it (renaming, sorting, completeness) then works as with a 16-bit checkpoint.

    kind          tensors                                             who writes it
    mxfp4         X_blocks, X_scales (fused);                         gpt-oss; compressed-tensors
                  weight_packed U8, weight_scale U8
    fp8           weight F8_E4M3, weight_scale_inv or weight_scale    DeepSeek-V3, Qwen3-FP8, ...
    awq           qweight, scales, qzeros                             AutoAWQ (gemm)
    gptq          qweight, scales, qzeros, g_idx                      GPTQ
    int4          weight_packed I32, weight_scale, weight_zero_point  compressed-tensors
    int8          weight I8, weight_scale                             compressed-tensors
    nvfp4         weight U8, weight_scale, weight_scale_2;            modelopt;
                  weight_packed U8, weight_scale, weight_global_scale compressed-tensors

Headers only, neither torch nor numpy: what cannot be read is refused within milliseconds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NoReturn

import msgspec

from expert_store.checkpoint import Checkpoint, CheckpointError, TensorEntry
from expert_store.formats import ScaleKind, WeightFormat
from expert_store.quantisation_config import ADVICE, FLOATS, stated_method, stated_quantisation

if TYPE_CHECKING:
    from collections.abc import Mapping

PackedKind = Literal["mxfp4", "fp8", "awq", "gptq", "int4", "int8", "nvfp4"]

PACKED_DTYPE = "PACKED"
_INDICES = ("I32", "I64")

#: Scales of inputs and of cached keys and values: Headrace quantises weights alone.
_SCALE_KINDS: dict[str, ScaleKind] = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_UNUSED = (
    ".input_scale", ".activation_scale", ".input_global_scale", ".k_scale", ".v_scale",
    ".q_scale", ".output_scale", ".input_zero_point",
)  # fmt: skip


class PackedTensor(TensorEntry, frozen=True, kw_only=True):
    """A weight that is stored in parts. ``dtype`` is PACKED_DTYPE, ``shape`` the weight's own as
    [outputs, inputs] or [experts, outputs, inputs]; ``num_bytes`` is that of all parts."""

    kind: PackedKind
    group: int
    """Consecutive inputs that share a scale."""
    block_rows: int = 1
    """Outputs that share a scale: more than one for fp8 in blocks."""
    parts: dict[str, TensorEntry]
    """Role (codes, scales, zeros, global, order) -> tensor."""
    is_reciprocal: bool = False
    """nvfp4: the global scale divides (compressed-tensors) instead of multiplying (modelopt)."""
    zero_shift: int = 0
    """gptq: what is added to a stored zero point, modulo 16."""

    @property
    def formats(self) -> tuple[WeightFormat, ...]:
        """Formats of the store that hold these values as they are, widest groups first.

        A scale that covers more than a group of the format is repeated, so scales for whole
        outputs, whole tensors or blocks of 128 outputs lie in the store as scales of groups.
        """
        if self.kind == "mxfp4":
            return (WeightFormat(kind="mxfp4", group_size=32, scale="e8m0"),)
        if self.kind == "nvfp4":
            return (WeightFormat(kind="nvfp4", group_size=16, scale="e4m3"),)
        if self.kind == "fp8":
            return (WeightFormat(kind="fp8", group_size=128, scale="float32"),)
        scale = _SCALE_KINDS.get(self.parts["scales"].dtype)
        is_one_group = self.group == self.shape[-1]
        return tuple(
            WeightFormat(
                kind="int8" if self.kind == "int8" else "int4",
                group_size=size,
                scale=scale,
                has_zero_points="zeros" in self.parts,
            )
            for size in (128, 64, 32)
            if scale is not None and (is_one_group or self.group % size == 0)
        )


def gather_packed(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint with every quantised weight as one PackedTensor; the same one when there is
    none. Raises CheckpointError naming the tensor when a layout is not known."""
    config = stated_quantisation(checkpoint.directory, checkpoint.config)
    if config is None:
        return checkpoint
    reader = _Reader(checkpoint, stated_method(checkpoint, config), config)
    tensors: dict[str, TensorEntry] = {}
    used: set[str] = set()
    for name in checkpoint.tensors:
        found = reader.packed_at(name)
        if found is not None:
            tensors[found.name] = found
            used |= {part.name for part in found.parts.values()} | reader.companions(name)
    for name, entry in checkpoint.tensors.items():
        if name not in used and not name.endswith(_UNUSED):
            if name in tensors:
                raise CheckpointError(
                    f"{checkpoint.directory / entry.file_name}: tensor {name} is there both"
                    " quantised and plain; remove one of the two"
                )
            tensors[name] = entry
    return msgspec.structs.replace(checkpoint, tensors=tensors)


class _Reader:
    """Recognises the tensor that holds the codes of a weight."""

    def __init__(self, checkpoint: Checkpoint, method: str, config: Mapping[str, Any]) -> None:
        self._checkpoint = checkpoint
        self._tensors = checkpoint.tensors
        self._method = method
        self._config = config

    def companions(self, name: str) -> set[str]:
        """Tensors beside the codes `name` that are read into no part."""
        stem = name.rpartition(".")[0]
        return {f"{stem}.weight_shape"} if f"{stem}.weight_shape" in self._tensors else set()

    def packed_at(self, name: str) -> PackedTensor | None:
        """The weight whose codes are the tensor `name`; None when it holds no codes."""
        entry = self._tensors[name]
        if name.endswith("_blocks") and f"{name.removesuffix('_blocks')}_scales" in self._tensors:
            return self._mxfp4_blocks(entry)
        stem, _, leaf = name.rpartition(".")
        if leaf == "qweight":
            return self._awq(entry, stem) if self._method == "awq" else self._gptq(entry, stem)
        if leaf == "weight_packed":
            if entry.dtype == "I32":
                return self._int4(entry, stem)
            return self._fp4(entry, stem, f"{stem}.weight_scale", f"{stem}.weight_global_scale")
        if entry.dtype == "U8" and f"{name}_scale_2" in self._tensors:
            return self._fp4(entry, stem, f"{name}_scale", f"{name}_scale_2")
        for scale_name in (f"{name}_scale_inv", f"{name}_scale"):
            if scale_name in self._tensors and entry.dtype in ("F8_E4M3", "I8"):
                return self._scaled(entry, scale_name)
        return None

    def _mxfp4_blocks(self, codes: TensorEntry) -> PackedTensor:
        name = codes.name.removesuffix("_blocks")
        scales = self._part(f"{name}_scales", ("U8", "F8_E8M0"))
        if codes.dtype != "U8" or len(codes.shape) < 3 or codes.shape[-1] != 16:
            self._refuse(codes, "16 bytes of two 4-bit codes each per group are expected")
        *outer, num_groups, _ = codes.shape
        self._require(scales, (*outer, num_groups), codes)
        return self._made(
            name, (*outer, 32 * num_groups), "mxfp4", 32, {"codes": codes, "scales": scales}
        )

    def _awq(self, codes: TensorEntry, stem: str) -> PackedTensor:
        scales = self._part(f"{stem}.scales", FLOATS)
        zeros = self._part(f"{stem}.qzeros", ("I32",))
        if codes.dtype != "I32" or len(codes.shape) != 2:
            self._refuse(codes, "I32 [inputs, outputs / 8] is expected of AWQ")
        inputs, outputs = codes.shape[0], 8 * codes.shape[1]
        group = self._group(inputs, scales, 0)
        self._require(scales, (inputs // group, outputs), codes)
        self._require(zeros, (inputs // group, outputs // 8), codes)
        parts = {"codes": codes, "scales": scales, "zeros": zeros}
        return self._made(f"{stem}.weight", (outputs, inputs), "awq", group, parts)

    def _gptq(self, codes: TensorEntry, stem: str) -> PackedTensor:
        scales = self._part(f"{stem}.scales", FLOATS)
        zeros = self._part(f"{stem}.qzeros", ("I32",))
        if codes.dtype != "I32" or len(codes.shape) != 2:
            self._refuse(codes, "I32 [inputs / 8, outputs] is expected of GPTQ")
        inputs, outputs = 8 * codes.shape[0], codes.shape[1]
        group = self._group(inputs, scales, 0)
        self._require(scales, (inputs // group, outputs), codes)
        self._require(zeros, (inputs // group, -(-outputs // 8)), codes)
        parts = {"codes": codes, "scales": scales, "zeros": zeros}
        order = self._order(f"{stem}.g_idx", inputs, codes)
        if order is not None:
            parts["order"] = order
        elif self._config.get("desc_act") and group < inputs:
            raise CheckpointError(
                f"{self._checkpoint.directory}: lacks tensor {stem}.g_idx, which says in which"
                " order its inputs lie (config.json says desc_act true); download the checkpoint"
                " again"
            )
        shift = 0 if self._config.get("checkpoint_format") == "gptq_v2" else 1
        return self._made(
            f"{stem}.weight", (outputs, inputs), "gptq", group, parts, zero_shift=shift
        )

    def _int4(self, codes: TensorEntry, stem: str) -> PackedTensor:
        scales = self._part(f"{stem}.weight_scale", FLOATS)
        if len(codes.shape) != 2:
            self._refuse(codes, "I32 [outputs, inputs / 8] is expected of pack-quantized weights")
        outputs, inputs = codes.shape[0], 8 * codes.shape[1]
        group = self._group(inputs, scales, 1)
        self._require(scales, (outputs, inputs // group), codes)
        parts = {"codes": codes, "scales": scales}
        zeros = self._tensors.get(f"{stem}.weight_zero_point")
        if zeros is not None:
            if zeros.dtype != "I32":
                self._refuse(zeros, "packed zero points (I32) are expected")
            self._require(zeros, (-(-outputs // 8), inputs // group), codes)
            parts["zeros"] = zeros
        order = self._order(f"{stem}.weight_g_idx", inputs, codes)
        if order is not None:
            parts["order"] = order
        return self._made(f"{stem}.weight", (outputs, inputs), "int4", group, parts)

    def _fp4(
        self, codes: TensorEntry, stem: str, scale_name: str, global_name: str
    ) -> PackedTensor:
        scales = self._part(scale_name, ("F8_E4M3", "U8", "F8_E8M0"))
        if codes.dtype != "U8" or len(codes.shape) != 2:
            self._refuse(codes, "U8 [outputs, inputs / 2] is expected of 4-bit floats")
        outputs, inputs = codes.shape[0], 2 * codes.shape[1]
        group = self._group(inputs, scales, 1)
        self._require(scales, (outputs, inputs // group), codes)
        parts = {"codes": codes, "scales": scales}
        if scales.dtype != "F8_E4M3":
            if group != 32:
                self._refuse(scales, "one power of two for 32 weights is expected of MXFP4")
            return self._made(f"{stem}.weight", (outputs, inputs), "mxfp4", group, parts)
        if group != 16:
            self._refuse(scales, "one scale for 16 weights is expected of NVFP4")
        parts["global"] = self._part(global_name, ("F32",))
        if parts["global"].shape not in ((), (1,)):
            self._refuse(parts["global"], "a single number is expected")
        return self._made(
            f"{stem}.weight", (outputs, inputs), "nvfp4", group, parts,
            is_reciprocal=global_name.endswith("global_scale"),
        )  # fmt: skip

    def _scaled(self, codes: TensorEntry, scale_name: str) -> PackedTensor:
        """fp8 or int8 codes with a scale for all, for each output, or for each block."""
        scales = self._part(scale_name, (*FLOATS, "F8_E8M0"))
        if len(codes.shape) not in (2, 3):
            self._refuse(codes, "[outputs, inputs] is expected")
        *outer, outputs, inputs = codes.shape
        kind: PackedKind = "fp8" if codes.dtype == "F8_E4M3" else "int8"
        shape = scales.shape[len(outer) :]
        if shape in ((), (1,), (1, 1)):
            group, rows = inputs, outputs
        elif shape in ((outputs,), (outputs, 1)):
            group, rows = inputs, 1
        elif kind == "fp8" and shape == (-(-outputs // 128), -(-inputs // 128)):
            group, rows = 128, 128
        else:
            self._refuse(
                scales,
                f"for weights {list(codes.shape)} one scale, one for each output"
                + (", or one for each block of 128 x 128 is expected" if kind == "fp8" else ""),
            )
        if scales.shape[: len(outer)] != tuple(outer):
            self._refuse(scales, f"scales of {list(outer)} matrices are expected")
        if f"{codes.name}_zero_point" in self._tensors:
            self._refuse(
                self._tensors[f"{codes.name}_zero_point"], "weights without zero points are read"
            )
        parts = {"codes": codes, "scales": scales}
        return self._made(codes.name, codes.shape, kind, group, parts, block_rows=rows)

    # ---------------------------------------------------------------- checks

    def _made(
        self,
        name: str,
        shape: tuple[int, ...],
        kind: PackedKind,
        group: int,
        parts: dict[str, TensorEntry],
        **more: Any,
    ) -> PackedTensor:
        codes = parts["codes"]
        return PackedTensor(
            name, PACKED_DTYPE, shape, codes.file_name, codes.offset_bytes,
            sum(part.num_bytes for part in parts.values()),
            kind=kind, group=group, parts=parts, **more,
        )  # fmt: skip

    def _part(self, name: str, dtypes: tuple[str, ...]) -> TensorEntry:
        entry = self._tensors.get(name)
        if entry is None:
            raise CheckpointError(
                f"{self._checkpoint.directory}: lacks tensor {name}, without which its quantised"
                " weight means nothing; download the checkpoint again"
            )
        if entry.dtype not in dtypes:
            self._refuse(entry, f"{' or '.join(dtypes)} is expected")
        return entry

    def _group(self, inputs: int, scales: TensorEntry, dimension: int) -> int:
        """Inputs per scale, from the shape of the scales."""
        num_groups = scales.shape[dimension] if len(scales.shape) == 2 else 0
        if not 1 <= num_groups <= inputs or inputs % num_groups:
            self._refuse(scales, f"whole groups of {inputs} inputs are expected")
        return inputs // num_groups

    def _order(self, name: str, inputs: int, codes: TensorEntry) -> TensorEntry | None:
        """The tensor that says of which group each input is; None where there is none."""
        order = self._tensors.get(name)
        if order is not None:
            self._require(order, (inputs,), codes)
            if order.dtype not in _INDICES:
                self._refuse(order, f"{' or '.join(_INDICES)} is expected")
        return order

    def _require(self, entry: TensorEntry, shape: tuple[int, ...], codes: TensorEntry) -> None:
        if entry.shape != shape:
            self._refuse(
                entry, f"{list(shape)} is expected beside {codes.name} {list(codes.shape)}"
            )

    def _refuse(self, entry: TensorEntry, expected: str) -> NoReturn:
        raise CheckpointError(
            f"{self._checkpoint.directory / entry.file_name}: tensor {entry.name} is {entry.dtype}"
            f" {list(entry.shape)} in a checkpoint quantised by {self._method}, where {expected}"
            + ADVICE
        )
