"""Who imports whom: the contracts hold, they can fail, and what must not need torch does not."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPO_ROOT = Path(__file__).resolve().parents[2]
PACKAGES = (
    "protocol",
    "expert_store",
    "expert_kernels",
    "orchestrator",
    "gpu_worker",
    "cpu_worker",
    "dma_worker",
)
#: All that the core may know: data types of the standard library, structs, and the messages.
CORE_MAY_IMPORT = re.compile(
    r"(__future__|abc|bisect|collections|dataclasses|enum|functools|heapq|itertools|math"
    r"|operator|typing|msgspec|orchestrator\.core|protocol\.(messages|config))(\.|$)"
)

#: The policies that score all experts of a layer at once; imported only when chosen.
CORE_MAY_USE_ARRAYS = {
    "foresight.py": {"numpy"},
    "reuse.py": {"numpy", "numpy.typing"},
    "scored_policy.py": {"numpy", "numpy.typing"},
}

#: An editable install finds our packages before the path does: it is set aside, so that a copy is
#: what gets linted.
LINT = """
import sys
sys.meta_path[:] = [f for f in sys.meta_path if "_editable" not in type(f).__module__]
from importlinter.cli import lint_imports_command
sys.exit(lint_imports_command())
"""


def lint(folder: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", LINT, "--no-logo", "--no-cache"],
        cwd=folder,
        env={**environment, "PYTHONPATH": str(folder), "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of all packages and the contracts, to be spoiled."""
    copy = tmp_path / "tree"
    copy.mkdir()
    for package in PACKAGES:
        shutil.copytree(
            REPO_ROOT / package, copy / package, ignore=shutil.ignore_patterns("__pycache__")
        )
    shutil.copy(REPO_ROOT / "pyproject.toml", copy)
    return copy


def test_contracts_hold(tiny_env: dict[str, str]) -> None:
    done = lint(REPO_ROOT, tiny_env)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("path", "line", "contract"),
    [
        ("gpu_worker/spoiled.py", "import orchestrator.core", "Imports point one way"),
        ("cpu_worker/spoiled.py", "import gpu_worker", "Imports point one way"),
        ("protocol/spoiled.py", "import expert_store", "Imports point one way"),
        ("expert_store/spoiled.py", "import expert_kernels", "Imports point one way"),
        ("orchestrator/spoiled.py", "import torch", "never import torch"),
        ("orchestrator/cli/spoiled.py", "import expert_kernels", "never import torch"),
        ("protocol/spoiled.py", "def late():\n    import transformers", "never import torch"),
        ("orchestrator/core/spoiled.py", "import time", "core sees no clock"),
        ("orchestrator/core/spoiled.py", "import protocol.channel", "core sees no clock"),
        ("gpu_worker/spoiled.py", "import zmq", "Only the channel"),
    ],
)
def test_contracts_fail_on_a_bad_tree(
    tree: Path, tiny_env: dict[str, str], path: str, line: str, contract: str
) -> None:
    (tree / path).write_text(f"{line}\n")
    done = lint(tree, tiny_env)
    assert done.returncode == 1, done.stdout + done.stderr
    broken = [text for text in done.stdout.splitlines() if " BROKEN" in text]
    assert any(contract in text for text in broken), done.stdout


IMPORT_ALL = """
import importlib, pkgutil, sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"torch", "transformers"}:
            raise ModuleNotFoundError(f"{name} is blocked here")

sys.meta_path.insert(0, Blocker())
count = 0
for top in ("protocol", "orchestrator"):
    package = importlib.import_module(top)
    for found in pkgutil.walk_packages(package.__path__, f"{top}."):
        if found.name.endswith("__main__"):
            continue
        importlib.import_module(found.name)
        count += 1
print(count)
"""


def test_orchestrator_and_protocol_import_without_torch(tiny_env: dict[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", IMPORT_ALL],
        env=tiny_env,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 10


def imported_names(source: str) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add("." * node.level + (node.module or ""))
    return names


def test_core_imports_only_what_is_listed() -> None:
    files = sorted((REPO_ROOT / "orchestrator" / "core").rglob("*.py"))
    assert files
    foreign = [
        f"{path.name}: {name}"
        for path in files
        for name in sorted(imported_names(path.read_text()))
        if not CORE_MAY_IMPORT.match(name) and name not in CORE_MAY_USE_ARRAYS.get(path.name, ())
    ]
    assert foreign == []


@pytest.mark.parametrize("line", ["import logging", "from os import path", "import protocol.logs"])
def test_core_list_can_say_no(line: str) -> None:
    (name,) = imported_names(line)
    assert not CORE_MAY_IMPORT.match(name)
