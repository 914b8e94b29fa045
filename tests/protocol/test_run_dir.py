"""The run directory: who may make it, lock it, join it."""

from __future__ import annotations

import gc
import os
import stat
from pathlib import Path

import pytest

from protocol.errors import UserError
from protocol.run_dir import LockedRunDir, RunDir, default_run_dir


def test_default_is_private_to_the_user(tmp_path: Path) -> None:
    assert default_run_dir({"XDG_RUNTIME_DIR": str(tmp_path)}) == tmp_path / "headrace"
    for environ in ({}, {"XDG_RUNTIME_DIR": ""}, {"XDG_RUNTIME_DIR": str(tmp_path / "none")}):
        assert default_run_dir(environ).name == f"headrace-{os.getuid()}"


def test_is_made_private_and_taken_away_again(tmp_path: Path) -> None:
    path = tmp_path / "a" / "run"
    run_dir = LockedRunDir(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert (path / "lock").read_text() == str(os.getpid())
    RunDir(path).check_joinable()
    assert run_dir.control_endpoint == f"ipc://{path}/control.sock"
    run_dir.close()
    assert not path.exists()


def test_a_directory_that_was_there_stays_with_what_others_put_in(tmp_path: Path) -> None:
    path = tmp_path / "run"
    path.mkdir(mode=0o700)
    (path / "notes").touch()
    for name in ("control.sock", "lifeline.sock"):
        (path / name).touch()  # left by one that was killed
    run_dir = LockedRunDir(path)
    assert sorted(os.listdir(path)) == ["lock", "notes"]
    run_dir.close()
    assert os.listdir(path) == ["notes"]


def test_in_use_names_the_holder(tmp_path: Path) -> None:
    run_dir = LockedRunDir(tmp_path / "run")
    gc.collect()  # what earlier tests have left is not to be closed in between
    descriptors = len(os.listdir("/proc/self/fd"))
    with pytest.raises(UserError, match=f"is in use by process {os.getpid()}; "):
        LockedRunDir(tmp_path / "run")
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert (tmp_path / "run" / "lock").read_text() == str(os.getpid())
    run_dir.close()
    LockedRunDir(tmp_path / "run").close()


def test_in_use_leaves_the_holders_sockets_alone(tmp_path: Path) -> None:
    run_dir = LockedRunDir(tmp_path / "run")
    (tmp_path / "run" / "lifeline.sock").touch()
    with pytest.raises(UserError, match="is in use"):
        LockedRunDir(tmp_path / "run")
    assert (tmp_path / "run" / "lifeline.sock").exists()
    RunDir(tmp_path / "run").remove_leftovers()
    assert (tmp_path / "run" / "lifeline.sock").exists()
    run_dir.close()


@pytest.mark.parametrize("mode", [0o755, 0o701, 0o770])
def test_open_to_others_is_refused_with_the_remedy(mode: int, tmp_path: Path) -> None:
    path = tmp_path / "run"
    path.mkdir()
    path.chmod(mode)
    with pytest.raises(UserError, match=f"mode {mode:04o}.*chmod 700 {path}"):
        LockedRunDir(path)
    with pytest.raises(UserError, match="is open to other users"):
        RunDir(path).check_joinable()


def test_a_file_is_no_run_directory(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch()
    for place in (path, path / "below"):
        with pytest.raises(UserError, match=f"{place} is a file"):
            LockedRunDir(place)
        with pytest.raises(UserError, match="There is no run directory"):
            RunDir(place).check_joinable()


@pytest.mark.parametrize("name", ["lock", "control.sock", "lifeline.sock"])
def test_what_cannot_be_replaced_is_named(name: str, tmp_path: Path) -> None:
    path = tmp_path / "run"
    path.mkdir(mode=0o700)
    (path / name).mkdir()
    descriptors = len(os.listdir("/proc/self/fd"))
    with pytest.raises(UserError, match=f"cannot be used: {name}: .*another --run-dir"):
        LockedRunDir(path)
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_a_lock_that_leads_elsewhere_is_not_followed(tmp_path: Path) -> None:
    path, precious = tmp_path / "run", tmp_path / "precious"
    path.mkdir(mode=0o700)
    precious.write_text("to be kept")
    (path / "lock").symlink_to(precious)
    with pytest.raises(UserError, match="cannot be used: lock: "):
        LockedRunDir(path)
    assert precious.read_text() == "to be kept"


def test_a_place_where_none_can_be_made() -> None:
    with pytest.raises(UserError, match=r"/proc/headrace-test cannot be made: .*--run-dir"):
        LockedRunDir(Path("/proc/headrace-test"))


def test_path_too_long_for_a_socket(tmp_path: Path) -> None:
    room = 107 - len(f"{tmp_path}/") - len("/lifeline.sock")
    RunDir(tmp_path / ("x" * room))
    for name in ("x" * (room + 1), "\N{LATIN SMALL LETTER E WITH ACUTE}" * (room // 2 + 1)):
        with pytest.raises(UserError, match="choose a shorter --run-dir"):
            LockedRunDir(tmp_path / name)
        assert not (tmp_path / name).exists()


def test_leftovers_of_a_killed_orchestrator_go(tmp_path: Path) -> None:
    path = tmp_path / "run"
    path.mkdir(mode=0o700)
    for name in ("control.sock", "lifeline.sock", "lock"):
        (path / name).touch()
    RunDir(path).remove_leftovers()
    assert os.listdir(path) == []
    RunDir(path).remove_leftovers()
