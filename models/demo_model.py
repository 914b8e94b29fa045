"""The demo checkpoint's network and a training step that is quick on two CPU cores.

The parameters live in a stock ``Qwen3MoeForCausalLM``, so that saving and evaluating use
Transformers itself.  Training runs the same mathematics through :func:`training_forward`, whose
autograd functions sort tokens by expert, fuse the loss with its gradient and avoid temporaries:
quicker in float32 on a CPU without bf16 units than the stock forward, which it matches.

Shapes: B sequences of S tokens, N = B*S, H hidden, I expert width, E experts, K experts a token,
V vocabulary.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Lock
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

CONTEXT = 2048
"""max_position_embeddings, in tokens."""


def demo_config(vocab_size: int, end_id: int) -> Qwen3MoeConfig:
    """The architecture: 8 layers of 24 experts, 4 a token, 6.2 M parameters."""
    return Qwen3MoeConfig(
        vocab_size=vocab_size,
        hidden_size=128,
        intermediate_size=128,
        moe_intermediate_size=64,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=24,
        num_experts_per_tok=4,
        norm_topk_prob=True,
        max_position_embeddings=CONTEXT,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=False,
        router_aux_loss_coef=0.01,
        bos_token_id=end_id,
        eos_token_id=end_id,
    )


class _RmsNorm(torch.autograd.Function):
    """RMS norm over the last dimension with a hand-written gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        scale = (torch.linalg.vecdot(x, x).div_(x.shape[-1]).add_(eps)).rsqrt_().unsqueeze(-1)
        unit = x * scale
        ctx.save_for_backward(unit, scale, weight)
        return unit * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        unit, scale, weight = ctx.saved_tensors
        grad_weight = (grad * unit).flatten(0, -2).sum(0)
        inner = grad * weight
        mean = torch.linalg.vecdot(inner, unit).div_(unit.shape[-1]).unsqueeze(-1)
        return inner.addcmul_(unit, mean, value=-1).mul_(scale), grad_weight, None


class _Experts(torch.autograd.Function):
    """SwiGLU experts on tokens sorted by expert, one matrix product an expert."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weights: Tensor, index: Tensor, gate_up: Tensor, down: Tensor
    ) -> Tensor:
        n, k = index.shape
        width = down.shape[-1]
        order = index.flatten().argsort(stable=True)
        place = torch.empty_like(order)
        place[order] = torch.arange(n * k)
        ends = index.flatten().bincount(minlength=len(down)).cumsum(0).tolist()
        token = order.div(k, rounding_mode="floor")
        rows = x.index_select(0, token)
        hidden = x.new_empty(n * k, 2 * width)
        out = torch.empty_like(rows)
        starts = [0, *ends[:-1]]
        for expert, (a, b) in enumerate(zip(starts, ends, strict=True)):
            torch.mm(rows[a:b], gate_up[expert].T, out=hidden[a:b])
        act = F.silu(hidden[:, :width]) * hidden[:, width:]
        for expert, (a, b) in enumerate(zip(starts, ends, strict=True)):
            torch.mm(act[a:b], down[expert].T, out=out[a:b])
        out = out.index_select(0, place).view(n, k, -1)
        ctx.save_for_backward(rows, hidden, act, out, weights, token, order, place, gate_up, down)
        ctx.spans = list(zip(starts, ends, strict=True))
        return torch.bmm(weights.unsqueeze(1), out).squeeze(1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        rows, hidden, act, out, weights, token, order, place, gate_up, down = ctx.saved_tensors
        n, k = weights.shape
        width = down.shape[-1]
        grad_weights = torch.bmm(out, grad.unsqueeze(-1)).squeeze(-1)
        grad_out = grad.index_select(0, token)
        grad_out.mul_(weights.flatten().index_select(0, order).unsqueeze(-1))
        grad_act = torch.empty_like(act)
        grad_down = torch.empty_like(down)
        for expert, (a, b) in enumerate(ctx.spans):
            torch.mm(grad_out[a:b], down[expert], out=grad_act[a:b])
            torch.mm(grad_out[a:b].T, act[a:b], out=grad_down[expert])
        gate, up = hidden[:, :width], hidden[:, width:]
        sig = gate.sigmoid()
        grad_hidden = torch.empty_like(hidden)
        torch.mul(grad_act, gate * sig, out=grad_hidden[:, width:])
        slope = sig * (1 + gate * (1 - sig))
        torch.mul(grad_act.mul_(up), slope, out=grad_hidden[:, :width])
        grad_rows = grad_out  # its values are spent: reuse the memory
        grad_gate_up = torch.empty_like(gate_up)
        for expert, (a, b) in enumerate(ctx.spans):
            torch.mm(grad_hidden[a:b], gate_up[expert], out=grad_rows[a:b])
            torch.mm(grad_hidden[a:b].T, rows[a:b], out=grad_gate_up[expert])
        grad_x = grad_rows.index_select(0, place).view(n, k, -1).sum(1)
        return grad_x, grad_weights, None, grad_gate_up, grad_down


class _HeadLoss(torch.autograd.Function):
    """Mean cross-entropy of ``x @ head.T`` in nats, gradients computed chunk by chunk."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, head: Tensor, target: Tensor) -> Tensor:
        grad_x = torch.empty_like(x)
        grad_head = torch.zeros_like(head)
        total = 0.0
        for rows, labels, grads in zip(
            x.split(512), target.split(512), grad_x.split(512), strict=True
        ):
            logits = rows @ head.T
            norm = logits.logsumexp(1, keepdim=True)
            total += (norm - logits.gather(1, labels[:, None])).sum().item()
            probs = logits.sub_(norm).exp_()
            probs[torch.arange(len(labels)), labels] -= 1
            probs.div_(len(x))
            torch.mm(probs, head, out=grads)
            grad_head.addmm_(probs.T, rows)
        ctx.save_for_backward(grad_x, grad_head)
        return x.new_tensor(total / len(x))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        grad_x, grad_head = ctx.saved_tensors
        return grad_x * grad, grad_head * grad, None


