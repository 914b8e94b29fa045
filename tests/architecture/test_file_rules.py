"""Rules on files and on what may be written in them. Each rule is also shown something bad."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

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
SOURCE_FOLDERS = (*PACKAGES, "models", "benchmarks", "scripts")
MAX_LINES = 450
#: Names that say nothing, so that anything may gather under them.
EMPTY_NAMES = {"utils", "util", "helpers", "helper", "common", "misc", "shared"}
PICKLING_MODULES = {"pickle", "cPickle", "cloudpickle", "dill", "shelve", "marshal", "joblib"}
PICKLING_NAMES = {"recv_pyobj", "send_pyobj", "allow_pickle"}
#: Loads or writes pickles, whatever it is given.
PICKLING_TORCH = {("torch", "load"), ("torch", "save")}


def files_below(*folders: str, suffixes: tuple[str, ...] = (".py",)) -> list[Path]:
    return [
        path
        for folder in folders
        for path in sorted((REPO_ROOT / folder).rglob("*"))
        if path.suffix in suffixes and "__pycache__" not in path.parts
    ]


def nodes(source: str) -> Iterator[ast.AST]:
    yield from ast.walk(ast.parse(source))


def pickling(source: str) -> list[int]:
    """Lines that pickle or unpickle."""
    lines = []
    for node in nodes(source):
        match node:
            case ast.Import(names=names):
                found = any(alias.name.split(".")[0] in PICKLING_MODULES for alias in names)
            case ast.ImportFrom(module=str(module), names=names):
                found = module.split(".")[0] in PICKLING_MODULES or any(
                    (module, alias.name) in PICKLING_TORCH for alias in names
                )
            case ast.Attribute(value=ast.Name(id=owner), attr=name):
                found = (owner, name) in PICKLING_TORCH or name in PICKLING_NAMES
            case ast.Attribute(attr=name):
                found = name in PICKLING_NAMES
            case ast.keyword(arg=name, value=ast.Constant(value=True)):
                found = name in PICKLING_NAMES
            case _:
                found = False
        if found:
            lines.append(getattr(node, "lineno", 0))
    return lines


def environment_reads(source: str) -> list[int]:
    """Lines that touch the process's environment."""
    lines = []
    for node in nodes(source):
        match node:
            case ast.Attribute(value=ast.Name(id="os"), attr=name):
                found = name in {"environ", "environb", "getenv", "putenv", "getenvb"}
            case ast.ImportFrom(module="os", names=names):
                found = any("env" in alias.name for alias in names)
            case _:
                found = False
        if found:
            lines.append(node.lineno)
    return lines


def may_read_environment(path: Path) -> bool:
    inside = path.relative_to(REPO_ROOT)
    return inside.name == "__main__.py" or inside.parts[:2] == ("orchestrator", "cli")


def offenders(paths: list[Path], rule: Callable[[str], list[int]]) -> list[str]:
    assert paths, "no files found: the rule would hold for want of anything to look at"
    return [
        f"{path.relative_to(REPO_ROOT)}:{line}" for path in paths for line in rule(path.read_text())
    ]


def test_no_pickle() -> None:
    assert offenders(files_below(*SOURCE_FOLDERS), pickling) == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from cloudpickle import dumps",
        "import torch\nx = torch.load('x')",
        "from torch import save",
        "socket.recv_pyobj()",
        "self.socket.send_pyobj(1)",
        "np.load('x', allow_pickle=True)",
    ],
)
def test_pickling_is_seen(source: str) -> None:
    assert len(pickling(source)) == 1


def test_environment_is_read_at_the_edges_only() -> None:
    inner = [path for path in files_below(*PACKAGES) if not may_read_environment(path)]
    assert offenders(inner, environment_reads) == []


@pytest.mark.parametrize(
    "source",
    ["import os\nx = os.environ['A']", "import os\nos.getenv('A')", "from os import environ"],
)
def test_environment_read_is_seen(source: str) -> None:
    assert len(environment_reads(source)) == 1


def test_edges_are_the_command_line_and_programs() -> None:
    assert may_read_environment(REPO_ROOT / "gpu_worker/__main__.py")
    assert may_read_environment(REPO_ROOT / "orchestrator/cli/main.py")
    assert not may_read_environment(REPO_ROOT / "orchestrator/core/cli/main.py")
    assert not may_read_environment(REPO_ROOT / "gpu_worker/worker.py")


def test_no_file_is_long() -> None:
    paths = files_below(*SOURCE_FOLDERS, suffixes=(".py", ".cpp", ".cc", ".h", ".hpp", ".cu"))
    assert paths
    long = {
        str(path.relative_to(REPO_ROOT)): num_lines
        for path in paths
        if (num_lines := len(path.read_text().splitlines())) > MAX_LINES
    }
    assert long == {}


def test_names_say_something() -> None:
    paths = files_below(*SOURCE_FOLDERS, "tests")
    empty = {
        str(path.relative_to(REPO_ROOT))
        for path in paths
        if EMPTY_NAMES & {*path.relative_to(REPO_ROOT).parts[:-1], path.stem}
    }
    assert empty == set()


def test_every_module_says_what_it_is() -> None:
    paths = files_below(*SOURCE_FOLDERS)
    assert paths
    silent = [
        str(path.relative_to(REPO_ROOT))
        for path in paths
        if (text := path.read_text().strip()) and not ast.get_docstring(ast.parse(text))
    ]
    assert silent == []


def message_structs() -> list[type[msgspec.Struct]]:
    messages = importlib.import_module("protocol.messages")
    return [
        struct
        for _, struct in inspect.getmembers(messages, inspect.isclass)
        if issubclass(struct, msgspec.Struct)
        and struct.__module__ == messages.__name__
        and struct.__struct_fields__
    ]


def undocumented(struct: type[msgspec.Struct], text: str) -> list[str]:
    """The struct's name and fields that `text` lacks (each is looked for in backquotes)."""
    told = set(re.findall(r"`([^`\s]+)`", text))
    wanted = [struct.__name__, *struct.__struct_encode_fields__]
    return [name for name in wanted if name not in told]


def test_every_message_is_documented() -> None:
    text = (REPO_ROOT / "docs" / "protocol.md").read_text()
    structs = message_structs()
    assert len(structs) > 5
    lacking = {struct.__name__: undocumented(struct, text) for struct in structs}
    assert {name: missing for name, missing in lacking.items() if missing} == {}


def test_lack_of_a_field_in_the_document_is_seen() -> None:
    class Copy(msgspec.Struct):
        epoch: int
        slot: int

    assert undocumented(Copy, "`Copy` has `epoch`, and a slot") == ["slot"]
    assert undocumented(Copy, "`Copy`: `epoch`, `slot`") == []
