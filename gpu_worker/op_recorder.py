"""Tensor operations written down as they happen: one run of the model is one recording.

torch's own tracer (`make_fx`) finds the same operations and takes about 2 ms for each, because it
builds them again on tensors without memory; a model of 48 layers has thousands. Here every
operation runs as ever and is noted, which takes 0.1 ms.

The operations are seen before torch takes them apart (a linear layer is one operation) by the door
that torch keeps for its tracers, which is why `OpRecorder` says that it is one.
"""

from __future__ import annotations

import operator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode
from torch.utils._python_dispatch import TorchDispatchMode

if TYPE_CHECKING:
    from collections.abc import Iterator

_LOOKS = frozenset(
    {
        torch.ops.aten.item.default,
        torch.ops.aten._local_scalar_dense.default,
        torch.ops.aten.is_nonzero.default,
        torch.ops.aten.equal.default,
        torch.ops.aten.nonzero.default,
    }
)


class LooksAtValues(Exception):
    """What is computed next would depend on the value of a tensor that changes with the inputs."""


class OpRecorder(ProxyTorchDispatchMode):
    """Notes operations while `recording`; `finish` makes a module of them.

    Tensors that no noted operation has made are constants: weights, and what was made of nothing
    but numbers outside torch.
    """

    def __init__(self, *inputs: torch.Tensor) -> None:
        # Not the tracer's own: nothing of its machinery is wanted.
        TorchDispatchMode.__init__(self, torch._C.DispatchKey.PreDispatch)
        self._graph = torch.fx.Graph()
        self._constants: dict[str, torch.Tensor] = {}
        self._nodes: dict[int, torch.fx.Node] = {}
        #: The same by memory and shape: torch hands some results on as another object.
        self._places: dict[tuple[Any, ...], torch.fx.Node] = {}
        self._changing: set[torch.fx.Node] = set()
        #: Tensors that have a node: as long as they live, no other has their id.
        self._alive: list[Any] = []
        for number, tensor in enumerate(inputs):
            node = self._graph.placeholder(f"input_{number}")
            self._changing.add(node)
            self._bind(tensor, node)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Note the operations of this thread.

        Raises:
            LooksAtValues: an operation that a recording cannot hold.
        """
        with enable_python_dispatcher():
            TorchDispatchMode.__enter__(self)
            try:
                yield
            finally:
                TorchDispatchMode.__exit__(self, None, None, None)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        noted_args, noted_kwargs = torch.fx.node.map_aggregate((args, kwargs), self._noted)
        node = self._graph.create_node("call_function", func, noted_args, noted_kwargs)
        if any(source in self._changing for source in node.all_input_nodes):
            if func in _LOOKS:
                raise LooksAtValues(str(func))
            self._changing.add(node)
        result = func(*args, **kwargs)
        if isinstance(result, torch.Tensor):
            self._bind(result, node)
        elif isinstance(result, (tuple, list)):
            for index, part in enumerate(result):
                if isinstance(part, torch.Tensor):
                    item = self._graph.call_function(operator.getitem, (node, index))
                    if node in self._changing:
                        self._changing.add(item)
                    self._bind(part, item)
        return result

    def _noted(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        node = self._nodes.get(id(value)) or self._places.get(_place(value))
        if node is None:
            name = f"constant_{len(self._constants)}"
            self._constants[name] = value
            node = self._graph.get_attr(name)
            self._bind(value, node)
        return node

    def _bind(self, tensor: torch.Tensor, node: torch.fx.Node) -> None:
        node.meta["val"] = tensor
        self._nodes[id(tensor)] = node
        if tensor.numel():
            self._places[_place(tensor)] = node
        self._alive.append(tensor)

    def finish(self, result: torch.Tensor) -> torch.fx.GraphModule:
        """The module that computes `result` from the inputs."""
        self._graph.output(self._noted(result))
        root = torch.nn.Module()
        for name, tensor in self._constants.items():
            root.register_buffer(name, tensor, persistent=False)
        return torch.fx.GraphModule(root, self._graph)


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What tells a living tensor that is not empty from every other, up to equal views."""
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype
