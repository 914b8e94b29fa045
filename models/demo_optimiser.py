"""Muon and AdamW for the demo checkpoint, with state that fits a safetensors file.

A few hundred steps is all the budget allows.  Muon moves every direction of a projection alike, so
that rarely used experts learn as fast as busy ones; AdamW serves what is not a projection.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from transformers import Qwen3MoeForCausalLM

_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)


def orthogonalise(x: Tensor, steps: int = 4) -> Tensor:
    """Nearly orthogonal rows for each wide matrix of ``x`` [M, r, c] (r <= c).

    Newton-Schulz on the r-by-r Gram matrix, so that only two products touch the c columns.
    """
    a, b, c = _NEWTON_SCHULZ
    x = x / (torch.linalg.matrix_norm(x, keepdim=True) + 1e-7)
    gram = x @ x.mT
    total = None
    for left in reversed(range(steps)):
        poly = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        poly.diagonal(dim1=-2, dim2=-1).add_(a)
        total = poly if total is None else poly @ total
        if left:
            gram = poly @ gram @ poly
    return total @ x  # type: ignore[operator]


class Optimiser:
    """Muon for the projections, AdamW for embeddings, routers and norms; float32 state.

    Args:
        model: the network; its parameters are changed in place.
        matrix_rate: peak spectral step of the projections.
        other_rate: peak AdamW rate of output head, routers and norms.
        embedding_rate: peak AdamW rate of the input embedding.
        decay: decoupled weight decay of the projections, a step at peak rate.
    """

    def __init__(
        self,
        model: Qwen3MoeForCausalLM,
        matrix_rate: float = 0.012,
        other_rate: float = 1e-3,
        embedding_rate: float = 2e-3,
        decay: float = 0.05,
    ) -> None:
        self.matrix_rate, self.decay = matrix_rate, decay
        self.groups: dict[tuple[int, int], list[Tensor]] = {}
        rest = []
        for name, p in model.named_parameters():
            p.grad = torch.zeros_like(p)
            if "_proj" not in name:
                rest.append(p)
                continue
            view = p.data.view(-1, p.shape[-2] // (2 if "gate_up" in name else 1), p.shape[-1])
            grad = p.grad.view(view.shape)
            if view.shape[1] > view.shape[2]:
                view, grad = view.mT, grad.mT
            self.groups.setdefault((view.shape[1], view.shape[2]), []).append((view, grad))
        self.momentum = {
            shape: torch.zeros(sum(len(v) for v, _ in pairs), *shape)
            for shape, pairs in self.groups.items()
        }
        self.adam = torch.optim.AdamW(
            [
                {"params": rest[:1], "lr": embedding_rate, "peak": embedding_rate},
                {"params": rest[1:], "lr": other_rate, "peak": other_rate},
            ],
            betas=(0.9, 0.95),
            weight_decay=0.0,
            fused=True,
        )

    def zero_grad(self) -> None:
        """Clear gradients, keeping the buffers that the projections' views point into."""
        self.adam.zero_grad(set_to_none=False)
        for pairs in self.groups.values():
            for _, grad in pairs:
                grad.zero_()

    @torch.no_grad()
    def step(self, scale: float) -> None:
        """Apply one update at ``scale`` (0 to 1) times the peak rates."""
        for shape, pairs in self.groups.items():
            grad = torch.cat([g for _, g in pairs])
            momentum = self.momentum[shape].lerp_(grad, 0.05)
            update = orthogonalise(grad.lerp_(momentum, 0.95))
            rate = scale * self.matrix_rate
            start = 0
            for view, _ in pairs:
                view.mul_(1 - rate * self.decay)
                view.sub_(update[start : start + len(view)], alpha=rate)
                start += len(view)
        for group in self.adam.param_groups:
            group["lr"] = scale * group["peak"]
        self.adam.step()

    def state(self) -> dict[str, Tensor]:
        """Every state tensor by name, for a safetensors file."""
        state = {f"muon.{r}x{c}": m for (r, c), m in self.momentum.items()}
        for number, entry in self.adam.state_dict()["state"].items():
            state |= {f"adam.{number}.{key}": value for key, value in entry.items()}
        return state

    def load(self, state: dict[str, Tensor]) -> None:
        """Restore what :meth:`state` returned."""
        for (r, c), momentum in self.momentum.items():
            momentum.copy_(state[f"muon.{r}x{c}"])
        whole = self.adam.state_dict()
        entries: dict[int, dict[str, Tensor]] = {}
        for name, value in state.items():
            if name.startswith("adam."):
                _, number, key = name.split(".")
                entries.setdefault(int(number), {})[key] = value
        self.adam.load_state_dict({**whole, "state": entries})
