"""--max-isa of a pipeline reaches the workers that compute experts, and no other."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from orchestrator.cli.options import add_model, add_pipeline_flags, settings_from
from orchestrator.supervisor import Supervisor
from protocol.run_dir import RunDir

if TYPE_CHECKING:
    from orchestrator.settings import PipelineSettings


def settings_for(*arguments: str) -> PipelineSettings:
    parser = argparse.ArgumentParser()
    add_model(parser, required=True)
    add_pipeline_flags(parser)
    return settings_from(parser.parse_args(["--model", "m", *arguments]), Path("run"))


def test_a_pipeline_caps_nothing_by_itself() -> None:
    assert settings_for().kernel_flags == ["--max-isa", "best"]
    with pytest.raises(SystemExit):
        settings_for("--max-isa", "mmx")


def test_workers_are_started_with_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    started: dict[str, tuple[str, ...]] = {}

    async def no_process(*command: str, **_: Any) -> None:
        started[command[3]] = command[4:]
        raise OSError(1, "not in this test")

    monkeypatch.setattr(asyncio, "create_subprocess_exec", no_process)
    flags = settings_for("--max-isa", "avx2").kernel_flags

    async def start() -> None:
        Supervisor(
            [["--numa-node", "0"]],
            RunDir(tmp_path),
            ["--log-level", "info"],
            flags,
            lambda _: "",
            lambda *_: None,
        ).start()
        await asyncio.sleep(0)  # every worker's task runs to its failed start
        await asyncio.sleep(0)

    asyncio.run(start())
    assert "--max-isa" not in started["dma_worker"]
    for role in ("gpu_worker", "cpu_worker"):
        assert started[role][-2:] == ("--max-isa", "avx2")
    assert "--numa-node" in started["cpu_worker"]
    assert "--numa-node" not in started["gpu_worker"]
