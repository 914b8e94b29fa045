"""The opening: both branches are measured while the gpu_worker still gets ready.

A cpu_worker and a dma_worker are ready seconds before the gpu_worker, which imports its libraries,
loads the dense weights and records them. In this time they are driven as in `headrace calibrate`,
with the experts that will serve: each alone, then both at once. Until that is over (1.3 s, or as
long as one command takes) the core hears of no worker, so nothing else is asked of them; the
activation segment and the slots are nobody's yet.

What comes out is where the live estimates start. It is not kept: `headrace calibrate` measures
longer, on a machine with nothing else to do.
"""

from __future__ import annotations

import asyncio
import logging
import mmap
from typing import TYPE_CHECKING

from orchestrator.calibrate.course import line_of, median_rate, way_s
from orchestrator.calibrate.driver import Driver
from orchestrator.core.adaptive_split import DEFAULT_CPU_ROW_PART
from orchestrator.core.events import RatesMeasured, WorkerJoined, WorkerLost
from orchestrator.core.fluid_split import BranchCosts
from orchestrator.core.planner import FillMode
from protocol.errors import UserError
from protocol.messages import Arena, AttachArena, Copied, DetachArena, Executed
from protocol.step_segment import ACTIVATIONS, ARENA

if TYPE_CHECKING:
    from collections.abc import Callable

    from expert_store.layout import StoreLayout
    from orchestrator.calibrate.driver import Sample
    from orchestrator.core.events import CoreEvent
    from orchestrator.settings import PipelineSettings
    from protocol.lifeline import SegmentGrant
    from protocol.messages import Copy, Execute, Role

log = logging.getLogger("headrace")

#: Experts that a cache may hold say nothing about memory.
LEAST_STORE_BYTES = 256 << 20
#: Memory of the dma_worker's own on an accelerator, in experts.
_NUM_SCRATCH_SLOTS = 4
_NUM_ROUNDS = 2
_WARM_UP_S, _ALONE_S, _BOTH_S = 0.05, 0.12, 0.3
_DRAIN_S = 30.0
_ROLES: tuple[Role, ...] = ("cpu_worker", "dma_worker")


def wants_opening(settings: PipelineSettings, layout: StoreLayout, *, is_calibrated: bool) -> bool:
    """Whether there is something to measure: rates decide something, nobody knows them, and the
    workers are started together."""
    is_stated = settings.host_gbps or settings.link_gbps
    is_auto = FillMode.parse(settings.fill).kind == "auto"
    is_split = is_auto and settings.planner not in ("fill-only", "cpu-only")
    if settings.probe == "off" or is_calibrated or is_stated or not is_split:
        return False
    if settings.num_cpu_workers != 1 or not settings.is_supervising:
        return False
    return settings.probe == "on" or layout.total_bytes >= LEAST_STORE_BYTES


class Opening:
    """`command` sends to a worker, `deliver` takes what the core is to hear once it is over."""

    def __init__(
        self,
        layout: StoreLayout,
        num_slots: int,
        segments: list[SegmentGrant],
        fds: list[int],
        command: Callable[[Copy | Execute | AttachArena | DetachArena], None],
        deliver: Callable[[CoreEvent], None],
    ) -> None:
        names = [segment.name for segment in segments]
        is_shared = ARENA in names
        count = min(num_slots, 16) if is_shared else _NUM_SCRATCH_SLOTS
        self._arena = Arena("shared" if is_shared else "scratch", count, layout.block_bytes)
        self._layout = layout
        self._command = command
        self._deliver = deliver
        self._driver = Driver(layout, count, command)
        index = names.index(ACTIVATIONS)
        memory = mmap.mmap(fds[index], segments[index].num_bytes)
        self._driver.use_activations(memory, segments[index])
        self._held: list[WorkerJoined | WorkerLost] = []
        self._course: asyncio.Task[None] | None = None
        self._is_over = False

    def takes(self, event: CoreEvent) -> bool:
        """Whether `event` is kept from the core, for now or for good."""
        if self._is_over:
            return False
        match event:
            case Copied() | Executed():
                self._driver.answer(event)
            case WorkerJoined():
                self._held.append(event)
                if event.role in _ROLES:
                    self._driver.epochs[event.role] = event.epoch
                if self._course is None and len(self._driver.epochs) == len(_ROLES):
                    self._course = asyncio.create_task(self._run())
            case WorkerLost():
                self._held.append(event)
                lost = [r for r, epoch in self._driver.epochs.items() if epoch == event.epoch]
                for role in lost:
                    del self._driver.epochs[role]
                    if self._course is not None and not self._driver.lost.done():
                        self._driver.lost.set_result(None)
            case _:
                return False
        return True

    def close(self) -> None:
        """Measure no more and say nothing."""
        self._is_over = True
        if self._course is not None:
            self._course.cancel()

    async def _run(self) -> None:
        costs: BranchCosts | None = None
        try:
            costs = await self._measure()
        except (UserError, ValueError, KeyError) as error:
            log.warning("link and CPU were not measured at the start: %s", error)
        # Rows of a late answer would be written over those of a step.
        rows = self._driver.unanswered_rows()
        if rows and "cpu_worker" in self._driver.epochs:
            await asyncio.wait(rows, timeout=_DRAIN_S)
        if "dma_worker" in self._driver.epochs:
            self._command(DetachArena(self._driver.epochs["dma_worker"]))
        self._is_over = True
        if costs is not None:
            self._deliver(RatesMeasured(costs))
        for event in self._held:
            self._deliver(event)

    async def _measure(self) -> BranchCosts:
        driver, size = self._driver, self._layout.expert_bytes
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        top_k = self._layout.top_k
        self._command(AttachArena(driver.epochs["dma_worker"], self._arena))
        await driver.run_cpu(_WARM_UP_S, sizes=(top_k,))
        await driver.run_link(_WARM_UP_S, sizes=(1,))
        cpu: list[Sample] = []
        link: list[Sample] = []
        cpu_beside: list[Sample] = []
        link_beside: list[Sample] = []
        for _ in range(_NUM_ROUNDS):
            cpu += await driver.run_cpu(_ALONE_S, sizes=(1, top_k))
            link += await driver.run_link(_ALONE_S, sizes=(1, 2))
            copies, batches = await driver.run_both(_BOTH_S, sizes=(top_k,))
            link_beside += copies
            cpu_beside += batches
        cpu_line, link_line = line_of(cpu, size), line_of(link, size)
        costs = BranchCosts(
            size,
            link_line.bytes_per_s,
            min(median_rate(link_beside, size), link_line.bytes_per_s),
            cpu_line.bytes_per_s,
            min(median_rate(cpu_beside, size), cpu_line.bytes_per_s),
            cpu_fixed_s=cpu_line.fixed_s + way_s(cpu),
            cpu_row_part=DEFAULT_CPU_ROW_PART,
            link_fixed_s=link_line.fixed_s + way_s(link),
        )
        log.warning(
            "measured in %.1f s: CPU %.2f GB/s, beside the link %.2f; link %.2f GB/s, beside the "
            "CPU %.2f; `headrace calibrate` measures longer and keeps it",
            loop.time() - started_s,
            costs.cpu_bytes_per_s / 1e9,
            costs.cpu_beside_link_bytes_per_s / 1e9,
            costs.link_bytes_per_s / 1e9,
            costs.link_beside_cpu_bytes_per_s / 1e9,
        )
        return costs
