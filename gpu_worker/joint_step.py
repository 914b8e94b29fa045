"""Several sequences in one step: the dense part runs for each alone, the experts for all together.

    sequence A   embed, attend, route --+             +-- go on ...
    sequence B   embed, attend, route --+-- experts --+-- go on ...      at every MoE layer
    sequence C   embed, attend, route --+             +-- go on ...

So an expert that several sequences chose is looked up, filled and read once, while every operation
of the dense part has the shape that it has for one sequence: what a sequence computes does not
depend, in a single bit, on who is in the step with it, whatever its family keeps in its cache.

A model's forward calls the experts from deep within and cannot return in the middle. So each
sequence's forward runs on a stack of its own (a greenlet: a coroutine that needs no `await`), which
is left at the experts of a layer and taken up again when the rows of all are there. All of it is
one thread, and what is thread-local (inference mode, number of threads) is the same for all.
"""

from __future__ import annotations

import contextvars
from typing import TYPE_CHECKING

import torch
from greenlet import getcurrent, greenlet

from protocol.errors import ProtocolError

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpu_worker.model import LayerExchange

#: layer, hidden [1, H], choices [1, K], weights [1, K]: what a sequence waits for experts with.
_Asked = tuple[int, torch.Tensor, torch.Tensor, torch.Tensor]


class JointStep:
    """The exchange that a model is connected to: passes a layer on to `exchange`, alone or with
    those of the other sequences in the step."""

    def __init__(self, exchange: LayerExchange) -> None:
        self._exchange = exchange
        self._hub: greenlet | None = None

    def __call__(
        self, layer: int, hidden: torch.Tensor, choices: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """See gpu_worker.model.LayerExchange."""
        hub = self._hub
        if hub is None:
            return self._exchange(layer, hidden, choices, weights)
        output: torch.Tensor = hub.switch((layer, hidden, choices, weights))
        return output

    def run(self, forwards: list[Callable[[], torch.Tensor]]) -> list[torch.Tensor]:
        """What each of `forwards` returns; each is a single token's way through the model.

        Raises:
            ProtocolError: they do not go through the same layers.
            Whatever the exchange or a forward raises; no forward is left half-way then.
        """
        if len(forwards) == 1:
            return [forwards[0]()]
        members = [greenlet(forward) for forward in forwards]
        for member in members:
            member.gr_context = contextvars.copy_context()
        self._hub = getcurrent()
        try:
            said = [member.switch() for member in members]
            while not all(member.dead for member in members):
                rows = self._together(members, said)
                said = [member.switch(row) for member, row in zip(members, rows, strict=True)]
            return said
        finally:
            self._hub = None
            for member in members:
                if member:  # stands at a layer that will not come
                    member.throw()

    def _together(self, members: list[greenlet], asked: list[_Asked]) -> list[torch.Tensor]:
        """One layer of all: output [1, H] for each."""
        if any(member.dead for member in members) or len({layer for layer, *_ in asked}) > 1:
            raise ProtocolError("the sequences of one step go through different layers")
        layers, hidden, choices, weights = zip(*asked, strict=True)
        output = self._exchange(
            layers[0], torch.cat(hidden), torch.cat(choices), torch.cat(weights)
        )
        # Copies: rows of one tensor would be aligned in another way than those of a step alone.
        return [row.clone() for row in output.split(1)]
