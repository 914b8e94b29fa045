"""Which experts the next layers of this token will ask for, guessed from the layers before.

What a token chooses in one layer says much about what it chooses in the next ones (a guess of top_k
experts one layer ahead is right for about two thirds of them on gpt-oss-20b, and hardly worse three
layers ahead). For every layer and distance d a table counts

    C_d[l][i, e]   how often e was chosen at layer l by a token that chose i at layer l - d
    N_d[l][i]      how often i was chosen there

and with the marginal q_e of layer l the guess is ranked by its log chance

    ln q_e + mean over d of sum over i chosen at layer l - d of
             ln( (C_d[i, e] + 8 q_e) / ((N_d[i] + 8) q_e) )

over the latest `NUM_SOURCES` layers that are known. Nothing is guessed across the end of a
token, nor from a batch of rows, of which nobody knows here which row chose what. A guess costs
bandwidth that nobody else wants and the slot of the expert that is worth least; so only the best
guesses are named, and only experts of a chance above one half.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from orchestrator.core.policies import DemandShape
    from protocol.messages import ExpertId, ExpertKey, LayerId

NUM_SOURCES = 2
PRIOR = 8.0
#: A guess is named when it is among the `top_k` best of its layer and at least so likely.
LEAST_CHANCE = 0.5


class Foresight:
    """`chose` after every layer-step of one row, then `expected`. Memory: num_layers x NUM_SOURCES
    x num_experts^2 x 4 bytes for each layer of `num_ahead`."""

    __slots__ = ("_ahead", "_chosen", "_counts", "_marginal", "_pairs", "_shape")

    def __init__(self, shape: DemandShape, num_ahead: int) -> None:
        """ValueError unless the shape is known and `num_ahead` 1 or more."""
        if min(shape.num_layers, shape.num_experts, shape.top_k, num_ahead) < 1:
            raise ValueError("foresight needs a known shape and looks 1 layer ahead or more")
        self._shape = shape
        self._ahead = max(min(num_ahead, shape.num_layers - 1), 1)
        distances = self._ahead + NUM_SOURCES - 1
        layers, experts = shape.num_layers, shape.num_experts
        self._counts = np.zeros((distances, layers, experts, experts), np.float32)
        self._pairs = np.zeros((distances, layers, experts), np.float32)
        self._marginal = np.ones((layers, experts), np.float32)
        #: What this token has chosen, by layer.
        self._chosen: list[list[int]] = [[] for _ in range(layers)]

    def chose(self, layer: LayerId, experts: Sequence[ExpertId]) -> None:
        """One row chose these; more than top_k of them are several rows and teach nothing."""
        if layer == 0:
            for row in self._chosen:
                row.clear()
        if len(experts) > self._shape.top_k:
            self._chosen[layer] = []
            return
        now = list(experts)
        self._marginal[layer, now] += 1.0
        for distance in range(1, min(len(self._counts), layer) + 1):
            sources = self._chosen[layer - distance]
            if sources:
                self._counts[distance - 1, layer][np.ix_(sources, now)] += 1.0
                self._pairs[distance - 1, layer, sources] += 1.0
        self._chosen[layer] = [int(expert) for expert in experts]

    def expected(self, layer: LayerId) -> list[ExpertKey]:
        """The likeliest experts of the layers after `layer`, the nearest layer first."""
        expected: list[ExpertKey] = []
        last = min(layer + self._ahead, self._shape.num_layers - 1)
        for target in range(layer + 1, last + 1):
            expected += self._guess(target, layer)
        return expected

    def _guess(self, target: int, known: int) -> list[ExpertKey]:
        top_k = self._shape.top_k
        marginal = self._marginal[target]
        share = marginal * (top_k / marginal.sum())
        evidence = np.zeros_like(share)
        num_sources = 0
        for source in range(known, max(known - NUM_SOURCES, -1), -1):
            chosen = self._chosen[source]
            distance = target - source
            if not chosen or distance > len(self._counts):
                continue
            counts = self._counts[distance - 1, target][chosen]
            pairs = self._pairs[distance - 1, target, chosen]
            ratio = (counts + PRIOR * share) / ((pairs[:, None] + PRIOR) * share)
            evidence += np.log(ratio + 1e-3).sum(axis=0)
            num_sources += 1
        scores = np.log(share) + evidence / max(num_sources, 1)
        order = np.argsort(-scores)[:top_k]
        return [
            (target, int(expert))  # type: ignore[misc]
            for expert in order
            if scores[expert] > math.log(LEAST_CHANCE)
        ]
