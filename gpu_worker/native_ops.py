"""ATen operations as operations of the native decode step (expert_kernels.native_dense).

`emit(builder, node, arguments)` is called for every operation of a recording, with tensors that
stand for its arguments, and answers with one that stands for its result. Views are made by torch
and are no operation; what depends on constants alone is computed once, by torch; everything else
becomes one or a few native operations that round where torch does.
"""

from __future__ import annotations

import math
import operator
from typing import TYPE_CHECKING, Any

import torch

from gpu_worker.native_program import NotNative
from gpu_worker.native_row_ops import (
    NARROW,
    ROW_OPS,
    cast,
    copied,
    room_for,
    taking_part,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpu_worker.native_program import ProgramBuilder

_VIEWS = frozenset(
    {
        "aten.alias.default", "aten.chunk.default", "aten.detach.default", "aten.detach_.default",
        "aten.expand.default", "aten.lift_fresh.default", "aten.narrow.default",
        "aten.permute.default", "aten.select.int", "aten.slice.Tensor", "aten.split.Tensor",
        "aten.split_with_sizes.default", "aten.squeeze.default", "aten.squeeze.dim",
        "aten.t.default", "aten.transpose.int", "aten.unbind.int", "aten.unflatten.int",
        "aten.unsqueeze.default", "aten.view.default", "aten.view_as_complex.default",
        "aten.view_as_real.default",
    }
)  # fmt: skip
_RESHAPES = frozenset(
    {"aten.reshape.default", "aten.flatten.using_ints", "aten.contiguous.default"}
)
_UNARY = frozenset(
    {
        "abs", "bitwise_not", "cos", "exp", "logical_not", "neg", "reciprocal", "relu", "rsqrt",
        "sigmoid", "silu", "sin", "sqrt", "square", "tanh",
    }
)  # fmt: skip
_BINARY = frozenset({"add", "sub", "mul", "div", "maximum", "minimum"})
_COMPARISONS = frozenset({"gt", "ge", "lt", "le", "eq", "ne"})
_CASTS = frozenset(
    {"aten.to.dtype", "aten.to.dtype_layout", "aten.to.device", "aten.type_as.default"}
)


def emit(
    builder: ProgramBuilder, node: torch.fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Add what `node` computes; `args` and `kwargs` are its own with tensors in place of nodes.

    Raises:
        NotNative: there is no kernel for it.
    """
    target: Any = node.target
    if target is operator.getitem:
        return args[0][args[1]]
    name = str(target)
    tensors = [value for value in _flat((args, kwargs)) if isinstance(value, torch.Tensor)]
    is_mutable = bool(getattr(getattr(target, "_schema", None), "is_mutable", False))
    if not any(builder.is_in_frame(tensor) for tensor in tensors):
        if "empty" in name:
            value = node.meta["val"]
            return builder.empty(value.shape, value.dtype)
        if is_mutable and name != "aten.detach_.default":
            raise NotNative(f"{name} of a constant")
        return _constant(builder, target(*args, **kwargs))
    if name in _VIEWS:
        return target(*args, **kwargs)
    if name in _RESHAPES:
        return _reshape(builder, target, args, kwargs)
    if name in _CASTS:
        return cast(builder, args[0], node.meta["val"].dtype)
    base, _, overload = name.removeprefix("aten.").partition(".")
    own = _OWN.get(name) or _OWN.get(base)
    if own is not None:
        return own(builder, node, *args, **kwargs)
    in_place = base.endswith("_")
    base = base.rstrip("_")
    out = args[0] if in_place else None
    if base in _UNARY and len(args) == 1:
        return _unary(builder, base, args[0], node, out)
    is_plain = kwargs.keys() <= {"alpha"} and kwargs.get("alpha", 1) == 1 and len(args) == 2
    if is_plain and (base in _BINARY or base in _COMPARISONS):
        return _binary(builder, base, args[0], args[1], node, out)
    raise NotNative(name if overload else base)


def _flat(value: Any) -> list[Any]:
    if isinstance(value, dict):
        value = tuple(value.values())
    if isinstance(value, (tuple, list)):
        return [item for part in value for item in _flat(part)]
    return [value]


def _constant(builder: ProgramBuilder, value: Any) -> Any:
    for tensor in _flat(value):
        builder.keep(tensor)
    return value


def _reshape(
    builder: ProgramBuilder, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> torch.Tensor:
    result = target(*args, **kwargs)
    source = args[0]
    if result.untyped_storage().data_ptr() == source.untyped_storage().data_ptr():
        return result
    return copied(builder, source).view(result.shape)


def _unary(
    builder: ProgramBuilder,
    name: str,
    value: torch.Tensor,
    node: torch.fx.Node,
    out: torch.Tensor | None,
) -> torch.Tensor:
    if name == "bitwise_not" and value.dtype != torch.bool:
        raise NotNative("bitwise_not of numbers")
    if value.dtype.is_complex:
        raise NotNative(f"{name} of complex numbers")
    if out is None:
        out = room_for(builder, node)
    value = taking_part(builder, value, out.dtype) if out.is_floating_point() else value
    builder.elementwise("not" if name.endswith("_not") else name, out, value)
    return out


def _binary(
    builder: ProgramBuilder,
    name: str,
    a: Any,
    b: Any,
    node: torch.fx.Node,
    out: torch.Tensor | None,
) -> torch.Tensor:
    if isinstance(a, complex) or isinstance(b, complex):
        raise NotNative(f"{name} of complex numbers")
    if out is None:
        out = room_for(builder, node)
    if out.dtype.is_complex:
        if name != "mul":
            raise NotNative(f"{name} of complex numbers")
        _multiply_complex(builder, out, a, b)
        return out
    dtype = out.dtype if name in _BINARY else torch.result_type(a, b)
    number = next((float(v) for v in (a, b) if not isinstance(v, torch.Tensor)), 0.0)
    operands = [
        taking_part(builder, v, dtype) if isinstance(v, torch.Tensor) else None for v in (a, b)
    ]
    if name in ("add", "sub") and dtype in NARROW:
        number = float(torch.tensor(number, dtype=dtype))  # torch rounds it; not so a factor
    if name == "div" and not dtype.is_floating_point:
        raise NotNative("div of whole numbers")
    builder.elementwise(name, out, *operands, x=number)
    return out


def _multiply_complex(builder: ProgramBuilder, out: torch.Tensor, a: Any, b: Any) -> None:
    if all(isinstance(v, torch.Tensor) and v.dtype == out.dtype for v in (a, b)):
        builder.elementwise("complex_mul", out, a, b)
        return
    pairs, other = (a, b) if getattr(a, "dtype", None) == out.dtype else (b, a)
    factor = other.unsqueeze(-1) if isinstance(other, torch.Tensor) else None
    number = 0.0 if factor is not None else float(other)
    builder.elementwise("mul", torch.view_as_real(out), torch.view_as_real(pairs), factor, x=number)


def _rsub(builder: ProgramBuilder, node: Any, a: Any, b: Any, alpha: float = 1) -> torch.Tensor:
    if alpha != 1:
        raise NotNative("rsub with a factor")
    return _binary(builder, "sub", b, a, node, None)


def _power(builder: ProgramBuilder, node: Any, value: Any, exponent: Any) -> torch.Tensor:
    if not isinstance(value, torch.Tensor) or isinstance(exponent, torch.Tensor):
        raise NotNative("pow of tensors")
    out = room_for(builder, node)
    builder.elementwise("pow", out, taking_part(builder, value, out.dtype), x=float(exponent))
    return out


def _clamp(
    builder: ProgramBuilder, node: Any, value: torch.Tensor, low: Any = None, high: Any = None
) -> torch.Tensor:
    out = room_for(builder, node)
    value = taking_part(builder, value, out.dtype)
    if not any(isinstance(bound, torch.Tensor) for bound in (low, high)):
        bounds = (-math.inf if low is None else low, math.inf if high is None else high)
        builder.elementwise("clamp", out, value, x=float(bounds[0]), y=float(bounds[1]))
        return out
    for name, bound in (("maximum", low), ("minimum", high)):
        if bound is not None:
            number = 0.0 if isinstance(bound, torch.Tensor) else float(bound)
            other = bound if isinstance(bound, torch.Tensor) else None
            builder.elementwise(name, out, value, other, x=number)
            value = out
    return out


def _where(builder: ProgramBuilder, node: Any, condition: torch.Tensor, a: Any, b: Any) -> Any:
    out = room_for(builder, node)
    numbers = [float(v) for v in (a, b) if not isinstance(v, torch.Tensor)]
    if len(numbers) > 1:
        raise NotNative("where of two numbers")
    operands = [
        taking_part(builder, v, out.dtype) if isinstance(v, torch.Tensor) else None for v in (a, b)
    ]
    builder.elementwise("where", out, condition, *operands, x=(numbers or [0.0])[0])
    return out


def _masked_fill(
    builder: ProgramBuilder, node: Any, value: torch.Tensor, mask: torch.Tensor, number: float
) -> torch.Tensor:
    out = room_for(builder, node)
    builder.elementwise("where", out, mask, None, value, x=float(number))
    return out


def _filled(number: float) -> Callable[..., torch.Tensor]:
    def fill(builder: ProgramBuilder, node: Any, *_: Any, **__: Any) -> torch.Tensor:
        out = room_for(builder, node)
        builder.elementwise("copy", out, None, x=number)
        return out

    return fill


def _new_empty(builder: ProgramBuilder, node: Any, *_: Any, **__: Any) -> torch.Tensor:
    return room_for(builder, node)


def _copy_into(
    builder: ProgramBuilder, node: Any, out: torch.Tensor, source: torch.Tensor, *_: Any
) -> torch.Tensor:
    if not builder.is_in_frame(out):
        raise NotNative("copy_ into a constant")
    builder.elementwise("copy", out, source)
    return out


def _cat(builder: ProgramBuilder, node: Any, parts: Any, dim: int = 0) -> torch.Tensor:
    value = node.meta["val"]
    out = builder.empty(value.shape, value.dtype)
    start = 0
    for part in parts:
        builder.elementwise("copy", out.narrow(dim, start, part.shape[dim]), part)
        start += part.shape[dim]
    return out


def _stack(builder: ProgramBuilder, node: Any, parts: Any, dim: int = 0) -> torch.Tensor:
    value = node.meta["val"]
    out = builder.empty(value.shape, value.dtype)
    for number, part in enumerate(parts):
        builder.elementwise("copy", out.select(dim, number), part)
    return out


def _repeat_interleave(
    builder: ProgramBuilder, node: Any, value: torch.Tensor, repeats: int, dim: Any = None, **_: Any
) -> torch.Tensor:
    if dim is None:
        raise NotNative("repeat_interleave without a dimension")
    dim %= value.dim()
    shape = [*value.shape[: dim + 1], repeats, *value.shape[dim + 1 :]]
    return copied(builder, value.unsqueeze(dim + 1).expand(shape)).flatten(dim, dim + 1)


def _polar(
    builder: ProgramBuilder, node: Any, magnitude: torch.Tensor, angle: torch.Tensor
) -> torch.Tensor:
    out = room_for(builder, node)
    builder.elementwise("polar", out, magnitude, angle)
    return out


_OWN: dict[str, Callable[..., Any]] = {
    **ROW_OPS,
    "aten.cat.default": _cat,
    "aten.clamp.Tensor": _clamp,
    "aten.clamp.default": _clamp,
    "aten.concat.default": _cat,
    "aten.copy_.default": _copy_into,
    "aten.empty_like.default": _new_empty,
    "aten.masked_fill.Scalar": _masked_fill,
    "aten.new_empty.default": _new_empty,
    "aten.ones_like.default": _filled(1.0),
    "aten.polar.default": _polar,
    "aten.pow.Tensor_Scalar": _power,
    "aten.repeat_interleave.self_int": _repeat_interleave,
    "aten.rsub.Scalar": _rsub,
    "aten.stack.default": _stack,
    "aten.where.ScalarOther": _where,
    "aten.where.ScalarSelf": _where,
    "aten.where.self": _where,
    "aten.zeros_like.default": _filled(0.0),
}
