"""Embeddings that already know which token follows which, before the network is trained.

On two CPU cores the budget is too short for a random embedding to see a rare token often enough.
Counting all neighbouring pairs of the corpus takes a second, and fitting the table's low-rank
logarithm with the network's own read-out (RMS norm, then the output head) takes about a minute.
Training proper then starts from a bigram model instead of from noise.
"""

from __future__ import annotations

import torch
from torch import Tensor

EMBEDDING_RMS = 0.5
"""Root mean square of each embedding row; the read-out's norm makes the scale free."""


def pair_counts(stream: Tensor, vocabulary: int) -> Tensor:
    """Counts [V, V] (float32) of token pairs: row is the earlier token, column the later one."""
    pairs = stream[:-1].long() * vocabulary + stream[1:].long()
    return pairs.bincount(minlength=vocabulary**2).view(vocabulary, vocabulary).float()


def bigram_embeddings(
    stream: Tensor, vocabulary: int, hidden: int, steps: int = 50, smoothing: float = 4.0
) -> tuple[Tensor, Tensor, float]:
    """Input embedding and output head whose composition approximates the bigram table.

    Args:
        stream: int32 token ids of the corpus.
        vocabulary: V.
        hidden: H, the rank of the approximation.
        steps: full-batch Adam steps after the factorisation.
        smoothing: pseudo-count of the unigram distribution in each row.

    Returns:
        embedding [V, H], head [V, H], and the fitted bigram cross-entropy in nats a token.
    """
    counts = pair_counts(stream, vocabulary)
    total = counts.sum()
    unigram = (counts.sum(0) + 0.5) / (total + 0.5 * vocabulary)
    seen = counts.sum(1, keepdim=True)
    weight = (seen / total).sqrt().clamp_min(1e-4)
    table = (counts + smoothing * unigram).div_(seen + smoothing)
    information = (table / unigram).log_().clamp_(-3, 8).mul_(weight)
    left, sizes, right = torch.svd_lowrank(information, q=hidden - 1, niter=2)
    rows = left * sizes.sqrt() / weight
    rows /= rows.square().sum(1).mean().sqrt()
    embedding = torch.cat((rows, torch.full((vocabulary, 1), 0.7)), 1)
    columns = right * sizes.sqrt()
    head = torch.cat((columns / columns.std() * 0.15, unigram.log()[:, None] * 0.1), 1)
    share = seen.squeeze(1) / total
    order = share.argsort(descending=True)
    embedding.requires_grad_()
    head.requires_grad_()
    optimiser = torch.optim.Adam([embedding, head], lr=0.03, betas=(0.8, 0.95), fused=True)
    loss = 0.0
    for step in range(steps):
        optimiser.param_groups[0]["lr"] = 0.03 * (1 - step / steps)
        optimiser.zero_grad()
        loss = 0.0
        for part in order.split(512):
            x = torch.nn.functional.rms_norm(embedding[part], (hidden,), eps=1e-6)
            log_probs = (x @ head.T).log_softmax(1)
            cost = -(share[part] * (table[part] * log_probs).sum(1)).sum()
            cost.backward()
            loss += cost.item()
        optimiser.step()
    with torch.no_grad():
        scale = embedding.square().mean(1, keepdim=True).sqrt()
        return (embedding / scale * EMBEDDING_RMS).detach(), head.detach(), loss