@dataclass
class StepLosses:
    """What one batch yields.

    Attributes:
        text: cross-entropy, nats a token (scalar).
        balance: load-balance loss, 1 where every expert is used alike (scalar, mean of layers).
        sticky: -log of the router's mass on the previous token's experts, nats (scalar, mean).
        overlap: share of a token's experts that the previous token used too, 0 to 1.
        busiest: load of the busiest expert over the mean load, worst layer.
        idlest: load of the least used expert over the mean load, worst layer.
    """

    text: Tensor
    balance: Tensor
    sticky: Tensor
    overlap: float
    busiest: float
    idlest: float


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of ``x`` [B, heads, S, D] by ``cos`` and ``sin`` [S, D]."""
    low, high = x.chunk(2, -1)
    return x * cos + torch.cat((-high, low), -1) * sin


def initial_model(config: Qwen3MoeConfig, embedding: Tensor, head: Tensor) -> Qwen3MoeForCausalLM:
    """A float32 network that starts as the bigram model of ``embedding`` and ``head`` [V, H].

    Attention and experts start with zero outputs, so that nothing disturbs the embeddings.
    """
    model = Qwen3MoeForCausalLM(config).float()
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(embedding)
        model.lm_head.weight.copy_(head)
        for layer in model.model.layers:
            layer.mlp.gate.weight.normal_(0, 0.05)
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.experts.down_proj.zero_()
    return model


def training_forward(model: Qwen3MoeForCausalLM, tokens: Tensor) -> StepLosses:
    """Losses of ``tokens`` [B, S+1] (int64): position t predicts position t+1."""
    config = model.config
    batch, length = tokens.shape[0], tokens.shape[1] - 1
    heads, groups, dim = (
        config.num_attention_heads,
        config.num_key_value_heads,
        config.head_dim,
    )
    eps = config.rms_norm_eps
    experts, top_k = config.num_experts, config.num_experts_per_tok
    cos, sin = model.model.rotary_emb(
        model.lm_head.weight, torch.arange(length, dtype=torch.long)[None]
    )
    cos, sin = cos[0], sin[0]
    x = F.embedding(tokens[:, :-1].reshape(-1), model.model.embed_tokens.weight)
    balance = sticky = x.new_zeros(())
    overlaps, loads = [], []
    for layer in model.model.layers:
        attn, mlp = layer.self_attn, layer.mlp
        y = _RmsNorm.apply(x, layer.input_layernorm.weight, eps)
        q = F.linear(y, attn.q_proj.weight).view(batch, length, heads, dim)
        k = F.linear(y, attn.k_proj.weight).view(batch, length, groups, dim)
        v = F.linear(y, attn.v_proj.weight).view(batch, length, groups, dim)
        q = _rotate(_RmsNorm.apply(q, attn.q_norm.weight, eps).transpose(1, 2), cos, sin)
        k = _rotate(_RmsNorm.apply(k, attn.k_norm.weight, eps).transpose(1, 2), cos, sin)
        k = k.repeat_interleave(heads // groups, 1)
        v = v.transpose(1, 2).repeat_interleave(heads // groups, 1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + F.linear(y.transpose(1, 2).reshape(-1, heads * dim), attn.o_proj.weight)
        y = _RmsNorm.apply(x, layer.post_attention_layernorm.weight, eps)
        probs = F.linear(y, mlp.gate.weight).softmax(-1)
        weights, index = probs.topk(top_k, -1)
        weights = weights / weights.sum(-1, keepdim=True)
        x = x + _Experts.apply(y, weights, index, mlp.experts.gate_up_proj, mlp.experts.down_proj)
        load = index.flatten().bincount(minlength=experts) / index.numel()
        balance = balance + experts * (load * probs.mean(0)).sum()
        chosen = index.view(batch, length, top_k)
        kept = probs.view(batch, length, experts)[:, 1:].gather(-1, chosen[:, :-1]).sum(-1)
        sticky = sticky - kept.clamp_min(1e-6).log().mean()
        same = chosen[:, 1:, :, None] == chosen[:, :-1, None, :]
        overlaps.append(float(same.any(-1).float().mean()))
        loads.append(load * experts)
    x = _RmsNorm.apply(x, model.model.norm.weight, eps)
    layers = config.num_hidden_layers
    return StepLosses(
        text=_HeadLoss.apply(x, model.lm_head.weight, tokens[:, 1:].reshape(-1)),
        balance=balance / layers,
        sticky=sticky / layers,
        overlap=sum(overlaps) / layers,
        busiest=float(torch.stack(loads).max()),
        idlest=float(torch.stack(loads).min()),
    )


class ParallelStep:
    """Gradients of a batch by a pool of threads, each running single-threaded kernels.

    A thread takes a part of the batch when it is free, so that another process on one of the
    cores slows a step by what it takes and no more; kernels that split each product over the
    cores would wait for the slower core thousands of times a step.
    """

    def __init__(self, model: Qwen3MoeForCausalLM, threads: int, parts: int) -> None:
        self.model, self.parts = model, parts
        self.params = list(model.parameters())
        self.pool = ThreadPoolExecutor(threads)
        self.lock = Lock()
        torch.set_num_threads(1)

    def __call__(self, tokens: Tensor, balance: float, sticky: float) -> StepLosses:
        """Add the gradients of ``tokens`` [B, S+1] to ``.grad``; returns the mean losses.

        Args:
            tokens: int64 token ids; B is split into ``parts``.
            balance: weight of the load-balance loss.
            sticky: weight of the loss that keeps the previous token's experts.
        """

        def work(part: Tensor) -> StepLosses:
            losses = training_forward(self.model, part)
            total = losses.text + balance * losses.balance + sticky * losses.sticky
            grads = torch.autograd.grad(total * (len(part) / len(tokens)), self.params)
            with self.lock:
                torch._foreach_add_([p.grad for p in self.params], list(grads))
            losses.text, losses.balance, losses.sticky = (
                value.detach() for value in (losses.text, losses.balance, losses.sticky)
            )
            return losses

        done = list(self.pool.map(work, tokens.chunk(self.parts)))
        mean = {
            name: sum(getattr(losses, name) for losses in done) / len(done)
            for name in StepLosses.__dataclass_fields__
        }
        return StepLosses(**mean)
