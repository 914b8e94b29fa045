"""A simulation is worth what it catches: cores broken on purpose, each of which it must object to.

The core's own `check` is switched off here, so what objects is the simulated machine and the
onlooker.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from orchestrator.core.core import Core
from orchestrator.core.directory import ExpertDirectory
from orchestrator.core.dispatch import ExpertDispatch
from orchestrator.core.layer_step import Unanswered
from orchestrator.core.scheduler import Flight, Scheduler
from orchestrator.core.workers import Roster
from tests.sim.scenarios import scenario
from tests.sim.world import Simulation

if TYPE_CHECKING:
    from collections.abc import Callable

NUM_TRIES = 60


def pins_nothing(real: Any) -> Callable[..., None]:
    return lambda self, slot: None


def does_nothing(real: Any) -> Callable[..., None]:
    return lambda self, *args: None


def says_no(real: Any) -> property:
    return property(lambda self: False)


def joins_too_early(real: Any) -> Callable[..., None]:
    def run(self: Any, work: Any, experts: Any, slots: Any, commands: Any, **told: Any) -> None:
        if work.num_missing == len(experts) + 1 and experts:
            work.num_missing -= 1
        real(self, work, experts, slots, commands, **told)

    return run


def forgets_a_token(real: Any) -> Callable[..., None]:
    def gpu_lost(self: Any, commands: Any) -> None:
        for live in self._active:
            del live.tokens[max(live.num_prompt, len(live.tokens) - 1) :]
        real(self, commands)

    return gpu_lost


def keeps_the_caches(real: Any) -> Callable[..., None]:
    def gpu_lost(self: Any, commands: Any) -> None:
        kept = [(live, live.num_cached) for live in self._active]
        real(self, commands)
        for live, num_cached in kept:
            live.num_cached = num_cached

    return gpu_lost


def believes_everybody(real: Any) -> Callable[..., bool]:
    def executed(self: Any, event: Any, commands: Any) -> bool:
        if self.work is not None:
            for expert in event.experts:
                if expert in self.work.executing:
                    self.work.executing[expert] = event.epoch
        return bool(real(self, event, commands))

    return executed


def never_leaves(real: Any) -> Callable[..., None]:
    def lose(self: Any, epoch: Any) -> Any:
        role = real(self, epoch)
        self._gone.discard(epoch)
        return role

    return lose


def starts_with(change: Callable[[Any], None]) -> Callable[[Any], Callable[..., Any]]:
    def broken(real: Any) -> Callable[..., Any]:
        def start_next(self: Any, gpu_epoch: Any, commands: Any) -> Any:
            change(self)
            return real(self, gpu_epoch, commands)

        return start_next

    return broken


def prompts_first(scheduler: Any) -> None:
    scheduler._is_chunk_next = True


def streams_first(scheduler: Any) -> None:
    scheduler._is_chunk_next = False


def newest_first(scheduler: Any) -> None:
    scheduler._active.sort(key=lambda live: -live.sequence)
    scheduler._had_turn.clear()


def is_no_guest(real: Any) -> property:
    return property(lambda self: False, lambda self, value: None)


def gives_up_nothing(real: Any) -> Callable[..., list[Any]]:
    return lambda self: []


def hosts_anybody(real: Any) -> property:
    return property(lambda self: self.num_slots)


def hears_the_first(real: Any) -> Callable[..., None]:
    def step_done(self: Any, event: Any, commands: Any) -> None:
        others = self.flight.parts[1:]
        real(self, event, commands)
        for part in others:  # their tokens are lost on the way
            if part.wants_token and commands and len(part.live.tokens) > part.live.num_prompt:
                part.live.tokens.pop()
                part.live.num_cached = min(part.live.num_cached, len(part.live.tokens) - 1)

    return step_done


def first_pays(real: Any) -> Callable[..., None]:
    def end_flight(self: Any) -> None:
        if self._flight is not None:
            del self._flight.parts[1:]
        real(self)

    return end_flight


def goes_on(real: Any) -> Callable[..., bool]:
    return lambda self, event, epoch, commands: True


FAULTS: list[tuple[type, str, Callable[[Any], Any]]] = [
    (ExpertDirectory, "pin", pins_nothing),
    (ExpertDirectory, "clear", does_nothing),
    (ExpertDirectory, "abort", does_nothing),
    (ExpertDispatch, "_run", joins_too_early),
    (ExpertDispatch, "link_lost", does_nothing),
    (ExpertDispatch, "cpu_lost", does_nothing),
    (ExpertDispatch, "roster_changed", does_nothing),
    (ExpertDispatch, "executed", believes_everybody),
    (Unanswered, "is_waited_for", says_no),
    (Scheduler, "gpu_lost", forgets_a_token),
    (Scheduler, "gpu_lost", keeps_the_caches),
    (Roster, "lose", never_leaves),
    (Scheduler, "start_next", starts_with(prompts_first)),
    (Scheduler, "start_next", starts_with(streams_first)),
    (Scheduler, "start_next", starts_with(newest_first)),
    (Scheduler, "step_done", hears_the_first),
    (Scheduler, "withdraw", goes_on),
    (Flight, "is_guest", is_no_guest),
    (ExpertDirectory, "max_guests", hosts_anybody),
    (ExpertDirectory, "shrink", gives_up_nothing),
    (ExpertDispatch, "_end_flight", first_pays),
]


@pytest.mark.parametrize(
    ("owner", "name", "broken"),
    FAULTS,
    ids=[
        f"{index}-{owner.__name__}.{name}-{broken.__name__}"
        for index, (owner, name, broken) in enumerate(FAULTS)
    ],
)
def test_a_broken_core_is_caught(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str, broken: Callable[[Any], Any]
) -> None:
    monkeypatch.setattr(Core, "check", lambda self: None)
    monkeypatch.setattr(owner, name, broken(getattr(owner, name)))
    for number in range(NUM_TRIES):
        try:
            Simulation(scenario(number)).run()
        except (AssertionError, ValueError):  # Violation, or the core trips over its own feet
            return
    pytest.fail(f"{NUM_TRIES} scenarios ran to a good end on a broken core")
