"""The machine on a virtual clock: a link, a CPU, and copies behind that run when the link is free.

Two fluids share the host's memory: each branch moves at one rate alone and at another beside the
other one (`BranchCosts`). A demanded fill always goes first; a copy behind is paused for it and
goes on later, as chunks do that pass a link in order of priority. A copy behind that may not run
beside the CPU is paused while the CPU works.

A layer-step ends with the later of two branches, and the mean of the later one is more than the
later of two means. So a machine may scatter (`Scatter`): what a layer-step costs is then drawn from
what was seen of each cost.

Times are seconds, sizes bytes; nothing here knows what is copied.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, Literal, TypeVar

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from orchestrator.core.fluid_split import BranchCosts

T = TypeVar("T")
Span = tuple[float, float]
#: The time per byte of either branch, the time until it begins, and the device's time per expert.
Scattered = Literal["link", "cpu", "link_start", "cpu_start", "device"]

# Below a byte nothing is left; rates times times seldom add up to whole bytes.
_WHOLE = 0.5


class Scatter:
    """What times are in parts of their mean, draw after draw; the same draws for the same seed."""

    def __init__(self, seen: Mapping[Scattered, Sequence[float]], seed: int = 0) -> None:
        """`seen`: times of a cost, in any unit; one of which none were seen keeps its mean.
        ValueError if one is negative."""
        self._chance = random.Random(seed)
        self._parts: dict[Scattered, list[float]] = {}
        for name, times in seen.items():
            if min(times, default=0.0) < 0:
                raise ValueError(f"a time of {name} cannot be {min(times)}")
            total = sum(times)
            if total:
                self._parts[name] = [time * len(times) / total for time in times]

    def draw(self, name: Scattered) -> float:
        """The next time of `name`, in parts of its mean."""
        parts = self._parts.get(name)
        return self._chance.choice(parts) if parts else 1.0


@dataclass
class Worked:
    """What the branches did in one layer-step, on the machine's clock."""

    #: From first to last byte of each fill, and of the CPU's part.
    fills: list[Span] = field(default_factory=list)
    cpu: Span | None = None
    #: What the device took for each expert.
    expert_s: float = 0.0


@dataclass
class _Behind(Generic[T]):
    label: T
    left_bytes: float
    is_beside_cpu: bool


class VirtualMachine(Generic[T]):
    """`now_s` moves on with every call; busy times count what each branch worked."""

    def __init__(self, costs: BranchCosts, scatter: Scatter | None = None) -> None:
        self.costs = costs
        self._scatter = scatter or Scatter({})
        self.now_s = 0.0
        self.link_busy_s = 0.0
        self.cpu_busy_s = 0.0
        self.num_copied_bytes = 0.0
        #: Of the latest `run`.
        self.worked = Worked()
        self._behind: deque[_Behind[T]] = deque()

    @property
    def num_behind(self) -> int:
        """Copies behind that have not ended."""
        return len(self._behind)

    def copy_behind(self, label: T, *, is_beside_cpu: bool) -> None:
        """Queue a copy of one expert; `label` is returned when it has ended."""
        left = self.costs.expert_bytes + self.costs.fill_fixed_s * self.costs.link_bytes_per_s
        self._behind.append(_Behind(label, left, is_beside_cpu))

    def compute(self, seconds: float) -> list[T]:
        """The GPU works for so long; link and CPU have nothing demanded."""
        ended: list[T] = []
        left_s = seconds
        while self._behind and left_s > 0:
            left_s -= self._pass_behind(left_s, self.costs.link_bytes_per_s, ended)
        self.now_s += seconds
        return ended

    def run(self, num_fills: int, cpu_weight: float, num_hits: int = 0) -> list[T]:
        """A layer-step's experts, until all are done: hits on the device, fills over the link and
        then on the device, the rest on the CPU. The device takes one after the other."""
        costs, draw = self.costs, self._scatter.draw
        ended: list[T] = []
        worked = self.worked = Worked(expert_s=costs.gpu_expert_s * draw("device"))
        begin_s = self.now_s
        fills_left = num_fills
        # Bytes that take longer are as good as more bytes. This is what is left of one fill.
        fill_left = costs.expert_bytes * draw("link") if num_fills else 0.0
        cpu_left = cpu_weight * costs.expert_bytes * draw("cpu") if cpu_weight else 0.0
        link_wait_s = cpu_wait_s = 0.0
        if num_fills:
            link_wait_s = costs.link_fixed_s * draw("link_start") + num_fills * costs.fill_fixed_s
        if cpu_left:
            cpu_wait_s = costs.cpu_fixed_s * draw("cpu_start")
        device_s = num_hits * worked.expert_s
        elapsed_s = 0.0
        link_began_s, cpu_began_s = link_wait_s, cpu_wait_s
        while fills_left or cpu_left > 0:
            is_cpu = cpu_left > 0 and cpu_wait_s <= 0
            is_link = fills_left > 0 and link_wait_s <= 0
            is_behind = (
                not fills_left
                and bool(self._behind)
                and (cpu_left <= 0 or self._behind[0].is_beside_cpu)
            )
            is_busy = is_link or is_behind
            link_rate = costs.link_beside_cpu_bytes_per_s if is_cpu else costs.link_bytes_per_s
            cpu_rate = costs.cpu_beside_link_bytes_per_s if is_busy else costs.cpu_bytes_per_s
            # Until the next thing ends.
            ends_s = [wait for wait in (link_wait_s, cpu_wait_s) if wait > 0]
            if is_link and link_rate > 0:
                ends_s.append(fill_left / link_rate)
            elif is_behind and link_rate > 0:
                ends_s.append(self._behind[0].left_bytes / link_rate)
            if is_cpu and cpu_rate > 0:
                ends_s.append(cpu_left / cpu_rate)
            if not ends_s:
                raise ValueError("a branch has work and a rate of 0: this step never ends")
            span_s = min(ends_s)
            if is_link:
                fill_left = _left(fill_left - span_s * link_rate)
                self.link_busy_s += span_s
            elif is_behind:
                self._pass_behind(span_s, link_rate, ended)
            if is_cpu:
                cpu_left = _left(cpu_left - span_s * cpu_rate)
                self.cpu_busy_s += span_s
            link_wait_s, cpu_wait_s = link_wait_s - span_s, cpu_wait_s - span_s
            elapsed_s += span_s
            if is_cpu and not cpu_left:
                worked.cpu = begin_s + cpu_began_s, begin_s + elapsed_s
            if is_link and not fill_left:  # the device begins with it while the next one is sent
                worked.fills.append((begin_s + link_began_s, begin_s + elapsed_s))
                self.num_copied_bytes += costs.expert_bytes
                fills_left -= 1
                fill_left = costs.expert_bytes * draw("link") if fills_left else 0.0
                link_began_s = elapsed_s
                device_s = max(device_s, elapsed_s) + worked.expert_s
        self.now_s += elapsed_s
        rest_s = device_s - elapsed_s
        if rest_s > 0:
            ended += self.compute(rest_s)
        return ended

    def _pass_behind(self, span_s: float, rate: float, ended: list[T]) -> float:
        """The first copy behind moves for up to `span_s`; returns how long it did."""
        first = self._behind[0]
        used_s = min(span_s, first.left_bytes / rate)
        first.left_bytes = _left(first.left_bytes - used_s * rate)
        self.link_busy_s += used_s
        self.num_copied_bytes += used_s * rate
        if first.left_bytes <= 0:
            self._behind.popleft()
            ended.append(first.label)
        return used_s


def _left(num_bytes: float) -> float:
    return num_bytes if num_bytes > _WHOLE else 0.0
