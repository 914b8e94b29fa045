"""Policies that score every expert, placed or not: the order of victims, and decayed frequency.

*State.* Two float64 arrays [num_layers, num_experts]: `worth` of every expert, placed or not, and
`rank`, which is the worth of the placed ones and +inf elsewhere. The next victim is an argmin over
the least of each layer; these are kept, and looked for again only in layers where something has
changed since. Worths are comparable across layers at any moment.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy.typing as npt

    from protocol.messages import ExpertId, ExpertKey, LayerId

    Floats = npt.NDArray[np.float64]

LFU_HALF_LIFE_VISITS = 16.0

_INF = math.inf
#: Guess for top_k while nobody has said it: most models choose 8 or 4.
_GUESSED_TOP_K = 4


class ScoredPolicy:
    """The order of victims by a worth per expert. Subclasses say what an expert is worth.

    The shape may be left out (0): it then grows with what is seen, at the cost of a worse start.
    """

    __slots__ = (
        "_head_of",
        "_heads",
        "_num_experts",
        "_num_layers",
        "_rank",
        "_stale",
        "_top_k",
        "_worth",
    )

    def __init__(self, num_layers: int = 0, num_experts: int = 0, top_k: int = 0) -> None:
        """ValueError if a number is negative or top_k exceeds num_experts."""
        if min(num_layers, num_experts, top_k) < 0 or top_k > num_experts > 0:
            raise ValueError(
                f"no model has {num_layers} layers of {num_experts} experts with top_k {top_k}"
            )
        self._num_layers = num_layers
        self._num_experts = num_experts
        self._top_k = top_k or _GUESSED_TOP_K
        self._worth: Floats = np.zeros((num_layers, num_experts))
        self._rank: Floats = np.full((num_layers, num_experts), _INF)
        #: Of each layer the placed expert of least worth, and that worth; wrong for stale layers.
        self._heads: Floats = np.full(num_layers, _INF)
        self._head_of = [0] * num_layers
        self._stale: set[int] = set()

    # ---- what the directory says ----

    def layer_step(self, layer: LayerId, experts: Sequence[ExpertId]) -> None:
        raise NotImplementedError

    def refreshed(self, key: ExpertKey) -> None:
        pass  # Demand was counted by layer_step, where misses that never get a slot count too.

    def admitted(self, key: ExpertKey) -> None:
        self._make_room(key[0], key[1])
        worth = float(self._worth[key])
        self._rank[key] = worth
        layer = key[0]
        head = self._heads[layer]
        # Of equals the first, as argmin has it: whether somebody looked meanwhile decides nothing.
        if worth < head or (worth == head and key[1] < self._head_of[layer]):
            self._heads[layer] = worth
            self._head_of[layer] = key[1]

    def removed(self, key: ExpertKey) -> None:
        self._rank[key] = _INF
        if self._head_of[key[0]] == key[1]:
            self._stale.add(key[0])

    def cleared(self) -> None:
        self._rank.fill(_INF)
        self._stale.update(range(self._num_layers))

    def victims(self, incoming: ExpertKey | None) -> Iterator[ExpertKey]:
        rank, heads, head_of = self._rank, self._heads, self._head_of
        for layer in self._stale:
            row = rank[layer]
            expert = int(row.argmin())
            head_of[layer] = expert
            heads[layer] = row[expert]
        self._stale.clear()
        if not head_of:
            return
        layer = int(heads.argmin())
        if heads[layer] == _INF:
            return
        yield layer, head_of[layer]  # type: ignore[misc]
        # The first nearly always may leave; only when it may not are copies worth their time.
        heads, head_of = heads.copy(), head_of.copy()
        rows: dict[int, Floats] = {}
        while True:
            row = rows[layer] if layer in rows else rows.setdefault(layer, rank[layer].copy())
            row[head_of[layer]] = _INF
            expert = int(row.argmin())
            head_of[layer] = expert
            heads[layer] = row[expert]
            layer = int(heads.argmin())
            if heads[layer] == _INF:
                return
            yield layer, head_of[layer]  # type: ignore[misc]

    # ---- admission and the choice of fills ----

    def worth(self, key: ExpertKey) -> float:
        """What keeping `key` is worth now, placed or not; only the order of worths means
        something."""
        self._make_room(key[0], key[1])
        return float(self._worth[key])

    # ---- growth ----

    def _make_room(self, layer: int, expert: int) -> None:
        if layer < self._num_layers and expert < self._num_experts:
            return
        self._grow(max(layer + 1, self._num_layers), max(expert + 1, self._num_experts))

    def _grow(self, num_layers: int, num_experts: int) -> None:
        worth = np.zeros((num_layers, num_experts))
        rank = np.full((num_layers, num_experts), _INF)
        worth[: self._num_layers, : self._num_experts] = self._worth
        rank[: self._num_layers, : self._num_experts] = self._rank
        self._worth, self._rank = worth, rank
        self._heads = np.full(num_layers, _INF)
        self._head_of = [0] * num_layers
        self._stale = set(range(num_layers))
        self._num_layers, self._num_experts = num_layers, num_experts


class DecayedLfu(ScoredPolicy):
    """Least frequently chosen first, where a choice counts half after 16 more visits of its layer.

    worth = log2 of the sum, over the visits v at which it was chosen, of 2^(v / 16), less now / 16
    for a layer that is ahead by a visit. Every expert decays alike, so nothing has to be touched
    but what was chosen.
    """

    __slots__ = ("_visits",)

    def __init__(self, num_layers: int = 0, num_experts: int = 0, top_k: int = 0) -> None:
        super().__init__(num_layers, num_experts, top_k)
        self._worth.fill(-_INF)  # never chosen
        self._visits = [0] * num_layers

    def layer_step(self, layer: LayerId, experts: Sequence[ExpertId]) -> None:
        self._make_room(layer, max(experts, default=0))
        self._visits[layer] += 1
        now = self._visits[layer] / LFU_HALF_LIFE_VISITS
        worth, rank = self._worth[layer], self._rank[layer]
        for expert in experts:
            old = float(worth[expert])
            new = now + math.log2(1.0 + 2.0 ** (old - now))
            worth[expert] = new
            if rank[expert] != _INF:
                rank[expert] = new
        self._stale.add(layer)

    def _grow(self, num_layers: int, num_experts: int) -> None:
        old_shape = self._worth.shape
        super()._grow(num_layers, num_experts)
        self._worth[old_shape[0] :, :] = -_INF
        self._worth[:, old_shape[1] :] = -_INF
        self._visits += [0] * (num_layers - len(self._visits))
