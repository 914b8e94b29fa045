"""The core decides without a clock, chance, a socket or a tensor: its imports say so."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import orchestrator.core

CORE = Path(orchestrator.core.__file__).parent
ROOT = CORE.parent.parent
MODULES = sorted(CORE.glob("*.py"))
ALLOWED = {
    "__future__",
    "bisect",
    "collections",
    "collections.abc",
    "dataclasses",
    "enum",
    "functools",
    "heapq",
    "itertools",
    "math",
    "msgspec",
    "protocol.config",
    "protocol.messages",
    "typing",
}


#: What some modules alone may import, and only when somebody asks for what is in them.
ALLOWED_TO_SOME = {
    "foresight": {"numpy"},
    "reuse": {"numpy", "numpy.typing"},
    "scored_policy": {"numpy", "numpy.typing"},
}


def imports_of(source: str) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide what is imported"
            if node.module in ("orchestrator", "protocol", "orchestrator.core"):
                found.update(f"{node.module}.{alias.name}" for alias in node.names)
            else:
                found.add(str(node.module))
    return found


def foreign(source: str) -> set[str]:
    return {
        name
        for name in imports_of(source)
        if name not in ALLOWED and not name.startswith("orchestrator.core.")
    }


@pytest.mark.parametrize("module", MODULES, ids=lambda path: path.stem)
def test_core_modules_import_only_what_cannot_surprise(module: Path) -> None:
    assert foreign(module.read_text()) - ALLOWED_TO_SOME.get(module.stem, set()) == set()


def test_the_rule_catches_what_it_forbids() -> None:
    source = (
        "import time\nimport os.path\nfrom random import Random\nfrom protocol import channel\n"
    )
    source += "def f():\n    import zmq.asyncio\nfrom orchestrator import shell\nimport msgspec\n"
    assert foreign(source) == {
        "time",
        "os.path",
        "random",
        "protocol.channel",
        "zmq.asyncio",
        "orchestrator.shell",
    }


def test_a_clean_interpreter_loads_the_core_without_the_heavy_ones() -> None:
    names = [
        f"orchestrator.core.{path.stem}"
        for path in MODULES
        if path.stem != "__init__" and path.stem not in ALLOWED_TO_SOME
    ]
    script = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        f"import importlib; [importlib.import_module(name) for name in {names!r}]\n"
        "print(*sorted({'asyncio', 'zmq', 'torch', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-c", script],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []
