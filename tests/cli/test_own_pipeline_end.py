"""`headrace generate` with a pipeline of its own: what that says at its end counts."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any, cast

import pytest

from orchestrator import client
from orchestrator.cli import generate

if TYPE_CHECKING:
    from orchestrator.cli.own_pipeline import OwnPipeline


class Ended:
    """In place of a pipeline, its client and what it has finished."""

    reason = "stop"
    sentence = ""
    run_dir = None

    def __init__(self, code: int) -> None:
        self.code = code

    def is_alive(self) -> bool:
        return True

    def end(self) -> int:
        return self.code

    def close(self) -> None:
        pass


@pytest.mark.parametrize(("pipeline_code", "code"), [(0, 0), (1, 1), (-9, 0)])
def test_a_pipeline_that_could_not_keep_a_file_is_no_success(
    pipeline_code: int, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = Ended(pipeline_code)
    monkeypatch.setattr(client.PipelineClient, "connect", lambda *arguments: ended)
    monkeypatch.setattr(generate, "_continue", lambda *arguments, **more: ended)
    anything: Any = None
    found = generate._on_own(
        argparse.Namespace(), anything, cast("OwnPipeline", ended), cast("Any", None)
    )
    assert found == code


def test_a_request_that_failed_alone_is_told_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its pipeline would go on: "the orchestrator went away" was no answer, twelve seconds late."""
    ended = Ended(0)
    ended.reason, ended.sentence = "error", "5 gpu_workers in a row ended."
    monkeypatch.setattr(client.PipelineClient, "connect", lambda *arguments: ended)
    monkeypatch.setattr(generate, "_continue", lambda *arguments, **more: ended)
    anything: Any = None
    found = generate._on_own(
        argparse.Namespace(), anything, cast("OwnPipeline", ended), cast("Any", None)
    )
    assert found == 1
    assert capsys.readouterr().err == "headrace: 5 gpu_workers in a row ended.\n"
