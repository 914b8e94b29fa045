"""What the pipeline has done since its start, as plain sums: for metrics, statistics and a page.

A fold over what passes between the core and the workers, like the latency log's, but over all
requests and never reset. Each event costs one dictionary look-up and a few additions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from orchestrator.core.events import Passed, Planned, Publish, ResetTable, TokenOut, Unpublish
from protocol.messages import Copied, Executed, Ran, Routed, StepDone

if TYPE_CHECKING:
    from collections.abc import Callable

    from orchestrator.core.events import CoreCommand, CoreEvent


class BusyTime:
    """Length in ns of the union of spans that come in about the order of their ends."""

    __slots__ = ("_end_ns", "sum_ns")

    def __init__(self) -> None:
        self.sum_ns = 0
        self._end_ns = 0

    def add(self, started_ns: int, ended_ns: int) -> None:
        self.sum_ns += max(0, ended_ns - max(started_ns, self._end_ns))
        self._end_ns = max(self._end_ns, ended_ns)


class Totals:
    """Counts are experts per layer-step, each expert counted once, unless they say otherwise."""

    def __init__(self) -> None:
        self.num_hits = 0
        self.num_fills = 0
        self.num_cpu_experts = 0
        self.num_evictions = 0
        #: Experts that were copied and bytes that the copies moved, late ones included.
        self.fill_bytes = 0
        self.cpu_bytes = 0
        self.link_busy = BusyTime()
        self.cpu_busy = BusyTime()
        self.gpu_busy = BusyTime()
        self.num_steps = 0
        self.num_tokens = 0
        #: Layer-steps that the gpu_worker passed without asking, and those it asked about.
        self.num_passed_layers = 0
        self.num_routed_layers = 0
        #: From the router's choice to the moment this process took it up.
        self.ipc_wait_ns = 0
        #: layer -> experts in slots, for layers that ever had one.
        self.residents: dict[int, int] = {}
        self._events: dict[type, Callable[[Any, int], None]] = {
            Passed: self._passed,
            Routed: self._routed,
            Ran: self._ran,
            Copied: self._copied,
            Executed: self._executed,
            StepDone: self._step_done,
        }
        self._commands: dict[type, Callable[[Any], None]] = {
            Planned: self._planned,
            Publish: self._publish,
            Unpublish: self._unpublish,
            ResetTable: self._reset,
            TokenOut: self._token,
        }

    def event(self, event: CoreEvent, now_ns: int) -> None:
        """An event that the core took at `now_ns`."""
        fold = self._events.get(type(event))
        if fold is not None:
            fold(event, now_ns)

    def command(self, command: CoreCommand) -> None:
        """A command that followed."""
        fold = self._commands.get(type(command))
        if fold is not None:
            fold(command)

    def _passed(self, event: Passed, now_ns: int) -> None:
        self.num_passed_layers += 1
        self.num_hits += len(event.experts)
        self.gpu_busy.add(event.started_ns, event.ended_ns)

    def _routed(self, event: Routed, now_ns: int) -> None:
        self.num_routed_layers += 1
        self.ipc_wait_ns += max(0, now_ns - event.routed_ns)

    def _ran(self, event: Ran, now_ns: int) -> None:
        self.gpu_busy.add(event.started_ns, event.ended_ns)

    def _copied(self, event: Copied, now_ns: int) -> None:
        self.fill_bytes += event.num_bytes
        self.link_busy.add(event.started_ns, event.ended_ns)

    def _executed(self, event: Executed, now_ns: int) -> None:
        self.cpu_bytes += event.num_bytes
        self.cpu_busy.add(event.started_ns, event.ended_ns)

    def _step_done(self, event: StepDone, now_ns: int) -> None:
        self.num_steps += 1

    def _planned(self, command: Planned) -> None:
        self.num_hits += len(command.hits)
        self.num_fills += len(command.fills)
        self.num_cpu_experts += len(command.cpu)

    def _publish(self, command: Publish) -> None:
        self.residents[command.layer] = self.residents.get(command.layer, 0) + 1

    def _unpublish(self, command: Unpublish) -> None:
        self.num_evictions += 1
        self.residents[command.layer] -= 1

    def _reset(self, command: ResetTable) -> None:
        self.residents = dict.fromkeys(self.residents, 0)

    def _token(self, command: TokenOut) -> None:
        self.num_tokens += 1
