"""`headrace calibrate` around its measuring, which is made up here."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from orchestrator.calibrate import profile as profile_module
from orchestrator.cli import calibrate
from orchestrator.cli.main import main
from protocol.errors import UserError
from tests.calibrate.test_profile import profile

if TYPE_CHECKING:
    from pathlib import Path

    from orchestrator.calibrate.profile import CalibrationProfile


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was measured so far."""
    measured: list[str] = []

    async def measure(options: object) -> CalibrationProfile:
        measured.append("all")
        return profile()

    monkeypatch.setattr(calibrate, "_measure", measure)
    return measured


def test_a_cache_that_cannot_be_written_is_told_before_measuring(
    tmp_path: Path,
    measured: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert main(["calibrate"]) == 2
    assert measured == []
    assert "XDG_CACHE_HOME" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "says"), [([], "10.00 GB/s"), (["--json"], '"link_bytes_per_s"')]
)
def test_what_was_measured_is_told_though_it_cannot_be_kept(
    flags: list[str],
    says: str,
    tmp_path: Path,
    measured: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def full(profile: CalibrationProfile, folder: Path) -> Path:
        raise UserError("The disk is full.")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(profile_module, "save_profile", full)
    assert main(["calibrate", *flags]) == 2
    said = capsys.readouterr()
    assert says in said.out
    assert said.err == "headrace: The disk is full.\n"


def test_it_says_where_the_profile_is_kept(
    tmp_path: Path,
    measured: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert main(["calibrate"]) == 0
    (path,) = (tmp_path / "headrace" / "calibration").iterdir()
    assert capsys.readouterr().out.endswith(f"kept in {path}\n")
