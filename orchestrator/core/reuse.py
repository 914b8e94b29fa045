"""The policy that keeps what will be used soonest: the chance and time of the next use.

Worths change only when their own layer has run, and that is where the work is: one fixed sequence
of ufuncs over one row, into arrays that exist already. Calls are what costs at this size, not
elements.

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

*Tables* (`Reuse(num_tables=2)`). What was chosen at layers l, l-1, .. of this token says more about
layer l of the next token than any frequency. T_j[l][i, e] counts how often e was chosen at layer l
one token after i was chosen at layer l - j (layers wrap), N_j[l][i] how often there was such a
pair to learn from, and q_e = top_k m_e / sum(m) is the marginal with m_e the choices of e plus 1:

    evidence_e = sum over j, over i chosen at layer l - j now, of
                 ln( (T_j[i, e] + 8 q_e) / ((N_j[i] + 8) q_e) + 0.001 )
    p = sigmoid(z + clip(0.2 evidence, -6, 6))

The 8 q prior makes a young table silent. The sum of logs is taken as the log of a product, in
float64, because 32 logs per expert would cost more than all the rest.

*Deferred.* The decision about a layer-step uses worths from before it: learning first costs more
time between router and experts than it gains (0.001 to 0.01 of hit rate on gpt-oss-20b). So
`layer_step` takes a note and `settle` learns.

The same in one compiled pass is a *kernel* that whoever makes the policy may hand in.

A batch of rows (a prefill) counts in the frequencies but teaches no pairs: which of its rows chose
what is not known here.

Source: Headrace's own replay study of public routing traces; the constants were fitted on two
models and tested on four others. They are the same for every model.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from orchestrator.core.scored_policy import ScoredPolicy

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt

    from protocol.messages import ExpertId, ExpertKey, LayerId

    Floats = npt.NDArray[np.float64]
    Singles = npt.NDArray[np.float32]
    Indices = npt.NDArray[np.intp]

HALF_LIVES_VISITS = (2.0, 16.0, 128.0)
HALF_LIFE_WEIGHTS = (0.15, 0.35, 0.30)
#: The floor under a decayed frequency, as a part of p0.
FLOOR_PART = 1 / 40
DISCOUNT_TOKENS = 1.5
TABLE_PRIOR = 8.0
EVIDENCE_FLOOR = 0.001
EVIDENCE_WEIGHT = 0.2
EVIDENCE_LIMIT = 6.0
DEFAULT_NUM_TABLES = 2

_LEAST_PRODUCT = math.exp(-EVIDENCE_LIMIT / EVIDENCE_WEIGHT)
_DISCOUNT = math.exp(-1 / DISCOUNT_TOKENS)


class LearnArrays(NamedTuple):
    """What a kernel learns into; C order, shapes as in native/reuse.cpp."""

    num_layers: int
    num_experts: int
    num_tables: int
    top_k: int
    max_chosen: int
    state: Singles
    decay: Singles
    floors: Singles
    weights: Singles
    odds_factor: float
    discount: float
    discount_tokens: float
    table_prior: float
    evidence_floor: float
    evidence_weight: float
    least_product: float
    tables: Singles
    pairs: Singles
    num_choices: Floats
    latest: npt.NDArray[np.int32]
    sources: npt.NDArray[np.int32]
    is_placed: npt.NDArray[np.bool_]
    worth: Floats
    rank: Floats
    odds: Singles
    products: Floats


class LearnKernel(Protocol):
    """Learns a layer-step as `Reuse` does with numpy, quicker."""

    def bind(self, arrays: LearnArrays, /) -> Callable[[int, Sequence[int], float], None]:
        """`learn(layer, experts chosen, number of the layer-step)` on these arrays."""


class Reuse(ScoredPolicy):
    """Least expected discounted reuse first; see the module for the formulas."""

    __slots__ = (
        "_buffer",
        "_chosen",
        "_decay",
        "_floors",
        "_is_placed",
        "_kernel",
        "_latest",
        "_learn_native",
        "_log_weights",
        "_noted",
        "_num_choices",
        "_num_tables",
        "_odds",
        "_odds_factor",
        "_pairs",
        "_products",
        "_sources",
        "_spare",
        "_state",
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
        kernel: LearnKernel | None = None,
    ) -> None:
        """`num_tables` source layers, 0 for the table-free form: memory of the tables is
        num_layers x num_tables x num_experts^2 x 4 bytes. Without a `kernel` numpy learns."""
        super().__init__(num_layers, num_experts, top_k)
        if num_tables < 0:
            raise ValueError(f"{num_tables} tables are not possible")
        self._num_tables = num_tables
        self._kernel = kernel
        self._learn_native: Callable[[int, Sequence[int], float], None] | None = None
        self._tick = 0
        self._noted: tuple[LayerId, Sequence[ExpertId]] | None = None
        self._state: Singles
        self._is_placed: npt.NDArray[np.bool_]
        self._tables: Singles
        self._pairs: Singles
        self._set_up(0, 0)

    def layer_step(self, layer: LayerId, experts: Sequence[ExpertId]) -> None:
        self.settle()
        self._noted = layer, experts

    def settle(self) -> None:
        """Learn from the last layer-step, off the path of its decision."""
        if self._noted is not None:
            layer, experts = self._noted
            self._noted = None
            self._learn(layer, experts)

    def _learn(self, layer: LayerId, experts: Sequence[ExpertId]) -> None:
        self._make_room(layer, max(experts, default=0))
        self._tick += 1
        if self._learn_native is not None:
            self._learn_native(layer, experts, self._tick)
            self._stale.add(layer)
            return
        chosen = np.array(experts, dtype=np.intp)
        self._count(layer, chosen)
        buffer, odds, value = self._buffer, self._odds, self._value
        np.add(self._state[layer, :3], self._floors, out=buffer)
        np.log(buffer, out=buffer)
        np.dot(self._log_weights, buffer, out=odds)
        np.exp(odds, out=odds)  # exp(-z) but for a factor
        if self._num_tables:
            # With A = exp(-z) and B = exp(-z - evidence), the odds against being chosen at a later
            # visit and at the next one:  V = ln( (1 + B / ((1 / g - 1) A + 1 / g)) / (1 + B) )
            np.multiply(odds, self._odds_factor, out=odds)
            self._tell(layer, self._see(layer, chosen))
            spare = self._spare
            np.multiply(odds, spare, out=value)
            np.multiply(odds, 1 / _DISCOUNT - 1, out=odds)
            np.add(odds, 1 / _DISCOUNT, out=odds)
            np.divide(value, odds, out=spare)
            np.add(spare, 1.0, out=spare)
            np.add(value, 1.0, out=value)
            np.divide(value, spare, out=value)
            np.log(value, out=value)
        else:
            # V = -ln( 1 + (1 - g) A )
            np.multiply(odds, self._odds_factor * (1 - _DISCOUNT), out=value)
            np.log1p(value, out=value)
        # In float64, because the time grows without end and the differences must stay.
        distance = (self._tick / self._num_layers + 1) / DISCOUNT_TOKENS
        worth = self._worth[layer]
        np.subtract(-distance, value, out=worth, dtype=np.float64)
        np.copyto(self._rank[layer], worth, where=self._is_placed[layer])
        self._stale.add(layer)

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
        """Decay and raise the three frequencies, and count the choices (the fourth row).

        The rows are r_h / (1 - 2^(-1/h)), so that a choice adds 1 to each.
        """
        state, flags = self._state[layer], self._chosen
        flags[chosen] = 1.0
        np.multiply(state, self._decay, out=state)
        np.add(state, flags, out=state)
        flags[chosen] = 0.0
        self._num_choices[layer] += len(chosen)

    def _see(self, layer: int, chosen: Indices) -> Indices:
        """Learn the pairs of what was chosen a token ago and what is chosen now; returns the rows
        of this layer's tables for what is chosen now."""
        num_experts, num_layers, latest = self._num_experts, self._num_layers, self._latest
        if len(chosen) > 2 * self._top_k:  # more than one row: who chose what is not known
            chosen = chosen[:0]
        sources = self._sources[layer]
        if len(sources) and len(chosen):
            places = (sources * num_experts)[:, None] + chosen
            self._tables[layer][places] += 1.0
            self._pairs[layer][sources] += 1.0
        latest[layer] = chosen
        others = [
            latest[(layer - j) % num_layers] + j * num_experts for j in range(1, self._num_tables)
        ]
        sources = self._sources[layer] = np.concatenate([chosen, *others])
        return sources

    def _tell(self, layer: int, sources: Indices) -> None:
        """exp(-0.2 evidence) per expert, clipped, into `spare`; float32 [num_experts]."""
        spare, products = self._spare, self._products
        if not len(sources):
            spare.fill(1.0)
            return
        np.divide(self._num_choices[layer] / self._top_k, self._state[layer, 3], out=spare)  # 1 / q
        ratios = self._tables[layer].reshape(-1, self._num_experts).take(sources, axis=0)
        share = 1.0 / (self._pairs[layer].take(sources)[:, None] + TABLE_PRIOR)
        np.multiply(ratios, share, out=ratios)
        np.multiply(ratios, spare, out=ratios)
        np.add(ratios, share * TABLE_PRIOR + EVIDENCE_FLOOR, out=ratios)
        np.multiply.reduce(ratios, axis=0, dtype=np.float64, out=products)
        np.maximum(products, _LEAST_PRODUCT, out=products)
        np.minimum(products, 1 / _LEAST_PRODUCT, out=products)
        np.power(products, -EVIDENCE_WEIGHT, out=spare, casting="same_kind")

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
        decay = 2.0 ** (-1.0 / np.array(HALF_LIVES_VISITS))
        self._log_weights = (-weights).astype(single)
        # As wide as the rows: a broadcast column costs more than its zero bytes save.
        wide = np.ones((4, num_experts), single)
        self._decay = wide * np.append(decay, 1.0).astype(single)[:, None]
        self._floors = wide[:3] * (floor / (1 - decay)).astype(single)[:, None]
        # exp(-z) = factor x product of (r_h / (1 - d_h) + floor_h) ^ -w_h
        self._odds_factor = float(
            (1 - marginal)
            / marginal
            * math.exp((weights * np.log((marginal + floor) / (1 - decay))).sum())
        )
        state = np.ones((num_layers, 4, num_experts), single)
        state[:, :3] = (marginal / (1 - decay))[:, None]
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
        # Sum of the fourth row of the state, by layer.
        self._num_choices: list[float] = [float(row.sum()) for row in state[:, 3]]
        # Of each layer, what was chosen at its last visit, and the rows of its tables that learn
        # what follows. Forgotten on growth: with more layers other ones come before the first.
        self._latest = [nothing] * num_layers
        self._sources = [nothing] * num_layers
        self._chosen: Singles = np.zeros(num_experts, single)
        self._buffer: Singles = np.zeros((3, num_experts), single)
        self._odds: Singles = np.zeros(num_experts, single)
        self._value: Singles = np.zeros(num_experts, single)
        self._spare: Singles = np.zeros(num_experts, single)
        self._products: Floats = np.zeros(num_experts)
        if self._kernel is not None and num_layers and num_experts:
            self._learn_native = self._kernel.bind(self._arrays())

    def _arrays(self) -> LearnArrays:
        """For a kernel; it keeps what was chosen lately in arrays of its own."""
        max_chosen = max(2 * self._top_k, 1)
        num_layers, num_tables = self._num_layers, self._num_tables
        return LearnArrays(
            num_layers,
            self._num_experts,
            num_tables,
            self._top_k,
            max_chosen,
            self._state,
            self._decay[:3, 0].copy(),
            self._floors[:, 0].copy(),
            self._log_weights,
            self._odds_factor,
            _DISCOUNT,
            DISCOUNT_TOKENS,
            TABLE_PRIOR,
            EVIDENCE_FLOOR,
            EVIDENCE_WEIGHT,
            _LEAST_PRODUCT,
            self._tables,
            self._pairs,
            np.array(self._num_choices),
            np.zeros((num_layers, 1 + max_chosen), np.int32),
            np.zeros((num_layers, 1 + max(num_tables, 1) * max_chosen), np.int32),
            self._is_placed,
            self._worth,
            self._rank,
            self._odds,
            self._products,
        )
