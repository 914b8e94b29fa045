"""Which profile is used, and which is not."""

from __future__ import annotations

import errno
import logging
import os
import resource
from pathlib import Path

import msgspec
import pytest

from orchestrator.calibrate.course import Measured
from orchestrator.calibrate.fits import Line
from orchestrator.calibrate.picture import draw
from orchestrator.calibrate.profile import (
    CalibrationProfile,
    ProfileKey,
    cache_dir,
    find_profile,
    key_of,
    prepare_folder,
    profile_of,
    save_profile,
)
from orchestrator.set_up import calibrated_costs, core_config, worker_setup
from orchestrator.settings import PipelineSettings
from protocol.errors import UserError
from tests.protocol.fake_orchestrator import small_layout

KEY = ProfileKey("a machine", "build 1", "bfloat16", "memory to memory")
MEASURED = Measured(
    link=Line(1e-6, 10e9, 0.01, 0.02),
    cpu=Line(2e-6, 30e9, 0.02, 0.04),
    link_beside_bytes_per_s=11e9,
    cpu_beside_bytes_per_s=22e9,
    link_way_s=50e-6,
    cpu_way_s=60e-6,
    cpu_row_part=0.1,
    flat_from_bytes=1 << 28,
    working_sets=[(1 << 28, 30e9), (1 << 29, 30e9)],
    rows=[(1, 1e-3), (8, 2e-3)],
)


def profile(key: ProfileKey = KEY) -> CalibrationProfile:
    return profile_of(
        MEASURED, key, measured_at="2026-01-01", expert_bytes=100, num_threads=2, isa="avx2"
    )


def test_costs_add_the_way_and_cut_what_cannot_be() -> None:
    costs = profile().costs(777)
    assert costs.expert_bytes == 777
    assert costs.link_beside_cpu_bytes_per_s == costs.link_bytes_per_s == 10e9
    assert costs.cpu_beside_link_bytes_per_s == 22e9
    assert costs.link_fixed_s == pytest.approx(51e-6)
    assert costs.cpu_fixed_s == pytest.approx(62e-6)


def test_what_is_saved_is_found(tmp_path: Path) -> None:
    path = save_profile(profile(), tmp_path / "new" / "folder")
    assert find_profile(KEY, path.parent) == profile()
    assert [entry.name for entry in path.parent.iterdir()] == [KEY.file_name]
    assert find_profile(KEY, tmp_path / "nowhere") is None


@pytest.mark.parametrize(
    ("other", "word"),
    [
        (msgspec.structs.replace(KEY, machine="another"), "another machine"),
        (msgspec.structs.replace(KEY, kernel_build="build 2"), "another build of the kernels"),
    ],
)
def test_a_foreign_profile_is_ignored_with_one_line(
    other: ProfileKey, word: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_profile(profile(other), tmp_path)
    with caplog.at_level(logging.WARNING, "headrace"):
        assert find_profile(KEY, tmp_path) is None
    assert len(caplog.records) == 1
    assert word in caplog.text
    caplog.clear()
    # Of another format or link: it is simply not what was asked for.
    save_profile(profile(msgspec.structs.replace(KEY, link="cuda: x")), tmp_path / "b")
    assert find_profile(KEY, tmp_path / "b") is None
    assert caplog.records == []


@pytest.mark.parametrize("content", [b"", b"{", b'{"version": 1}', b"x" * 2_000_000])
def test_a_damaged_profile_is_ignored_with_one_line(
    content: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / KEY.file_name).write_bytes(content)
    with caplog.at_level(logging.WARNING, "headrace"):
        assert find_profile(KEY, tmp_path) is None
    assert "damaged" in caplog.text


def test_numbers_that_no_machine_has_are_damage(tmp_path: Path) -> None:
    path = save_profile(profile(), tmp_path)
    path.write_bytes(path.read_bytes().replace(b"22000000000.0", b"-3.0"))
    assert find_profile(KEY, tmp_path) is None


def test_a_folder_that_cannot_be_written_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="XDG_CACHE_HOME"):
        save_profile(profile(), tmp_path / "file" / "folder")


def test_a_folder_that_cannot_be_written_is_told_before_measuring(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    prepare_folder(folder)
    assert os.listdir(folder) == []
    with pytest.raises(UserError, match="XDG_CACHE_HOME"):
        prepare_folder(Path("/proc/headrace"))
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="XDG_CACHE_HOME"):
        prepare_folder(tmp_path / "file" / "folder")


def test_a_full_disk_costs_no_older_profile_and_leaves_nothing(tmp_path: Path) -> None:
    path = save_profile(profile(), tmp_path)
    before = path.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        with pytest.raises(UserError, match="free space"):
            save_profile(profile(), tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == [path.name]


def test_a_folder_that_cannot_be_read_is_one_line_and_no_profile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert find_profile(KEY, tmp_path / ("x" * 300)) is None  # the system refuses it to root too
    assert "File name too long; going on without" in caplog.text
    assert len(caplog.records) == 1
    caplog.clear()

    def refuse(path: object, *more: object, **named: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    # As on a folder of another user, whose entries cannot even be asked for.
    for name in ("stat", "listdir", "scandir"):
        monkeypatch.setattr(os, name, refuse)
    found = find_profile(KEY, tmp_path / "calibration")
    monkeypatch.undo()
    assert found is None
    assert "Permission denied; going on without" in caplog.text
    assert len(caplog.records) == 1


def test_where_profiles_lie() -> None:
    assert str(cache_dir({"XDG_CACHE_HOME": "/c"})) == "/c/headrace/calibration"
    assert str(cache_dir({"XDG_CACHE_HOME": "rel", "HOME": "/h"})).startswith("/h/.cache/")


def test_serving_uses_it_unless_a_rate_is_stated(tmp_path: Path) -> None:
    layout = small_layout()
    settings = PipelineSettings(model_dir=tmp_path, run_dir=tmp_path, calibration_dir=tmp_path)
    assert core_config(settings, layout, 4, 64).costs is None
    save_profile(profile(key_of(layout, "cpu", 0.0)), tmp_path)
    config = core_config(settings, layout, 4, 64)
    assert config.costs == profile().costs(layout.expert_bytes)
    assert worker_setup(settings, layout, 4, 64, "cpu_worker", True).is_rate_stated
    for changes in ({"host_gbps": 3.0}, {"emulate_link_gbps": 2.0}, {"num_cpu_workers": 2}):
        other = msgspec.structs.replace(settings, **changes)
        assert calibrated_costs(other, layout) is None


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_a_picture_is_drawn(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"rates.{suffix}"
    draw(profile(), path)
    written = path.read_bytes()
    assert written.startswith(b"\x89PNG") if suffix == "png" else b"<svg" in written
    with pytest.raises(UserError, match="cannot be written"):
        draw(profile(), tmp_path / "nowhere" / f"rates.{suffix}")
