"""The serving core against workers that race, repeat themselves and die."""

from __future__ import annotations

import pytest

from tests.sim.scenarios import NUM_SCENARIOS, scenario
from tests.sim.world import Simulation


@pytest.mark.parametrize("number", range(NUM_SCENARIOS))
def test_every_request_gets_its_undisturbed_answer(number: int) -> None:
    Simulation(scenario(number)).run()
