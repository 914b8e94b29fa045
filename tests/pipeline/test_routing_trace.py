"""Routing that is forced on a pipeline, and routing that is recorded from one."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from orchestrator.simulate.trace import read_trace, synthetic_trace
from tests.checkpoints import make_checkpoint

if TYPE_CHECKING:
    from pathlib import Path

    from tests.process.pipelines import Processes

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]

NUM_TOKENS = 40


def test_a_recording_of_a_replay_is_what_was_replayed(tmp_path: Path, processes: Processes) -> None:
    model = make_checkpoint("qwen3_moe", tmp_path / "model", dtype="float32")
    config = json.loads((model / "config.json").read_text())
    # Fewer steps than tokens, so that it begins anew; more layers than the model has.
    trace = synthetic_trace(
        30,
        config["num_hidden_layers"] + 2,
        config["num_local_experts"],
        config["num_experts_per_tok"],
    )
    played, recorded = tmp_path / "played.npz", tmp_path / "recorded.npz"
    np.savez(played, ids=trace.ids, num_experts=trace.num_experts)
    done = processes.call(
        "trace", "record", recorded, "--model", model, "--prompt", "Water turns the wheel",
        "--max-tokens", NUM_TOKENS, "--ignore-eos", "--json", "--slots", "50%",
        "--replay-routing", played,
        timeout_s=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["hits"] > 0

    found = read_trace(recorded)
    assert found.num_steps == NUM_TOKENS - 1  # the first token comes from the prompt's own step
    assert found.num_experts == config["num_local_experts"]
    positions = np.arange(NUM_TOKENS - 1) + result["prompt_tokens"]
    expected = trace.ids[positions % 30, : config["num_hidden_layers"]]
    assert np.array_equal(found.ids, expected)

    shown = processes.call("trace", "show", recorded, "--json")
    assert json.loads(shown.stdout)["steps"] == NUM_TOKENS - 1


def test_a_trace_of_another_shape_is_refused_with_a_sentence(
    tmp_path: Path, processes: Processes
) -> None:
    model = make_checkpoint("qwen3_moe", tmp_path / "model", dtype="float32")
    trace = synthetic_trace(5, 2, 64, 5)
    np.savez(tmp_path / "other.npz", ids=trace.ids, num_experts=64)
    weights = load_file(model / "model.safetensors")
    spoilt = next(name for name in weights if ".experts." in name)
    weights[spoilt] = np.full_like(weights[spoilt], np.nan)  # to load it would be told otherwise
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    done = processes.call(
        "generate", "--model", model, "--prompt", "x", "--replay-routing", tmp_path / "other.npz"
    )
    assert done.returncode == 2
    assert "2 layers of 64 experts, top-5" in done.stderr
    assert "Traceback" not in done.stderr
