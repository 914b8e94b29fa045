"""A request that ends every gpu_worker: it comes to an end itself, and the others get on."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest

from orchestrator.core.scheduler import MAX_LOSSES
from tests.sim.scenarios import NUM_SCENARIOS, scenario
from tests.sim.world import Scenario, Simulation


def calm(number: int, poison: int | None = None) -> Scenario:
    """Four requests without crashes or withdrawals, all of them active together."""
    drawn = scenario(number)
    prompts = tuple((1000 + index, *range(2 + index)) for index in range(4))
    return dataclasses.replace(
        drawn,
        config=msgspec.structs.replace(drawn.config, max_num_seqs=4),
        cpu_rates=drawn.cpu_rates or (30.0,),
        prompts=prompts,
        max_tokens=(12,) * 4,
        crashes=(),
        withdrawals={},
        poison=poison,
    )


def poisoned(number: int) -> tuple[Simulation, str] | None:
    """One of the requests brings or samples a token that is deadly and that no other has; and which
    it is. None if there is no such token."""
    plain = calm(number)
    books = Simulation(plain).onlooker.books
    tokens = {
        name: [*prompt, *books[name].answer.tokens]
        for (name, prompt) in zip(books, plain.prompts, strict=True)
    }
    for name, own in tokens.items():
        others = {token for other, seen in tokens.items() if other != name for token in seen}
        deadly = [token for token in own[1:-1] if token not in others]  # the last goes in nowhere
        if deadly:
            simulation = Simulation(calm(number, deadly[number % len(deadly)]))
            simulation.onlooker.books[name].is_poisoned = True
            return simulation, name
    return None


@pytest.mark.parametrize("number", range(0, NUM_SCENARIOS, 24))
def test_the_others_get_their_undisturbed_answers(number: int) -> None:
    found = poisoned(number)
    assert found is not None
    simulation, name = found
    story = simulation.run()
    assert story.num_deaths == MAX_LOSSES
    done = simulation.onlooker.books[name].done
    assert done is not None
    assert done.reason == "error"
    assert f"{MAX_LOSSES} gpu_workers" in done.sentence
