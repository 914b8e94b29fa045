"""`headrace latency`: percentiles, traces, and damaged files."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

import pytest

from orchestrator.cli.main import main
from orchestrator.latency_log import LogHeader, WorkerRecord
from orchestrator.log_file import LogFile
from tests.orchestrator.test_latency_log import STORY, play

if TYPE_CHECKING:
    from pathlib import Path

HEADER = LogHeader(1, "demo", "float32", 2, 1, 24, 6, 24)


@pytest.fixture
def log_path(tmp_path: Path) -> Path:
    path = tmp_path / "log.jsonl"
    log = LogFile(path)
    log.write(HEADER)
    log.write(WorkerRecord(2, "dma_worker", 77, "joined", 50))
    log.write(WorkerRecord(3, "cpu_worker", 78, "joined", 50))
    for record in play(STORY)[1]:
        log.write(record)
    log.close()
    return path


def test_tables(log_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["latency", str(log_path)]) == 0
    out = capsys.readouterr().out
    assert "demo: 1 steps, 2 layer-steps, 6 slots of 24 experts" in out
    for stage in ("dense", "plan", "gpu_hits", "dma", "gpu_fills", "cpu", "join", "sample"):
        assert f"\n{stage} " in out
    assert "fill mode all" in out


def test_json(log_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["latency", str(log_path), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["num_steps"], report["num_layer_steps"]) == (1, 2)
    assert report["stages"]["cpu"]["max_us"] == 0.64
    assert report["stages"]["step"]["share"] == 1.0
    assert [layer["layer"] for layer in report["layers"]] == [0, 1]
    assert report["slowest"][0]["slowest_layer"] == 0


def test_a_trace_is_never_written_over_its_log(
    log_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = log_path.read_bytes()
    link = tmp_path / "other-name.json"
    link.symlink_to(log_path)
    for name in (log_path, link):
        assert main(["latency", str(log_path), "--trace", str(name)]) == 2
        assert "is the log itself" in capsys.readouterr().err
    assert log_path.read_bytes() == whole


def test_trace(log_path: Path, tmp_path: Path) -> None:
    out = tmp_path / "trace.json"
    assert main(["latency", str(log_path), "--trace", str(out)]) == 0
    events = json.loads(out.read_bytes())["traceEvents"]
    names = {event["args"]["name"] for event in events if event["ph"] == "M"}
    assert names == {
        "orchestrator",
        "gpu_worker",
        "dma_worker (pid 77)",
        "cpu_worker (pid 78)",
    }
    slices = [event for event in events if event["ph"] == "X"]
    assert {event["pid"] for event in slices} == {
        event["pid"] for event in events if event["ph"] == "M"
    }
    assert all(event["ts"] >= 0 and event["dur"] >= 0 for event in slices)
    starts = {event["id"]: event for event in events if event["ph"] == "s"}
    ends = {event["id"]: event for event in events if event["ph"] == "f"}
    assert starts.keys() == ends.keys()
    # Every arrow ends inside a slice of its track.
    assert ends
    for end in ends.values():
        assert any(
            (piece["pid"], piece["tid"]) == (end["pid"], end["tid"])
            and piece["ts"] <= end["ts"] <= piece["ts"] + piece["dur"]
            for piece in slices
        )


def test_damaged_line_is_named(log_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = log_path.read_bytes().splitlines(keepends=True)
    lines[3] = lines[3][:40] + b"\n"
    log_path.write_bytes(b"".join(lines))
    assert main(["latency", str(log_path)]) == 2
    assert f"Line 4 of {log_path}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"dense_ns":', b'"dense_ns":1' + b"0" * 30),
        (b'"routed_ns":', b'"routed_ns":-5' + b"0" * 18),
        (b'"fill_bytes":', b'"fill_bytes":' + b"9" * 400),
        (b'"fill_bytes":', b'"unknown":' + b"[" * 100_000),
    ],
)
def test_numbers_and_lists_of_no_log_are_damage(
    log_path: Path, old: bytes, new: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    raw = log_path.read_bytes()
    assert old in raw
    log_path.write_bytes(raw.replace(old, new, 1))
    assert main(["latency", str(log_path)]) == 2
    err = capsys.readouterr().err
    assert f"of {log_path} is not a record of a latency log" in err
    assert len(err.splitlines()) == 1


def test_stamps_as_far_apart_as_they_may_be(
    log_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    raw = re.sub(rb'"routed_ns":\d+', b'"routed_ns":%d' % -(1 << 62), log_path.read_bytes())
    raw = re.sub(rb'"joined_ns":\d+', b'"joined_ns":%d' % ((1 << 62) - 1), raw)
    log_path.write_bytes(raw)
    assert main(["latency", str(log_path), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["stages"]["layer"]["max_us"] == pytest.approx(2**63 / 1e3)


def test_names_are_printed_as_they_are(log_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    raw = log_path.read_bytes().replace(b'"model":"demo"', b'"model":"a[/b]c[int4]"', 1)
    log_path.write_bytes(raw.replace(b"fill mode all", b"[/b] of :smile:"))
    assert main(["latency", str(log_path)]) == 0
    out = capsys.readouterr().out
    assert "a[/b]c[int4]: 1 steps" in out
    assert "[/b] of :smile:" in out


def test_line_cut_short_by_a_kill_is_left_out(
    log_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with log_path.open("ab") as log:
        log.write(b'{"kind":"layer","requ')
    assert main(["latency", str(log_path)]) == 0
    assert "line 7 of" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is empty: its run has not loaded the model yet, or was ended"),
        (b"\x00\xff\n", "is not a latency log"),
        (b"{}\n", "is not a latency log"),
        (b"[]", "is not a latency log"),
        (b'{"kind":"worker","worker":1,"role":"","pid":1,"change":"","at_ns":1}\n', "Line 1 of"),
        (
            b'{"kind":"log","version":9,"model":"","dtype":"","num_layers":1,"top_k":1,'
            b'"expert_bytes":1,"num_slots":1,"total_experts":1}\n',
            "version 9",
        ),
        (
            b'{"kind":"log","version":1,"model":"","dtype":"","num_layers":1,"top_k":1,'
            b'"expert_bytes":1,"num_slots":1,"total_experts":1}\n',
            "no complete step",
        ),
    ],
)
def test_no_log_at_all(
    tmp_path: Path, content: bytes, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(content)
    assert main(["latency", str(path)]) == 2
    err = capsys.readouterr().err
    assert says in err
    assert err.count("\n") == 1


def test_missing_file_and_unwritable_trace(
    log_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["latency", str(tmp_path / "none")]) == 2
    assert main(["latency", str(log_path), "--trace", str(tmp_path / "no" / "t.json")]) == 2
    assert capsys.readouterr().err.count("headrace: ") == 2
