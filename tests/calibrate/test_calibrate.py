"""The command with real workers on small experts: rates of any size, but a profile that is used."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

import pytest

from orchestrator.calibrate.profile import cache_dir, find_profile, key_of
from orchestrator.calibrate.store import bench_layout, gated_form
from tests.process.pipelines import Processes

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.process, pytest.mark.timeout(240)]


def test_calibrate_measures_and_keeps_what_it_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "logs").mkdir()
    done = Processes(tmp_path / "logs").call(
        "calibrate", "--quick", "--hidden", 256, "--intermediate", 128, "--memory-gb", 0.06,
        "--emulate-link-gbps", 0.05, "--json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["expert_bytes"] == 3 * 256 * 128 * 2
    for name in ("link", "cpu"):
        assert said[f"{name}_beside_{'cpu' if name == 'link' else 'link'}_bytes_per_s"] > 0
        assert said[f"{name}_bytes_per_s"] < 1e12
    # The link is paced, and nothing makes it faster.
    assert said["link_bytes_per_s"] <= 0.06e9
    assert [rows for rows, _ in said["rows"]] == [1, 2, 4, 8]
    sizes = [size for size, _ in said["working_sets"]]
    assert sizes == sorted(sizes)

    layout = bench_layout(gated_form(256, 128), "bfloat16", None, 1)
    found = find_profile(key_of(layout, "cpu", 0.05e9), cache_dir(os.environ))
    assert found is not None
    assert found.cpu_bytes_per_s == said["cpu_bytes_per_s"]


def test_more_than_half_of_the_memory_is_not_taken(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    done = Processes(tmp_path / "logs").call(
        "calibrate", "--hidden", 2_000_000, "--intermediate", 2_000_000
    )
    assert done.returncode == 2
    assert "half of what is free" in done.stderr
