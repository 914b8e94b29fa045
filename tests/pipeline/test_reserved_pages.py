"""A pipeline whose experts lie in huge pages that were set aside."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from protocol.machine import read_huge_pages
from tests.checkpoints import make_checkpoint
from tests.process.pipelines import Pipeline

if TYPE_CHECKING:
    from pathlib import Path

    from tests.process.pipelines import Processes

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]

FLAGS = (
    "--supervise", "--slots", "25%", "--digest-logits", "--host-gbps", "2", "--link-gbps", "1",
    "--log-level", "info",
)  # fmt: skip


def test_reserved_pages_change_no_bit_and_are_given_back(
    tmp_path: Path, processes: Processes
) -> None:
    pools = read_huge_pages().pools
    if not any(pool.num_free * pool.page_bytes >= 16 << 20 for pool in pools):
        pytest.skip("fewer than 16 MiB of huge pages are set aside here (sysctl vm.nr_hugepages)")
    model = make_checkpoint("qwen3_moe", tmp_path / "model")
    results = []
    for mode, place in (("auto", ", reserved ones"), ("off", "huge pages")):
        pipeline = Pipeline(processes, model, tmp_path / mode, "--huge-pages", mode, *FLAGS)
        pipeline.wait_for(lambda status: status.is_ready)
        results.append(pipeline.generate(16))
        said = processes.said(pipeline.orchestrator)
        assert place in said
        assert ("reserved" in said) is (mode == "auto")
        pipeline.orchestrator.terminate()
        pipeline.orchestrator.wait(30)
    assert min(results[0][name] for name in ("hits", "fills", "cpu_experts")) > 0
    assert results[0]["token_ids"] == results[1]["token_ids"]
    assert results[0]["logits_digest"] == results[1]["logits_digest"]
