"""Policies that score every expert: decayed frequency, and the chance and time of the next use.

*State.* Two float64 arrays [num_layers, num_experts]: `worth` of every expert, placed or not, and
`rank`, which is the worth of the placed ones and +inf elsewhere, so that the next victim is an
argmin. Worths are comparable across layers at any moment; they change only when their own layer
runs, and that is where the work is: one fixed sequence of ufuncs over one row, into arrays that
exist already. Calls are what costs at this size, not elements.

*Reuse.* What is estimated for an expert e of layer l is E[exp(-wait / 1.5 tokens)], the discounted
time to its next use. Let x be 1 when e is chosen at a visit of its layer, p0 = top_k / num_experts
and c = p0 / 40. Three decayed frequencies r_h (half-lives h = 2, 16, 128 visits, p0 at the start)
give the log-odds

    z = logit(p0) + sum over h of w_h ln((r_h + c) / (p0 + c))     w = 0.15, 0.35, 0.30

of being chosen at a visit. With p the chance at the next visit, s = sigmoid(z) that at every later
one, and g = exp(-1 / 1.5), the waiting time is geometric after the first visit:

    V = ln( p + (1 - p) g s / (1 - (1 - s) g) )
    worth = V - (visit_time + 1 token) / (1.5 tokens)

The second term is the cyclic distance: a layer that has just run comes back last, so its experts
are worth less than equals of a layer that is about to run. Without tables p = s and
V = -ln(1 + (1 - g) exp(-z)); so two transcendental calls replace six.

*Tables* (`Reuse(num_tables=4)`). What was chosen at layers l, l-1, .. of this token says more about
layer l of the next token than any frequency. T_j[l][i, e] counts how often e was chosen at layer l
one token after i was chosen at layer l - j (layers wrap), N_j[l][i] how often there was such a
pair to learn from, and q_e = top_k m_e / sum(m) is the marginal with m_e the choices of e plus 1:

    evidence_e = sum over j, over i chosen at layer l - j now, of
                 ln( (T_j[i, e] + 8 q_e) / ((N_j[i] + 8) q_e) + 0.001 )
    p = sigmoid(z + clip(0.2 evidence, -6, 6))

The 8 q prior makes a young table silent. The sum of logs is taken as the log of a product, in
float64, because 32 logs per expert would cost more than all the rest.

A batch of rows (a prefill) counts in the frequencies but teaches no pairs: which of its rows chose
what is not known here.

Source: Headrace's own replay study of public routing traces; the constants were fitted on two
models and tested on four others. They are the same for every model.
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
    Singles = npt.NDArray[np.float32]
    Indices = npt.NDArray[np.intp]

LFU_HALF_LIFE_VISITS = 16.0

HALF_LIVES_VISITS = (2.0, 16.0, 128.0)
HALF_LIFE_WEIGHTS = (0.15, 0.35, 0.30)
#: The floor under a decayed frequency, as a part of p0.
FLOOR_PART = 1 / 40
DISCOUNT_TOKENS = 1.5
TABLE_PRIOR = 8.0
EVIDENCE_FLOOR = 0.001
EVIDENCE_WEIGHT = 0.2
EVIDENCE_LIMIT = 6.0
DEFAULT_NUM_TABLES = 4

_DISCOUNT = math.exp(-1 / DISCOUNT_TOKENS)
_INF = math.inf
#: Guess for top_k while nobody has said it: most models choose 8 or 4.
_GUESSED_TOP_K = 4


class ScoredPolicy:
    """The order of victims by a worth per expert. Subclasses say what an expert is worth.

    The shape may be left out (0): it then grows with what is seen, at the cost of a worse start.
    """

    __slots__ = ("_num_experts", "_num_layers", "_rank", "_top_k", "_worth")

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

    # ---- what the directory says ----

    def layer_step(self, layer: LayerId, experts: Sequence[ExpertId]) -> None:
        raise NotImplementedError

    def refreshed(self, key: ExpertKey) -> None:
        pass  # Demand was counted by layer_step, where misses that never get a slot count too.

    def admitted(self, key: ExpertKey) -> None:
        self._make_room(key[0], key[1])
        self._rank[key] = self._worth[key]

    def removed(self, key: ExpertKey) -> None:
        self._rank[key] = _INF

    def cleared(self) -> None:
        self._rank.fill(_INF)

    def victims(self, incoming: ExpertKey | None) -> Iterator[ExpertKey]:
        rank = self._rank
        if not rank.size:
            return
        num_experts = self._num_experts
        is_first = True
        while True:
            index = int(rank.argmin())
            key: ExpertKey = divmod(index, num_experts)  # type: ignore[assignment]
            if rank[key] == _INF:
                return
            yield key
            # The first one nearly always may leave; only when it may not is a copy worth its time.
            if is_first:
                rank = rank.copy()
                is_first = False
            rank[key] = _INF

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

    def _grow(self, num_layers: int, num_experts: int) -> None:
        old_shape = self._worth.shape
        super()._grow(num_layers, num_experts)
        self._worth[old_shape[0] :, :] = -_INF
        self._worth[:, old_shape[1] :] = -_INF
        self._visits += [0] * (num_layers - len(self._visits))


class Reuse(ScoredPolicy):
    """Least expected discounted reuse first; see the module for the formulas."""

    __slots__ = (
        "_buffer",
        "_chosen",
        "_constant",
        "_decay",
        "_floor",
        "_gain",
        "_is_placed",
        "_latest",
        "_log_weights",
        "_num_tables",
        "_odds",
        "_pairs",
        "_previous",
        "_products",
        "_spare",
        "_state",
        "_sums",
        "_tables",
        "_tick",
        "_value",
    )

    def __init__(
        self,
        num_layers: int = 0,
        num_experts: int = 0,
        top_k: int = 0,
        *,
        num_tables: int = 0,
    ) -> None:
        """`num_tables` source layers, 0 for the table-free form: memory of the tables is
        num_layers x num_tables x num_experts^2 x 4 bytes."""
        super().__init__(num_layers, num_experts, top_k)
        if num_tables < 0:
            raise ValueError(f"{num_tables} tables are not possible")
        self._num_tables = num_tables
        self._tick = 0
        self._state: Singles
        self._is_placed: npt.NDArray[np.bool_]
        self._tables: Singles
        self._pairs: Singles
        self._set_up(0, 0)

    def layer_step(self, layer: LayerId, experts: Sequence[ExpertId]) -> None:
        self._make_room(layer, max(experts, default=0))
        chosen = np.array(experts, dtype=np.intp)
        self._tick += 1
        self._count(layer, chosen)
        # exp(-z), into `odds`: the odds against being chosen at a later visit.
        buffer, odds, value = self._buffer, self._odds, self._value
        np.add(self._state[layer, :3], self._floor, out=buffer)
        np.log(buffer, out=buffer)
        np.dot(self._log_weights, buffer, out=odds)
        np.add(odds, self._constant, out=odds)
        if self._num_tables:
            self._see(layer, chosen)
            evidence = self._evidence(layer)
            np.subtract(odds, evidence, out=value)
            np.exp(value, out=value)  # odds against being chosen at the next visit
            np.exp(odds, out=odds)
            spare = self._spare
            # V = ln( (1 + g B / (1 + (1 - g) A)) / (1 + B) ), A = `odds`, B = `value`
            np.multiply(odds, 1 / _DISCOUNT - 1, out=odds)
            np.add(odds, 1 / _DISCOUNT, out=odds)
            np.divide(value, odds, out=spare)
            np.add(spare, 1.0, out=spare)
            np.add(value, 1.0, out=value)
            np.divide(spare, value, out=value)
            np.log(value, out=value)
        else:
            # V = -ln( 1 + (1 - g) A )
            np.exp(odds, out=value)
            np.multiply(value, 1 - _DISCOUNT, out=value)
            np.log1p(value, out=value)
            np.negative(value, out=value)
        # In float64, because the time grows without end and the differences must stay.
        distance = (self._tick / self._num_layers + 1) / DISCOUNT_TOKENS
        worth = self._worth[layer]
        np.subtract(value, distance, out=worth)
        np.copyto(self._rank[layer], worth, where=self._is_placed[layer])

    def admitted(self, key: ExpertKey) -> None:
        super().admitted(key)
        self._is_placed[key] = True

    def removed(self, key: ExpertKey) -> None:
        super().removed(key)
        self._is_placed[key] = False

    def cleared(self) -> None:
        super().cleared()
        self._is_placed.fill(False)

    # ---- the parts of a layer-step ----

    def _count(self, layer: int, chosen: Indices) -> None:
        """Decay and raise the three frequencies, and count the choices (the fourth row)."""
        state, flags = self._state[layer], self._chosen
        flags[chosen] = 1.0
        np.multiply(state, self._decay, out=state)
        np.multiply(self._gain, flags, out=self._sums)
        np.add(state, self._sums, out=state)
        flags[chosen] = 0.0

    def _see(self, layer: int, chosen: Indices) -> None:
        """Learn the pairs (what was chosen a token ago, what is chosen now), then remember."""
        is_one_row = len(chosen) <= 2 * self._top_k
        previous, latest = self._previous, self._latest
        if is_one_row:
            sources = self._sources(previous, layer, latest[layer])
            if len(sources):
                tables = self._tables[layer]
                places = np.add.outer(sources * self._num_experts, chosen)
                tables[places] += 1.0
                self._pairs[layer][sources] += 1.0
        previous[layer] = latest[layer]
        latest[layer] = chosen if is_one_row else chosen[:0]

    def _sources(self, history: list[Indices], layer: int, own: Indices) -> Indices:
        """Rows of the tables of `layer` for what `history` holds of layers l-1, l-2, ..; `own` is
        what layer l itself stands for."""
        num_experts, num_layers = self._num_experts, self._num_layers
        others = [
            history[(layer - j) % num_layers] + j * num_experts for j in range(1, self._num_tables)
        ]
        return np.concatenate([own, *others])

    def _evidence(self, layer: int) -> Singles:
        """0.2 of the evidence per expert, clipped; float32 [num_experts]."""
        latest = self._latest
        sources = self._sources(latest, layer, latest[layer])
        spare = self._spare
        if not len(sources):
            spare.fill(0.0)
            return spare
        counts = self._state[layer, 3]
        np.divide(counts.sum() / self._top_k, counts, out=spare)  # 1 / q
        ratios = self._tables[layer].reshape(-1, self._num_experts).take(sources, axis=0)
        share = 1.0 / (self._pairs[layer].take(sources)[:, None] + TABLE_PRIOR)
        np.multiply(ratios, share, out=ratios)
        np.multiply(ratios, spare, out=ratios)
        np.add(ratios, share * TABLE_PRIOR + EVIDENCE_FLOOR, out=ratios)
        np.multiply.reduce(ratios, axis=0, dtype=np.float64, out=self._products)
        np.log(self._products, out=self._products)
        np.multiply(self._products, EVIDENCE_WEIGHT, out=spare, casting="same_kind")
        np.maximum(spare, -EVIDENCE_LIMIT, out=spare)
        np.minimum(spare, EVIDENCE_LIMIT, out=spare)
        return spare

    # ---- arrays ----

    def _grow(self, num_layers: int, num_experts: int) -> None:
        old_layers, old_experts = self._num_layers, self._num_experts
        super()._grow(num_layers, num_experts)
        self._set_up(old_layers, old_experts)

    def _set_up(self, old_layers: int, old_experts: int) -> None:
        """Arrays of the present shape; what was learned in the old one is kept."""
        num_layers, num_experts = self._num_layers, self._num_experts
        single = np.float32
        marginal = min(self._top_k, max(num_experts - 1, 1)) / max(num_experts, 2)
        floor = marginal * FLOOR_PART
        weights = np.array(HALF_LIFE_WEIGHTS)
        self._floor = single(floor)
        self._log_weights = (-weights).astype(single)
        # -logit(p0) + sum w ln(p0 + c)
        self._constant = single(
            math.log((1 - marginal) / marginal) + weights.sum() * math.log(marginal + floor)
        )
        decay = 2.0 ** (-1.0 / np.array(HALF_LIVES_VISITS))
        # As wide as the rows: a broadcast column costs more than its zero bytes save.
        wide = np.ones((4, num_experts), single)
        self._decay = wide * np.append(decay, 1.0).astype(single)[:, None]
        self._gain = wide * np.append(1.0 - decay, 1.0).astype(single)[:, None]
        state = np.full((num_layers, 4, num_experts), marginal, single)
        state[:, 3] = 1.0
        is_placed = np.zeros((num_layers, num_experts), bool)
        shape = (num_layers, self._num_tables, num_experts, num_experts)
        tables = np.zeros(shape, single)
        pairs = np.zeros(shape[:3], single)
        if old_layers and old_experts:
            state[:old_layers, :, :old_experts] = self._state
            is_placed[:old_layers, :old_experts] = self._is_placed
            old = (old_layers, self._num_tables, old_experts)
            tables[:old_layers, :, :old_experts, :old_experts] = self._tables.reshape(
                *old, old_experts
            )
            pairs[:old_layers, :, :old_experts] = self._pairs.reshape(old)
        self._state, self._is_placed = state, is_placed
        rows = self._num_tables * num_experts
        self._tables = tables.reshape(num_layers, rows * num_experts)
        self._pairs = pairs.reshape(num_layers, rows)
        nothing = np.zeros(0, np.intp)
        # Choices by layer of the last visit and of the one before it; forgotten when the number of
        # layers turns out larger, for the layers before the first were others.
        self._latest = [nothing] * num_layers
        self._previous = [nothing] * num_layers
        self._chosen: Singles = np.zeros(num_experts, single)
        self._buffer: Singles = np.zeros((3, num_experts), single)
        self._sums: Singles = np.zeros((4, num_experts), single)
        self._odds: Singles = np.zeros(num_experts, single)
        self._value: Singles = np.zeros(num_experts, single)
        self._spare: Singles = np.zeros(num_experts, single)
        self._products: Floats = np.zeros(num_experts)
