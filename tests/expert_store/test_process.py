"""The loader as its parent sees it: a process, a descriptor and lines of JSON."""

from __future__ import annotations

import json
import math
import os
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from expert_store.reports import Failure, Inspection, Loaded, Progress, Report, decode_report
from expert_store.segment import StoreView

if TYPE_CHECKING:
    from collections.abc import Callable

# A start costs seconds of imports, many on a loaded machine.
pytestmark = [pytest.mark.process, pytest.mark.timeout(240)]

ROOT = Path(__file__).parents[2]
LOADER = [sys.executable, "-m", "expert_store"]
TIMEOUT_S = 200


def run(*arguments: str, fd: int | None = None) -> tuple[int, list[Report], str]:
    command = [*LOADER, *arguments, *(["--fd", str(fd)] if fd is not None else [])]
    done = subprocess.run(
        command,
        cwd=ROOT,
        pass_fds=[fd] if fd is not None else [],
        capture_output=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    reports = [decode_report(line) for line in done.stdout.splitlines()]
    return done.returncode, reports, done.stderr.decode()


def test_inspect_tells_all_on_one_line(checkpoint_of: Callable[..., Path]) -> None:
    code, reports, _ = run("inspect", "--model", str(checkpoint_of("olmoe")), "--dtype", "bfloat16")
    assert code == 0
    (told,) = reports
    assert isinstance(told, Inspection)
    assert told.architecture == "OlmoeForCausalLM"
    assert told.layout.dtype == "bfloat16"
    assert told.layout.num_experts == (8, 8, 8)


@pytest.mark.parametrize(
    ("model_type", "shard", "says"),
    [
        ("qwen3_moe", struct.pack("<Q", 999) + b"{}", "model.safetensors"),
        ("qwen3", struct.pack("<Q", 2) + b"{}", "dense"),
    ],
)
def test_bad_files_are_told_before_torch_is_imported(
    model_type: str, shard: bytes, says: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    (tmp_path / "model.safetensors").write_bytes(shard)
    code = (
        "import sys; from expert_store.__main__ import main;"
        f"code = main(['load', '--fd', '0', '--model', {str(tmp_path)!r}]);"
        "sys.exit(code if 'torch' not in sys.modules else 99)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 2
    report = decode_report(done.stdout)  # nor does a first progress make anybody start workers
    assert isinstance(report, Failure)
    assert says in report.message
    assert done.stderr == b""


def test_unknown_flags_and_missing_ones_exit_2() -> None:
    for arguments in (("load", "--model", "x"), ("inspect", "--model", "x", "--dtype", "int8"), ()):
        code, reports, stderr = run(*arguments)
        assert code == 2
        assert reports == []
        assert "usage" in stderr


def test_a_parent_that_left_is_no_fault_of_ours(
    checkpoint_of: Callable[..., Path], segment: int
) -> None:
    read_end, write_end = os.pipe()
    process = subprocess.Popen(
        [*LOADER, "load", "--model", str(checkpoint_of("olmoe")), "--fd", str(segment)],
        cwd=ROOT,
        pass_fds=[segment],
        stdout=write_end,
        stderr=subprocess.PIPE,
    )
    os.close(read_end)
    os.close(write_end)
    _, stderr = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 1
    assert b"Traceback" not in stderr


def write_sparse_model(path: Path, *, num_layers: int, num_experts: int) -> None:
    """A Qwen3-MoE of zeros whose files take no disk: what counts here is its size."""
    hidden, middle, vocab, heads, head_size = 1024, 512, 1024, 8, 64
    config = {
        "model_type": "qwen3_moe",
        "hidden_size": hidden,
        "intermediate_size": middle,
        "moe_intermediate_size": middle,
        "num_hidden_layers": num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": head_size,
        "num_experts": num_experts,
        "num_experts_per_tok": 2,
        "vocab_size": vocab,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }
    (path / "config.json").write_text(json.dumps(config))
    shapes = {
        "model.embed_tokens.weight": [vocab, hidden],
        "lm_head.weight": [vocab, hidden],
        "model.norm.weight": [hidden],
    }
    for layer in range(num_layers):
        prefix = f"model.layers.{layer}"
        for name in ("q_proj", "k_proj", "v_proj"):
            shapes[f"{prefix}.self_attn.{name}.weight"] = [heads * head_size, hidden]
        shapes[f"{prefix}.self_attn.o_proj.weight"] = [hidden, heads * head_size]
        shapes[f"{prefix}.self_attn.q_norm.weight"] = [head_size]
        shapes[f"{prefix}.self_attn.k_norm.weight"] = [head_size]
        shapes[f"{prefix}.input_layernorm.weight"] = [hidden]
        shapes[f"{prefix}.post_attention_layernorm.weight"] = [hidden]
        shapes[f"{prefix}.mlp.gate.weight"] = [num_experts, hidden]
        for expert in range(num_experts):
            shapes[f"{prefix}.mlp.experts.{expert}.gate_proj.weight"] = [middle, hidden]
            shapes[f"{prefix}.mlp.experts.{expert}.up_proj.weight"] = [middle, hidden]
            shapes[f"{prefix}.mlp.experts.{expert}.down_proj.weight"] = [hidden, middle]
    header, end = {}, 0
    for name, shape in shapes.items():
        begin, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with (path / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)


def resident_bytes(pid: int) -> int:
    """Anonymous and file-backed resident memory; shared memory is counted at the segment."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    fields = dict(line.split(":", 1) for line in status.splitlines())
    return sum(
        int(fields[name].split()[0]) * 1024 for name in ("RssAnon", "RssFile") if name in fields
    )


def test_a_load_stays_within_its_memory(tmp_path: Path, segment: int) -> None:
    """RSS and shared memory stay under 1.05 x store + dense + 400 MB, sampled all the way."""
    write_sparse_model(tmp_path, num_layers=4, num_experts=40)
    process = subprocess.Popen(
        [*LOADER, "load", "--model", str(tmp_path), "--fd", str(segment)],
        cwd=ROOT,
        pass_fds=[segment],
        stdout=subprocess.PIPE,
    )
    deadline = time.monotonic() + TIMEOUT_S
    peak_bytes = 0
    while process.poll() is None:
        assert time.monotonic() < deadline
        shared_bytes = os.fstat(segment).st_blocks * 512
        peak_bytes = max(peak_bytes, resident_bytes(process.pid) + shared_bytes)
        time.sleep(0.01)
    stdout, _ = process.communicate()
    assert process.returncode == 0
    *progress, loaded = [decode_report(line) for line in stdout.splitlines()]
    assert isinstance(loaded, Loaded)
    assert all(isinstance(report, Progress) for report in progress)
    done = [report.done_bytes for report in progress if isinstance(report, Progress)]
    assert done == sorted(done)
    told = [report for report in progress if isinstance(report, Progress) and report.layout]
    assert [(report.layout, report.done_bytes) for report in told] == [(loaded.layout, 0)]
    with StoreView(segment) as view:
        layout = view.layout
    assert layout == loaded.layout
    assert layout.total_bytes > 500_000_000
    dense_bytes = sum(entry for entry in done[-1:]) - layout.expert_bytes * layout.total_experts
    assert peak_bytes > layout.total_bytes
    assert peak_bytes <= 1.05 * layout.total_bytes + dense_bytes + 400_000_000


def test_it_ends_with_whoever_reads_its_reports(tmp_path: Path) -> None:
    """It waits for a file that never comes, so no report tells it that its parent is gone."""
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_moe"}')
    index = {"weight_map": {"x": "never.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    os.mkfifo(tmp_path / "never.safetensors")
    loader = subprocess.Popen(
        [*LOADER, "inspect", "--model", str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE
    )
    try:
        assert loader.stdout is not None
        with pytest.raises(subprocess.TimeoutExpired):
            loader.wait(1.0)
        loader.stdout.close()
        assert loader.wait(60) == 1
    finally:
        loader.kill()
        loader.wait()
