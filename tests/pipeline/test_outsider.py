"""Conformance: a cpu_worker that shares no line with the project serves set C."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.checkpoints import make_checkpoint
from tests.process.pipelines import REPO_ROOT, Pipeline

if TYPE_CHECKING:
    from tests.process.pipelines import Processes

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]

OUTSIDER = REPO_ROOT / "tests" / "outsider_worker.py"
PROMPT = "An outsider joins."
NUM_TOKENS = 48


def test_the_outsider_knows_nothing_of_the_project() -> None:
    imported = set()
    for node in ast.walk(ast.parse(OUTSIDER.read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add((node.module or "").partition(".")[0])
    ours = {path.name for path in Path(REPO_ROOT).iterdir() if path.is_dir()}
    assert not imported & ours
    assert {"zmq", "msgpack", "numpy"} <= imported


def test_tokens_are_the_same_with_an_outsider(processes: Processes, tmp_path: Path) -> None:
    model = make_checkpoint("qwen3_moe", tmp_path / "model")
    flags = ("--prompt", PROMPT, "--max-tokens", NUM_TOKENS, "--temperature", 0, "--ignore-eos")
    ours = processes.call("generate", "--model", model, *flags, "--json", timeout_s=240)
    assert ours.returncode == 0, ours.stderr

    pipeline = Pipeline(processes, model, tmp_path / "run", "--slots", "1", "--fill", "none")
    processes.headrace("gpu-worker", "--run-dir", pipeline.run_dir)
    processes.headrace("dma-worker", "--run-dir", pipeline.run_dir)
    outsider = processes.start(OUTSIDER, pipeline.run_dir)
    pipeline.wait_for(lambda status: sum(worker.is_ready for worker in status.workers) == 3)
    done = processes.call(
        "generate", "--run-dir", pipeline.run_dir, *flags, "--json", timeout_s=240
    )
    assert done.returncode == 0, done.stderr + processes.said(outsider)
    result = json.loads(done.stdout)
    assert outsider.poll() is None, processes.said(outsider)
    assert result["cpu_experts"] > 0
    assert result["fills"] == 0
    assert result["token_ids"] == json.loads(ours.stdout)["token_ids"]
