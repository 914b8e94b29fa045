"""The recorded decode step as one list of native operations (expert_kernels.native_dense).

Whole segments and the attention sites between them are one call into the library; Python is met
again where the routed experts of a layer are exchanged:

    ops .. attention .. ops   | experts |   ops .. attention .. ops   | experts |   ... ops

A segment with an operation that has no native kernel stays a replay by torch, and so does an
attention site of another kind than softmax(q k) v with sinks or without. Both work on the same
frame, so everything else stays native.

Sums are in another order than torch's, so results differ in their last bits; what they must not
differ by, says gpu_worker.native_check.
"""

from __future__ import annotations

import ctypes
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from expert_kernels.native_dense import CacheLayer
from gpu_worker.decode_step import PLAIN_ARGUMENTS, Segment, SiteCall
from gpu_worker.kv_cache import GrowingLayer
from gpu_worker.native_ops import emit
from gpu_worker.native_program import Frame, NotNative, ProgramBuilder
from gpu_worker.step_trace import AttentionSite

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from transformers.cache_utils import DynamicCache

    from expert_kernels.native_dense import DenseKernels
    from gpu_worker.decode_step import DecodeStep

#: Modules whose own attention adds one sink per head to the softmax, given as `s_aux`.
_WITH_SINKS = "transformers.models.gpt_oss.modeling_gpt_oss"


@dataclass
class _Part:
    """What is run at a stretch: operations first .. last - 1, or what torch does at `call`."""

    first: int = 0
    last: int = 0
    call: Segment | SiteCall | None = None


