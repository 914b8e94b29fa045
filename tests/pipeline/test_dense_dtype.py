"""`--dense-dtype` through the whole pipeline: the demo model with quantised linear layers."""

from __future__ import annotations

import contextlib
import math
from functools import cache
from typing import TYPE_CHECKING

import pytest

from orchestrator.client import PipelineClient
from protocol.messages import Finished, Generated, SamplingParams
from protocol.run_dir import RunDir
from tests.process.pipelines import REPO_ROOT, Pipeline, Processes

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = [pytest.mark.process, pytest.mark.timeout(400)]

MODEL = REPO_ROOT / "models" / "demo"
PROMPT = "def read_lines(path):\n    with open(path) as"
NUM_TOKENS = 40
NUM_LOGPROBS = 20  # the most that a client may ask for
#: Root of the mean squared difference from the logits of the model as it is, in units of how much
#: those scatter over the likeliest tokens.
BOUNDS = {"int8": 0.06, "int4": 0.35}
IN_SLOTS = ("--slots", "100%", "--fill", "all")
ON_CPU = ("--slots", "1", "--fill", "none")


class Answer:
    """Tokens, the digest of all logits, and log probabilities of each token's candidates."""

    def __init__(self, pipeline: Pipeline) -> None:
        pipeline.wait_for(lambda status: status.is_ready)
        client = PipelineClient.connect(RunDir(pipeline.run_dir), 30)
        sampling = SamplingParams(num_logprobs=NUM_LOGPROBS)
        self.tokens: list[int] = []
        self.logprobs: list[dict[int, float]] = []
        with contextlib.closing(client):
            for reply in client.generate(
                PROMPT, max_tokens=NUM_TOKENS, sampling=sampling, ignore_eos=True
            ):
                if isinstance(reply, Generated):
                    self.tokens += reply.tokens
                    self.logprobs += [
                        dict(zip(token.top_tokens, token.top_logprobs, strict=True))
                        for token in reply.logprobs
                    ]
                if isinstance(reply, Finished):
                    self.stats = reply.stats


@pytest.fixture(scope="module")
def answer_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Answer]:
    """Flags of a pipeline -> its answer, had once."""

    @cache
    def get(*flags: str) -> Answer:
        path = tmp_path_factory.mktemp("dense")
        processes = Processes(path)
        try:
            pipeline = Pipeline(
                processes, MODEL, path / "run", "--supervise", "--digest-logits",
                "--host-gbps", "2", "--link-gbps", "1", *flags,
            )  # fmt: skip
            return Answer(pipeline)
        finally:
            processes.end()

    return get


@pytest.mark.parametrize("name", BOUNDS)
def test_placement_changes_no_bit(name: str, answer_of: Callable[..., Answer]) -> None:
    in_slots, on_cpu = (answer_of("--dense-dtype", name, *flags) for flags in (IN_SLOTS, ON_CPU))
    assert in_slots.stats.cpu_experts == 0
    assert in_slots.stats.hits > 0
    assert on_cpu.stats.cpu_experts > 0
    assert on_cpu.stats.fills == 0
    assert len(in_slots.tokens) == NUM_TOKENS
    assert in_slots.tokens == on_cpu.tokens
    assert in_slots.stats.logits_digest == on_cpu.stats.logits_digest != ""


@pytest.mark.parametrize("name", BOUNDS)
def test_logits_are_near_those_of_the_model_as_it_is(
    name: str, answer_of: Callable[..., Answer]
) -> None:
    plain, packed = answer_of(*IN_SLOTS), answer_of("--dense-dtype", name, *IN_SLOTS)
    assert packed.stats.logits_digest != plain.stats.logits_digest
    ours: list[float] = []
    theirs: list[float] = []
    for position, (found, expected) in enumerate(zip(packed.logprobs, plain.logprobs, strict=True)):
        if packed.tokens[:position] != plain.tokens[:position]:
            break  # from here on they answer another text
        shared = sorted(found.keys() & expected.keys())
        # A constant for all tokens lies between logits and log probabilities: take it out.
        ours += centred([found[token] for token in shared])
        theirs += centred([expected[token] for token in shared])
    assert len(theirs) > NUM_LOGPROBS  # more than one position
    error = math.dist(ours, theirs) / math.hypot(*theirs)
    assert 0 < error < BOUNDS[name], (error, position)


def centred(values: list[float]) -> list[float]:
    mean = sum(values) / len(values)
    return [value - mean for value in values]
