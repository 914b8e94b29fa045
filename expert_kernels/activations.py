"""Activations by the names that transformers' ACT2FN gives them, as torch functions.

The formulas are those of the definitions, in the order of operations that the model's own library
uses, because in half precision the order is part of the result. Importing transformers for them
would cost each worker seconds of start-up.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from protocol.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable

_SQRT_2_OVER_PI = math.sqrt(2.0 / math.pi)


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    inner = _SQRT_2_OVER_PI * (x + 0.044715 * torch.pow(x, 3.0))
    return 0.5 * x * (1.0 + torch.tanh(inner))


def _gelu_fast(x: torch.Tensor) -> torch.Tensor:
    return 0.5 * x * (1.0 + torch.tanh(x * 0.7978845608 * (1.0 + 0.044715 * x * x)))


def _gelu_clipped(x: torch.Tensor) -> torch.Tensor:
    return torch.clip(functional.gelu(x), -10, 10)


def _quick_gelu(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(1.702 * x)


def _relu_squared(x: torch.Tensor) -> torch.Tensor:
    return torch.square(functional.relu(x))


def _sqrt_softplus(x: torch.Tensor) -> torch.Tensor:
    return functional.softplus(x).sqrt()


def _identity(x: torch.Tensor) -> torch.Tensor:
    return x


_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": functional.gelu,
    "gelu_10": _gelu_clipped,
    "gelu_accurate": _gelu_tanh,
    "gelu_fast": _gelu_fast,
    "gelu_new": _gelu_tanh,
    "gelu_pytorch_tanh": partial(functional.gelu, approximate="tanh"),
    "hardswish": functional.hardswish,
    "leaky_relu": functional.leaky_relu,
    "linear": _identity,
    "mish": functional.mish,
    "quick_gelu": _quick_gelu,
    "relu": functional.relu,
    "relu2": _relu_squared,
    "relu6": functional.relu6,
    "sigmoid": torch.sigmoid,
    "silu": functional.silu,
    "sqrtsoftplus": _sqrt_softplus,
    "swish": functional.silu,
    "tanh": torch.tanh,
}


def activation(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """The function of that name.

    Raises:
        UserError: it is none that experts are known to use.
    """
    try:
        return _ACTIVATIONS[name]
    except KeyError:
        raise UserError(
            f"The model's experts use the activation {name!r}, which is not supported; known are "
            f"{', '.join(sorted(_ACTIVATIONS))}."
        ) from None
