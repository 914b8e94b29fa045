"""A real cpu_worker process against a small orchestrator: every result bit, every way to end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest
import torch

from expert_kernels.native import make_expert_function
from expert_kernels.step_rows import ActivationViews, as_tensor
from expert_store.segment import StoreView
from protocol.messages import (
    PROTOCOL_VERSION,
    DropSequence,
    Epoch,
    Execute,
    Executed,
    ExpertId,
    Failed,
    LayerId,
    Ready,
    SequenceId,
    Shutdown,
    StepId,
)
from tests.protocol.fake_orchestrator import FakeOrchestrator, Worker, small_layout

if TYPE_CHECKING:
    from pathlib import Path

    from expert_kernels.native import MaxIsa
    from expert_store.layout import Dtype

pytestmark = pytest.mark.process


def execute(worker: Worker, step: int, layer: int, experts: list[int]) -> Execute:
    ids = [ExpertId(expert) for expert in experts]
    return Execute(worker.epoch, StepId(step), LayerId(layer), ids)


def route(views: ActivationViews, step: int, layer: int, choices: list[list[int]]) -> None:
    """Put a layer-step into the segment, as a gpu_worker would."""
    generator = torch.Generator().manual_seed(step)
    shape = (len(choices), views.hidden.shape[1])
    hidden = torch.randn(shape, generator=generator)
    views.hidden[: len(choices)] = hidden.to(views.hidden.dtype)
    views.choices[: len(choices)] = torch.tensor(choices, dtype=torch.int32)
    views.rows.fill_(float("nan"))
    views.write_header(step, layer, len(choices))


def expected_rows(
    orchestrator: FakeOrchestrator,
    views: ActivationViews,
    layer: int,
    experts: list[int],
    max_isa: MaxIsa = "best",
) -> torch.Tensor:
    """What `rows` must hold, computed in this process in the plainest way."""
    layout = orchestrator.layout
    function = make_expert_function(layout, max_isa=max_isa)
    num_rows = views.read_header()[2]
    result = torch.full_like(views.rows, float("nan"))
    torch.set_num_threads(1)
    with StoreView(orchestrator.weights_fd) as store:
        blocks = as_tensor(store.memory, torch.uint8, 0, [layout.total_bytes])
        for expert in experts:
            start = layout.block_offset(layer, expert)
            tensors = function.tensors_of(blocks[start : start + layout.block_bytes].clone())
            row_ids, choice_ids = torch.where(views.choices[:num_rows] == expert)
            if len(row_ids):
                result[row_ids, choice_ids] = function(tensors, views.hidden[row_ids].clone())
        del blocks
    return result


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("max_isa", ["best", "torch"])
def test_rows_are_the_reference_bit_for_bit(
    max_isa: MaxIsa, dtype: Dtype, tmp_path: Path, tiny_env: dict[str, str]
) -> None:
    with FakeOrchestrator(tmp_path / "run", small_layout(dtype), environ=tiny_env) as orchestrator:
        worker = orchestrator.start_worker("cpu_worker", "--threads", "2", "--max-isa", max_isa)
        views = ActivationViews(orchestrator.activations_map, orchestrator.activations)
        cases = [
            (1, 0, [[5, 2]], [5, 2]),
            (2, 1, [[3, 0]], [0]),
            (3, 0, [[1, 4], [4, 2], [0, 4]], [4, 0, 2]),
            (4, 1, [[0, 1], [2, 3]], [3, 2, 1, 0]),
            (5, 0, [[0, 1], [2, 3]], [5]),  # nobody chose it: no row may change
        ]
        for step, layer, choices, experts in cases:
            route(views, step, layer, choices)
            orchestrator.send(worker, execute(worker, step, layer, experts))
            executed = orchestrator.expect(worker, Executed)
            assert (executed.epoch, executed.step) == (worker.epoch, step)
            assert (executed.layer, executed.experts) == (layer, experts)
            assert executed.num_bytes == len(experts) * orchestrator.layout.block_bytes
            assert 0 < executed.started_ns <= executed.ended_ns <= time.monotonic_ns()
            expected = expected_rows(orchestrator, views, layer, experts, max_isa)
            assert torch.equal(views.rows.view(torch.int32), expected.view(torch.int32))
        del views


@pytest.mark.parametrize("max_isa", ["best", "torch"])
def test_threads_share_large_experts_and_change_no_bit(
    max_isa: MaxIsa, tmp_path: Path, tiny_env: dict[str, str]
) -> None:
    layout = small_layout(hidden_size=512, intermediate_size=384, num_experts=(6,))
    with FakeOrchestrator(tmp_path / "run", layout, environ=tiny_env) as orchestrator:
        worker = orchestrator.start_worker("cpu_worker", "--threads", "3", "--max-isa", max_isa)
        views = ActivationViews(orchestrator.activations_map, orchestrator.activations)
        for step in range(1, 6):
            route(views, step, 0, [[0, 1], [2, 3], [4, 5]])
            orchestrator.send(worker, execute(worker, step, 0, [0, 1, 2, 3, 4, 5]))
            orchestrator.expect(worker, Executed)
            expected = expected_rows(orchestrator, views, 0, [0, 1, 2, 3, 4, 5], max_isa)
            assert torch.equal(views.rows.view(torch.int32), expected.view(torch.int32))
        del views


def test_hello_says_who_and_ready_says_how_fast(tmp_path: Path, tiny_env: dict[str, str]) -> None:
    with FakeOrchestrator(tmp_path / "run", environ=tiny_env) as orchestrator:
        flags = ("--run-dir", str(tmp_path / "run"), "--threads", "2", "--numa-node", "0")
        worker = orchestrator.spawn("-P", "-m", "cpu_worker", *flags)
        hello = orchestrator.welcome(worker)
        assert (hello.protocol_version, hello.role) == (PROTOCOL_VERSION, "cpu_worker")
        assert hello.pid == worker.process.pid
        assert hello.token == f"token-{worker.process.pid}"
        assert hello.capabilities.num_threads == 2
        assert hello.capabilities.cpus
        assert hello.capabilities.numa_note
        ready = orchestrator.expect(worker, Ready, 60)
        assert ready.epoch == worker.epoch
        assert ready.bytes_per_s > 1e6


def test_commands_it_cannot_follow_are_dropped(tmp_path: Path, tiny_env: dict[str, str]) -> None:
    with FakeOrchestrator(tmp_path / "run", is_rate_stated=True, environ=tiny_env) as orchestrator:
        worker = orchestrator.start_worker("cpu_worker")
        views = ActivationViews(orchestrator.activations_map, orchestrator.activations)
        route(views, 7, 1, [[0, 1]])
        orchestrator.send(worker, execute(worker, 6, 1, [0]))  # an older step
        orchestrator.send(worker, execute(worker, 7, 0, [0]))  # another layer
        orchestrator.send(worker, execute(worker, 7, 2, [0]))  # no such layer
        orchestrator.send(worker, execute(worker, 7, -1, [0]))
        orchestrator.send(worker, execute(worker, 7, 1, [0, 4]))  # no such expert
        orchestrator.send(worker, Execute(Epoch(99), StepId(7), LayerId(1), [ExpertId(0)]))
        orchestrator.send(worker, DropSequence(worker.epoch, SequenceId(1)))  # not its business
        for frames in ([b""], [b"\xc1"], [os.urandom(300)], [b"\x81\xa4type"], [b"a", b"b"]):
            orchestrator.send_raw(worker, *frames)
        assert torch.isnan(views.rows).all()
        orchestrator.send(worker, execute(worker, 7, 1, [1]))
        executed = orchestrator.expect(worker, Executed)
        assert executed.experts == [1]
        expected = expected_rows(orchestrator, views, 1, [1])
        assert torch.equal(views.rows.view(torch.int32), expected.view(torch.int32))
        views.header[2] = 1_000_000  # more rows than there is room for
        orchestrator.send(worker, execute(worker, 7, 1, [1]))
        orchestrator.send(worker, Shutdown(worker.epoch, "test over"))
        assert worker.wait() == 0
        assert not worker.messages
        assert "dropped 8 commands in all" in worker.stderr
        del views


def test_refused_worker_says_why(tmp_path: Path, tiny_env: dict[str, str]) -> None:
    with FakeOrchestrator(tmp_path / "run", environ=tiny_env) as orchestrator:
        worker = orchestrator.spawn("-P", "-m", "cpu_worker", "--run-dir", str(tmp_path / "run"))
        orchestrator.grant(worker)
        orchestrator.hear_hello(worker)
        orchestrator.refuse(worker, "Worker speaks version 1, this pipeline 2.")
        assert worker.wait() == 2
        last_line = worker.stderr.splitlines()[-1]
        assert last_line == "headrace cpu-worker: Worker speaks version 1, this pipeline 2."


def test_wrong_store_version_is_told(tmp_path: Path, tiny_env: dict[str, str]) -> None:
    with FakeOrchestrator(tmp_path / "run", environ=tiny_env) as orchestrator:
        os.pwrite(orchestrator.weights_fd, (77).to_bytes(4, "little"), 8)
        worker = orchestrator.spawn("-P", "-m", "cpu_worker", "--run-dir", str(tmp_path / "run"))
        orchestrator.welcome(worker)
        assert worker.wait(60) == 2
        orchestrator.wait_until(lambda: bool(worker.messages), 5)
        failed = worker.messages[-1]
        assert isinstance(failed, Failed)
        assert failed.is_user_error
        assert "format version 77" in failed.sentence
        assert "format version 77" in worker.stderr


def test_sigterm_ends_it_in_order(tmp_path: Path, tiny_env: dict[str, str]) -> None:
    with FakeOrchestrator(tmp_path / "run", is_rate_stated=True, environ=tiny_env) as orchestrator:
        worker = orchestrator.start_worker("cpu_worker")
        worker.process.send_signal(signal.SIGTERM)
        assert worker.wait() == 0


def test_closed_life_line_ends_it(tmp_path: Path, tiny_env: dict[str, str]) -> None:
    with FakeOrchestrator(tmp_path / "run", is_rate_stated=True, environ=tiny_env) as orchestrator:
        worker = orchestrator.start_worker("cpu_worker")
        assert worker.connection is not None
        worker.connection.close()
        assert worker.wait(5) == 0


@pytest.mark.parametrize("module", ["cpu_worker", "dma_worker"])
def test_killed_orchestrator_ends_it(module: str, tmp_path: Path, tiny_env: dict[str, str]) -> None:
    run_dir = tmp_path / "run"
    command = [sys.executable, "-m", "tests.protocol.fake_orchestrator", str(run_dir)]
    orchestrator = subprocess.Popen(command, env=tiny_env, stdout=subprocess.PIPE)
    worker = None
    try:
        assert orchestrator.stdout is not None
        assert orchestrator.stdout.readline() == b"listening\n"
        stderr_path = tmp_path / "stderr.txt"
        with stderr_path.open("wb") as stderr:
            command = [sys.executable, "-P", "-m", module, "--run-dir", str(run_dir)]
            worker = subprocess.Popen(command, env=tiny_env, stderr=stderr)
        # What it says once it has loaded everything: an import cannot be interrupted.
        said = "weights, by a sample" if module == "cpu_worker" else "joined as"
        deadline = time.monotonic() + 60
        while said not in stderr_path.read_text() and time.monotonic() < deadline:
            time.sleep(0.02)
        assert said in stderr_path.read_text()
        orchestrator.kill()
        orchestrator.wait(5)
        assert worker.wait(5) == 0
    finally:
        for process in (orchestrator, worker):
            if process is not None:
                process.kill()
                process.wait(10)
        assert orchestrator.stdout is not None
        orchestrator.stdout.close()


@pytest.mark.parametrize("module", ["cpu_worker", "dma_worker"])
@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--wait", "-1"], "argument --wait: '-1' does not serve: say a number >= 0 (seconds)"),
        (["--wait", "inf"], "argument --wait: 'inf' does not serve: say a number >= 0 (seconds)"),
        (["--bogus"], "unrecognized arguments: --bogus"),
        (["--log-level", "loud"], "argument --log-level: invalid choice: 'loud'"),
        (["--wait", "0", "--run-dir", "{}/none"], "There is no run directory {}/none"),
        (["--wait", "0", "--run-dir", "{}"], "No orchestrator listens in {}"),
        (["--wait", "0", "--run-dir", "{}/" + "x" * 100], "choose a shorter --run-dir"),
    ],
)
def test_mistakes_are_one_sentence(
    module: str, flags: list[str], sentence: str, tmp_path: Path, tiny_env: dict[str, str]
) -> None:
    directory = tmp_path / "d"
    directory.mkdir(mode=0o700)
    arguments = [flag.replace("{}", str(directory)) for flag in flags]
    command = [sys.executable, "-P", "-m", module, *arguments]
    result = subprocess.run(
        command, env=tiny_env, capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 2
    assert result.stdout == ""
    prog = f"headrace {module.replace('_', '-')}: "
    assert result.stderr.startswith(prog)
    assert sentence.replace("{}", str(directory)) in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "flags",
    [["--threads", "0"], ["--threads", "x"], ["--numa-node", "999"], ["--max-isa", "mmx"]],
)
def test_its_own_flags_are_checked(flags: list[str], tiny_env: dict[str, str]) -> None:
    command = [sys.executable, "-P", "-m", "cpu_worker", *flags]
    result = subprocess.run(
        command, env=tiny_env, capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1
    assert flags[0] in result.stderr
