"""The benchmarks of this area run on small input and say what they promise."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.adaptive_split import common_step_us
from benchmarks.disturbances import judge
from benchmarks.turns import RunningText
from orchestrator.core.policies import POLICY_NAMES
from orchestrator.simulate.trace import synthetic_trace

Turns = list[tuple[int, int]]

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


class MadeUpText:
    """A log: `step_ms[i]` long steps, one after the other, each with one layer-step of 4 misses of
    which `fills[i]` are filled; and the turns that it had."""

    def __init__(
        self, step_ms: list[float], fills: list[int], turns: list[tuple[int, int]]
    ) -> None:
        self.turns = [(begin * 10**6, end * 10**6) for begin, end in turns]
        self._records: list[dict[str, Any]] = []
        now_ns = 0
        for number, (took_ms, num_fills) in enumerate(zip(step_ms, fills, strict=True)):
            end_ns = now_ns + round(took_ms * 1e6)
            layer = {"kind": "layer", "step": number, "num_rows": 1, "m": 4}
            self._records.append(layer | {"fills": list(range(num_fills))})
            step = {"kind": "step", "step": number, "num_tokens": 1, "is_complete": True}
            self._records.append(step | {"started_ns": now_ns, "done_ns": end_ns})
            now_ns = end_ns

    def records(self) -> list[dict[str, Any]]:
        return self._records

    steps = RunningText.steps
    step_us_in_turns = RunningText.step_us_in_turns


def test_ways_are_compared_over_the_steps_that_all_made_in_their_turns() -> None:
    texts = {
        "a": MadeUpText([10.0] * 20, [0] * 20, [(0, 95), (105, 200)]),  # step 9 and 10 were cut
        "b": MadeUpText([20.0] * 15, [0] * 15, [(0, 300)]),
    }
    times_us, count = common_step_us(texts, warm_up=4)  # type: ignore[arg-type]
    assert count == 15 - 4 - 2
    assert times_us == {"a": 10_000, "b": 20_000}


def test_a_disturbance_is_judged_by_what_was_decided() -> None:
    """Twenty calm steps with a quarter filled; then eight slow ones, and all is filled."""
    step_ms = [10.0] * 20 + [50.0] * 8 + [20.0] * 40
    fills = [1] * 20 + [1] * 8 + [4] * 40
    text = MadeUpText(step_ms, fills, [])
    found = judge("cpu", text, 200 * 10**6, 48)  # type: ignore[arg-type]
    assert (found["filled_part_before"], found["filled_part_settled"]) == (0.25, 1.0)
    assert found["moved_after"] == 8 + 3  # three of five steps have moved
    assert found["lost_ms"] == 8 * 30.0
    assert found["worst_over_settled"] == 2.5
