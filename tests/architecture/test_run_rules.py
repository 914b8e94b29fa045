"""The rules of a run and of the set-up: leaks fail a run, bad surroundings get one sentence."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import uuid
from pathlib import Path

import psutil
import pytest

REPO_ROOT = Path(__file__).resolve().parents[2]

LEAKS_A_PROCESS = """
import pathlib, subprocess, sys
def test_leak():
    # Its parent is gone at once, so only what it inherited tells whose it is.
    code = (
        "import subprocess as s; nowhere = s.DEVNULL;"
        "print(s.Popen(['sleep', '60'], stdout=nowhere, stderr=nowhere).pid)"
    )
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    pathlib.Path("pid").write_text(done.stdout)
"""
LEAKS_SHARED_MEMORY = """
import pathlib
def test_leak():
    pathlib.Path("/dev/shm/NAME").write_text("x")
"""
LEAKS_DESCRIPTORS = """
import os
def test_leak():
    for _ in range(100):
        os.dup(0)
"""
LEAKS_NOTHING = """
import subprocess
def test_clean():
    subprocess.run(["true"], check=True)
"""


def run_alone(folder: Path, test: str, environment: dict[str, str]) -> tuple[int, str]:
    """One test file under our conftest, in a pytest of its own."""
    shutil.copy(REPO_ROOT / "tests" / "conftest.py", folder)
    (folder / "test_it.py").write_text(test)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_it.py"]
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        timeout=100,
        check=False,
    )
    return done.returncode, done.stdout


@pytest.mark.process
def test_clean_run_passes(tmp_path: Path, tiny_env: dict[str, str]) -> None:
    code, output = run_alone(tmp_path, LEAKS_NOTHING, tiny_env)
    assert code == 0, output


@pytest.mark.process
def test_left_process_fails_the_run(tmp_path: Path, tiny_env: dict[str, str]) -> None:
    try:
        code, output = run_alone(tmp_path, LEAKS_A_PROCESS, tiny_env)
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            left = psutil.Process(int((tmp_path / "pid").read_text()))
            if left.name() == "sleep":
                left.kill()
    assert code == 1
    assert "left behind" in output
    assert "sleep 60" in output


@pytest.mark.process
@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="no /dev/shm")
def test_left_shared_memory_fails_the_run(tmp_path: Path, tiny_env: dict[str, str]) -> None:
    name = f"test-{uuid.uuid4().hex}"
    try:
        code, output = run_alone(tmp_path, LEAKS_SHARED_MEMORY.replace("NAME", name), tiny_env)
    finally:
        Path("/dev/shm", name).unlink()
    assert code == 1
    assert f"shared memory /dev/shm/{name}" in output


@pytest.mark.process
def test_left_descriptors_fail_the_run(tmp_path: Path, tiny_env: dict[str, str]) -> None:
    code, output = run_alone(tmp_path, LEAKS_DESCRIPTORS, tiny_env)
    assert code == 1
    assert "open descriptors" in output


def run_setup(*words: str, **environment: str) -> tuple[int, str]:
    """scripts/setup in surroundings in which it must refuse before it touches anything."""
    done = subprocess.run(
        ["/bin/bash", str(REPO_ROOT / "scripts" / "setup"), *words],
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    return done.returncode, done.stderr


def test_setup_names_a_python_that_is_too_old() -> None:
    code, said = run_setup(PATH=os.environ["PATH"], PYTHON="/bin/false")
    assert code == 2
    assert said == (
        "setup: PYTHON=/bin/false is not a Python 3.11 or newer; name another interpreter\n"
    )


def test_setup_says_when_there_is_no_python(tmp_path: Path) -> None:
    dirname = shutil.which("dirname")
    assert dirname
    (tmp_path / "dirname").symlink_to(dirname)
    code, said = run_setup(PATH=str(tmp_path))
    assert code == 2
    assert said.startswith("setup: Headrace needs Python 3.11 or newer and found none")
    assert len(said.splitlines()) == 1


def test_setup_refuses_unknown_arguments() -> None:
    code, said = run_setup("--fast", PATH=os.environ["PATH"])
    assert (code, "'--fast'" in said) == (2, True)
