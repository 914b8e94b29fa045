"""Every native operation against torch's own, on strided and broadcast inputs of every dtype."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest
import torch

from expert_kernels.native_dense import _OP_NAMES, DenseKernels
from gpu_worker.native_ops import emit
from gpu_worker.native_program import Frame, NotNative, ProgramBuilder
from gpu_worker.op_recorder import OpRecorder

if TYPE_CHECKING:
    from collections.abc import Callable

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def run_natively(
    function: Callable[..., Any],
    *inputs: torch.Tensor,
    threads: int = 1,
    isa: Any = "best",
    names: list[str] | None = None,
) -> Any:
    """What `function` computes, recorded and run by the native library; the inputs stay. With
    `names`, linear layers of the same rows are gathered, and it becomes what is run in order."""
    recorder = OpRecorder(*inputs)
    results: list[torch.Tensor] = []
    with recorder.recording():
        made = function(*inputs)
        results += made if isinstance(made, tuple) else (made,)
    noted = [recorder._noted(result) for result in results]
    recorder.finish(results[0])
    builder = ProgramBuilder()
    given = iter(inputs)
    found: dict[Any, Any] = {}
    stand_ins = []
    for node in recorder._graph.nodes:
        if node.op == "placeholder":
            value = next(given)
            found[node] = builder.empty(value.shape, value.dtype, value.stride())
            stand_ins.append(found[node])
        elif node.op == "get_attr":
            found[node] = recorder._constants[node.target]
        elif node.op == "call_function":
            args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), found.__getitem__)
            found[node] = emit(builder, node, args, kwargs)
    outputs = [found[node] for node in noted]
    if names is not None:
        builder.gather_linears(0)
        names[:] = [_OP_NAMES[planned.code] for planned in builder._ops]
    builder.touch(*outputs)
    program = builder.finish()
    frame = Frame(program)
    for stand_in, value in zip(stand_ins, inputs, strict=True):
        frame.bind(stand_in).copy_(value)
    kernels = DenseKernels(max_isa=isa, num_threads=threads)
    kernels.run(program.ops, 0, builder.num_ops, frame.address, 0)
    bound = tuple(frame.bind(output).clone() for output in outputs)
    return bound if isinstance(made, tuple) else bound[0]


def values(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + math.prod(shape))
    return torch.randn(shape, generator=generator).to(dtype)


def strided(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> torch.Tensor:
    """Transposed, and with a hole after every second value."""
    return values(*reversed(shape), 2, dtype=dtype, seed=seed)[..., 0].permute(
        *reversed(range(len(shape)))
    )


def _few(a: torch.Tensor) -> torch.Tensor:
    """0, 1 or 2: many of them are equal."""
    return (a > 0.1).to(a.dtype) + (a > 1).to(a.dtype)


EXACT: dict[str, Callable[..., Any]] = {
    "neg": lambda a, b: -a,
    "abs": lambda a, b: a.abs(),
    "reciprocal": lambda a, b: a.reciprocal(),
    "relu": lambda a, b: torch.relu(a),
    "square": lambda a, b: a.square(),
    "pow": lambda a, b: a.pow(2),
    "add": lambda a, b: a + b,
    "add a number": lambda a, b: a + 0.1,
    "sub": lambda a, b: a - b,
    "number less": lambda a, b: 1 - b,
    "mul": lambda a, b: a * b,
    "mul by a number": lambda a, b: a * 0.3,
    "div": lambda a, b: a / b,
    "div_": lambda a, b: (a * b).div_(b),
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "clamp": lambda a, b: a.clamp(-0.5, 0.7),
    "clamp from below": lambda a, b: a.clamp(min=0.1),
    "clamp by a tensor": lambda a, b: a.clamp(min=b),
    "compare": lambda a, b: a > 0.1,
    "less": lambda a, b: a <= b,
    "where": lambda a, b: torch.where(a > b, a, b),
    "masked_fill": lambda a, b: a.masked_fill(~(a > b), -math.inf),
    "cat": lambda a, b: torch.cat((a, b.expand(a.shape)[:1]), dim=0),
    "stack": lambda a, b: torch.stack((a, -a), dim=1),
    "repeat_interleave": lambda a, b: a.repeat_interleave(3, dim=0),
    "slices": lambda a, b: torch.cat((-a[..., 3:], a[..., :3]), dim=-1),
    "chunks": lambda a, b: a.unsqueeze(0).chunk(2, dim=1)[0] * 2,
    "splits": lambda a, b: a.split([2, a.shape[0] - 2], dim=0)[1] * 2,
    "reshape": lambda a, b: (a * 1).t().reshape(-1) * 2,
    "float32 with others": lambda a, b: a.float() * b,
    "to bfloat16": lambda a, b: (a * b).to(torch.bfloat16),
    "to float16": lambda a, b: (a * b).to(torch.float16),
    "type_as": lambda a, b: (a.float() * 3).type_as(a),
    "topk": lambda a, b: torch.topk(a, 3, dim=-1),
    "topk of many": lambda a, b: torch.topk(_few(a).reshape(1, -1), 1),
    "topk of equals": lambda a, b: torch.topk(_few(a), 5, dim=-1, sorted=False),
    "topk of equals, sorted": lambda a, b: torch.topk(_few(a), 5, dim=-1),
    "max": lambda a, b: tuple(_few(a).max(dim=-1, keepdim=True)),
    "gather": lambda a, b: a.gather(1, torch.topk(a, 2, dim=-1)[1]),
    "scatter": lambda a, b: torch.zeros_like(a).scatter_(1, torch.topk(a, 2, dim=-1)[1], 1),
    "scatter a copy": lambda a, b: a.scatter(1, a.max(dim=-1, keepdim=True)[1], -math.inf),
    "copy_": lambda a, b: (lambda room: (room[:2].copy_(a[:2]), room)[1])(torch.zeros_like(a)),
    "whole numbers": lambda a, b: torch.topk(a, 2, dim=-1)[1] * 3 + 1,
    "from whole numbers": lambda a, b: torch.topk(a, 2, dim=-1)[1].float() * 0.1,
}
CLOSE: dict[str, Callable[..., Any]] = {
    "exp": lambda a, b: a.exp(),
    "sqrt": lambda a, b: a.abs().sqrt(),
    "cube": lambda a, b: a.pow(3),
    "sin": lambda a, b: (a * 50).sin(),
    "cos": lambda a, b: (a * 50).cos(),
    "rsqrt": lambda a, b: a.abs().rsqrt(),
    "sigmoid": lambda a, b: a.sigmoid(),
    "silu": lambda a, b: torch.nn.functional.silu(a),
    "tanh": lambda a, b: a.tanh(),
    "odd power": lambda a, b: a.abs().pow(1.7),
    "sum": lambda a, b: a.sum(dim=-1),
    "sum of rows": lambda a, b: a.sum(dim=0, keepdim=True),
    "mean": lambda a, b: a.mean(-1, keepdim=True),
    "softmax": lambda a, b: (a * 5).softmax(-1),
    "softmax in float32": lambda a, b: torch.softmax(a, dim=-1, dtype=torch.float32),
    "softmax of masked": lambda a, b: a.masked_fill(a > 0.5, -math.inf).softmax(-1),
    "layer_norm": lambda a, b: torch.nn.functional.layer_norm(a, a.shape[-1:], a[0], a[1], 1e-5),
}


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(6, 8), (3, 300)])
@pytest.mark.parametrize("name", [*EXACT, *CLOSE])
@torch.inference_mode()
def test_an_operation_is_torchs(name: str, shape: tuple[int, int], dtype: torch.dtype) -> None:
    function = EXACT.get(name) or CLOSE[name]
    inputs = [
        (values(*shape, dtype=dtype), values(1, shape[1], dtype=dtype)),
        (strided(*shape, dtype=dtype), values(shape[0], 1, dtype=dtype)),
    ]
    for a, b in inputs:
        expected, found = function(a, b), run_natively(function, a, b)
        pairs = (
            zip(expected, found, strict=True)
            if isinstance(expected, tuple)
            else [(expected, found)]
        )
        for wanted, result in pairs:
            if name in EXACT:
                assert result.dtype == wanted.dtype
                assert torch.equal(result, wanted)
            else:
                ulps = {torch.float32: 3e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}[
                    wanted.dtype
                ]
                torch.testing.assert_close(result, wanted, rtol=ulps, atol=ulps)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(1, 64, 40), (3, 500, 37), (1, 700, 1024)])
@torch.inference_mode()
def test_linear_layers(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    """And the same bits for any number of threads and on every instruction set."""
    rows, outputs, depth = shape
    weight = (values(outputs, depth, seed=3) / depth**0.5).to(dtype)
    bias = values(outputs, dtype=dtype)
    x = values(rows, depth, dtype=dtype)
    for with_bias in (None, bias):
        for w in (weight, weight.t().contiguous().t()):
            linear = lambda x, w=w, b=with_bias: torch.nn.functional.linear(x, w, b)  # noqa: E731
            found = run_natively(linear, x)
            exact = torch.nn.functional.linear(
                x.double(), w.double(), None if with_bias is None else with_bias.double()
            )
            tolerance = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}[dtype]
            torch.testing.assert_close(found.double(), exact, rtol=tolerance, atol=tolerance)
            assert torch.equal(found, run_natively(linear, x, threads=3, isa="scalar"))


@pytest.mark.parametrize("dtype", FLOATS)
@torch.inference_mode()
def test_linear_layers_of_the_same_rows_are_gathered(dtype: torch.dtype) -> None:
    """They have the bits of each alone, on any threads; what changes the rows keeps them apart."""
    linear = torch.nn.functional.linear
    weights = [(values(n, 300, seed=n) / 17).to(dtype) for n in (200, 40, 333)]
    bias = values(40, dtype=dtype)

    def gathered(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        first = linear(x, weights[0]).square()
        second = linear(x, weights[1], bias).abs()
        return first, linear(x.abs(), weights[0]), second, linear(x, weights[2])

    def apart(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        rows = x.abs()
        first = linear(rows, weights[0])
        rows.mul_(3)
        return first, linear(rows, weights[1])

    x = values(1, 300, dtype=dtype)
    for function, order in (
        (gathered, "linear linear linear square abs abs linear"),
        (apart, "abs linear mul linear"),
    ):
        names: list[str] = []
        expected = run_natively(function, x)
        for threads in (1, 3):
            found = run_natively(function, x, threads=threads, names=names)
            assert names == order.split()
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@torch.inference_mode()
def test_complex_rotations() -> None:
    def rotate(x: torch.Tensor, angle: torch.Tensor) -> torch.Tensor:
        turned = torch.polar(torch.ones_like(angle), angle) * 1.5
        pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * turned).flatten(-2)

    x, angle = values(4, 16), values(1, 8)
    torch.testing.assert_close(run_natively(rotate, x, angle), rotate(x, angle))


@torch.inference_mode()
def test_rows_of_a_table() -> None:
    table = values(50, 12, dtype=torch.bfloat16)
    rows = torch.tensor([[3, 49, 0]])
    look_up = lambda rows: torch.nn.functional.embedding(rows, table)  # noqa: E731
    assert torch.equal(run_natively(look_up, rows), look_up(rows))


@torch.inference_mode()
def test_what_is_not_known_is_said() -> None:
    with pytest.raises(NotNative, match="cumsum"):
        run_natively(lambda a: a.cumsum(0), values(4))
    with pytest.raises(NotNative, match="float64"):
        run_natively(lambda a: a.double() * 2, values(4))
