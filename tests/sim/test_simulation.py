"""The serving core against workers that race, repeat themselves and die."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.core.core import Core
from tests.sim.scenarios import NUM_SCENARIOS, scenario
from tests.sim.world import Simulation

REPO_ROOT = Path(__file__).resolve().parents[2]
#: Scenarios with crashes, waves, several sequences and both branches.
EVENTFUL = (4, 23, 69, 130)


@pytest.mark.parametrize("number", range(NUM_SCENARIOS))
def test_every_request_gets_its_undisturbed_answer(number: int) -> None:
    Simulation(scenario(number)).run()


@pytest.mark.parametrize("number", EVENTFUL)
def test_the_same_seed_tells_the_same_story(number: int) -> None:
    assert Simulation(scenario(number)).run().lines == Simulation(scenario(number)).run().lines


@pytest.mark.parametrize("number", EVENTFUL)
def test_a_recorded_story_replays_on_a_fresh_core(number: int) -> None:
    story = Simulation(scenario(number)).run()
    core = Core(scenario(number).config)
    for event, is_learning, decision in zip(
        story.events, story.learnt, story.decisions, strict=True
    ):
        assert core.handle(event) == decision
        if is_learning:
            core.settle()


def test_the_story_does_not_hang_on_the_order_of_hashes() -> None:
    program = (
        "import hashlib\n"
        "from tests.sim.scenarios import scenario\n"
        "from tests.sim.world import Simulation\n"
        f"lines = [line for n in {EVENTFUL} for line in Simulation(scenario(n)).run().lines]\n"
        "print(hashlib.sha256('\\n'.join(lines).encode()).hexdigest())\n"
    )
    digests = {
        subprocess.run(
            [sys.executable, "-c", program],
            check=True,
            capture_output=True,
            text=True,
            timeout=60,
            env={**os.environ, "PYTHONPATH": str(REPO_ROOT), "PYTHONHASHSEED": hash_seed},
        ).stdout
        for hash_seed in ("1", "2")
    }
    assert len(digests) == 1


def test_the_stories_are_as_eventful_as_they_are_meant_to_be() -> None:
    stories = [Simulation(scenario(number)).run() for number in range(0, NUM_SCENARIOS, 7)]
    assert sum(story.num_deaths for story in stories) > 50
    assert sum(story.num_stale for story in stories) > 200
    assert sum(story.num_waits for story in stories) > 50
    assert sum(story.num_layer_steps for story in stories) > 500
    assert sum(story.num_behind for story in stories) > 20
    assert sum(story.num_preloaded for story in stories) > 10
    assert sum(story.num_learned for story in stories) > 1
    assert sum(story.num_given_up for story in stories) > 20
    assert sum(story.num_guest_steps for story in stories) > 20
    assert sum(story.num_joint_steps for story in stories) > 20
    assert sum(story.num_foreseen for story in stories) > 10
