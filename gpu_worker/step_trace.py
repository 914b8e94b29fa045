"""One decode step of any family as a flat list of tensor operations.

transformers' decode of one token spends most of its time in Python: wrappers, keyword arguments,
masks, positions, all of them the same for every token. So the model's own forward is run once under
a recorder of tensor operations; what depends on the token, on its position and on earlier
tokens stays a tensor. Two kinds of calls are not looked into and become *sites*:

    attention   keys and values are added to the sequence's cache, then the family's own attention
                function runs on whatever the cache holds: its length is in no recorded operation
    experts     the layer exchange

The record is only good if nothing else in it depends on the position. That is made sure of:
- positions come in as a tensor; code that looks at their values cannot be recorded;
- the recording pretends that very many positions are held (`num_pretended`), and whoever uses the
  record compares it with the model at others (gpu_worker.decode_step);
- a run beforehand evaluates the model's masks there: all keys that a cache layer keeps must be
  visible to a new token, for sites attend without a mask;
- attention must take the keys and values as the cache returned them, or as the module's own
  `expand_kv` makes them of what it returned.

Models for which one of these fails are run by transformers as ever.
"""

from __future__ import annotations

import sys
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import DynamicCache
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from gpu_worker.kv_cache import GrowingLayer, GrowingSlidingLayer, is_growing
from gpu_worker.op_recorder import OpRecorder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from transformers import PreTrainedModel

_NAME = "headrace_trace"
#: Arguments of attention functions that one row without a mask has no use for.
_UNUSED_ARGUMENTS = frozenset({"position_ids", "cache_position", "output_router_logits"})

_library = torch.library.Library("headrace", "DEF")
_library.define("attend(Tensor q, Tensor k, Tensor v, int dim, int site) -> Tensor")
_library.define("experts(Tensor hidden, Tensor choices, Tensor weights, int site) -> Tensor")


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dim: int, site: int) -> torch.Tensor:
    """q [1, heads, n, ...] -> zeros [1, n, heads, dim]: what recording sees of attention."""
    return q.new_zeros(q.shape[0], q.shape[2], q.shape[1], dim)


def _experts(
    hidden: torch.Tensor, choices: torch.Tensor, weights: torch.Tensor, site: int
) -> torch.Tensor:
    return torch.zeros_like(hidden, memory_format=torch.contiguous_format)


_library.impl("attend", _attend, "CompositeExplicitAutograd")
_library.impl("experts", _experts, "CompositeExplicitAutograd")


class Untraceable(Exception):
    """This model's decode step cannot be recorded; the text says why."""


@dataclass(frozen=True)
class AttentionSite:
    """One attention call: `function(module, q, keys, values, None, **arguments)[0]`.

    Keys and values are what the cache holds, or what `expand` makes of it (latent attention).
    """

    module: Any
    expand: Callable[..., Any] | None
    function: Callable[..., Any]
    arguments: dict[str, Any]
    cache_layer: int


@dataclass(frozen=True)
class ExpertsSite:
    """One call of routed experts: the module holds the exchange and its layer's number."""

    module: Any


@dataclass(frozen=True)
class StepTrace:
    """The record. Placeholders of `graph`: token and position, int64 [1, 1] each; its result: the
    logits [1, 1, vocab]. Sites are calls of torch.ops.headrace; their last argument counts them."""

    graph: torch.fx.GraphModule
    sites: list[AttentionSite | ExpertsSite]


def is_site(node: torch.fx.Node) -> bool:
    """Whether a node of the record is an attention or an experts call."""
    return node.target in (torch.ops.headrace.attend.default, torch.ops.headrace.experts.default)


