"""A recorded routing that a gpu_worker follows in place of its router's choices.

    ids   int16 [steps, layers, top_k]   which experts, best first    (by orchestrator, once)

The row at position p of a sequence takes step p, and begins anew after the last one. So the same
prompt meets the same experts again, whoever computes them and whatever died meanwhile. The segment
is granted only where somebody asked for a replay.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from protocol.step_segment import segment_of

if TYPE_CHECKING:
    from protocol.lifeline import SegmentGrant

ROUTING = "routing"


def routing_grant(num_steps: int, num_layers: int, top_k: int) -> SegmentGrant:
    """Layout for so many steps."""
    return segment_of(ROUTING, ("ids", "int16", [num_steps, num_layers, top_k]))
