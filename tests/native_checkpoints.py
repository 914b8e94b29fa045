"""Tiny quantised checkpoints in the layouts of their makers, and what their weights stand for.

`quantise_checkpoint` takes a plain tiny checkpoint (tests.checkpoints) and writes two directories:
the same model quantised in one maker's layout, and a plain float32 one with exactly the weights
that the codes stand for, as an outside implementation computes them. What decodes the first must
agree with what transformers decodes from the second.

Outside implementations: compressed-tensors (its own layouts, and its converters from AutoAWQ and
modelopt) and transformers (MXFP4, FP8 blocks). GPTQ has none that installs light: its order is
spelled out here.
"""

from __future__ import annotations

import json
import re
import shutil
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file

if TYPE_CHECKING:
    from pathlib import Path

State = dict[str, torch.Tensor]
#: Stem of a weight's name, float32 [outputs, inputs] -> its tensors, and the weight they stand for.
Quantiser = "Callable[[str, torch.Tensor], tuple[State, torch.Tensor]]"

AWQ_OUTPUTS = (0, 2, 4, 6, 1, 3, 5, 7)


def affine_codes(
    weight: torch.Tensor, group: int, *, symmetric: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """codes [outputs, inputs] and zeros [outputs, groups] in 0..15, scales float16."""
    grouped = weight.reshape(weight.shape[0], -1, group)
    if symmetric:
        scales = (grouped.abs().amax(-1) / 7).half()
        zeros = torch.full(scales.shape, 8, dtype=torch.int32)
    else:
        low, high = grouped.amin(-1).clamp(max=0), grouped.amax(-1).clamp(min=0)
        scales = ((high - low) / 15).half()
        zeros = (-low / scales.float()).round().clamp(0, 15).int()
    codes = (grouped / scales.float()[..., None]).round() + zeros[..., None]
    return codes.clamp(0, 15).int().reshape(weight.shape), zeros, scales


def affine_values(codes: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    grouped = codes.reshape(codes.shape[0], scales.shape[1], -1) - zeros[..., None]
    return (grouped.float() * scales.float()[..., None]).reshape(codes.shape)


def pack_along(codes: torch.Tensor, order: tuple[int, ...] = tuple(range(8))) -> torch.Tensor:
    """int32 [n, m / 8] of int32 codes [n, m]: nibble i of a word holds its column `order[i]`."""
    words = codes.reshape(codes.shape[0], -1, 8).to(torch.int64)
    packed = sum(words[:, :, column] << (4 * nibble) for nibble, column in enumerate(order))
    assert isinstance(packed, torch.Tensor)
    return torch.where(packed >= 1 << 31, packed - (1 << 32), packed).to(torch.int32).contiguous()


def awq(stem: str, weight: torch.Tensor, group: int = 32) -> tuple[State, torch.Tensor]:
    codes, zeros, scales = affine_codes(weight, group, symmetric=False)
    state = {
        f"{stem}.qweight": pack_along(codes.T, AWQ_OUTPUTS),
        f"{stem}.qzeros": pack_along(zeros.T, AWQ_OUTPUTS),
        f"{stem}.scales": scales.T.contiguous(),
    }
    return state, affine_values(codes, zeros, scales)


def gptq(
    stem: str,
    weight: torch.Tensor,
    group: int = 32,
    symmetric: bool = False,
    desc_act: bool = False,
) -> tuple[State, torch.Tensor]:
    """`desc_act`: groups are of inputs in an order of their own, not of neighbours."""
    in_turn = torch.arange(weight.shape[1])
    if desc_act:
        in_turn = torch.randperm(len(in_turn), generator=torch.Generator().manual_seed(3))
    place = torch.argsort(in_turn)
    codes, zeros, scales = affine_codes(weight[:, in_turn], group, symmetric=symmetric)
    state = {
        f"{stem}.qweight": pack_along(codes[:, place]).T.contiguous(),
        f"{stem}.qzeros": pack_along((zeros.T - 1) & 15),
        f"{stem}.scales": scales.T.contiguous(),
        f"{stem}.g_idx": (place // group).to(torch.int32),
    }
    return state, affine_values(codes, zeros, scales)[:, place]


def _scheme(**weights: Any) -> Any:
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    return QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights))


def compressed_int4(
    stem: str, weight: torch.Tensor, group: int = 32, symmetric: bool = True
) -> tuple[State, torch.Tensor]:
    from compressed_tensors.compressors import PackedQuantizationCompressor as Compressor

    _, zeros, scales = affine_codes(weight, group, symmetric=symmetric)
    scheme = _scheme(
        num_bits=4, type="int", symmetric=symmetric, strategy="group", group_size=group
    )
    state = {"weight": weight, "weight_scale": scales.float()}
    if not symmetric:
        state["weight_zero_point"] = (zeros - 8).to(torch.int8)
    return _compressed(Compressor, scheme, stem, state)


def compressed_fp8(
    stem: str, weight: torch.Tensor, strategy: str = "channel"
) -> tuple[State, torch.Tensor]:
    from compressed_tensors.compressors import FloatQuantizationCompressor as Compressor

    largest = weight.abs().amax(1, keepdim=True) if strategy == "channel" else weight.abs().amax()
    scales = (largest / 448).reshape(-1, 1) if strategy == "channel" else (largest / 448)[None]
    scheme = _scheme(num_bits=8, type="float", symmetric=True, strategy=strategy)
    return _compressed(Compressor, scheme, stem, {"weight": weight, "weight_scale": scales})


def compressed_nvfp4(stem: str, weight: torch.Tensor) -> tuple[State, torch.Tensor]:
    from compressed_tensors.compressors import NVFP4PackedCompressor as Compressor

    factor = 448 * 6 / weight.abs().amax()
    largest = weight.reshape(weight.shape[0], -1, 16).abs().amax(-1)
    scales = (largest / 6 * factor).to(torch.float8_e4m3fn).float()
    scheme = _scheme(
        num_bits=4, type="float", symmetric=True, strategy="tensor_group", group_size=16
    )
    state = {"weight": weight, "weight_scale": scales, "weight_global_scale": factor.reshape(1)}
    stored = Compressor.compress(state, scheme)
    return {f"{stem}.{name}": value for name, value in stored.items()}, _nvfp4_values(stored)


def _nvfp4_values(stored: State) -> torch.Tensor:
    """compressed-tensors' steps of decompression, in float32 where it would take bfloat16."""
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
    from compressed_tensors.quantization.lifecycle.forward import dequantize

    packed, scale = stored["weight_packed"], stored["weight_scale"].float()
    codes = unpack_fp4_from_uint8(packed, len(packed), 2 * packed.shape[1], torch.float32)
    scheme = _scheme(
        num_bits=4, type="float", symmetric=True, strategy="tensor_group", group_size=16
    )
    return dequantize(
        codes, scale, args=scheme.weights, global_scale=stored["weight_global_scale"]
    ).float()


def _compressed(
    compressor: Any, scheme: Any, stem: str, state: State
) -> tuple[State, torch.Tensor]:
    stored = compressor.compress(state, scheme)
    weight = compressor.decompress(stored, scheme)["weight"].float()
    return {f"{stem}.{name}": value.contiguous() for name, value in stored.items()}, weight


def modelopt_nvfp4(stem: str, weight: torch.Tensor) -> tuple[State, torch.Tensor]:
    """compressed-tensors' own conversion from modelopt, turned round."""
    stored, _ = compressed_nvfp4("x", weight)
    state = {
        f"{stem}.weight": stored["x.weight_packed"],
        f"{stem}.weight_scale": stored["x.weight_scale"],
        f"{stem}.weight_scale_2": 1 / stored["x.weight_global_scale"].reshape(()),
        f"{stem}.input_scale": torch.tensor(1.0),
    }
    from compressed_tensors.entrypoints.convert.converters import ModelOptNvfp4Converter

    converter = ModelOptNvfp4Converter(targets=["re:.*"])
    theirs = converter.process({f"x.{name.rpartition('.')[2]}": t for name, t in state.items()})
    return state, _nvfp4_values({name.partition(".")[2]: t for name, t in theirs.items()})


def fp8_blocks(stem: str, weight: torch.Tensor) -> tuple[State, torch.Tensor]:
    """DeepSeek-V3's layout: e4m3 and one float32 scale for each block of 128 x 128."""
    rows, columns = -(-weight.shape[0] // 128), -(-weight.shape[1] // 128)
    padded = torch.zeros(rows * 128, columns * 128)
    padded[: weight.shape[0], : weight.shape[1]] = weight
    blocks = padded.reshape(rows, 128, columns, 128)
    scales = blocks.abs().amax((1, 3)) / 448
    spread = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
    spread = spread[: weight.shape[0], : weight.shape[1]]
    codes = (weight / spread).to(torch.float8_e4m3fn)
    state = {f"{stem}.weight": codes, f"{stem}.weight_scale_inv": scales}
    return state, codes.float() * spread


def mxfp4_blocks(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """gpt-oss's blocks [..., groups, 16] and scales [..., groups] of float32 [..., inputs]."""
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    groups = weight.reshape(*weight.shape[:-1], -1, 32)
    exponents = torch.floor(torch.log2(groups.abs().amax(-1))) - 2
    scaled = groups * torch.exp2(-exponents)[..., None]
    codes = (scaled[..., None] - values).abs().argmin(-1).to(torch.uint8)
    return codes[..., ::2] | (codes[..., 1::2] << 4), (exponents + 127).to(torch.uint8)


#: Layout -> quantiser of one weight, what config.json then says, which modules stay plain.
LAYOUTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}),
    "gptq": (gptq, {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False}),
    "fp8": (fp8_blocks, {"quant_method": "fp8", "weight_block_size": [128, 128]}),
    "compressed int4": (
        compressed_int4,
        {"quant_method": "compressed-tensors", "format": "pack-quantized"},
    ),
    "compressed fp8": (
        compressed_fp8,
        {"quant_method": "compressed-tensors", "format": "float-quantized"},
    ),
    "compressed nvfp4": (
        compressed_nvfp4,
        {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"},
    ),
    "modelopt nvfp4": (modelopt_nvfp4, {"quant_method": "modelopt", "quant_algo": "NVFP4"}),
}
#: Never quantised by anybody: routers and what turns rows into logits.
_PLAIN = re.compile(r"(\.gate|embed_tokens|lm_head|norm)\.weight$")


def quantise_checkpoint(
    plain: Path, native: Path, meaning: Path, layout: str, **options: Any
) -> None:
    """Write `plain` (one file, experts one by one) in `layout` to `native`, and the float32
    checkpoint of the same values to `meaning`."""
    quantise, config = LAYOUTS[layout]
    packed: State = {}
    means: State = {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        if tensor.dim() != 2 or _PLAIN.search(name) or not name.endswith(".weight"):
            packed[name] = means[name] = tensor
            continue
        state, means[name] = quantise(name.removesuffix(".weight"), tensor.float(), **options)
        packed |= state
    _write(plain, native, packed, config)
    _write(plain, meaning, means, None)


def quantise_gpt_oss(plain: Path, native: Path, meaning: Path) -> None:
    """The same for gpt-oss, whose experts are fused and the only thing that MXFP4 covers."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    packed: State = {}
    means: State = {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            packed[name] = means[name] = tensor
            continue
        blocks, scales = mxfp4_blocks(tensor.float().transpose(1, 2).contiguous())
        packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        means[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    _write(plain, native, packed, {"quant_method": "mxfp4"})
    _write(plain, meaning, means, None)


def _write(plain: Path, path: Path, state: State, quantisation: dict[str, Any] | None) -> None:
    shutil.copytree(plain, path)
    save_file({name: t.contiguous() for name, t in state.items()}, path / "model.safetensors")
    config = json.loads((path / "config.json").read_text())
    if quantisation is not None:
        config["quantization_config"] = quantisation
    (path / "config.json").write_text(json.dumps(config))
