"""Several requests at once on a real pipeline: each gets what it gets alone, whatever happens."""

from __future__ import annotations

import json
import threading
import uuid
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from orchestrator.client import PipelineClient
from protocol.channel import DealerChannel
from protocol.codec import to_client
from protocol.lifeline import Lifeline
from protocol.messages import Accepted, Finished, Generate, Generated, RequestId, SamplingParams
from protocol.run_dir import RunDir
from tests.checkpoints import make_checkpoint
from tests.process.pipelines import Pipeline, Processes, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]

#: Prompt and how to sample: greedy and drawn, one chunk and several, with and without penalties.
ASKED: list[tuple[str, SamplingParams]] = [
    ("Water turns the wheel. " * 7, SamplingParams()),
    ("The stone", SamplingParams(0.8, seed=5)),
    ("grinds the corn; " * 3, SamplingParams(1.1, top_p=0.9, seed=6, frequency_penalty=0.5)),
    ("A headrace", SamplingParams(repetition_penalty=1.3, num_logprobs=2)),
    ("brings the water", SamplingParams(0.7, top_k=20, seed=8, logit_bias={40: 2.0})),
]
NUM_TOKENS = 30


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("log") / "log.jsonl"


@pytest.fixture(scope="module")
def pipeline(log: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pipeline]:
    path = tmp_path_factory.mktemp("many")
    processes = Processes(path)
    try:
        started = Pipeline(
            processes, make_checkpoint("qwen3_moe", path / "model"), path / "run", "--supervise",
            "--slots", "25%", "--digest-logits", "--max-num-seqs", "4", "--latency-log", str(log),
        )  # fmt: skip
        started.wait_for(lambda status: status.is_ready)
        yield started
    finally:
        processes.end()


def ask(pipeline: Pipeline, number: int) -> tuple[list[int], list[Any], str]:
    """Tokens, log probabilities and the digest of all logits."""
    prompt, sampling = ASKED[number]
    client = PipelineClient.connect(RunDir(pipeline.run_dir), 10)
    tokens: list[int] = []
    logprobs: list[Any] = []
    try:
        for reply in client.generate(
            prompt, max_tokens=NUM_TOKENS, sampling=sampling, ignore_eos=True
        ):
            match reply:
                case Generated():
                    tokens += reply.tokens
                    logprobs += reply.logprobs
                case Finished():
                    assert reply.reason == "length", reply
                    return tokens, logprobs, reply.stats.logits_digest
    finally:
        client.close()
    raise AssertionError("no end")


@pytest.fixture(scope="module")
def alone(pipeline: Pipeline) -> list[tuple[list[int], list[Any], str]]:
    answers = [ask(pipeline, number) for number in range(len(ASKED))]
    assert all(len(tokens) == NUM_TOKENS for tokens, _, _ in answers)
    assert [len(logprobs) for _, logprobs, _ in answers] == [0, 0, 0, NUM_TOKENS, 0]
    return answers


def ask_all(pipeline: Pipeline) -> tuple[list[threading.Thread], dict[int, Any]]:
    found: dict[int, Any] = {}

    def run(number: int) -> None:
        found[number] = ask(pipeline, number)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(ASKED))]
    for thread in threads:
        thread.start()
    return threads, found


def steps(log: Path) -> list[dict[str, Any]]:
    lines = log.read_text().splitlines()
    return [record for line in lines if (record := json.loads(line))["kind"] == "step"]


def test_each_gets_in_a_crowd_what_it_gets_alone(
    pipeline: Pipeline, alone: list[tuple[list[int], list[Any], str]], log: Path
) -> None:
    wait_until(lambda: len(steps(log)) >= len(ASKED) * NUM_TOKENS)
    num_before = len(steps(log))
    threads, found = ask_all(pipeline)
    for thread in threads:
        thread.join(120)
    assert [found[number] for number in range(len(ASKED))] == alone
    during = steps(log)[num_before:]
    widths = [len(record["request"].split(",")) for record in during]
    assert max(widths) == 4, "one of five waits"
    assert len(during) < 0.7 * len(ASKED) * NUM_TOKENS, "they went one by one"


def test_a_gpu_worker_killed_in_a_crowd_changes_nothing(
    pipeline: Pipeline, alone: list[tuple[list[int], list[Any], str]], log: Path
) -> None:
    num_before = len(steps(log))
    threads, found = ask_all(pipeline)
    wait_until(lambda: len(steps(log)) > num_before)
    (gpu,) = (w for w in pipeline.status().workers if w.role == "gpu_worker")
    psutil.Process(gpu.pid).kill()
    for thread in threads:
        thread.join(200)
    assert [found[number] for number in range(len(ASKED))] == alone


def test_a_client_that_goes_while_its_prompt_is_read_stops_the_work(
    pipeline: Pipeline, alone: list[tuple[list[int], list[Any], str]], log: Path
) -> None:
    run_dir = RunDir(pipeline.run_dir)
    lifeline = Lifeline.connect(run_dir, 10)
    channel = DealerChannel(run_dir, to_client(), lifeline.fileno())
    num_before = len(steps(log))
    name = RequestId(uuid.uuid4().hex)
    channel.send(Generate(name, "", [65] * 448, 5, True, SamplingParams()))
    while not isinstance(channel.receive(5), Accepted):
        pass
    channel.close()
    lifeline.close()
    assert ask(pipeline, 1) == alone[1]
    read = [record["num_tokens"] for record in steps(log)[num_before:]]
    assert sum(num_tokens for num_tokens in read if num_tokens == 64) < 448, "all of it was read"
