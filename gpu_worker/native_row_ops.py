"""ATen operations along rows, by index and of linear layers, as native operations; and what they
share with the others of gpu_worker.native_ops: casts, copies and rooms for results."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from expert_kernels.native_dense import format_number
from expert_store.expert_dtype import parse_expert_dtype
from gpu_worker.native_program import NotNative

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpu_worker.native_program import ProgramBuilder

#: Dtypes that take part in a float32 operation as they are: widening is exact.
NARROW = (torch.bfloat16, torch.float16)


def room_for(builder: ProgramBuilder, node: torch.fx.Node) -> torch.Tensor:
    """A tensor in the frame like the result that the recording saw."""
    return builder.like(node.meta["val"])


def cast(builder: ProgramBuilder, value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`value` in `dtype`."""
    if value.dtype == dtype:
        return value
    out = builder.like(value, dtype)
    builder.elementwise("copy", out, value)
    return out


def copied(builder: ProgramBuilder, value: torch.Tensor) -> torch.Tensor:
    """A contiguous copy."""
    out = builder.empty(value.shape, value.dtype)
    builder.elementwise("copy", out, value)
    return out


def taking_part(builder: ProgramBuilder, value: Any, dtype: torch.dtype) -> Any:
    """An operand as torch casts it before it computes in `dtype`."""
    if not isinstance(value, torch.Tensor) or value.dtype in (dtype, torch.bool):
        return value
    if value.dtype in NARROW and dtype == torch.float32:
        return value
    return cast(builder, value, dtype)


