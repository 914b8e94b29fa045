"""Parts told finished in shared memory, with one rule broken at a time: the simulation must object.

The core's own `check` is switched off; what objects is the machine, whose gpu_worker believes the
words, or the onlooker, or a request that never ends.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import pytest

from orchestrator.core.core import Core
from orchestrator.finished_parts import FinishedParts
from protocol.completions import Completion, Completions
from protocol.errors import ProtocolError
from protocol.residency import ResidencyReader
from tests.sim.machine import Copier
from tests.sim.scenarios import NUM_SCENARIOS, scenario
from tests.sim.world import Simulation

if TYPE_CHECKING:
    from collections.abc import Callable

NUM_TRIES = 150


def takes_any_step(real: Any) -> Callable[..., Any]:
    """A word of another step is good enough."""

    def landed(self: Any, step: int, layer: int, experts: Any) -> list[tuple[int, int]]:
        found = dict(
            pair for before in range(step) for pair in real(self, before, layer, list(experts))
        )
        return [*found.items(), *(pair for pair in real(self, step, layer, experts)
                                  if pair[0] not in found)]  # fmt: skip

    return landed


def sees_nothing(real: Any) -> Callable[..., list[Any]]:
    return lambda self: []


def sees_no_copies(real: Any) -> Callable[..., list[Any]]:
    def look(self: Any) -> list[Any]:
        copies, self._copies = self._copies, {}
        try:
            return real(self)
        finally:
            self._copies = copies

    return look


def helps_nobody(real: Any) -> Callable[..., None]:
    return lambda self, *args: None


def says_it_and_does_not(real: Any) -> Callable[..., bool]:
    return lambda self, *args: True


def tells_before_it_copies(real: Any) -> Callable[..., None]:
    def begin(self: Any) -> None:
        worker, command = self._worker, self._queue[0]
        real(self)
        if command.step and worker.role == "dma_worker":
            done = Completion(command.slot, worker.epoch, worker.world.now, worker.world.now)
            worker.world.finished(command.step, command.layer, [command.expert], done)

    return begin


def names_no_slot_it_knows(real: Any) -> Callable[..., Any]:
    def landed(self: Any, *args: Any) -> list[tuple[int, int]]:
        return [(expert, -1 if slot < 0 else 0) for expert, slot in real(self, *args)]

    return landed


FAULTS: list[tuple[type, str, Callable[[Any], Any]]] = [
    (Completions, "landed", takes_any_step),
    (Completions, "landed", names_no_slot_it_knows),
    (Copier, "_begin", tells_before_it_copies),
    (FinishedParts, "look", sees_nothing),
    (FinishedParts, "look", sees_no_copies),
    (FinishedParts, "heard", helps_nobody),
    (ResidencyReader, "ran", says_it_and_does_not),
]


@pytest.mark.parametrize(
    ("owner", "name", "broken"),
    FAULTS,
    ids=[f"{owner.__name__}.{name}-{broken.__name__}" for owner, name, broken in FAULTS],
)
def test_a_broken_word_is_caught(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str, broken: Callable[[Any], Any]
) -> None:
    monkeypatch.setattr(Core, "check", lambda self: None)
    monkeypatch.setattr(owner, name, broken(getattr(owner, name)))
    for number in itertools.islice(range(0, 5 * NUM_SCENARIOS, 5), NUM_TRIES):
        try:
            Simulation(scenario(number % NUM_SCENARIOS + number // NUM_SCENARIOS)).run()
        except (AssertionError, ValueError, KeyError, ProtocolError):
            return
    pytest.fail(f"{NUM_TRIES} scenarios ran to a good end with a broken word")


def test_the_stories_see_parts_finished_before_their_messages() -> None:
    stories = [Simulation(scenario(number)).run() for number in range(0, NUM_SCENARIOS, 9)]
    assert sum(story.num_seen for story in stories) > 100
