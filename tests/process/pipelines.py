"""Processes of a test: started, watched, and ended with it whatever happens."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from orchestrator.client import ask_status
from protocol.errors import UserError
from protocol.run_dir import RunDir

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from protocol.messages import Status

REPO_ROOT = Path(__file__).resolve().parents[2]
SCRIPTED = Path(__file__).with_name("scripted_worker.py")
#: Bounds a wait for what takes a few seconds on an idle machine (a gpu_worker imports torch).
PATIENCE_S = 120.0
PROMPT = "Hello, mill wheel"


class Processes:
    """Everything a test started; all of it is ended with the test."""

    def __init__(
        self,
        logs: Path,
        python_path: Sequence[Path] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._logs = logs
        self._all: list[subprocess.Popen[bytes]] = []
        path = os.pathsep.join(map(str, [*python_path, REPO_ROOT]))
        self._environment = {**os.environ, "PYTHONPATH": path, **(environment or {})}

    def start(self, *arguments: object) -> subprocess.Popen[bytes]:
        """A Python process with these arguments; what it says goes to a file."""
        log = self._logs / f"{len(self._all)}.log"
        with log.open("wb") as out:
            process = subprocess.Popen(
                [sys.executable, "-P", *map(str, arguments)],
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
            )
        self._all.append(process)
        return process

    def said(self, process: subprocess.Popen[bytes]) -> str:
        return (self._logs / f"{self._all.index(process)}.log").read_text(errors="replace")

    def headrace(self, *arguments: object) -> subprocess.Popen[bytes]:
        return self.start("-m", "orchestrator.cli.main", *arguments)

    def scripted(self, role: str, run_dir: Path, ill: str = "no") -> subprocess.Popen[bytes]:
        return self.start(SCRIPTED, role, "--run-dir", run_dir, "--ill", ill)

    def call(self, *arguments: object, timeout_s: float = 110) -> subprocess.CompletedProcess[str]:
        """Run `headrace ARGUMENTS` to its end."""
        return subprocess.run(
            [sys.executable, "-P", "-m", "orchestrator.cli.main", *map(str, arguments)],
            env=self._environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    def end(self) -> None:
        for process in reversed(self._all):
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGCONT)
                process.terminate()
        for process in self._all:
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(10)


class Pipeline:
    """A running orchestrator, started by hand, and scripted workers for it."""

    def __init__(self, processes: Processes, model: Path, run_dir: Path, *flags: str) -> None:
        self.processes = processes
        self.run_dir = run_dir
        self.orchestrator = processes.headrace(
            "orchestrator", "--model", model, "--run-dir", run_dir, *flags
        )

    def status(self) -> Status:
        return ask_status(RunDir(self.run_dir))

    def wait_for(self, what: Callable[[Status], object]) -> Status:
        """The first status that pleases `what`."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            assert self.orchestrator.poll() is None, self.processes.said(self.orchestrator)
            with contextlib.suppress(UserError):
                if what(status := self.status()):
                    return status
            assert time.monotonic() < deadline, "waited in vain"
            time.sleep(0.05)

    def wait_until_loaded(self) -> None:
        self.wait_for(lambda status: not status.text.startswith(("loading", "starting")))

    def generate(self, max_tokens: int = 8, prompt: str = PROMPT) -> dict[str, Any]:
        done = self.processes.call(*self.generate_arguments(max_tokens, prompt))
        assert done.returncode == 0, done.stderr + self.processes.said(self.orchestrator)
        return json.loads(done.stdout)

    def begin_generate(self, max_tokens: int) -> subprocess.Popen[bytes]:
        return self.processes.headrace(*self.generate_arguments(max_tokens))

    def finish(self, generate: subprocess.Popen[bytes]) -> dict[str, Any]:
        code = generate.wait(110)
        said = self.processes.said(generate)
        assert code == 0, said + self.processes.said(self.orchestrator)
        return json.loads(said.splitlines()[-1])

    def generate_arguments(self, max_tokens: int, prompt: str = PROMPT) -> list[object]:
        return [
            "generate", "--run-dir", self.run_dir, "--prompt", prompt, "--max-tokens", max_tokens,
            "--ignore-eos", "--json",
        ]  # fmt: skip


def is_over(pid: int) -> bool:
    """No such process, or one that only waits to be reaped."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def wait_until(condition: Callable[[], object], timeout_s: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)
