"""Quantised experts through the whole pipeline, in the layouts of other makers.

One pipeline for each format: its tokens are those that transformers decodes from the same weights
as floats, and a second time, when other experts have slots, not a bit of any logit differs.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from tests.checkpoints import make_checkpoint
from tests.pipeline.test_families import PROMPT, transformers_tokens
from tests.process.pipelines import Pipeline

if TYPE_CHECKING:
    from pathlib import Path

    from tests.process.pipelines import Processes

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]

NUM_TOKENS = 32


@pytest.mark.parametrize("layout", ["mxfp4", "fp8", "compressed int4"])
def test_tokens_are_those_of_the_same_weights_and_placement_changes_no_bit(
    layout: str, tmp_path: Path, processes: Processes
) -> None:
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    from tests import native_checkpoints as native

    plain = make_checkpoint("gpt_oss" if layout == "mxfp4" else "qwen3_moe", tmp_path / "plain")
    paths = tmp_path / "native", tmp_path / "meaning"
    if layout == "mxfp4":
        native.quantise_gpt_oss(plain, *paths)
    else:
        native.quantise_checkpoint(plain, *paths, layout)
    pipeline = Pipeline(
        processes, paths[0], tmp_path / "run", "--supervise", "--slots", "25%", "--digest-logits",
        "--host-gbps", "2", "--link-gbps", "1",
    )  # fmt: skip

    pipeline.wait_for(lambda status: status.is_ready)

    def generate() -> dict[str, Any]:
        done = processes.call(
            "generate", "--run-dir", pipeline.run_dir, "--prompt", PROMPT, "--temperature", 0,
            "--max-tokens", NUM_TOKENS, "--ignore-eos", "--json", timeout_s=240,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        result: dict[str, Any] = json.loads(done.stdout)
        return result

    first, second = generate(), generate()
    assert first["token_ids"] == transformers_tokens(paths[1])[:NUM_TOKENS]
    counters = ("hits", "fills", "cpu_experts")
    assert min(first[name] for name in counters) > 0
    assert [first[name] for name in counters] != [second[name] for name in counters]
    assert second["token_ids"] == first["token_ids"]
    assert second["logits_digest"] == first["logits_digest"]
