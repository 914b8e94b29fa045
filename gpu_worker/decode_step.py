"""The decode step without Python between its operations: a recorded step, cut and replayed.

The record (gpu_worker.step_trace) is cut at its sites into *segments*. Most of them differ only in
the weights that they read, so weights are inputs and equal segments are one *kind*: as many
programs as there are kinds of layers, however deep the model is. A kind runs

    as a replay     the same torch operations in the same order, so the same bits as transformers'
                    own forward
    compiled        by torch's inductor (gpu_worker.compilation), which fuses them

Before it is used, a step is compared with the model's forward over several tokens, with experts
that answer something that depends on everything the router says: bit for bit as a replay, and a
compiled segment against its replay within rounding.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from gpu_worker.step_trace import AttentionSite, Untraceable, is_site

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers.cache_utils import DynamicCache

    from gpu_worker.step_trace import ExpertsSite, StepTrace

#: ATen operations whose plain torch function takes the same arguments: it parses them in C++.
_SAME_ARGUMENTS = frozenset(
    {
        "abs", "add", "cat", "clamp", "cos", "div", "embedding", "exp", "gather", "matmul",
        "maximum", "mean", "minimum", "mul", "neg", "pow", "reshape", "rsqrt", "sigmoid", "sin",
        "softmax", "sqrt", "squeeze", "sub", "sum", "tanh", "topk", "transpose", "unsqueeze",
        "where",
    }
)  # fmt: skip


#: Arguments of attention functions that change nothing for one row that sees all.
PLAIN_ARGUMENTS = frozenset({"scaling", "dropout", "sliding_window", "use_cache"})


@dataclass(frozen=True)
class SegmentKind:
    """One program: `graph` takes values, then constants, and returns a tuple of values.

    `examples` are tensors like those of its first use, in the order of its placeholders.
    """

    graph: torch.fx.GraphModule
    examples: tuple[torch.Tensor, ...]


@dataclass
class Segment:
    """One use of a kind: numbers of the values that it takes and makes, and its constants."""

    kind: int
    inputs: tuple[int, ...]
    constants: tuple[torch.Tensor, ...]
    outputs: tuple[int, ...]


@dataclass
class SiteCall:
    """One use of a site: numbers of the values that it takes and makes."""

    site: AttentionSite | ExpertsSite
    inputs: tuple[int, ...]
    output: int
    #: Of an attention site: (q, what the cache holds ...) -> [1, 1, heads, dim].
    attend: Callable[..., torch.Tensor] | None = None


class DecodeStep:
    """Runs the recorded step for one token after another, with any sequence's cache.

    `calls` are segments and sites in their order. Values are numbered: 0 is the token, 1 its
    position, `result` the logits; `replays` are the kinds' plain programs.
    """

    def __init__(self, trace: StepTrace, device: torch.device) -> None:
        self.kinds: list[SegmentKind] = []
        self.calls: list[Segment | SiteCall] = []
        self.num_values = self.result = 0
        self._device = device
        self._cut(trace)
        self.replays = [_quick(kind.graph) for kind in self.kinds]
        self._programs: list[Callable[..., Any]] = list(self.replays)

    @property
    def num_segments(self) -> int:
        return sum(isinstance(call, Segment) for call in self.calls)

    def use(self, programs: list[Callable[..., Any]]) -> None:
        """Run kind i as programs[i]; an empty list brings the replays back."""
        self._programs = list(programs or self.replays)

    def run(
        self,
        token: int,
        position: int,
        cache: DynamicCache,
        look: Callable[[int, list[torch.Tensor], Any], None] | None = None,
    ) -> torch.Tensor:
        """Logits [vocab] of the token after `token`, which comes at `position` and is added to
        `cache`. `look(number, inputs, outputs)` is shown every segment and attention site as it has
        run; `number` is its place in `calls`."""
        values: list[Any] = [None] * self.num_values
        values[0] = torch.tensor([[token]], device=self._device)
        values[1] = torch.tensor([[position]], device=self._device)
        layers, programs = cache.layers, self._programs
        for number, call in enumerate(self.calls):
            if isinstance(call, Segment):
                inputs = [values[i] for i in call.inputs]
                results = programs[call.kind](*inputs, *call.constants)
                if look is not None:
                    look(number, inputs, results)
                for output, result in zip(call.outputs, results, strict=True):
                    values[output] = result
                continue
            site, sources = call.site, call.inputs
            if isinstance(site, AttentionSite):
                assert call.attend is not None  # every attention site has one
                held = layers[site.cache_layer].update(values[sources[1]], values[sources[2]])
                values[call.output] = call.attend(values[sources[0]], *held)
                if look is not None:
                    look(number, [values[i] for i in sources], (values[call.output],))
            else:
                module = site.module
                values[call.output] = module.headrace_exchange(
                    module.headrace_layer, *[values[i] for i in sources]
                )
        return values[self.result][0, -1]

    def _cut(self, trace: StepTrace) -> None:
        """Fill `kinds` and `_calls` from the record."""
        slots: dict[torch.fx.Node, int] = {}
        constants: dict[torch.fx.Node, torch.Tensor] = {}
        found: dict[str, int] = {}
        pending: list[torch.fx.Node] = []

        def finish() -> None:
            if pending:
                segment = self._segment(pending, slots, constants, found)
                self.calls.append(segment)
                pending.clear()

        for node in trace.graph.graph.nodes:
            if node.op == "placeholder":
                slots[node] = len(slots)
            elif node.op == "get_attr":
                constants[node] = operator.attrgetter(node.target)(trace.graph)
            elif node.op == "output":
                finish()
                result = node.args[0]
            elif is_site(node):
                finish()
                inputs, number = node.args[:3], node.args[-1]
                slots[node] = len(slots)
                site = trace.sites[number]
                attend = _attend(site) if isinstance(site, AttentionSite) else None
                self.calls.append(
                    SiteCall(site, tuple(slots[value] for value in inputs), slots[node], attend)
                )
            elif node.op == "call_function":
                pending.append(node)
            else:
                raise Untraceable(f"its record holds a {node.op}")
        if result not in slots:
            raise Untraceable("its logits are not computed by the step")
        self.result = slots[result]
        self.num_values = len(slots)

    def _segment(
        self,
        nodes: list[torch.fx.Node],
        slots: dict[torch.fx.Node, int],
        constants: dict[torch.fx.Node, torch.Tensor],
        found: dict[str, int],
    ) -> Segment:
        inside = set(nodes)
        used = dict.fromkeys(
            value for node in nodes for value in node.all_input_nodes if value not in inside
        )
        inputs = [value for value in used if value in slots]
        weights = [value for value in used if value in constants]
        outputs = [node for node in nodes if any(user not in inside for user in node.users)]
        graph = torch.fx.Graph()
        copies: dict[torch.fx.Node, torch.fx.Node] = {}
        # Names are counted, so that equal segments have equal code.
        for number, value in enumerate((*inputs, *weights)):
            copies[value] = graph.placeholder(f"i{number}")
            copies[value].meta["val"] = _value(value, constants)
        for number, node in enumerate(nodes):
            args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), copies.__getitem__)
            copies[node] = graph.create_node(node.op, node.target, args, kwargs, name=f"n{number}")
            copies[node].meta["val"] = node.meta.get("val")
        graph.output(tuple(copies[node] for node in outputs))
        examples = tuple(_value(value, constants) for value in (*inputs, *weights))
        shapes = [(tuple(t.shape), t.stride(), str(t.dtype), str(t.device)) for t in examples]
        key = "\n".join(f"{n.name} {n.target} {n.args} {n.kwargs}" for n in graph.nodes)
        key += str(shapes)
        if key not in found:
            found[key] = len(self.kinds)
            self.kinds.append(SegmentKind(torch.fx.GraphModule({}, graph), examples))
        for node in outputs:
            slots[node] = len(slots)
        return Segment(
            found[key],
            tuple(slots[value] for value in inputs),
            tuple(constants[value] for value in weights),
            tuple(slots[node] for node in outputs),
        )


def _attend(site: AttentionSite) -> Callable[..., torch.Tensor]:
    """What an attention site runs, without what does not apply to one row and no mask."""
    module, function, arguments, expand = site.module, site.function, site.arguments, site.expand
    is_plain = function is sdpa_attention_forward and expand is None
    is_grouped = getattr(module, "num_key_value_groups", 1) > 1
    if not is_plain or module.training or arguments.keys() - PLAIN_ARGUMENTS:

        def attend(query: torch.Tensor, *held: torch.Tensor) -> torch.Tensor:
            if expand is not None:
                held = expand(*held)
            return function(module, query, *held, None, **arguments)[0]

        return attend

    scale = arguments.get("scaling")

    def attend_plainly(
        query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        result = scaled_dot_product_attention(
            query, keys, values, scale=scale, enable_gqa=is_grouped
        )
        return result.transpose(1, 2).contiguous()

    return attend_plainly


def _value(node: torch.fx.Node, constants: dict[torch.fx.Node, torch.Tensor]) -> torch.Tensor:
    value = constants[node] if node in constants else node.meta["val"]
    if not isinstance(value, torch.Tensor):
        raise Untraceable(f"{node.name} of its record is no tensor")
    return value


def _quick(module: torch.fx.GraphModule) -> Callable[..., Any]:
    """The same operations through torch's plain functions where they mean the same."""
    graph = torch.fx.Graph()
    copies: dict[torch.fx.Node, torch.fx.Node] = {}
    aten = torch.ops.aten
    for node in module.graph.nodes:
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), copies.__getitem__)
        target = node.target
        name = target.overloadpacket.__name__ if hasattr(target, "overloadpacket") else ""
        overload = getattr(target, "_overloadname", "")
        if node.op == "placeholder":
            copies[node] = graph.placeholder(node.name)
        elif node.op == "output":
            graph.output(args[0])
        elif target is aten.linear.default:
            copies[node] = graph.call_function(torch.nn.functional.linear, args, kwargs)
        elif target is aten.silu.default:
            copies[node] = graph.call_function(torch.nn.functional.silu, args, kwargs)
        elif (target is aten.to.dtype and len(args) == 2) or target is aten.view.default:
            copies[node] = graph.call_method(name, args, kwargs)
        elif target is aten.slice.Tensor and len(args) == 4 and _is_narrow(node):
            start, end = args[2], min(args[3], node.args[0].meta["val"].shape[args[1]])
            copies[node] = graph.call_function(torch.narrow, (*args[:2], start, end - start))
        elif name in _SAME_ARGUMENTS and overload not in ("Dimname", "out"):
            copies[node] = graph.call_function(getattr(torch, name), args, kwargs)
        else:
            copies[node] = graph.call_function(target, args, kwargs)
    return torch.fx.GraphModule({}, graph).forward


def _is_narrow(node: torch.fx.Node) -> bool:
    tensor, dim, start, end = node.args[:4]
    source = tensor.meta.get("val") if isinstance(tensor, torch.fx.Node) else None
    return (
        isinstance(source, torch.Tensor)
        and isinstance(dim, int)
        and isinstance(start, int)
        and isinstance(end, int)
        and 0 <= start <= min(end, source.shape[dim])
    )
