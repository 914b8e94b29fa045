"""The benchmarks of this area run on small input and say what they promise."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np

from orchestrator.core.policies import POLICY_NAMES
from orchestrator.simulate.trace import synthetic_trace

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def run(name: str, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", str(BENCHMARKS / name), *words],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_policies_have_their_ratio_to_lru() -> None:
    done = run("policies.py", "--steps", "4", "--json")
    assert done.returncode == 0, done.stderr
    rows = {row["policy"]: row for row in json.loads(done.stdout)["policies"]}
    assert set(rows) == set(POLICY_NAMES)
    assert rows["lru"]["over_lru"] == 1.0
    assert all(row["decision_p50_us"] > 0 <= row["settle_p50_us"] for row in rows.values())


def test_profiles_have_nine_cells_and_a_mean(tmp_path: Path) -> None:
    made = synthetic_trace(25, 4, 16, 2)
    path = tmp_path / "trace.npz"
    np.savez(path, ids=made.ids, num_experts=made.num_experts)
    done = run("simulate_profiles.py", "--trace", str(path), "--steps", "25", "--json")
    assert done.returncode in (0, 1), done.stderr
    answer = json.loads(done.stdout)
    assert len(answer["cells"]) == 9
    assert len(answer["gaps"]) == 3
    ratios = [cell["ratio"] for cell in answer["cells"]]
    assert answer["largest"] == max(ratios)
    assert np.isclose(answer["geometric_mean"], np.exp(np.log(ratios).mean()))
    assert done.returncode == (0 if answer["passed"] else 1)


def test_a_bad_trace_is_one_sentence(tmp_path: Path) -> None:
    for name in ("policies.py", "simulate_profiles.py"):
        done = run(name, "--trace", str(tmp_path / "none.npz"))
        assert done.returncode == 2
        assert "There is no trace" in done.stderr
        assert "Traceback" not in done.stderr