def trace_step(
    model: PreTrainedModel,
    arguments: dict[str, Any],
    cache_argument: str,
    new_cache: Callable[[], DynamicCache],
) -> StepTrace:
    """Record one decode step of `model`, called with `arguments` and a cache.

    Raises:
        Untraceable: it cannot be recorded, or could not be trusted.
    """
    cache = new_cache()
    if not is_growing(cache):
        raise Untraceable("its layers keep more than keys and values")
    num_held = num_pretended(cache)
    recorder = _Recorder(model)
    token = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
    position = torch.full_like(token, num_held)

    def step(token: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        recorder.begin(new_cache(), num_held)
        call = {**arguments, cache_argument: recorder.cache, "position_ids": position}
        return model(token, **call).logits

    with torch.no_grad(), recorder.installed():
        try:
            step(token, position)
            recorder.is_probing = False
            operations = OpRecorder(token, position)
            with operations.recording():
                logits = step(token, position)
            graph = operations.finish(logits)
        except Untraceable:
            raise
        except Exception as error:  # whatever the family's code does with a recorded tensor
            first_line = str(error).strip().split("\n", 1)[0][:120]
            raise Untraceable(f"{type(error).__name__}: {first_line}") from error
    _remove_dead_code(graph)
    _remove_noops(graph)
    return StepTrace(graph, recorder.sites)


def num_pretended(cache: DynamicCache) -> int:
    """More positions than any sliding layer of `cache` keeps."""
    windows = [
        layer.sliding_window for layer in cache.layers if isinstance(layer, GrowingSlidingLayer)
    ]
    return 2 * max(windows, default=64) + 3


class _Recorder:
    """Stands in for attention, experts and masks while the model is recorded."""

    def __init__(self, model: PreTrainedModel) -> None:
        configs = [module.config for module in model.modules() if hasattr(module, "config")]
        self._configs = list({id(config): config for config in configs}.values())
        self._implementation = model.config._attn_implementation
        self._constants = {id(t) for t in (*model.parameters(), *model.buffers())}
        self._model = model

    def begin(self, cache: DynamicCache, num_held: int) -> None:
        self.sites: list[AttentionSite | ExpertsSite] = []
        self.cache = _PassingCache(cache.layers, num_held)

    @contextmanager
    def installed(self) -> Iterator[None]:
        before = [config._attn_implementation for config in self._configs]
        experts_before = [
            getattr(config, "_experts_implementation", None) for config in self._configs
        ]
        ALL_ATTENTION_FUNCTIONS.register(_NAME, self._attention)
        ALL_EXPERTS_FUNCTIONS.register(_NAME, self._experts)
        ALL_MASK_ATTENTION_FUNCTIONS.register(_NAME, self._mask)
        self.is_probing = True
        try:
            for config in self._configs:
                config._attn_implementation = _NAME
            self._model.set_experts_implementation(_NAME)
            yield
        finally:
            for config, name, experts in zip(self._configs, before, experts_before, strict=True):
                config._attn_implementation = name
                if experts is not None:
                    config._experts_implementation = experts
            for functions in (
                ALL_ATTENTION_FUNCTIONS,
                ALL_EXPERTS_FUNCTIONS,
                ALL_MASK_ATTENTION_FUNCTIONS,
            ):
                del functions._global_mapping[_NAME]

    def _mask(self, **arguments: Any) -> torch.Tensor | None:
        if self.is_probing:
            return sdpa_mask(**{**arguments, "allow_is_causal_skip": False})
        return None

    def _attention(
        self,
        module: Any,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        mask: torch.Tensor | None,
        **arguments: Any,
    ) -> tuple[torch.Tensor, None]:
        layer, added_keys, added_values = self.cache.passed
        expand = None
        if keys is not added_keys or values is not added_values:
            expand = getattr(module, "expand_kv", None)
            if expand is None:
                raise Untraceable("its attention changes keys and values after caching them")
        if self.is_probing and mask is not None:
            if not bool(mask.all()):
                raise Untraceable("its attention hides keys that its cache keeps")
        elif mask is not None:
            raise Untraceable("it makes its attention masks in a way of its own")
        kept = {}
        for name, value in arguments.items():
            if name in _UNUSED_ARGUMENTS:
                continue
            if isinstance(value, torch.Tensor) and id(value) not in self._constants:
                raise Untraceable(f"its attention takes a computed tensor, {name}")
            kept[name] = value
        # The default function that the family itself would have fallen back to.
        own = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
        function = ALL_ATTENTION_FUNCTIONS.get_interface(self._implementation, own)
        if function is None:
            raise Untraceable("its attention function is not known")
        self.sites.append(AttentionSite(module, expand, function, kept, layer))
        site = len(self.sites) - 1
        dim = values.shape[3]
        return torch.ops.headrace.attend(query, added_keys, added_values, dim, site), None

    def _experts(
        self, module: Any, hidden: torch.Tensor, choices: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        self.sites.append(ExpertsSite(module))
        return torch.ops.headrace.experts(hidden, choices, weights, len(self.sites) - 1)


class _PassingCache(DynamicCache):
    """Says that it holds `num_held` positions, holds none, and remembers what came last."""

    def __init__(self, layers: list[Any], num_held: int) -> None:
        super().__init__()
        self.layer_class_to_replicate = None
        self.layers = layers
        for layer in layers:
            if isinstance(layer, GrowingLayer):
                layer.cumulative_length = num_held
        self.passed: tuple[int, Any, Any] = (-1, None, None)

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *_: Any,
        **__: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not isinstance(self.layers[layer_idx], GrowingLayer):
            raise Untraceable("it caches keys in a layer that keeps none")
        self.passed = (layer_idx, key_states, value_states)
        return key_states, value_states


def _remove_dead_code(graph: torch.fx.GraphModule) -> None:
    """Drop what nobody uses; operations that write into a tensor stay."""

    def has_effect(node: torch.fx.Node) -> bool:
        schema = getattr(node.target, "_schema", None)
        is_mutable = node.op == "call_function" and bool(getattr(schema, "is_mutable", False))
        return node.op in ("placeholder", "output") or is_mutable

    graph.graph.eliminate_dead_code(has_effect)


def _remove_noops(graph: torch.fx.GraphModule) -> None:
    """Drop casts to the dtype and device that a tensor has already."""
    casts = (torch.ops.aten.to.dtype, torch.ops.aten.to.device)
    for node in list(graph.graph.nodes):
        if node.op != "call_function" or node.target not in casts:
            continue
        source, result = node.args[0].meta.get("val"), node.meta.get("val")
        if source is None or result is None or node.kwargs.get("copy") or len(node.args) > 4:
            continue
        if source.dtype == result.dtype and source.device == result.device:
            node.replace_all_uses_with(node.args[0])
            graph.graph.erase_node(node)
