"""Numbers of a config.json that no model can have.

transformers checks their types and not their values: a NaN as `rms_norm_eps` would be found at the
first logits, by a worker that dies of it, again and again.
"""

from __future__ import annotations

import math
from typing import Any

#: Last words of names: what goes into a root.
_EPSILONS = ("eps", "epsilon")
#: Whole names, in whichever part of the file.
_ABOVE_ZERO = ("rope_theta", "max_position_embeddings")


def why_no_number(config: dict[str, Any]) -> str | None:
    """The first number that cannot be, by its path and why; None where all may be right."""
    parts: list[tuple[str, str, object]] = [("", "", config)]
    while parts:  # no recursion: how deep a file nests is its author's choice
        path, name, value = parts.pop()
        if isinstance(value, dict):
            parts += [
                (f"{path}.{key}" if path else key, key, part)
                for key, part in reversed(value.items())
            ]
        elif isinstance(value, list):
            parts += [
                (f"{path}[{index}]", name, part) for index, part in reversed([*enumerate(value)])
            ]
        elif isinstance(value, int | float) and not isinstance(value, bool):
            reason = _why_not(name, value)
            if reason is not None:
                return f"{path} is {str(value)[:40]}{reason}"
    return None


def _why_not(name: str, value: float) -> str | None:
    # What has a limit may have none: mamba's `time_step_limit` is [0.0, Infinity]. Whole numbers
    # are finite, and may be too large for a float.
    is_finite = isinstance(value, int) or math.isfinite(value)
    if not is_finite and (math.isnan(value) or "limit" not in name):
        return ", which is no number to compute with"
    if name.rpartition("_")[2] in _EPSILONS and not 0 <= value <= 1:
        return " and must be from 0 to 1, like 1e-06"
    if name in _ABOVE_ZERO and value <= 0:
        return " and must be above 0"
    return None