class NativeStep:
    """Runs the recorded step natively; call `run` like DecodeStep's.

    `reasons` says, per kind of segment that stays with torch, why.
    """

    def __init__(self, step: DecodeStep, kernels: DenseKernels) -> None:
        self._step = step
        self._kernels = kernels
        self.reasons: dict[int, str] = {}
        self._values: list[Any] = [None] * step.num_values
        #: Operations of every call, as (first, last); None where torch runs it.
        self._spans: list[tuple[int, int] | None] = []
        #: Cache layer -> keys and values like those that its site adds.
        self._added: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._sinks: list[torch.Tensor] = []
        self._build()
        self._parts = self._join_parts()
        self._frames: list[_BoundFrame] = []
        self._tables: weakref.WeakKeyDictionary[Any, _CacheTable] = weakref.WeakKeyDictionary()

    @property
    def num_native(self) -> int:
        """Segments that run natively."""
        spans = zip(self._step.calls, self._spans, strict=True)
        return sum(isinstance(call, Segment) and span is not None for call, span in spans)

    def run(self, token: int, position: int, cache: DynamicCache) -> torch.Tensor:
        """Logits [vocab] of the token after `token`, which comes at `position` and is added to
        `cache`."""
        frame = self._take_frame()
        frame.inputs[0], frame.inputs[1] = token, position
        caches = self._table_of(cache).advance()
        run, ops, address, layers = self._kernels.run, self._ops, frame.address, cache.layers
        experts_output = None
        source = in_offset = num_in_bytes = 0
        for first, last, module, torch_call, tensors, target in frame.parts:
            if module is not None:
                experts_output = module.headrace_exchange(module.headrace_layer, *tensors)
                if target is None:
                    continue
                if isinstance(target, torch.Tensor):
                    target.copy_(experts_output)
                    continue
                experts_output = experts_output.contiguous()
                source = experts_output.data_ptr()
                in_offset, num_in_bytes = target
            elif torch_call is not None:
                torch_call(layers)
            else:
                run(ops, first, last, address, caches, source, in_offset, num_in_bytes)
                source = 0
        logits = frame.logits.clone()
        self._frames.append(frame)
        return logits

    def run_call(
        self, number: int, inputs: Sequence[torch.Tensor], cache: DynamicCache
    ) -> tuple[torch.Tensor, ...] | None:
        """What call `number` alone makes of `inputs`; None if torch runs it. An attention site
        adds to `cache`, whose layers are to be counted on by `add_position`."""
        span, call = self._spans[number], self._step.calls[number]
        if span is None:
            return None
        frame = self._take_frame()
        outputs = call.outputs if isinstance(call, Segment) else (call.output,)
        for place, value in zip(call.inputs, inputs, strict=True):
            frame.bind(self._values[place]).copy_(value)
        self._kernels.run(self._ops, *span, frame.address, self._table_of(cache).address)
        found = tuple(frame.bind(self._values[place]).clone() for place in outputs)
        self._frames.append(frame)
        return found

    def add_position(self, cache: DynamicCache) -> None:
        """Make room for one position in the layers of native attention sites; see `run_call`."""
        self._table_of(cache).advance()

    def _table_of(self, cache: DynamicCache) -> _CacheTable:
        table = self._tables.get(cache)
        if table is None:
            table = self._tables[cache] = _CacheTable(cache, self._added)
        return table

    def _take_frame(self) -> _BoundFrame:
        if self._frames:
            return self._frames.pop()
        bound = _BoundFrame(Frame(self._program), self._values)
        bound.finish(self._step, self._parts, self._values)
        return bound

    # ---------------------------------------------------------------------- building

    def _build(self) -> None:
        step, values = self._step, self._values
        builder = ProgramBuilder()
        examples: dict[int, torch.Tensor] = {}
        for call in step.calls:
            if isinstance(call, Segment):
                examples.update(zip(call.inputs, step.kinds[call.kind].examples, strict=False))
        self._inputs = builder.empty((2, 1, 1), torch.int64)
        values[0], values[1] = self._inputs[0], self._inputs[1]
        for call in step.calls:
            start = builder.num_ops
            try:
                if isinstance(call, Segment):
                    self._add_segment(builder, call)
                elif not self._add_attention(builder, call, examples):
                    self._spans.append(None)
                    continue
                builder.gather_linears(start)
                self._spans.append((start, builder.num_ops))
            except (NotNative, RuntimeError) as error:
                builder.forget_from(start)
                assert isinstance(call, Segment)  # sites say beforehand whether they are native
                self.reasons[call.kind] = str(error)
                self._add_replay(builder, call)
                self._spans.append(None)
        builder.touch(values[step.result])
        self._program = builder.finish()
        self._ops = self._program.ops

    def _add_segment(self, builder: ProgramBuilder, call: Segment) -> None:
        graph = self._step.kinds[call.kind].graph.graph
        given = iter([*(self._values[place] for place in call.inputs), *call.constants])
        found: dict[torch.fx.Node, Any] = {}
        for node in graph.nodes:
            if node.op == "placeholder":
                found[node] = next(given)
            elif node.op == "output":
                for place, output in zip(call.outputs, node.args[0], strict=True):
                    self._values[place] = found[output]
            else:
                args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), found.__getitem__)
                found[node] = emit(builder, node, args, kwargs)

    def _add_replay(self, builder: ProgramBuilder, call: Segment) -> None:
        graph = self._step.kinds[call.kind].graph.graph
        builder.touch(*(self._values[place] for place in call.inputs))
        made = next(node for node in graph.nodes if node.op == "output").args[0]
        for place, node in zip(call.outputs, made, strict=True):
            self._values[place] = builder.like(node.meta["val"])
            builder.touch(self._values[place])

    def _add_attention(
        self, builder: ProgramBuilder, call: SiteCall, examples: dict[int, torch.Tensor]
    ) -> bool:
        """Whether the call is native now; else it stays with torch or with the exchange."""
        taken = [self._values[place] for place in call.inputs]
        example = examples.get(call.output)
        output = builder.empty((taken[0] if example is None else example).shape, taken[0].dtype)
        self._values[call.output] = output
        sinks = _sinks_of(call.site) if isinstance(call.site, AttentionSite) else None
        if sinks is None or not _is_one_row(*taken):
            builder.touch(*taken, output)
            return False
        assert isinstance(call.site, AttentionSite)
        query, keys, values = (tensor[0, :, 0] for tensor in taken)
        scale = call.site.arguments.get("scaling")
        self._sinks.append(sinks)
        flat = output.view(query.shape[0], values.shape[1])
        builder.other(
            "attend",
            (*(t.shape[0] for t in (query, keys)), query.shape[1], values.shape[1]),
            *((t, t.stride()) for t in (flat, query, keys, values)),
            x=query.shape[1] ** -0.5 if scale is None else float(scale),
            n=call.site.cache_layer,
            m=sinks.data_ptr() if len(sinks) else 0,
        )
        self._added[call.site.cache_layer] = taken[1], taken[2]
        return True

    def _join_parts(self) -> list[_Part]:
        parts: list[_Part] = []
        for call, span in zip(self._step.calls, self._spans, strict=True):
            if span is None:
                parts.append(_Part(call=call))
            elif parts and parts[-1].call is None:
                parts[-1].last = span[1]
            else:
                parts.append(_Part(*span))
        return parts


