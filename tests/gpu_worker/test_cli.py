"""The program's edge: help that teaches, one sentence for a mistake, nothing that hangs."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from gpu_worker.__main__ import main

if TYPE_CHECKING:
    from pathlib import Path


def test_help_names_the_flags_and_the_way_to_start(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    for part in ("headrace gpu-worker", "--run-dir", "--wait", "--device", "--log-level"):
        assert part in text
    assert "headrace orchestrator --model DIR" in text


@pytest.mark.parametrize("flags", [["--divice", "cpu"], ["--device", "tpu"], ["--wait", "long"]])
def test_wrong_flags_are_one_sentence(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(flags)
    assert caught.value.code == 2
    assert capsys.readouterr().err.startswith("headrace gpu-worker: ")


@pytest.mark.process
def test_without_an_orchestrator_it_says_so_and_leaves(
    tmp_path: Path, tiny_env: dict[str, str]
) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "gpu_worker", "--run-dir", str(tmp_path / "r"), "--wait", "0.1"],
        env=tiny_env,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert result.returncode == 2
    assert "There is no run directory" in result.stderr
    assert "Traceback" not in result.stderr
