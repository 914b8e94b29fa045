"""Training text and held-out files of the demo checkpoint, from what any machine has.

The corpus is the running Python's standard library (PSF-2.0): module sources, their docstrings
again as plain prose, the language reference inside ``pydoc_data/topics.py``, and a slice of
``Lib/test`` where that is installed.  ``--docs DIR`` adds the reStructuredText pages that Debian's
``python3-doc`` installs under ``/usr/share/doc/python3.11/html/_sources``.

Held-out files are whole files.  Nothing that shares most of its text with one of them is trained
on: byte-identical copies, the module's own docstrings, its unit tests and its page in the library
reference are dropped too.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import re
import sysconfig
import warnings
from dataclasses import dataclass
from pathlib import Path

HELD_OUT_MODULES = (
    "calendar.py",
    "configparser.py",
    "fractions.py",
    "ftplib.py",
    "heapq.py",
    "json/decoder.py",
    "logging/handlers.py",
    "queue.py",
    "shlex.py",
    "statistics.py",
    "tempfile.py",
    "textwrap.py",
)
"""Standard-library modules never trained on, relative to ``sysconfig``'s ``stdlib`` path."""

HELD_OUT_PAGES = ("faq/design.rst.txt", "howto/logging.rst.txt", "tutorial/classes.rst.txt")
"""Documentation pages never trained on, relative to ``--docs``; scored only where given."""

TEST_BYTES = 1_000_000
"""At most this much of ``Lib/test`` is used: it reads less well than the library itself."""

PAGE_BYTES = 300_000
"""Longer documentation pages (the changelog) are left out: lists, not prose."""

_SKIP_PARTS = {"site-packages", "dist-packages", "__pycache__", "_bundled"}
_TEST_PARTS = {"test", "tests", "idle_test"}
_RELATIVES = re.compile(
    r"^(test_)?_?(calendar|configparser|fractions|ftplib|heapq|json|decoder|decode|queue|shlex"
    r"|statistics|tempfile|textwrap|logging|logging\.handlers|handlers|logging-cookbook)$"
)


@dataclass(frozen=True)
class Document:
    """One text of the corpus.

    Attributes:
        name: where it came from, such as ``stdlib:heapq.py`` or ``docs:faq/gui.rst.txt``.
        text: its text, decoded as UTF-8.
    """

    name: str
    text: str

    @property
    def data(self) -> bytes:
        """The text as UTF-8 bytes."""
        return self.text.encode()

    @property
    def sha256(self) -> str:
        """SHA-256 of the bytes, in hex."""
        return hashlib.sha256(self.data).hexdigest()


def stdlib_dir() -> Path:
    """The directory that holds the running Python's standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def read_document(kind: str, root: Path, relative: str) -> Document | None:
    """Read ``root/relative``; ``None`` where it is missing or not UTF-8."""
    try:
        return Document(f"{kind}:{relative}", (root / relative).read_bytes().decode())
    except (OSError, UnicodeDecodeError):
        return None


def held_out(docs: Path | None = None) -> list[Document]:
    """The held-out files that this machine has, modules first."""
    found = [read_document("stdlib", stdlib_dir(), name) for name in HELD_OUT_MODULES]
    if docs is not None:
        found += [read_document("docs", docs, name) for name in HELD_OUT_PAGES]
    return [document for document in found if document is not None]


def _is_table(text: str) -> bool:
    """Whether a source is mostly data: codec tables, generated constants, minified lines."""
    digits = sum(map(text.count, "0123456789"))
    return digits > 0.15 * len(text) or len(text) > 200 * (text.count("\n") + 1)


def _docstrings(document: Document) -> Document | None:
    """The docstrings of a module, indentation stripped, as one prose document."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(document.text)
    except (SyntaxError, ValueError):
        return None
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    strings = [ast.get_docstring(node) or "" for node in ast.walk(tree) if isinstance(node, kinds)]
    prose = "\n\n".join(text for text in strings if len(text) >= 160)
    return Document(document.name + "#doc", prose + "\n") if len(prose) >= 400 else None


def _topics(document: Document) -> list[Document]:
    """The pages inside ``pydoc_data/topics.py``: English about the language, one per topic."""
    assign = next(node for node in ast.parse(document.text).body if isinstance(node, ast.Assign))
    pages = ast.literal_eval(assign.value)
    return [Document(f"stdlib:topics#{k}", inspect.cleandoc(v) + "\n") for k, v in pages.items()]


def training_documents(docs: Path | None = None) -> list[Document]:
    """Every training document, deduplicated, without anything close to a held-out file."""
    root = stdlib_dir()
    closed = {document.sha256 for document in held_out(docs)}
    library: list[Document] = []
    tests: list[Document] = []
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        parts = set(relative.parts)
        if parts & _SKIP_PARTS or relative.as_posix() in HELD_OUT_MODULES:
            continue
        document = read_document("stdlib", root, relative.as_posix())
        if document is None or not document.text.strip() or document.sha256 in closed:
            continue
        if relative.as_posix() == "pydoc_data/topics.py":
            library += _topics(document)
        elif _is_table(document.text):
            continue
        elif parts & _TEST_PARTS:
            related = any(_RELATIVES.match(Path(part).stem) for part in relative.parts)
            if not related:
                tests.append(document)
        else:
            library.append(document)
            prose = _docstrings(document)
            if prose is not None:
                library.append(prose)
    budget = TEST_BYTES
    for document in sorted(tests, key=lambda document: document.sha256):
        budget -= len(document.data)
        if budget > 0:
            library.append(document)
    for path in sorted(docs.rglob("*.rst.txt")) if docs is not None else []:
        relative = path.relative_to(docs)
        stem = path.name.removesuffix(".rst.txt")
        if relative.as_posix() in HELD_OUT_PAGES or _RELATIVES.match(stem):
            continue
        document = read_document("docs", docs, relative.as_posix())
        if document is not None and len(document.text) < PAGE_BYTES:
            library.append(document)
    kept = []
    for document in library:
        if document.sha256 not in closed:
            closed.add(document.sha256)
            kept.append(document)
    return kept
