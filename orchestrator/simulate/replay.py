"""A trace through the directory, the policy and the planner that serve, on a virtual clock.

Each layer-step is handled as `ExpertDispatch` handles it: the policy is told what the router chose,
hits are pinned and refreshed, misses are ranked and admitted, the planner splits them, fills
reserve and commit, and everything is unpinned at the join. Only the workers are replaced, by
`VirtualMachine`.

An expert that is on its way behind and demanded meanwhile runs on the CPU: nothing is used before
it is whole.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from orchestrator.core.directory import ExpertDirectory
from orchestrator.core.fill_choice import DEFAULT_MAX_BEHIND, FillBehind, FillChoice
from orchestrator.core.foresight import Foresight
from orchestrator.core.planner import DemandMemory
from orchestrator.core.policies import DeferringPolicy, DemandShape, make_policy
from orchestrator.native_reuse import load_kernel
from orchestrator.simulate.machine import VirtualMachine

if TYPE_CHECKING:
    from orchestrator.core.directory import Reservation
    from orchestrator.core.fill_choice import FillBehindMode
    from orchestrator.core.fluid_split import BranchCosts
    from orchestrator.core.split_rules import Planner
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
        planner: Planner,
        fill_behind: FillBehindMode,
        dense_s: float,
        prefetch: int = 0,
    ) -> None:
        """`prefetch`: layers ahead, 0 for none. ValueError if the policy is unknown or there is no
        slot."""
        self._shape = shape
        eviction = make_policy(policy, shape, load_kernel())
        self.directory = ExpertDirectory(num_slots, eviction)
        self._deferring = eviction if isinstance(eviction, DeferringPolicy) else None
        self._planner = planner
        self._memory = DemandMemory(num_slots + _REMEMBERED_TOKENS * shape.num_layers * shape.top_k)
        self._choice = FillChoice(eviction, self._memory.last_demand)
        self._behind = FillBehind(fill_behind, costs)
        self.machine: VirtualMachine[Reservation] = VirtualMachine(costs)
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

    def layer_step(self, layer: int, experts: list[int]) -> None:
        """Attention and router, then the experts, until the join."""
        directory, machine = self.directory, self.machine
        self._commit(machine.compute(self._dense_s))
        self._num_layer_steps += 1
        keys: list[ExpertKey] = [(layer, expert) for expert in experts]  # type: ignore[misc]
        directory.layer_step(layer, experts)  # type: ignore[arg-type]
        pinned: list[SlotId] = []
        misses: list[ExpertKey] = []
        num_on_the_way = 0
        for key in keys:
            slot = directory.slot_of(key)
            if slot is not None:
                directory.pin(slot)
                directory.refresh(key)
                pinned.append(slot)
            elif directory.is_filling(key):
                directory.refresh(key)
                num_on_the_way += 1
            else:
                misses.append(key)
        num_hits = len(pinned)
        num_missing = len(misses) + num_on_the_way
        if num_missing:
            candidates = self._choice.candidates(directory, misses)
            split = self._planner.plan(
                num_missing, candidates.num_admitted, has_cpu=True, has_link=True
            )
            # Mode "all" may say more than can be placed at once; what is over goes in waves over
            # the same link, through slots that are free again, and is not kept.
            num_fills = min(split.num_fills, candidates.num_admitted)
            num_waves = split.num_fills - num_fills
            num_cpu = num_missing - split.num_fills
            behind = self._behind.choose(candidates, split.num_fills, machine.num_behind)
            filled = [self._reserve(key) for key in candidates.ranked[:num_fills]]
            for reservation in filled:
                directory.pin(reservation.slot)
                pinned.append(reservation.slot)
            for copy in behind:
                machine.copy_behind(self._reserve(copy.key), is_beside_cpu=copy.is_beside_cpu)
            self._fills += num_fills + num_waves
            self._fills_behind += len(behind)
            self._cpu_experts += num_cpu
            landed = machine.run(num_fills + num_waves, num_cpu, num_hits)
            self._commit(filled)
            self._commit(landed)
        elif num_hits and self._gpu_s:
            self._commit(machine.compute(num_hits * self._gpu_s))
        if self._choice.needs_last_demand:
            self._memory.demanded(keys)
        for slot in pinned:
            directory.unpin(slot)
        if self._deferring is not None:
            self._deferring.settle()
        if self._foresight is not None:
            self._foresight.chose(layer, experts)  # type: ignore[arg-type]
            self._prefetch(self._foresight.expected(layer))  # type: ignore[arg-type]

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
