"""Bad input: one clear sentence, exit code 2, soon, and nothing left running."""

from __future__ import annotations

import json
import shutil
import struct
import time
from typing import TYPE_CHECKING

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.process.pipelines import Processes

pytestmark = pytest.mark.process


def change_config(**changes: object) -> Callable[[Path], None]:
    def change(model: Path) -> None:
        path = model / "config.json"
        config = {**json.loads(path.read_bytes()), **changes}
        path.write_text(json.dumps(config))

    return change


def cut(model: Path) -> None:
    weights = model / "model.safetensors"
    with weights.open("r+b") as file:
        file.truncate(weights.stat().st_size - 1)


def remove(name: str) -> Callable[[Path], None]:
    return lambda model: (model / name).unlink()


def write(name: str, content: str) -> Callable[[Path], None]:
    return lambda model: (model / name).write_text(content) and None


def nothing(model: Path) -> None:
    pass


#: A tensor of an expert, as it is named on disk.
TENSOR = "model.layers.1.mlp.experts.3.down_proj.weight"


def change_tensor(change: Callable[[np.ndarray], np.ndarray]) -> Callable[[Path], None]:
    def rewrite(model: Path) -> None:
        path = model / "model.safetensors"
        tensors = load_file(path)
        tensors[TENSOR] = change(tensors[TENSOR])
        save_file(tensors, path, {"format": "pt"})

    return rewrite


def with_nan(values: np.ndarray) -> np.ndarray:
    values = values.copy()
    values[-1, -1] = np.nan
    return values


def overlap(model: Path) -> None:
    """Let one tensor claim the bytes of its neighbour."""
    path = model / "model.safetensors"
    data = path.read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + length])
    entry = header[TENSOR]
    start, end = entry["data_offsets"]
    entry["data_offsets"] = [start - 4, end - 4]
    changed = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(changed)) + changed + data[8 + length :])


def lose_shard(model: Path) -> None:
    """An index that names a shard which is not there."""
    (model / "model.safetensors").rename(model / "model-00001-of-00002.safetensors")
    index = {
        "metadata": {},
        "weight_map": {
            TENSOR: "model-00002-of-00002.safetensors",
            "lm_head.weight": "model-00001-of-00002.safetensors",
        },
    }
    (model / "model.safetensors.index.json").write_text(json.dumps(index))


#: What is wrong -> (how to make it so, more flags, words of the sentence, seconds it may take).
#: What config, tokenizer and flags tell is told before anything heavy is imported.
QUICK_S, IMPORTING_S = 20.0, 90.0
CASES: dict[str, tuple[Callable[[Path], None], list[str], str, float]] = {
    "missing directory": (shutil.rmtree, [], "There is no directory", QUICK_S),
    "empty directory": (
        lambda model: [path.unlink() for path in model.iterdir()] and None,
        [],
        "no config.json",
        QUICK_S,
    ),
    "no config": (remove("config.json"), [], "no config.json", QUICK_S),
    "broken config": (write("config.json", "{"), [], "config.json cannot be read", QUICK_S),
    "no number": (
        change_config(rms_norm_eps=float("nan")),
        [],
        "config.json: rms_norm_eps is nan, which is no number",
        QUICK_S,
    ),
    "no tokenizer": (remove("tokenizer.json"), [], "no tokenizer.json", QUICK_S),
    "broken tokenizer": (write("tokenizer.json", "{}"), [], "is not a tokenizer", QUICK_S),
    "no weights": (remove("model.safetensors"), [], "safetensors", QUICK_S),
    "truncated weights": (cut, [], "model.safetensors", QUICK_S),
    "overlapping tensors": (overlap, [], TENSOR, QUICK_S),
    "missing shard": (lose_shard, [], "model-00002-of-00002.safetensors", QUICK_S),
    "NaN weights": (change_tensor(with_nan), [], TENSOR, IMPORTING_S),
    "wrong shape": (change_tensor(lambda values: values[:, :-1].copy()), [], TENSOR, IMPORTING_S),
    "wrong dtype": (
        change_tensor(lambda values: values.astype(np.int32)),
        [],
        TENSOR,
        IMPORTING_S,
    ),
    "unknown architecture": (
        change_config(model_type="moe_of_tomorrow", architectures=["MoeOfTomorrow"]),
        [],
        "moe_of_tomorrow",
        IMPORTING_S,
    ),
    "dense model": (
        change_config(model_type="qwen3", architectures=["Qwen3ForCausalLM"]),
        [],
        "qwen3",
        IMPORTING_S,
    ),
    "empty prompt": (nothing, ["--prompt", ""], "prompt is empty", QUICK_S),
    "long prompt": (nothing, ["--prompt", "x" * 512], "the context holds 512", QUICK_S),
    "zero slots": (nothing, ["--slots", "0"], "no expert slot", QUICK_S),
    "senseless slots": (nothing, ["--slots", "some"], "not a number", QUICK_S),
    "too many slots": (nothing, ["--slots", "25"], "more than the 24 experts", IMPORTING_S),
    "nobody for misses": (nothing, ["--fill=none", "--cpu-workers=0"], "starts nobody", QUICK_S),
    "unknown policy": (nothing, ["--policy", "magic"], "magic", QUICK_S),
    "log in no directory": (nothing, ["--latency-log", "/no/where"], "/no/where", QUICK_S),
    "recording in no directory": (
        nothing,
        ["--record-routing", "/no/where"],
        "/no/where cannot be written",
        QUICK_S,
    ),
    "no trace to replay": (nothing, ["--replay-routing", "/no/where"], "/no/where", QUICK_S),
}


@pytest.mark.parametrize("case", CASES)
def test_one_sentence(case: str, tiny_model: Path, tmp_path: Path, processes: Processes) -> None:
    spoil, flags, words, limit_s = CASES[case]
    model = tmp_path / "model"
    shutil.copytree(tiny_model, model)
    spoil(model)
    run_dir = tmp_path / "run"
    started_s = time.monotonic()
    done = processes.call(
        "generate",
        "--model",
        model,
        "--run-dir",
        run_dir,
        "--max-tokens",
        4,
        "--prompt",
        "x",
        *flags,
    )
    assert time.monotonic() - started_s < limit_s
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    sentences = [line for line in done.stderr.splitlines() if line.startswith("headrace")]
    assert words in sentences[-1]
    assert "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) == len(sentences)
    assert not run_dir.exists()  # nobody is left to hold it; leaked processes fail the whole run