class _BoundFrame:
    """A frame, and everything that Python hands over at its sites, made once."""

    def __init__(self, frame: Frame, values: list[Any]) -> None:
        self._frame = frame
        self.bind = frame.bind
        self.address = frame.address
        base = frame.bind(values[0])
        #: Token and position, written before a run.
        self.inputs = (ctypes.c_int64 * 2).from_address(base.data_ptr())
        #: first, last | experts module, its tensors, where its result goes | what torch does
        self.parts: list[tuple[int, int, Any, Any, Any, Any]] = []

    def finish(self, step: DecodeStep, parts: list[_Part], values: list[Any]) -> None:
        """Fill `parts` and `logits`."""
        bound: list[Any] = [None if value is None else self.bind(value) for value in values]
        for number, part in enumerate(parts):
            call = part.call
            if call is None:
                self.parts.append((part.first, part.last, None, None, None, None))
            elif isinstance(call, Segment):
                replay = _replay_call(step, call, bound)
                self.parts.append((0, 0, None, replay, None, None))
            elif isinstance(call.site, AttentionSite):
                self.parts.append((0, 0, None, _attend_call(call, bound), None, None))
            else:
                output = bound[call.output]
                target: Any = output
                if number + 1 < len(parts) and parts[number + 1].call is None:
                    target = (output.data_ptr() - self.address, output.nbytes)
                taken = tuple(bound[place] for place in call.inputs)
                self.parts.append((0, 0, call.site.module, None, taken, target))
        self.logits = bound[step.result][0, -1]


class _CacheTable:
    """Where the layers of one sequence's cache hold keys and values, as the library wants it."""

    def __init__(
        self, cache: DynamicCache, added: dict[int, tuple[torch.Tensor, torch.Tensor]]
    ) -> None:
        self._places = (CacheLayer * len(cache.layers))()
        self._layers = [
            (cache.layers[number], self._places[number], *like) for number, like in added.items()
        ]
        self.address = ctypes.addressof(self._places)

    def advance(self) -> int:
        """Count on every layer by one position, which the library will write; the address."""
        for layer, place, keys, values in self._layers:
            assert isinstance(layer, GrowingLayer)
            place.end = layer.add_place(keys, values)
            if layer.room_number != place.room_number:
                place.room_number = layer.room_number
                rooms = layer.rooms
                place.keys, place.values = rooms[0].data_ptr(), rooms[1].data_ptr()
                place.key_head_stride = rooms[0].stride(1)
                place.value_head_stride = rooms[1].stride(1)
                place.window = layer.window
        return self.address


def _is_one_row(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> bool:
    return (
        query.shape[0] == query.shape[2] == keys.shape[2] == 1
        and query.shape[1] % keys.shape[1] == 0
        and query.shape[3] == keys.shape[3]
        and keys.dtype == values.dtype == query.dtype
        and query.is_floating_point()
    )


def _sinks_of(site: AttentionSite) -> torch.Tensor | None:
    """float32 [heads], [0] where attention has none; None if it is not natively known."""
    arguments = {name: value for name, value in site.arguments.items() if value is not None}
    sinks = arguments.pop("s_aux", None)
    if site.expand is not None or site.module.training or arguments.keys() - PLAIN_ARGUMENTS:
        return None
    if sinks is None and site.function is sdpa_attention_forward:
        return torch.empty(0)
    is_known = getattr(site.function, "__module__", "") == _WITH_SINKS
    if is_known and isinstance(sinks, torch.Tensor):
        return sinks.detach().float().contiguous()
    return None


def _replay_call(step: DecodeStep, call: Segment, bound: list[Any]) -> Callable[[Any], None]:
    replay = step.replays[call.kind]
    arguments = [*(bound[place] for place in call.inputs), *call.constants]
    targets = [bound[place] for place in call.outputs]

    def run(layers: Any) -> None:
        for target, result in zip(targets, replay(*arguments), strict=True):
            target.copy_(result)

    return run


def _attend_call(call: SiteCall, bound: list[Any]) -> Callable[[Any], None]:
    query, keys, values = (bound[place] for place in call.inputs)
    site, attend, target = call.site, call.attend, bound[call.output]
    assert isinstance(site, AttentionSite)
    assert attend is not None  # every attention site has one

    def run(layers: Any) -> None:
        held = layers[site.cache_layer].update(keys, values)
        target.copy_(attend(query, *held))

    return run
