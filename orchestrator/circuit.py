"""The path while serving: an event goes to the core, and what the core wishes is carried out.

    event --> what was said in shared memory before it --> core --> table, words, workers are told
          --> and only then: log, figures, clients, learning

One event may bring others along (reports of the gpu_worker, parts that are finished). The core
hears them first, in their order, but all of them are acted on before any is kept account of: the
gpu_worker waits for the answer to the last one.

A step whose experts are all in slots sends nothing until it is done, and then the reports of all
its layers would stand between it and the next step. So they are looked for while it goes on.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from typing import TYPE_CHECKING

from orchestrator.core.events import AllIn, WorkerFault
from orchestrator.hub import ADDRESSED
from protocol.errors import ProtocolError
from protocol.messages import StartStep, StepDone

if TYPE_CHECKING:
    from collections.abc import Callable

    from orchestrator.clients import Clients
    from orchestrator.core.core import Core
    from orchestrator.core.events import CoreCommand, CoreEvent, Passed
    from orchestrator.data_plane import DataPlane
    from orchestrator.hub import Hub
    from protocol.messages import Ran

log = logging.getLogger("headrace")

#: Learn no more often than this, and not within a step unless it takes long: learning takes the
#: processor from workers, and new rates have the planner make its tables anew.
_LEARN_EVERY_NS = 20_000_000
_LEARN_WITHIN_STEP_NS = 40_000_000
#: Between two looks for reports within a step. A look costs 100 us, most of it the wake, and
#: the report of a layer 70; so after a look in vain it is twice as long, up to the last of them.
_LOOK_AFTER_S, _LOOK_AT_LAST_S = 0.003, 0.05


class Circuit:
    """`account(event, commands, now_ns)` is called for each event after all workers are told, and
    gives back events of its own; `on_fault` when this process met a fault of its own."""

    def __init__(
        self,
        core: Core,
        hub: Hub,
        plane: DataPlane,
        clients: Clients,
        account: Callable[[CoreEvent, list[CoreCommand], int], list[CoreEvent]],
        on_fault: Callable[[], None],
    ) -> None:
        self._core = core
        self._hub = hub
        self._plane = plane
        self._clients = clients
        self._account = account
        self._on_fault = on_fault
        self._events: deque[CoreEvent] = deque()
        self._is_handling = False
        self._learned_ns = 0
        self._is_look_due = False
        self._look_after_s = _LOOK_AFTER_S

    def deliver(self, event: CoreEvent) -> None:
        """Hand an event to the core and carry out what follows, one event at a time. What was said
        in shared memory before this goes first."""
        try:
            self._events += self._plane.before(event)
        except ProtocolError as error:
            self._hub.condemn(event.epoch, f"broke the protocol: it {error}")  # type: ignore[union-attr]
            return
        self._events.append(event)
        self._go_on(event)

    def _go_on(self, cause: object) -> None:
        if self._is_handling:
            return
        self._is_handling = True
        try:
            while self._events:
                self._turn()
        except Exception:
            log.exception("fault while handling %r", cause)
            self._on_fault()
        finally:
            self._is_handling = False

    def _turn(self) -> None:
        """All events that are there: act on each, learn now and then, keep account of each."""
        acted: list[tuple[CoreEvent, list[CoreCommand], int]] = []
        while self._events:
            event = self._events.popleft()
            try:
                commands = self._core.handle(event)
            except WorkerFault as fault:
                self._hub.condemn(fault.epoch, f"broke the protocol ({fault})")
                continue
            acted.append((event, commands, time.monotonic_ns()))
            self._carry_out(event, commands)
        if acted:
            event, commands, now_ns = acted[-1]
            least_ns = _LEARN_EVERY_NS if isinstance(event, StepDone) else _LEARN_WITHIN_STEP_NS
            if now_ns - self._learned_ns > least_ns:
                self._learned_ns = now_ns
                commands += self._core.settle()
            self._events += self._core.foresee()
        for event, commands, now_ns in acted:
            self._events += self._account(event, commands, now_ns)

    def _look_later(self) -> None:
        if not self._is_look_due:
            self._is_look_due = True
            self._plane.later(self._look_after_s, self._look)

    def _look(self) -> None:
        """Hear reports that no message has announced yet, and look again as long as the step is in
        flight. Not while a layer waits: what its worker has to say of it comes as a message."""
        self._is_look_due = False
        if not self._core.is_in_step:
            return  # the next one begins to look again
        early: list[Passed | Ran] = []
        if self._core.is_between_layers:
            try:
                early = self._plane.early()
            except WorkerFault as fault:
                self._hub.condemn(fault.epoch, f"broke the protocol: it {fault}")
        self._look_after_s = (
            _LOOK_AFTER_S if early else min(2 * self._look_after_s, _LOOK_AT_LAST_S)
        )
        self._look_later()
        self._events += early
        self._go_on(early)

    def _carry_out(self, event: CoreEvent, commands: list[CoreCommand]) -> None:
        grammars = self._clients.grammars
        self._plane.carry(commands)
        for command in commands:
            if grammars:
                command = grammars.see(command, self._core.request_of)
            if isinstance(command, ADDRESSED):
                self._hub.command(command)
                if isinstance(command, StartStep):
                    self._look_later()
            elif isinstance(command, AllIn):
                self._hub.expect(command)
        self._plane.after(event)
