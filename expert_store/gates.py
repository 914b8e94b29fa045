"""What one expert computes, derived from transformers' experts module and then proven.

An experts module says of itself how its weights lie (``is_transposed``, ``is_concatenated``,
``has_bias``, ``has_gate``). How gate and up combine is code, its ``_apply_gate``: the library's
default, or the class's own, which is known here by the class that was read. Neither is believed:
`prove_form` runs the module's own forward on a few small random weights and compares it with
`expert_rows`, the meaning of an ExpertForm in eight lines. A family whose forward does something
else (weights its inputs, adds a norm, ...) is refused, whatever it is called.
"""

from __future__ import annotations

import copy
import inspect
import math
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers.activations import ACT2FN
from transformers.integrations import moe

from expert_store.checkpoint import CheckpointError
from expert_store.layout import ExpertForm, GateKind

if TYPE_CHECKING:
    from collections.abc import Callable

_KNOWN_GATES: dict[str, tuple[GateKind, str | None, str | None]] = {
    # class: kind, attribute of alpha, attribute of the limit
    "GptOssExperts": ("alpha_swiglu", "alpha", "limit"),
    "OpenAIPrivacyFilterExperts": ("alpha_swiglu", "alpha", "limit"),
    "MiniMaxM3VLExperts": ("alpha_swiglu", "swiglu_alpha", "swiglu_limit"),
    "DeepseekV4Experts": ("clamped_act_mul", None, "limit"),
    "HYV4Experts": ("clamped_act_mul", None, "swiglu_limit"),
    "HYV4VLExperts": ("clamped_act_mul", None, "swiglu_limit"),
    "Glm5NextTextExperts": ("clamped_act_mul", None, "swiglu_limit"),
    # The default in float32 steps: the same function, rounded later.
    "BeamExperts": ("act_mul", None, None),
}


class UnsupportedModelError(CheckpointError):
    """A model that transformers knows and Headrace cannot run, refused by name."""


def is_experts(module: nn.Module) -> bool:
    """True for the modules that transformers' ExpertsInterface can be put in charge of."""
    return hasattr(module, "is_concatenated") and hasattr(module, "has_post_expert_norm")


def derive_form(module: nn.Module, family: str) -> ExpertForm:
    """The form of one experts module (its parameters may be on meta).

    Raises UnsupportedModelError when the module is none of the forms that the kernels compute.
    """
    has_gate, has_bias = bool(module.has_gate), bool(module.has_bias)
    if module.has_post_expert_norm:
        raise UnsupportedModelError(
            f"{family}: a norm follows each expert, which is not supported; choose another model"
        )
    first = "gate_up_proj" if has_gate else "up_proj"
    wanted = {first, "down_proj"} | ({f"{first}_bias", "down_proj_bias"} if has_bias else set())
    shapes = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
    if set(shapes) != wanted or len(shapes["down_proj"]) != 3:
        raise UnsupportedModelError(
            f"{family}: its experts hold {', '.join(sorted(shapes)) or 'nothing'} where"
            f" {', '.join(sorted(wanted))} are expected; this family is not supported"
        )
    num_experts, hidden, middle = shapes["down_proj"]
    if module.is_transposed:
        hidden, middle = middle, hidden
    gate, alpha, limit = _derive_gate(module, family) if has_gate else ("act", None, None)
    form = ExpertForm(
        hidden_size=hidden,
        intermediate_size=middle,
        has_gate=has_gate,
        has_bias=has_bias,
        is_transposed=bool(module.is_transposed),
        is_interleaved=has_gate and not module.is_concatenated,
        activation="silu" if gate == "alpha_swiglu" else _activation_name(module, family),
        gate=gate,
        alpha=alpha,
        limit=limit,
    )
    expected = (hidden, form.up_rows) if form.is_transposed else (form.up_rows, hidden)
    if shapes[first] != (num_experts, *expected) or num_experts != module.num_experts:
        raise UnsupportedModelError(
            f"{family}: {first} of shape {shapes[first]} beside down_proj {shapes['down_proj']}"
            f" and {module.num_experts} experts; this family is not supported"
        )
    return form


def _derive_gate(module: nn.Module, family: str) -> tuple[GateKind, float | None, float | None]:
    owner: Any = type(module)
    if owner._apply_gate is moe._default_apply_gate:
        return "act_mul", None, None
    if owner.__name__ not in _KNOWN_GATES:
        raise UnsupportedModelError(
            f"{family}: {owner.__name__} gates its experts in a way of its own, which is not"
            " supported yet; choose another model"
        )
    kind, alpha_name, limit_name = _KNOWN_GATES[owner.__name__]
    alpha = float(getattr(module, alpha_name)) if alpha_name else None
    limit = getattr(module, limit_name) if limit_name else None
    if kind == "clamped_act_mul" and (limit is None or math.isinf(limit)):
        return "act_mul", None, None
    return kind, alpha, None if limit is None else float(limit)


def _activation_name(module: nn.Module, family: str) -> str:
    """The ACT2FN name of the module's activation, found by what it computes, not by its type."""
    act_fn = getattr(module, "act_fn", torch.nn.functional.silu)
    config = getattr(module, "config", None)
    stated = (
        getattr(config, name, None)
        for name in ("hidden_act", "mlp_hidden_act", "hidden_activation", "activation")
    )
    x = torch.linspace(-9, 9, 73)
    expected = act_fn(x)
    for name in (*(name for name in stated if isinstance(name, str)), "silu", *ACT2FN):
        if name in ACT2FN and torch.equal(ACT2FN[name](x), expected):
            return name
    raise UnsupportedModelError(
        f"{family}: its experts use the activation {act_fn}, which has no name in transformers"
    )


