"""`headrace simulate` from the outside."""

from __future__ import annotations

import importlib.util
import json
import sys
from typing import TYPE_CHECKING

import numpy as np
import pytest

from orchestrator.cli.main import main
from orchestrator.simulate.trace import synthetic_trace

if TYPE_CHECKING:
    from pathlib import Path

PROMISED = {
    "hit_rate",
    "lru_hit_rate",
    "belady_hit_rate",
    "gap_closed",
    "step_us",
    "tokens_per_s",
    "fills",
    "cpu_experts",
    "link_idle",
    "cpu_idle",
}


@pytest.fixture
def trace(tmp_path: Path) -> str:
    made = synthetic_trace(30, 4, 16, 2)
    path = tmp_path / "trace.npz"
    np.savez(path, ids=made.ids, num_experts=made.num_experts)
    return str(path)


@pytest.mark.parametrize(
    "planner", ["fluid", "closed-form", "fixed-fraction", "fill-only", "cpu-only"]
)
def test_json_has_what_was_promised(
    planner: str, trace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["simulate", "--trace", trace, "--profile", "laptop", "--slots", "25%"]
    assert main([*words, "--policy", "reuse", "--planner", planner, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer.keys() >= PROMISED
    assert answer["num_slots"] == 16
    assert answer["planner"] == planner
    assert answer["fill_behind"] == ("auto" if planner == "fluid" else "off")
    assert answer["tokens_per_s"] == pytest.approx(1e6 / answer["step_us"])


def test_the_table_names_the_bounds_and_the_baselines(
    trace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", "--trace", trace, "--baselines", "--steps", "10"]) == 0
    text = capsys.readouterr().out
    for word in ("tokens/s", "Belady, best split", "link floor", "fixed-fraction", "static"):
        assert word in text


def test_sizes_come_from_where_they_are_said(
    trace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["simulate", "--trace", trace, "--json", "--steps", "5"]
    sizes = []
    for more in ([], ["--expert-bytes", "1000000"]):
        assert main(words + more) == 0
        sizes.append(json.loads(capsys.readouterr().out)["expert_bytes"])
    assert sizes == [13_200_000, 1_000_000]
    assert main([*words, "--model-shape", "gpt-oss-20b"]) == 2
    assert "gpt-oss-20b has 24 of 32" in capsys.readouterr().err


@pytest.mark.parametrize("what", ["slots=10,50", "link=5,20", "host=20,80"])
def test_a_sweep_has_a_row_per_value(
    what: str, trace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["simulate", "--trace", trace, "--sweep", what, "--steps", "10"]
    assert main([*words, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["sweep"] == what.split("=")[0]
    first, second = answer["rows"]
    assert second["value"] > first["value"]
    assert second["tokens_per_s"] > first["tokens_per_s"]
    assert main(words) == 0
    assert "cpu-only tokens/s" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--profile", "toaster"], "There is no profile or file 'toaster'"),
        (["--slots", "half"], "--slots is a number"),
        (["--steps", "0"], "--steps is a whole number"),
        (["--steps", "many"], "--steps is a whole number"),
        (["--skip", "99"], "none from step 99 on"),
        (["--skip", "-1"], "--skip"),
        (["--policy", "mru"], "--policy"),
        (["--sweep", "speed=1"], "--sweep is slots, link or host"),
        (["--sweep", "slots=a"], "--sweep is slots, link or host"),
        (["--sweep", "link=-3"], "--sweep is slots, link or host"),
        (["--plot", "x.svg"], "--plot shows a sweep"),
        (["--weight-format", "bf16"], "--weight-format needs --model-shape"),
        (["--model-shape", "gpt-oss-20b", "--weight-format", "q1"], "no weight format 'q1'"),
        (["--model-shape", "gpt-5"], "no model shape 'gpt-5'"),
        (["--expert-bytes", "0"], "--expert-bytes"),
        (["--expert-bytes", "1" * 400], "and <= 1e+15 (bytes)"),
        (["--steps", "\u0663"], "--steps is a whole number"),
        (["--slots", "\u0665\u0660%"], "--slots is a number"),
        (["--skip", "\u0663"], "--skip"),
        (["--profile", "x" * 5000], "There is no profile or file"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(
    words: list[str], sentence: str, trace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = main(["simulate", "--trace", trace, *words])
    except SystemExit as leaving:
        code = leaving.code
    assert code == 2
    said = capsys.readouterr()
    assert sentence in said.err
    assert said.out == ""
    assert len(said.err.strip().splitlines()) == 1


def test_names_are_printed_as_they_are(
    trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('name = "[/red] :smile:"\nsource = "me"\nlink_gbps = 20\nhost_gbps = 60\n')
    words = ["simulate", "--trace", trace, "--profile", str(path), "--steps", "5"]
    assert main(words) == 0
    assert "on [/red] :smile:," in capsys.readouterr().out
    assert main([*words, "--sweep", "slots=10,50"]) == 0
    assert "on [/red] :smile:" in capsys.readouterr().out


def test_the_slowest_machine_that_a_profile_may_state(
    trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "slow.toml"
    path.write_text(
        'name = "slow"\nsource = "nobody"\nlink_gbps = 1e-9\nhost_gbps = 1e-9\n'
        "link_beside_cpu_gbps = 1e-9\ncpu_beside_link_gbps = 1e-9\ndense_us = 1e9\n"
        "cpu_dispatch_us = 1e9\nlink_dispatch_us = 1e9\nfill_fixed_us = 1e9\n"
        "gpu_expert_us = 1e9\ncpu_row_part = 1e3\nexpert_bytes = 1_000_000_000_000_000\n"
    )
    words = ["simulate", "--trace", trace, "--profile", str(path), "--steps", "2", "--baselines"]
    assert main([*words, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert 1e20 < answer["step_us"] < 1e30
    assert answer["tokens_per_s"] > 0


def test_a_bad_trace_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "bad.npz"
    path.write_text("nonsense")
    assert main(["simulate", "--trace", str(path)]) == 2
    said = capsys.readouterr()
    assert "bad.npz" in said.err
    assert "Traceback" not in said.err


def test_without_matplotlib_a_plot_is_one_sentence(
    trace: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *rest: None if name == "matplotlib" else find_spec(name, *rest),
    )
    plot = tmp_path / "sweep.svg"
    words = ["simulate", "--trace", trace, "--sweep", "slots=10", "--plot", str(plot)]
    assert main(words) == 2
    assert f"{sys.executable} -m pip install matplotlib" in capsys.readouterr().err
    assert not plot.exists()


@pytest.mark.parametrize(
    ("name", "says"), [("x.xyz", "writes .png"), ("no/x.svg", "no such folder"), (".svg", "writes")]
)
def test_where_a_plot_cannot_go_is_told_first(
    name: str, says: str, trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["simulate", "--trace", trace, "--sweep", "slots=10", "--plot", str(tmp_path / name)]
    assert main(words) == 2
    assert says in capsys.readouterr().err


def test_a_plot_is_written(trace: str, tmp_path: Path) -> None:
    plot = tmp_path / "sweep.svg"
    words = ["simulate", "--trace", trace, "--sweep", "slots=10,50", "--steps", "5"]
    assert main([*words, "--plot", str(plot)]) == 0
    assert "<svg" in plot.read_text()
