"""Experts as they were recorded, not as this model's router chose them: see protocol.routing.

With random weights a router says nothing, and what a cache does depends on what it is asked for. So
the choices of a real model are put in its place; everything after them is as always.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from protocol.errors import ProtocolError
from protocol.routing import ROUTING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from protocol.worker_life import WorkerLink


class RoutingReplay:
    """`ids` is int16 [steps, layers, top_k]."""

    def __init__(self, ids: np.ndarray, device: torch.device) -> None:
        self._num_steps = ids.shape[0]
        # By layer first: one layer's choices for the rows of a step is one index.
        self._ids = torch.from_numpy(ids.astype(np.int64)).transpose(0, 1).contiguous().to(device)
        self._forced = self._ids[:, :0]

    @classmethod
    def of(
        cls, link: WorkerLink, num_layers: int, num_experts: Sequence[int], device: torch.device
    ) -> RoutingReplay | None:
        """The replay that was granted; None where none was.

        Raises:
            ProtocolError: it is of another shape than the model.
        """
        try:
            memory, grant = link.map_segment(ROUTING, is_writable=False)
        except KeyError:
            return None
        field = grant.fields["ids"]
        count = int(np.prod(field.shape))
        flat = np.frombuffer(memory, np.int16, count, field.offset_bytes)
        ids = flat.reshape(field.shape).copy()
        if ids.shape[1] != num_layers or not ids.size:
            raise ProtocolError(f"a routing of {ids.shape} is not for {num_layers} MoE layers")
        if ids.min() < 0 or (ids.max(axis=(0, 2)) >= np.array(num_experts)).any():
            raise ProtocolError("the routing names experts that the model does not have")
        return cls(ids, device)

    def begin_step(self, positions: Sequence[int]) -> None:
        """The rows of the step are those at these positions of their sequences."""
        steps = [position % self._num_steps for position in positions]
        # All layers at once: replays are for measuring what a layer takes by itself.
        self._forced = self._ids[:, torch.tensor(steps, device=self._ids.device)]

    def choices(self, layer: int, chosen: torch.Tensor) -> torch.Tensor:
        """In place of `chosen` [n, K], of the same type.

        Raises:
            ProtocolError: K or n is another than recorded or announced.
        """
        forced = self._forced[layer].to(chosen.dtype)
        if forced.shape != chosen.shape:
            raise ProtocolError(
                f"the router chose {tuple(chosen.shape)} experts, the routing that is to be "
                f"followed has {tuple(forced.shape)}"
            )
        return forced
