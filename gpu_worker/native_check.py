"""Is the native decode step the recorded one, up to rounding? Asked before it is used.

Two ways, because each sees what the other does not:

    call by call   every segment and every attention site gets the very inputs that the replay had;
                   results must agree within the tolerance of their dtype, whole numbers (a router's
                   choices) nearly always: of experts with nearly equal scores either may be named
    free           the whole step on its own, layer after layer, with experts whose answer does not
                   hang on one close choice; the logits must be near the replay's
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from gpu_worker.compilation import why_apart
from gpu_worker.decode_step import Segment

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from transformers.cache_utils import DynamicCache

    from gpu_worker.decode_step import DecodeStep
    from gpu_worker.native_step import NativeStep

#: Largest difference of logits after a whole step, relative to the largest logit.
_FREE_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.2, torch.float16: 0.05}
#: Share of whole numbers that must agree.
_LEAST_AGREEING = 0.75


def why_not_native(
    step: DecodeStep, native: NativeStep, prompt: Callable[[DynamicCache], object],
    new_cache: Callable[[], DynamicCache], tokens: Sequence[int], position: int,
    dtype: torch.dtype,
) -> str | None:  # fmt: skip
    """None, or how `native` differs from `step` for `tokens`, the first at `position`; `dtype` is
    the one that the model computes in.

    `prompt` brings a cache to `position`. The exchange that the model is connected to must be
    `answer_by_weights`.
    """
    free, forced, replayed = new_cache(), new_cache(), new_cache()
    for cache in (free, forced, replayed):
        prompt(cache)
    found: list[str] = []
    num_equal = num_whole = 0

    def look(number: int, inputs: list[torch.Tensor], expected: Sequence[torch.Tensor]) -> None:
        nonlocal num_equal, num_whole
        results = native.run_call(number, inputs, forced)
        if results is None:
            return
        call = step.calls[number]
        what = f"segment {number}" if isinstance(call, Segment) else f"attention {number}"
        for result, wanted in zip(results, expected, strict=True):
            if wanted.is_floating_point():
                difference = why_apart(result, wanted)
                if difference is not None:
                    found.append(f"{what} has {difference}")
            else:
                num_whole += wanted.numel()
                num_equal += int((result == wanted).sum())

    for offset, token in enumerate(tokens):
        native.add_position(forced)
        expected = step.run(token, position + offset, replayed, look)
        logits = native.run(token, position + offset, free)
        if found:
            return found[0]
        tolerance = _FREE_TOLERANCE.get(dtype, 1e-3)
        difference = why_apart(logits, expected, tolerance)
        if difference is not None:
            return f"its logits have {difference}"
    if num_equal < _LEAST_AGREEING * num_whole:
        return f"{num_whole - num_equal} of {num_whole} choices are others"
    return None


def answer_by_weights(
    layer: int, hidden: torch.Tensor, choices: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """An exchange for comparisons: [n, H] that follows the weights, whatever was chosen."""
    factors: Any = weights.float().sum(dim=1, keepdim=True) * ((layer % 3 + 1) / 4)
    return (hidden.float() * factors).to(hidden.dtype)
