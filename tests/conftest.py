"""What every test runs under: no network, no stray settings, and nothing left behind.

A run fails when it leaves a process, a shared-memory entry or a pile of open descriptors. Several
runs may share a machine, so the check blames this run only for its own: every process started from
here inherits an environment variable with this run's id, and an entry in /dev/shm counts only when
no living process of another run holds it open.
"""

from __future__ import annotations

import gc
import importlib
import os
import shutil
import tempfile
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from collections.abc import Iterator

REPO_ROOT = Path(__file__).resolve().parent.parent
RUN_ID_VARIABLE = "PYTEST_LEAK_CHECK_ID"
MAX_NEW_DESCRIPTORS = 32  # what importing torch and friends may open once and keep
LEAK_GRACE_S = 5.0

# Before any test imports transformers, which reads these once.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"
os.environ[RUN_ID_VARIABLE] = uuid.uuid4().hex
# What a person has calibrated on this machine must not decide how a test ends.
CACHE_HOME = tempfile.mkdtemp(prefix="headrace-tests-cache-")
os.environ["XDG_CACHE_HOME"] = CACHE_HOME
# How long an example takes is the machine's business, not the test's.
settings.register_profile("headrace", deadline=None)
settings.load_profile("headrace")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    # Importing torch costs seconds: only a run that has such tests pays.
    if not gpu_items or importlib.import_module("torch").cuda.is_available():
        return
    for item in gpu_items:
        item.add_marker(pytest.mark.skip(reason="needs a CUDA device, torch sees none"))


def _own_processes() -> dict[int, str]:
    """Living processes that this run started, directly or not: pid -> command line."""
    run_id = os.environ[RUN_ID_VARIABLE]
    children = {child.pid for child in psutil.Process().children(recursive=True)}
    found = {}
    for process in psutil.process_iter():
        if process.pid == os.getpid():
            continue
        try:
            if process.status() == psutil.STATUS_ZOMBIE:
                continue
            if process.pid in children or process.environ().get(RUN_ID_VARIABLE) == run_id:
                found[process.pid] = " ".join(process.cmdline())
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def _shm_entries() -> set[str]:
    try:
        return {
            entry.path for entry in os.scandir("/dev/shm") if entry.stat().st_uid == os.getuid()
        }
    except FileNotFoundError:  # not Linux, or an entry went away between the two calls
        return set()


def _is_held_by_another(path: str) -> bool:
    own = {os.getpid(), *_own_processes()}
    for process in psutil.process_iter():
        if process.pid in own:
            continue
        try:
            maps = Path(f"/proc/{process.pid}/maps").read_text()
            links = [os.readlink(link) for link in Path(f"/proc/{process.pid}/fd").iterdir()]
        except OSError:
            continue
        if path in maps or path in links:
            return True
    return False


def _num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0


def pytest_unconfigure() -> None:
    shutil.rmtree(CACHE_HOME, ignore_errors=True)


@pytest.fixture(scope="session", autouse=True)
def _nothing_left_behind() -> Iterator[None]:
    """Fails the run when it leaves processes, shared memory or descriptors behind."""
    shm_before, descriptors_before = _shm_entries(), _num_descriptors()
    yield
    gc.collect()
    deadline = time.monotonic() + LEAK_GRACE_S
    while (processes := _own_processes()) and time.monotonic() < deadline:
        time.sleep(0.1)
    leaks = [f"process {pid}: {command}" for pid, command in sorted(processes.items())]
    leaks += [
        f"shared memory {path}"
        for path in sorted(_shm_entries() - shm_before)
        if not _is_held_by_another(path)
    ]
    new_descriptors = _num_descriptors() - descriptors_before
    if new_descriptors > MAX_NEW_DESCRIPTORS:
        leaks.append(f"{new_descriptors} open descriptors more than at the start")
    if leaks:
        pytest.fail("the test run left behind:\n  " + "\n  ".join(leaks), pytrace=False)


@pytest.fixture
def tiny_env(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """A small environment for child processes: no HEADRACE_* settings, no network, its own home.

    The HEADRACE_* variables are also taken out of this process for the length of the test.
    """
    for name in [name for name in os.environ if name.startswith("HEADRACE_")]:
        monkeypatch.delenv(name)
    home = tmp_path / "home"
    home.mkdir()
    kept = ("PATH", "LANG", "LC_ALL", "TMPDIR", "OMP_NUM_THREADS", RUN_ID_VARIABLE)
    return {
        **{name: os.environ[name] for name in kept if name in os.environ},
        "HOME": str(home),
        "PYTHONPATH": str(REPO_ROOT),
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
    }
