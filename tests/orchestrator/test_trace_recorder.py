"""Where a recording is written: told at the start, whole or not at all at the end."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from orchestrator.core.events import Passed, WorkerLost
from orchestrator.simulate.trace import read_trace
from orchestrator.trace_recorder import TraceRecorder
from protocol.errors import UserError
from protocol.messages import Epoch, ExpertId, LayerId, StartStep, StepDone, StepId
from tests.protocol.fake_orchestrator import small_layout

if TYPE_CHECKING:
    from collections.abc import Iterator

LAYOUT = small_layout()
EPOCH = Epoch(1)


def record(recorder: TraceRecorder, num_steps: int) -> None:
    """Every layer of every step chooses the first experts."""
    experts = [ExpertId(expert) for expert in range(LAYOUT.top_k)]
    for number in range(num_steps):
        step = StepId(number + 1)
        recorder.hear(WorkerLost(EPOCH), [StartStep(EPOCH, step, [])])
        for layer in range(LAYOUT.num_layers):
            recorder.hear(Passed(EPOCH, step, LayerId(layer), experts, [1, 1], 0, 0, 0, 0), [])
        recorder.hear(StepDone(EPOCH, step, [], 0, 0), [])


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("none/trace.npz", "No such file or directory"),
        ("file/trace.npz", "Not a directory"),
        ("folder", "no ordinary file"),
        ("/dev/null", "no ordinary file"),
        ("x" * 300, "File name too long"),
    ],
)
def test_what_cannot_be_written_is_told_at_the_start(name: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=says) as caught:
        TraceRecorder(tmp_path / name)
    assert "name another file" in str(caught.value)
    assert sorted(os.listdir(tmp_path)) == ["file", "folder"]
    assert Path("/dev/null").is_char_device()


def test_a_whole_recording_takes_the_place_of_an_older_one(tmp_path: Path) -> None:
    path, link = tmp_path / "trace.npz", tmp_path / "link.npz"
    path.write_text("older")
    link.symlink_to(path)
    recorder = TraceRecorder(link)
    recorder.begin(LAYOUT)
    record(recorder, 3)
    assert path.read_text() == "older"
    assert recorder.close() == ""
    recorder.discard()
    assert link.is_symlink()
    assert read_trace(path).num_steps == 3
    assert sorted(os.listdir(tmp_path)) == ["link.npz", "trace.npz"]


@pytest.fixture
def full_disk() -> Iterator[None]:
    """No file may grow beyond some bytes, as on a disk that is full."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_full_disk_is_told_and_costs_no_older_trace(tmp_path: Path, full_disk: None) -> None:
    path = tmp_path / "trace.npz"
    path.write_text("older")
    recorder = TraceRecorder(path)
    recorder.begin(LAYOUT)
    record(recorder, 3)
    sentence = recorder.close()
    assert str(path) in sentence
    assert "3 decode steps are lost" in sentence
    assert path.read_text() == "older"
    assert os.listdir(tmp_path) == ["trace.npz"]


@pytest.mark.parametrize("is_loaded", [False, True])
def test_nothing_recorded_leaves_what_was_there(is_loaded: bool, tmp_path: Path) -> None:
    path = tmp_path / "trace.npz"
    path.write_text("older")
    recorder = TraceRecorder(path)
    if is_loaded:
        recorder.begin(LAYOUT)
    assert recorder.close() == ""
    recorder.discard()
    assert path.read_text() == "older"
    assert os.listdir(tmp_path) == ["trace.npz"]


def test_what_a_killed_recording_left_is_taken_away(tmp_path: Path) -> None:
    """But neither that of one that still runs, nor a stranger's."""
    path = tmp_path / "trace[1].npz"
    left, fresh = tmp_path / "trace[1].npz.0123abcd.tmp", tmp_path / "trace[1].npz.89abcdef.tmp"
    others = [tmp_path / "trace[1].npz.old.tmp", tmp_path / "trace1.npz.0123abcd.tmp"]
    running = TraceRecorder(path)
    [lock] = tmp_path.iterdir()
    for file in (left, fresh, *others):
        file.write_text("")
    for file in (left, lock, *others):
        os.utime(file, (0, 0))
    recorder = TraceRecorder(path)
    assert not left.exists()
    assert lock.exists()
    assert fresh.exists()
    assert all(other.exists() for other in others)
    for one in (running, recorder):
        one.discard()
    assert sorted(tmp_path.iterdir()) == sorted([fresh, *others])