def expert_rows(
    form: ExpertForm, weights: dict[str, torch.Tensor], x: torch.Tensor
) -> torch.Tensor:
    """The definition of an ExpertForm: rows x [n, hidden_size] through one expert.

    ``weights`` are one expert's tensors under the module's names (gate_up_proj, down_proj, ...).
    Returns [n, hidden_size].
    """

    def project(rows: torch.Tensor, name: str) -> torch.Tensor:
        weight = weights[name] if form.is_transposed else weights[name].T
        return rows @ weight + (weights[f"{name}_bias"] if form.has_bias else 0.0)

    h = project(x, "gate_up_proj" if form.has_gate else "up_proj")
    return project(_gated(form, h), "down_proj")


def _gated(form: ExpertForm, h: torch.Tensor) -> torch.Tensor:
    act: Callable[[torch.Tensor], torch.Tensor] = ACT2FN[form.activation]
    if form.gate == "act":
        return act(h)
    gate, up = (h[..., ::2], h[..., 1::2]) if form.is_interleaved else h.chunk(2, dim=-1)
    if form.limit is not None:
        gate, up = gate.clamp(max=form.limit), up.clamp(min=-form.limit, max=form.limit)
    if form.gate == "alpha_swiglu":
        return (up + 1) * gate * torch.sigmoid(gate * (form.alpha or 0.0))
    return act(gate) * up


def prove_form(module: nn.Module, form: ExpertForm, family: str) -> None:
    """Compare the form with the module's own forward on tiny random weights.

    Raises UnsupportedModelError when they disagree or the forward is not
    (hidden_states, top_k_index, top_k_weights).
    """
    forward = type(module).forward
    if len(inspect.signature(forward).parameters) != 4:
        raise UnsupportedModelError(
            f"{family}: its experts take {inspect.signature(forward)}, not hidden states with the"
            " router's choice and weights; this family is not supported"
        )
    tiny = _shrunk(module, form)
    weights = dict(tiny.named_parameters())
    hidden = weights["down_proj"].shape[2 if form.is_transposed else 1]
    x = torch.randn(3, hidden, generator=torch.Generator().manual_seed(1))
    choice = torch.tensor([[0, 2], [1, 0], [2, 1]])
    share = torch.tensor([[0.7, 1.6], [0.4, 0.3], [1.1, 0.2]])
    with torch.no_grad():
        expected = torch.zeros_like(x)
        for row, (experts, parts) in enumerate(zip(choice.tolist(), share.tolist(), strict=True)):
            for expert, part in zip(experts, parts, strict=True):
                one = {name: parameter[expert] for name, parameter in weights.items()}
                expected[row] += part * expert_rows(form, one, x[row : row + 1])[0]
        try:
            # __wrapped__: the family's own code, not the implementation the interface would pick.
            found = inspect.unwrap(forward)(tiny, x, choice, share)
        except Exception as error:
            raise UnsupportedModelError(
                f"{family}: its experts could not be tried out ({type(error).__name__}: {error});"
                " this family is not supported"
            ) from error
    if found.shape != x.shape or not torch.allclose(found, expected, rtol=1e-4, atol=1e-4):
        raise UnsupportedModelError(
            f"{family}: {type(module).__name__} computes something other than {form.gate} experts"
            " weighted by the router; this family is not supported"
        )


def _shrunk(module: nn.Module, form: ExpertForm) -> nn.Module:
    """A copy of the module with 3 experts of 8 x 6; random weights that reach the clamps."""
    sizes = {form.hidden_size: 8, form.intermediate_size: 6}
    if form.hidden_size == form.intermediate_size:
        sizes = {form.hidden_size: 8}
    sizes[2 * form.intermediate_size] = 2 * sizes[form.intermediate_size]
    hidden, middle = sizes[form.hidden_size], sizes[form.intermediate_size]
    up_rows = middle * (2 if form.has_gate else 1)
    first = "gate_up_proj" if form.has_gate else "up_proj"
    shapes: dict[str, tuple[int, ...]] = {
        first: (hidden, up_rows) if form.is_transposed else (up_rows, hidden),
        "down_proj": (middle, hidden) if form.is_transposed else (hidden, middle),
    }
    if form.has_bias:
        shapes |= {f"{first}_bias": (up_rows,), "down_proj_bias": (hidden,)}
    generator = torch.Generator().manual_seed(0)
    spread = {first: 0.5 * (form.limit or 1.0), f"{first}_bias": 1.0}
    tiny = copy.copy(module)
    state: dict[str, Any] = tiny.__dict__
    for name, value in list(state.items()):
        # The module may use its sizes to reshape; the number of experts goes by its own name.
        if type(value) is int and value in sizes and name != "num_experts":
            state[name] = sizes[value]
    state["num_experts"] = 3
    state["_parameters"] = {
        name: nn.Parameter(
            torch.randn(3, *shape, generator=generator) * spread.get(name, 0.5),
            requires_grad=False,
        )
        for name, shape in shapes.items()
    }
    return tiny