def _reduce(name: str) -> Callable[..., torch.Tensor]:
    def reduce(
        builder: ProgramBuilder,
        node: Any,
        value: torch.Tensor,
        dims: Any = None,
        keepdim: bool = False,
        *,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        result = node.meta["val"]
        dims = [dims] if isinstance(dims, int) else dims
        if not dims or len(dims) != 1:
            raise NotNative(f"{name} along several dimensions")
        value = taking_part(builder, value, result.dtype)
        last = value.movedim(dims[0], -1)
        out = builder.empty((*last.shape[:-1], 1), result.dtype)
        builder.rows(name, out, last)
        return out.movedim(-1, dims[0]) if keepdim else out.squeeze(-1)

    return reduce


def _greatest(
    builder: ProgramBuilder, node: Any, value: torch.Tensor, dim: int, keepdim: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    last = value.movedim(dim, -1)
    found = builder.empty((*last.shape[:-1], 1), value.dtype)
    places = builder.empty(found.shape, torch.int64)
    builder.rows("max", found, last, (places, places.stride()))
    if keepdim:
        return found.movedim(-1, dim), places.movedim(-1, dim)
    return found.squeeze(-1), places.squeeze(-1)


def _softmax(
    builder: ProgramBuilder, node: Any, value: torch.Tensor, dim: int, dtype: Any = None
) -> torch.Tensor:
    result = node.meta["val"]
    last = taking_part(builder, value, result.dtype).movedim(dim, -1)
    out = builder.empty(last.shape, result.dtype)
    builder.rows("softmax", out, last)
    return out.movedim(-1, dim)


def _layer_norm(
    builder: ProgramBuilder,
    node: Any,
    value: torch.Tensor,
    shape: Any,
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
    *_: Any,
) -> torch.Tensor:
    if len(shape) != 1:
        raise NotNative("layer_norm over several dimensions")
    out = builder.empty(value.shape, value.dtype)
    others = [
        None if part is None else (part, (*[0] * (value.dim() - 1), part.stride(0)))
        for part in (weight, bias)
    ]
    builder.rows("layer_norm", out, value, *others, x=float(eps))
    return out


def _topk(
    builder: ProgramBuilder,
    node: Any,
    value: torch.Tensor,
    k: int,
    dim: int = -1,
    largest: bool = True,
    is_sorted: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    if not value.is_floating_point():
        raise NotNative("topk of whole numbers")
    last = value.movedim(dim, -1)
    if not 1 <= k <= last.shape[-1]:
        raise NotNative("topk of none")
    found = builder.empty((*last.shape[:-1], k), value.dtype)
    places = builder.empty(found.shape, torch.int64)
    builder.rows("topk", found, last, (places, places.stride()), n=k, m=largest + 2 * is_sorted)
    return found.movedim(-1, dim), places.movedim(-1, dim)


def _gather(
    builder: ProgramBuilder, node: Any, value: torch.Tensor, dim: int, index: torch.Tensor, **_: Any
) -> torch.Tensor:
    out = builder.empty(index.shape, value.dtype)
    operands = ((t, t.stride()) for t in (out, value, index))
    builder.other("gather", index.shape, *operands, m=dim % value.dim())
    return out


def _scatter(
    builder: ProgramBuilder,
    node: Any,
    value: torch.Tensor,
    dim: int,
    index: torch.Tensor,
    number: float,
) -> torch.Tensor:
    out = value if str(node.target) == "aten.scatter_.value" else copied(builder, value)
    operands = ((out, out.stride()), None, (index, index.stride()))
    builder.other("scatter", index.shape, *operands, x=float(number), m=dim % value.dim())
    return out


def _embedding(
    builder: ProgramBuilder, node: Any, weight: torch.Tensor, index: torch.Tensor, *_: Any
) -> torch.Tensor:
    if weight.stride(1) != 1 or index.dtype != torch.int64:
        raise NotNative("embedding of transposed weights")
    rows = index.reshape(-1) if index.is_contiguous() else copied(builder, index).view(-1)
    out = builder.empty((*index.shape, weight.shape[1]), weight.dtype)
    flat = out.view(-1, weight.shape[1])
    operands = ((t, t.stride()) for t in (flat, weight, rows))
    builder.other("embedding", flat.shape, *operands)
    return out


def _linear(
    builder: ProgramBuilder, node: Any, value: torch.Tensor, weight: torch.Tensor, bias: Any = None
) -> torch.Tensor:
    if value.dtype != weight.dtype or not value.is_floating_point() or 1 not in weight.stride():
        raise NotNative(f"linear of {value.dtype} by {weight.dtype}")
    outputs, depth = weight.shape
    try:
        rows = value.view(-1, depth)
    except RuntimeError:
        rows = copied(builder, value).view(-1, depth)
    out = builder.empty((*value.shape[:-1], outputs), value.dtype)
    flat = out.view(-1, outputs)
    builder.other(
        "linear",
        (rows.shape[0], outputs, depth),
        *((t, t.stride()) for t in (flat, rows, weight)),
        None if bias is None else (bias, bias.stride()),
    )
    return out


def _packed_linear(
    builder: ProgramBuilder,
    node: Any,
    value: torch.Tensor,
    tiles: torch.Tensor,
    bias: Any,
    num_outputs: int,
    name: str,
) -> torch.Tensor:
    weights = parse_expert_dtype(name)
    if weights is None or builder.is_in_frame(tiles):
        raise NotNative(f"linear of {name}")
    depth = value.shape[-1]
    try:
        rows = value.view(-1, depth)
    except RuntimeError:
        rows = copied(builder, value).view(-1, depth)
    out = builder.empty((*value.shape[:-1], num_outputs), value.dtype)
    flat = out.view(-1, num_outputs)
    builder.keep(tiles)
    builder.other(
        "packed_linear",
        (rows.shape[0], num_outputs, depth),
        (flat, flat.stride()),
        (rows, rows.stride()),
        None,
        None if bias is None else (bias, bias.stride()),
        n=format_number(weights),
        m=tiles.data_ptr(),
    )
    return out


#: By the names that a recording gives them.
ROW_OPS: dict[str, Callable[..., Any]] = {
    "aten.embedding.default": _embedding,
    "aten.gather.default": _gather,
    "aten.layer_norm.default": _layer_norm,
    "aten.linear.default": _linear,
    "aten.max.dim": _greatest,
    "aten.mean.dim": _reduce("mean"),
    "aten.scatter.value": _scatter,
    "aten.scatter_.value": _scatter,
    "aten.softmax.int": _softmax,
    "aten.sum.dim_IntList": _reduce("sum"),
    "aten.topk.default": _topk,
    "headrace.packed_linear.default": _packed_linear,
}
