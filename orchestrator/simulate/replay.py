"""A trace through the directory, the policy and the split that serve, on a virtual clock.

Each layer-step is handled as `ExpertDispatch` handles it: the policy is told what the router chose,
hits are pinned and refreshed, `AdaptiveSplit` decides about the misses, fills reserve and commit,
and everything is unpinned at the join. Only the workers are replaced, by `VirtualMachine`.

Costs are either *stated*, and then nothing is learned from the machine; or they are where learning
begins, as while serving: every fill and every CPU batch is a sample, and the floor rule probes.

An expert that is on its way behind and demanded meanwhile runs on the CPU: nothing is used before
it is whole.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from orchestrator.core.adaptive_split import AdaptiveSplit
from orchestrator.core.directory import ExpertDirectory
from orchestrator.core.events import CoreConfig
from orchestrator.core.fill_choice import DEFAULT_MAX_BEHIND
from orchestrator.core.foresight import Foresight
from orchestrator.core.planner import DemandMemory
from orchestrator.core.policies import DeferringPolicy, DemandShape, make_policy
from orchestrator.native_reuse import load_kernel
from orchestrator.simulate.machine import VirtualMachine

if TYPE_CHECKING:
    from orchestrator.core.directory import Reservation
    from orchestrator.core.fill_choice import FillBehindMode
    from orchestrator.core.fluid_split import BranchCosts
    from orchestrator.simulate.machine import Scatter
    from orchestrator.simulate.trace import RoutingTrace
    from protocol.messages import ExpertKey, SlotId

#: As in dispatch: demand is remembered this many tokens beyond what the slots hold.
_REMEMBERED_TOKENS = 8


class ReplayResult(msgspec.Struct, frozen=True):
    """Sums over a replay. `fills` are demanded ones, `fills_behind` the others."""

    num_steps: int
    num_layer_steps: int
    num_accesses: int
    hits: int
    fills: int
    fills_behind: int
    cpu_experts: int
    time_s: float
    link_busy_s: float
    cpu_busy_s: float
    copied_bytes: float

    @property
    def hit_rate(self) -> float:
        return self.hits / self.num_accesses

    @property
    def step_s(self) -> float:
        """Seconds per token."""
        return self.time_s / self.num_steps

    @property
    def link_idle(self) -> float:
        """Part of the time in which nothing passes the link."""
        return 1 - self.link_busy_s / self.time_s if self.time_s else 0.0

    @property
    def cpu_idle(self) -> float:
        return 1 - self.cpu_busy_s / self.time_s if self.time_s else 0.0


class Replay:
    """One run from an empty cache."""

    def __init__(
        self,
        shape: DemandShape,
        costs: BranchCosts,
        *,
        num_slots: int,
        policy: str,
        planner: str,
        fill_behind: FillBehindMode,
        dense_s: float,
        prefetch: int = 0,
        is_learning: bool = False,
        scatter: Scatter | None = None,
    ) -> None:
        """`prefetch`: layers ahead, 0 for none. `is_learning`: `costs` are measured, not stated.
        `scatter`: how the machine's times scatter. ValueError if the policy or the planner is
        unknown or there is no slot."""
        self._shape = shape
        eviction = make_policy(policy, shape, load_kernel())
        self.directory = ExpertDirectory(num_slots, eviction)
        self._deferring = eviction if isinstance(eviction, DeferringPolicy) else None
        self._memory = DemandMemory(num_slots + _REMEMBERED_TOKENS * shape.num_layers * shape.top_k)
        stated = None if is_learning else costs.cpu_bytes_per_s
        config = CoreConfig(
            shape.num_layers,
            shape.top_k,
            costs.expert_bytes,
            num_slots,
            max_rows=1,
            max_sequence_tokens=1,
            planner=planner,
            fill_behind=fill_behind,
            costs=costs,
            host_bytes_per_s=stated,
        )
        self._split = AdaptiveSplit(
            config,
            eviction,
            self._memory.last_demand,
            costs.cpu_bytes_per_s,
            costs.link_bytes_per_s,
        )
        self.machine: VirtualMachine[Reservation] = VirtualMachine(costs, scatter)
        self._foresight = Foresight(shape, prefetch) if prefetch else None
        self._dense_s = dense_s
        self._gpu_s = costs.gpu_expert_s
        self._num_layer_steps = self._fills = self._fills_behind = self._cpu_experts = 0

    def run(self, trace: RoutingTrace) -> ReplayResult:
        """All steps of `trace`, and the sums."""
        for step in trace.ids.tolist():
            for layer, experts in enumerate(step):
                self.layer_step(layer, experts)
        machine = self.machine
        return ReplayResult(
            num_steps=trace.num_steps,
            num_layer_steps=self._num_layer_steps,
            num_accesses=self._num_layer_steps * self._shape.top_k,
            hits=self.directory.hits,
            fills=self._fills,
            fills_behind=self._fills_behind,
            cpu_experts=self._cpu_experts,
            time_s=machine.now_s,
            link_busy_s=machine.link_busy_s,
            cpu_busy_s=machine.cpu_busy_s,
            copied_bytes=machine.num_copied_bytes,
        )

    @property
    def counts(self) -> tuple[int, int, int]:
        """Hits, fills that were waited for, and experts on the CPU, so far."""
        return self.directory.hits, self._fills, self._cpu_experts

    def layer_step(self, layer: int, experts: list[int]) -> None:
        """Attention and router, then the experts, until the join."""
        directory, machine = self.directory, self.machine
        self._commit(machine.compute(self._dense_s))
        self._num_layer_steps += 1
        keys: list[ExpertKey] = [(layer, expert) for expert in experts]  # type: ignore[misc]
        directory.layer_step(layer, experts)  # type: ignore[arg-type]
        hits, pinned, misses = directory.demand(keys)
        if misses:
            self._run_misses(len(hits), misses, pinned)
        elif self._gpu_s:
            self._commit(machine.compute(len(hits) * self._gpu_s))
        if self._split.needs_last_demand:
            self._memory.demanded(keys)
        for slot in pinned:
            directory.unpin(slot)
        if self._deferring is not None:
            self._deferring.settle()
        self._split.settle()
        if self._foresight is not None:
            self._foresight.chose(layer, experts)  # type: ignore[arg-type]
            self._prefetch(self._foresight.expected(layer))  # type: ignore[arg-type]

    def _run_misses(self, num_hits: int, misses: list[ExpertKey], pinned: list[SlotId]) -> None:
        """Decide about `misses`, and let the machine do it. Slots that are filled join `pinned`."""
        directory, machine = self.directory, self.machine
        num_misses, begin_s = len(misses), machine.now_s
        arriving = [key for key in misses if directory.is_filling(key)]
        for key in arriving:
            misses.remove(key)
        was_link_idle = not machine.num_behind
        decision = self._split.decide(
            directory,
            misses,
            arriving,
            None,
            has_cpu=True,
            has_link=True,
            num_in_flight=machine.num_behind,
        )
        filled: list[Reservation] = []
        for key in decision.fills:
            reservation = directory.reserve(key)
            # What finds no slot goes over the same link in a wave, through one that is free again;
            # it is not kept here.
            if reservation is not None:
                directory.pin(reservation.slot)
                filled.append(reservation)
        pinned += [reservation.slot for reservation in filled]
        for copy in decision.behind:
            machine.copy_behind(self._reserve(copy.key), is_beside_cpu=copy.is_beside_cpu)
        num_fills, num_cpu = len(decision.fills), len(decision.cpu)
        self._fills += num_fills
        self._fills_behind += len(decision.behind)
        self._cpu_experts += num_cpu
        landed = machine.run(num_fills, num_cpu, num_hits)
        self._commit(filled)
        self._commit(landed)
        self._tell(begin_s, num_misses, num_cpu, was_link_idle=was_link_idle)

    def _tell(self, begin_s: float, num_misses: int, num_cpu: int, *, was_link_idle: bool) -> None:
        """The split hears what its workers would report of this layer-step."""
        split, worked = self._split, self.machine.worked
        begin_ns, end_ns = _ns(begin_s), 0
        for index, (start_s, end_s) in enumerate(worked.fills):
            start_ns, end_ns = _ns(start_s), _ns(end_s)
            split.filled(self.machine.costs.expert_bytes, start_ns, end_ns)
            if not index and was_link_idle:
                split.took("link_fixed_s", start_ns - begin_ns)
            split.took("gpu_expert_s", _ns(worked.expert_s))
        if worked.cpu is not None:
            start_ns, cpu_end_ns = _ns(worked.cpu[0]), _ns(worked.cpu[1])
            split.executed(num_cpu, [1] * num_cpu, start_ns, cpu_end_ns)
            split.took("cpu_fixed_s", start_ns - begin_ns)
            end_ns = max(end_ns, cpu_end_ns)
        split.joined(num_misses, end_ns - begin_ns)

    def _prefetch(self, expected: list[ExpertKey]) -> None:
        directory, machine = self.directory, self.machine
        for key in expected:
            if machine.num_behind >= DEFAULT_MAX_BEHIND:
                return
            if directory.state_of(key) is None and directory.num_reservable:
                machine.copy_behind(self._reserve(key), is_beside_cpu=False)
                self._fills_behind += 1

    def _reserve(self, key: ExpertKey) -> Reservation:
        reservation = self.directory.reserve(key)
        assert reservation is not None  # it was admitted, and nothing came between
        return reservation

    def _commit(self, reservations: list[Reservation]) -> None:
        for reservation in reservations:
            self.directory.commit(reservation.slot, reservation.generation)


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
