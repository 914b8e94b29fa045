"""`headrace serve DIR`: a model that cannot be served is told before anybody may connect."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from orchestrator import process
from orchestrator.cli.main import main
from orchestrator.http import server
from tests.expert_store.test_checkpoint import write_shard

DEMO = Path(__file__).resolve().parents[2] / "models/demo"


@pytest.fixture(autouse=True)
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever listens or starts an orchestrator all the same fails the test."""

    def start(*arguments: object) -> int:
        raise AssertionError("it was started")

    monkeypatch.setattr(server, "listen", start)
    monkeypatch.setattr(process, "run_orchestrator", start)


def said_about(model: Path, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["serve", str(model), "--port", "0", "--run-dir", str(model.parent / "run")]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    return said.err


def test_no_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = said_about(tmp_path / "none", capsys)
    assert "There is no directory" in said
    assert "--model" not in said  # nobody wrote that flag


def test_a_dense_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tmp_path / "dense"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"model_type": "qwen3", "vocab_size": 300}))
    shutil.copy(DEMO / "tokenizer.json", model)
    write_shard(model / "model.safetensors", {"model.layers.0.mlp.down_proj.weight": [2, 3]})
    assert "qwen3 is a dense model without routed experts" in said_about(model, capsys)


def test_a_truncated_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tmp_path / "cut"
    model.mkdir()
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(DEMO / name, model)
    write_shard(model / "model.safetensors", {"a": [2, 3]})
    with (model / "model.safetensors").open("r+b") as file:
        file.truncate(40)
    assert "model.safetensors" in said_about(model, capsys)
