"""`headrace generate --model DIR`: everything real, from the prompt to the last process gone."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from orchestrator.client import ask_status
from protocol.errors import UserError
from protocol.run_dir import RunDir
from tests.process.pipelines import PROMPT, Processes, is_over, wait_until

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterator

# Under load, importing torch in five processes at once takes most of a minute.
pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(300)]

TIMEOUT_S = 200.0
KEYS = {
    "text", "token_ids", "prompt_tokens", "generated_tokens", "tokens_per_s", "ttft_s", "hits",
    "fills", "cpu_experts", "fills_behind", "evictions", "fill_bytes", "cpu_bytes",
    "worker_restarts", "slots", "stages", "logits_digest",
}  # fmt: skip


def arguments(model: Path, max_tokens: int, *more: object) -> list[object]:
    return [
        "generate", "--model", model, "--prompt", PROMPT, "--max-tokens", max_tokens,
        "--ignore-eos", "--json", "--digest-logits", *more,
    ]  # fmt: skip


def result_of(processes: Processes, generate: subprocess.Popen[bytes]) -> dict[str, Any]:
    code = generate.wait(TIMEOUT_S)
    said = processes.said(generate)
    assert code == 0, said
    return json.loads(said.splitlines()[-1])


def family_of(process: subprocess.Popen[bytes]) -> list[int]:
    """The orchestrator and its workers, which live in sessions of their own."""
    children = psutil.Process(process.pid).children(recursive=True)
    return [child.pid for child in children]


def worker_pids(run_dir: Path) -> dict[str, int]:
    with contextlib.suppress(UserError):
        status = ask_status(RunDir(run_dir))
        if status.is_ready:
            return {worker.role: worker.pid for worker in status.workers}
    return {}


@pytest.fixture(scope="module")
def undisturbed(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A run to which nothing happens, with a latency log."""
    path = tmp_path_factory.mktemp("undisturbed")
    processes = Processes(path)
    log = path / "log.jsonl"
    try:
        done = processes.call(
            *arguments(tiny_model, 400, "--latency-log", log, "--fill-behind", "off"),
            timeout_s=TIMEOUT_S,
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("\n") == 1
        return {**json.loads(done.stdout), "log": log}
    finally:
        processes.end()


def test_json_says_it_all(undisturbed: dict[str, Any]) -> None:
    assert undisturbed.keys() >= KEYS
    assert undisturbed["generated_tokens"] == len(undisturbed["token_ids"]) == 400
    assert undisturbed["prompt_tokens"] == len(PROMPT)
    assert undisturbed["slots"] == 6
    assert undisturbed["worker_restarts"] == 0
    assert undisturbed["tokens_per_s"] > 0
    assert undisturbed["ttft_s"] > 0
    assert len(undisturbed["logits_digest"]) == 64
    demanded = undisturbed["hits"] + undisturbed["fills"] + undisturbed["cpu_experts"]
    # 3 layers, top 2, one row per step after the prompt.
    assert demanded >= 3 * 2 * 399
    assert undisturbed["fills"] + undisturbed["fills_behind"] >= undisturbed["evictions"]
    stages = undisturbed["stages"]
    assert {"dense", "plan", "join", "layer", "sample", "step"} <= stages.keys()
    assert stages["layer"]["num_samples"] == 3 * stages["step"]["num_samples"]
    for times in stages.values():
        assert 0 <= times["p50_us"] <= times["p95_us"] <= times["p99_us"] <= times["max_us"]


def test_the_log_agrees_with_the_result(
    undisturbed: dict[str, Any], processes: Processes, tmp_path: Path
) -> None:
    trace = tmp_path / "trace.json"
    done = processes.call("latency", undisturbed["log"], "--json", "--trace", trace)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["hits"] == undisturbed["hits"]
    assert report["fills"] == undisturbed["fills"]
    assert report["cpu"] == undisturbed["cpu_experts"]
    assert report["fill_bytes"] == undisturbed["fill_bytes"]
    assert report["cpu_bytes"] == undisturbed["cpu_bytes"]
    assert report["num_steps"] == undisturbed["stages"]["step"]["num_samples"]
    assert report["stages"]["step"] == undisturbed["stages"]["step"]
    assert json.loads(trace.read_bytes())["traceEvents"]


def test_killed_workers_and_a_neighbour(
    undisturbed: dict[str, Any], tiny_model: Path, tmp_path: Path, processes: Processes
) -> None:
    """Two pipelines side by side; in one of them every worker dies once."""
    run_dir, log = tmp_path / "run", tmp_path / "log.jsonl"
    # A slow link makes it last, so that the deaths fall into its middle.
    slowly = ["--fill", "1", "--emulate-link-gbps", "0.002", "--latency-log", log]
    hit = processes.headrace(*arguments(tiny_model, 400, "--run-dir", run_dir, *slowly))
    neighbour = processes.headrace(*arguments(tiny_model, 400, "--fill", "all", "--slots", "1"))
    wait_until(lambda: log.exists() and b'"kind":"step"' in log.read_bytes(), TIMEOUT_S)
    pids = worker_pids(run_dir)
    for role in ("cpu_worker", "dma_worker", "gpu_worker"):
        os.kill(pids[role], signal.SIGKILL)
        time.sleep(0.2)
    results = [result_of(processes, generate) for generate in (hit, neighbour)]
    for result in results:
        assert result["token_ids"] == undisturbed["token_ids"]
        assert result["logits_digest"] == undisturbed["logits_digest"]
    assert results[0]["worker_restarts"] == 3
    assert results[1]["worker_restarts"] == 0
    assert results[1]["slots"] == 1
    assert not list(run_dir.glob("*"))


#: Every miss waits for a link of 2 MB/s: no text is over before it is meddled with.
SLOW = ("--slots", "1", "--fill", "all", "--emulate-link-gbps", "0.002")


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_the_end_of_the_command_ends_everything(
    tiny_model: Path, tmp_path: Path, processes: Processes, how: signal.Signals
) -> None:
    run_dir = tmp_path / "run"
    generate = processes.headrace(*arguments(tiny_model, 100_000, "--run-dir", run_dir, *SLOW))
    wait_until(lambda: worker_pids(run_dir), TIMEOUT_S)
    family = family_of(generate)
    assert len(family) == 4
    generate.send_signal(how)
    assert generate.wait(30) == (130 if how == signal.SIGINT else -signal.SIGKILL)
    wait_until(lambda: all(is_over(pid) for pid in family), 30)
    assert not list(run_dir.glob("*"))
    if how == signal.SIGINT:
        assert "Traceback" not in processes.said(generate)


def test_a_killed_orchestrator_takes_its_workers_along(
    tiny_model: Path, processes: Processes
) -> None:
    before = set(_private_run_dirs())
    generate = processes.headrace(*arguments(tiny_model, 100_000, *SLOW))
    wait_until(lambda: len(family_of(generate)) == 4, TIMEOUT_S)
    mine = _mine(before, generate)
    wait_until(lambda: worker_pids(mine), TIMEOUT_S)
    family = family_of(generate)
    orchestrator = psutil.Process(generate.pid).children()[0]
    orchestrator.kill()
    wait_until(lambda: all(is_over(pid) for pid in family), 5 + 5)
    assert generate.wait(30) == 1
    said = processes.said(generate)
    assert "the orchestrator went away" in said
    assert "signal 9" in said
    assert "Traceback" not in said
    assert not mine.exists()


def _private_run_dirs() -> Iterator[Path]:
    return Path(tempfile.gettempdir()).glob("headrace-*")


def _mine(before: set[Path], generate: subprocess.Popen[bytes]) -> Path:
    """The private run directory of this very command: its orchestrator holds the lock."""
    orchestrator = psutil.Process(generate.pid).children()[0]
    for path in set(_private_run_dirs()) - before:
        with contextlib.suppress(OSError):
            if (path / "lock").read_text() == str(orchestrator.pid):
                return path
    raise AssertionError("no private run directory")
