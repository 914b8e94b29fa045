"""A worker written from docs/protocol.md alone joins, computes and leaves like ours."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest
import torch

from expert_kernels.step_rows import ActivationViews
from protocol.messages import Executed, Ready, Shutdown
from tests.cpu_worker.test_worker import execute, expected_rows, route
from tests.protocol.fake_orchestrator import FakeOrchestrator

OUTSIDER = Path(__file__).resolve().parents[1] / "outsider_worker.py"


def test_it_imports_nothing_of_the_project() -> None:
    imported = set()
    for node in ast.walk(ast.parse(OUTSIDER.read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add((node.module or "").split(".")[0])
    assert imported - set(sys.stdlib_module_names) == {"zmq", "msgpack", "numpy"}


@pytest.mark.process
def test_it_serves_set_c(tmp_path: Path, tiny_env: dict[str, str]) -> None:
    del tiny_env["PYTHONPATH"]
    with FakeOrchestrator(tmp_path / "run", environ=tiny_env) as orchestrator:
        worker = orchestrator.spawn(str(OUTSIDER), str(tmp_path / "run"))
        assert orchestrator.welcome(worker).role == "cpu_worker"
        assert orchestrator.expect(worker, Ready).epoch == worker.epoch
        views = ActivationViews(orchestrator.activations_map, orchestrator.activations)
        orchestrator.send(worker, execute(worker, 99, 0, [1]))  # stale: no answer
        cases = [(1, 0, [[5, 2]], [5, 2]), (2, 1, [[3, 0], [0, 1], [2, 3]], [3, 0])]
        for step, layer, choices, experts in cases:
            route(views, step, layer, choices)
            orchestrator.send(worker, execute(worker, step, layer, experts))
            executed = orchestrator.expect(worker, Executed)
            assert (executed.step, executed.layer, executed.experts) == (step, layer, experts)
            expected = expected_rows(orchestrator, views, layer, experts)
            torch.testing.assert_close(views.rows, expected, equal_nan=True)
        orchestrator.send(worker, Shutdown(worker.epoch, "test over"))
        assert worker.wait() == 0
        assert worker.stderr == ""
        del views


@pytest.mark.process
def test_it_leaves_with_the_orchestrator(tmp_path: Path, tiny_env: dict[str, str]) -> None:
    with FakeOrchestrator(tmp_path / "run", environ=tiny_env) as orchestrator:
        worker = orchestrator.spawn(str(OUTSIDER), str(tmp_path / "run"))
        orchestrator.welcome(worker)
        orchestrator.expect(worker, Ready)
        assert worker.connection is not None
        worker.connection.close()
        assert worker.wait(5) == 0


@pytest.mark.process
def test_refusal_is_told(tmp_path: Path, tiny_env: dict[str, str]) -> None:
    with FakeOrchestrator(tmp_path / "run", environ=tiny_env) as orchestrator:
        worker = orchestrator.spawn(str(OUTSIDER), str(tmp_path / "run"))
        orchestrator.grant(worker)
        orchestrator.hear_hello(worker)
        orchestrator.refuse(worker, "Not today.")
        assert worker.wait() != 0
        assert "Not today." in worker.stderr
