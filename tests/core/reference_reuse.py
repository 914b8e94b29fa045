"""The reuse policy again, slow and obvious: plain floats, the formulas as they are written."""

from __future__ import annotations

import math
from collections import defaultdict

LN = math.log


def sigmoid(z: float) -> float:
    return 1 / (1 + math.exp(-z))


class ReferenceReuse:
    def __init__(self, num_layers: int, num_experts: int, top_k: int, num_tables: int) -> None:
        self.L, self.E, self.K, self.J = num_layers, num_experts, top_k, num_tables
        self.p0 = top_k / num_experts
        self.c = self.p0 / 40
        self.t = 0
        self.r = defaultdict(lambda: {2: self.p0, 16: self.p0, 128: self.p0})
        self.m = defaultdict(lambda: 1)
        self.pairs = defaultdict(int)  # (j, layer, source, expert)
        self.sightings = defaultdict(int)  # (j, layer, source)
        #: What each layer chose, visit by visit.
        self.visits: list[list[list[int]]] = [[] for _ in range(num_layers)]
        self.worth: dict[tuple[int, int], float] = {}

    def chosen_at(self, layer: int, lag: int, tokens_ago: int) -> list[int]:
        """What layer - lag chose in the token before last (1) or in this one (0), as seen from
        `layer`, whose own choice of this token is in `visits` already."""
        source = (layer - lag) % self.L
        # A later layer number has not run in this token yet.
        have = self.visits[source]
        return have[-1 - tokens_ago] if len(have) > tokens_ago else []

    def layer_step(self, layer: int, experts: list[int]) -> None:
        self.t += 1
        is_one_row = len(experts) <= 2 * self.K
        self.visits[layer].append(experts if is_one_row else [])
        if is_one_row:
            for j in range(self.J):
                for source in self.chosen_at(layer, j, 1):
                    self.sightings[j, layer, source] += 1
                    for expert in experts:
                        self.pairs[j, layer, source, expert] += 1
        for expert in range(self.E):
            chosen = float(expert in experts)
            self.m[layer, expert] += int(chosen)
            r = self.r[layer, expert]
            for h in r:
                r[h] = r[h] * 2 ** (-1 / h) + (1 - 2 ** (-1 / h)) * chosen
        total = sum(self.m[layer, expert] for expert in range(self.E))
        for expert in range(self.E):
            r = self.r[layer, expert]
            z = LN(self.p0 / (1 - self.p0))
            for h, w in ((2, 0.15), (16, 0.35), (128, 0.30)):
                z += w * LN((r[h] + self.c) / (self.p0 + self.c))
            q = self.K * self.m[layer, expert] / total
            evidence = 0.0
            for j in range(self.J):
                for source in self.chosen_at(layer, j, 0):
                    seen = self.sightings[j, layer, source]
                    both = self.pairs[j, layer, source, expert]
                    evidence += LN((both + 8 * q) / ((seen + 8) * q) + 0.001)
            p1 = sigmoid(z + min(max(0.2 * evidence, -6), 6))
            pm = sigmoid(z)
            g = math.exp(-1 / 1.5)
            value = LN(p1 + (1 - p1) * g * pm / (1 - (1 - pm) * g))
            self.worth[layer, expert] = value - (self.t / self.L + 1) / 1.5
