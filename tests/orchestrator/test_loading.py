"""What the loader process says, whatever way it ends."""

from __future__ import annotations

import asyncio
import sys
import time
from typing import TYPE_CHECKING

import pytest

from orchestrator import loading
from protocol.errors import UserError

if TYPE_CHECKING:
    from pathlib import Path

_SAY = "import os, time; print({line!r}, flush=True); {ending}"


def inspect_with(monkeypatch: pytest.MonkeyPatch, folder: Path, line: str, ending: str) -> None:
    """`inspect_model` with a loader that says `line` and then does `ending`."""
    program = folder / "python"
    code = _SAY.format(line=line, ending=ending)
    program.write_text(f"#!{sys.executable}\n{code}\n")
    program.chmod(0o700)
    monkeypatch.setattr(loading.sys, "executable", str(program))
    monkeypatch.setattr(loading, "_END_TIMEOUT_S", 1.0)
    asyncio.run(loading.inspect_model(folder, "auto"))


def test_an_answer_counts_though_the_loader_is_slow_to_leave(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    line = '{"type":"error","message":"It is a dense model."}'
    started_s = time.monotonic()
    with pytest.raises(UserError, match="dense model"):
        inspect_with(monkeypatch, tmp_path, line, "time.sleep(60)")
    assert time.monotonic() - started_s < 30


def test_a_loader_that_hangs_without_an_answer_is_a_fault(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    line = '{"type":"progress","done_bytes":0,"total_bytes":1,"text":"x"}'
    with pytest.raises(loading.LoaderFault, match="hangs"):
        inspect_with(monkeypatch, tmp_path, line, "os.close(1); time.sleep(30)")


def test_a_loader_that_breaks_down_is_a_fault(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    line = '{"type":"progress","done_bytes":0,"total_bytes":1,"text":"x"}'
    with pytest.raises(loading.LoaderFault, match="code 1"):
        inspect_with(monkeypatch, tmp_path, line, "raise SystemExit(1)")
