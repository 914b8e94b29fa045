"""Where an expert runs never changes a bit: tokens and logits of every placement are the same."""

from __future__ import annotations

import json
import time
from functools import cache
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from tests.checkpoints import make_checkpoint
from tests.process.pipelines import Pipeline, Processes, wait_until

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable
    from pathlib import Path

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]

#: Longer than a decode step's one row: the prompt gives every expert several rows.
PROMPT = "Water turns the wheel; the wheel turns the stone; the stone grinds the corn. " * 2
NUM_TOKENS = 120

#: A name, the flags of the pipeline, and what must have happened for the name to be true.
PLACEMENTS = {
    "one slot": (["--slots", "1"], ("fills", "cpu_experts")),
    "slots = top_k": (["--slots", "2"], ("fills", "cpu_experts")),
    "quarter": (["--slots", "25%"], ("hits", "fills", "cpu_experts")),
    "every miss filled": (["--slots", "25%", "--fill", "all"], ("fills",)),
    "every miss filled through one slot": (["--slots", "1", "--fill", "all"], ("fills",)),
    "every miss on the CPU": (["--slots", "25%", "--fill", "none"], ("cpu_experts",)),
    "q = 1": (["--slots", "50%", "--fill", "1"], ("fills", "cpu_experts")),
    "two cpu_workers": (
        ["--slots", "25%", "--fill", "none", "--cpu-workers", "2"],
        ("cpu_experts",),
    ),
    "no cpu_worker": (["--slots", "25%", "--cpu-workers", "0"], ("hits", "fills")),
}
#: Stated rates: the split is then adaptive and yet the same on every machine.
RATES = ("--host-gbps", "2", "--link-gbps", "1")


#: Where experts run and what they are made of are independent: 16 bits repeat a few placements.
CASES = [("float32", name) for name in PLACEMENTS] + [
    ("bfloat16", name) for name in ("one slot", "quarter", "every miss on the CPU")
]


@pytest.fixture(scope="module")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    @cache
    def make(dtype: str) -> Path:
        path = tmp_path_factory.mktemp("placement") / dtype
        return make_checkpoint("qwen3_moe", path, dtype=dtype)

    return make


def generate(processes: Processes, model: Path, *flags: str) -> dict[str, Any]:
    done = processes.call(
        "generate", "--model", model, "--prompt", PROMPT, "--max-tokens", NUM_TOKENS,
        "--temperature", 0.7, "--seed", 5, "--ignore-eos", "--digest-logits", "--json", *flags,
        timeout_s=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


@pytest.fixture(scope="module")
def all_resident_of(
    model_of: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], dict[str, Any]]:
    """The reference of a dtype: every expert has a slot of its own."""

    @cache
    def decode(dtype: str) -> dict[str, Any]:
        processes = Processes(tmp_path_factory.mktemp("logs"))
        result = generate(processes, model_of(dtype), "--slots", "100%", "--fill", "all")
        assert result["cpu_experts"] == result["evictions"] == 0
        assert len(result["token_ids"]) == NUM_TOKENS
        assert result["logits_digest"]
        return result

    return decode


@pytest.mark.parametrize(("dtype", "name"), CASES)
def test_placement_changes_no_bit(
    dtype: str,
    name: str,
    model_of: Callable[[str], Path],
    all_resident_of: Callable[[str], dict[str, Any]],
    processes: Processes,
) -> None:
    flags, must_happen = PLACEMENTS[name]
    result = generate(processes, model_of(dtype), *RATES, *flags)
    for counter in must_happen:
        assert result[counter] > 0, counter
    assert result["token_ids"] == all_resident_of(dtype)["token_ids"]
    assert result["logits_digest"] == all_resident_of(dtype)["logits_digest"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_workers_killed_in_mid_run_change_no_bit(
    dtype: str,
    model_of: Callable[[str], Path],
    all_resident_of: Callable[[str], dict[str, Any]],
    processes: Processes,
    tmp_path: Path,
) -> None:
    """kill -9 of each worker once, while one text is being written."""
    log = tmp_path / "log.jsonl"
    pipeline = Pipeline(
        processes, model_of(dtype), tmp_path / "run", "--supervise", "--slots", "25%",
        "--digest-logits", "--latency-log", str(log), *RATES,
        "--emulate-link-gbps", "0.002",  # slow fills: the kills meet copies in flight
    )  # fmt: skip
    pipeline.wait_for(lambda status: status.is_ready)
    client = processes.headrace(
        "generate", "--run-dir", pipeline.run_dir, "--prompt", PROMPT, "--max-tokens", NUM_TOKENS,
        "--temperature", 0.7, "--seed", 5, "--ignore-eos", "--json",
    )  # fmt: skip
    # A client's imports can take longer than all three kills: wait for its first step.
    wait_until(lambda: log.exists() and b'"kind":"step"' in log.read_bytes())
    for role in ("cpu_worker", "dma_worker", "gpu_worker"):
        _kill_one(pipeline, client, role)
    result = pipeline.finish(client)
    assert result["worker_restarts"] >= 3
    assert result["token_ids"] == all_resident_of(dtype)["token_ids"]
    assert result["logits_digest"] == all_resident_of(dtype)["logits_digest"]


def _kill_one(pipeline: Pipeline, client: subprocess.Popen[bytes], role: str) -> None:
    status = pipeline.wait_for(
        lambda status: any(worker.role == role and worker.is_ready for worker in status.workers)
    )
    pid = next(worker.pid for worker in status.workers if worker.role == role)
    time.sleep(0.3)
    assert client.poll() is None, "the text was over before the kill: make it longer"
    psutil.Process(pid).kill()
    wait_until(lambda: all(worker.pid != pid for worker in pipeline.status().workers))
