"""The residency table, its ring and its fence, broken on purpose: the simulation must object.

Neither the core's own `check` nor the onlooker's look at the table helps here: what objects is the
simulated machine, in which slots are torn and swapped under a reader who looked too long ago.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import pytest

from orchestrator.core.background import BackgroundFills
from orchestrator.core.core import Core
from orchestrator.core.dispatch import ExpertDispatch
from orchestrator.core.events import Retired
from orchestrator.residency import ResidencyBoard
from protocol.errors import ProtocolError
from protocol.residency import NO_SLOT, ResidencyReader, ResidencyWriter
from tests.sim.scenarios import NUM_SCENARIOS, scenario
from tests.sim.watch import Onlooker
from tests.sim.world import Simulation

if TYPE_CHECKING:
    from collections.abc import Callable

NUM_TRIES = 150


def does_nothing(real: Any) -> Callable[..., None]:
    return lambda self, *args: None


def ignores_the_fence(real: Any) -> Callable[..., None]:
    return lambda self, copy: self._deliver(Retired(copy))


def waits_for_no_grace(real: Any) -> Callable[..., Any]:
    def begin(self: Any, *args: Any, is_resting: bool) -> Any:
        return real(self, *args, is_resting=True)

    return begin


def looks_outside_the_fence(real: Any) -> Callable[..., Any]:
    def look(self: Any, layer: int, experts: Any) -> Any:
        slots = real(self, layer, experts)
        if slots is not None and any(slot != NO_SLOT for slot in slots):
            self._words[8] += 1  # even already, while the slots are still to be used
        return slots

    return look


def believes_what_has_left(real: Any) -> Callable[..., bool]:
    return lambda self, event, experts: False


def keeps(index: int) -> Callable[[Any], Callable[..., None]]:
    """One of head and tail outlives the gpu_worker, so that they fit no longer."""

    def breaks(real: Any) -> Callable[..., None]:
        def reset(self: Any, epoch: int) -> None:
            word = self._words[index]
            real(self, epoch)
            self._words[index] = word

        return reset

    breaks.__name__ = f"keeps_word_{index}"
    return breaks


keeps_the_head, keeps_the_tail = keeps(16), keeps(24)


def keeps_old_slots(real: Any) -> Callable[..., None]:
    def reset(self: Any, epoch: int) -> None:
        table = list(self._table)
        real(self, epoch)
        for index, slot in enumerate(table):
            self._table[index] = slot

    return reset


def never_finds_the_ring_full(real: Any) -> Callable[..., Any]:
    def look(self: Any, layer: int, experts: Any) -> Any:
        tail, self._words[24] = self._words[24], self.num_reports
        try:
            return real(self, layer, experts)
        finally:
            self._words[24] = tail

    return look


def takes_no_reports(real: Any) -> Callable[..., list[Any]]:
    return lambda self, epoch, num_reports: []


def forgets_what_it_takes(real: Any) -> Callable[..., list[Any]]:
    def early(self: Any) -> list[Any]:
        real(self)
        return []

    return early


def takes_everything(real: Any) -> Callable[..., list[Any]]:
    return lambda self: self.take(self.head)


FAULTS: list[tuple[type, str, Callable[[Any], Any]]] = [
    (ResidencyWriter, "unpublish", does_nothing),
    (ResidencyWriter, "reset", keeps_the_head),
    (ResidencyWriter, "reset", keeps_the_tail),
    (ResidencyWriter, "reset", keeps_old_slots),
    (ResidencyReader, "look", never_finds_the_ring_full),
    (ResidencyReader, "look", looks_outside_the_fence),
    (ResidencyReader, "leave", does_nothing),
    (ResidencyBoard, "_retire", ignores_the_fence),
    (ResidencyBoard, "_reports", takes_no_reports),
    (ResidencyBoard, "early", forgets_what_it_takes),
    (ResidencyWriter, "take_layers", takes_everything),
    (BackgroundFills, "begin", waits_for_no_grace),
    (ExpertDispatch, "_have_left", believes_what_has_left),
]


@pytest.mark.parametrize(
    ("owner", "name", "broken"),
    FAULTS,
    ids=[f"{owner.__name__}.{name}-{broken.__name__}" for owner, name, broken in FAULTS],
)
def test_a_broken_table_is_caught(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str, broken: Callable[[Any], Any]
) -> None:
    monkeypatch.setattr(Core, "check", lambda self: None)
    monkeypatch.setattr(Onlooker, "check_table", lambda self, table: None)
    monkeypatch.setattr(owner, name, broken(getattr(owner, name)))
    # The whole range, so that all kinds of scenarios are among the first ones tried.
    for number in itertools.islice(range(0, 5 * NUM_SCENARIOS, 5), NUM_TRIES):
        try:
            Simulation(scenario(number % NUM_SCENARIOS + number // NUM_SCENARIOS)).run()
        except (AssertionError, ValueError, ProtocolError):
            return
    pytest.fail(f"{NUM_TRIES} scenarios ran to a good end on a broken table")


def test_a_look_while_a_layer_waits_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes a worker that is through with the next layer before the core hears of the last part
    of this one; that is rare, so the story is named."""
    rare = 134
    Simulation(scenario(rare)).run()
    monkeypatch.setattr(Core, "is_between_layers", property(lambda self: True))
    with pytest.raises(AssertionError, match="passed out of turn"):
        Simulation(scenario(rare)).run()


def test_the_stories_use_the_table_in_every_way() -> None:
    stories = [Simulation(scenario(number)).run() for number in range(0, NUM_SCENARIOS, 9)]
    assert sum(story.num_passed for story in stories) > 100
    assert sum(story.num_early for story in stories) > 50
    assert sum(story.num_retired for story in stories) > 20
    assert sum(story.num_full for story in stories) > 10
    assert sum(story.num_started for story in stories) > 10
    assert sum(story.num_deferred for story in stories) > 0
