"""The benchmark of CPU experts runs and says what it promises."""

from __future__ import annotations

import json
import sys

import pytest

from benchmarks import cpu_experts, expert_blocks
from tests.expert_kernels.test_native import ISAS

pytestmark = pytest.mark.skipif(not ISAS, reason="the native kernels have not been built")
FORMATS = ("float32", "int8", "int4", "fp8")
STATED = {
    "format", "hidden", "intermediate", "experts", "rows", "threads", "gbps", "ceiling_gbps",
    "torch_gbps",
}  # fmt: skip


@pytest.fixture(autouse=True)
def _little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_experts, "WORKING_SET_BYTES", 2_000_000)
    monkeypatch.setattr(cpu_experts, "SHAPES", ((64, 64, 16), (96, 32, 8)))
    monkeypatch.setattr(cpu_experts, "_READ_BYTES", 500_000)
    monkeypatch.setattr(expert_blocks, "_PATTERN_ITEMS", 4096)
    monkeypatch.setattr(cpu_experts, "_WAY_BYTES", 500_000)
    monkeypatch.setattr(cpu_experts, "_SLICE_S", 0.001)
    monkeypatch.setattr(cpu_experts, "_PRODUCT", (32, 64, 48))


def test_rows_have_what_is_promised(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        sys, "argv", ["cpu_experts", "--json", "--threads", "1", "--formats", *FORMATS]
    )
    assert cpu_experts.main() == 0
    result = json.loads(capsys.readouterr().out)
    rows = result["rows"]
    assert set(rows[0]) >= STATED
    assert {row["format"] for row in rows} == set(FORMATS)
    assert {row["threads"] for row in rows} == {1}
    assert {(row["hidden"], row["intermediate"]) for row in rows} == {(64, 64), (96, 32)}
    assert max(row["rows"] for row in rows) == 128
    assert all(row[name] > 0 for row in rows for name in STATED - {"format"})
    assert all(row["bound_ms"] > 0 for row in rows)
    reading = result["reading"]["1"]
    way = (reading["streams"], reading["ahead_bytes"], reading["farther_bytes"])
    assert way in cpu_experts._WAYS
    assert reading["gbps"] > 0


def test_a_table_is_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--quick", "--processor-time", "--max-isa", "scalar"]
    monkeypatch.setattr(sys, "argv", ["cpu_experts", *arguments, "--formats", "mxfp4", "nvfp4"])
    assert cpu_experts.main() == 0
    assert "scalar" in capsys.readouterr().out


def test_too_little_memory_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cpu_experts, "WORKING_SET_BYTES", 10**15)
    monkeypatch.setattr(sys, "argv", ["cpu_experts"])
    assert cpu_experts.main() == 2
    said = capsys.readouterr().err
    assert said.startswith("cpu_experts: needs 1000001.1 GB of memory")
    assert said.count("\n") == 1
