"""What the table after a text says."""

from __future__ import annotations

import pytest

from orchestrator.cli.generate_report import Waiting, print_table, say_waiting
from protocol.messages import (
    Capabilities,
    Epoch,
    Finished,
    FinishReason,
    RequestStats,
    Status,
    WorkerStatus,
)


@pytest.mark.parametrize(
    ("reason", "num_prompt", "num_generated", "max_tokens", "says"),
    [
        ("stop", 9, 12, 128, "the model ended the text"),
        ("stop", 9, 128, 128, "the model ended the text"),
        ("length", 9, 128, 128, "after the 128 tokens of --max-tokens"),
        ("length", 1, 2047, 2047, "after the 2047 tokens of --max-tokens"),
        ("length", 1, 2047, 5000, "the context of 2048 tokens is full"),
        ("cancelled", 9, 3, 128, "cancelled"),
    ],
)
def test_why_a_text_ended(
    reason: FinishReason,
    num_prompt: int,
    num_generated: int,
    max_tokens: int,
    says: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    stats = RequestStats(prompt_tokens=num_prompt, generated_tokens=num_generated)
    print_table(Finished("r", reason, stats), max_tokens)
    (line,) = (line for line in capsys.readouterr().err.splitlines() if line.startswith("ended"))
    assert says in line


@pytest.mark.parametrize(("num_bytes", "text"), [(1_572_864, "1.57 MB"), (5 * 10**10, "50.00 GB")])
def test_bytes_in_a_unit_that_can_be_read(
    num_bytes: int, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    stats = RequestStats(prompt_tokens=9, generated_tokens=1, fill_bytes=num_bytes)
    print_table(Finished("r", "stop", stats), 128)
    assert text in capsys.readouterr().err


def test_who_is_missing_and_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    say_waiting([])
    say_waiting(["gpu_worker", "cpu_worker"])
    assert capsys.readouterr().err == (
        "headrace: the pipeline has no gpu_worker and no cpu_worker, and waits; where no "
        "supervisor starts workers, start `headrace gpu-worker` and `headrace cpu-worker` "
        "with the pipeline's --run-dir\n"
    )


def test_who_was_just_started_is_not_called_missing(capsys: pytest.CaptureFixture[str]) -> None:
    now_s = 0.0
    waiting = Waiting(lambda: now_s)
    starting = WorkerStatus("gpu_worker", 7, Epoch(1), False, 0.0, Capabilities(), 0)
    all_missing = Status(False, "", ["gpu_worker", "dma_worker"], [], 0)
    one_missing = Status(False, "", ["gpu_worker", "dma_worker"], [starting], 0)
    waiting.hear(all_missing)
    now_s = 2.0
    waiting.hear(all_missing)
    waiting.hear(one_missing)
    now_s = 4.0
    waiting.hear(one_missing)
    assert capsys.readouterr().err == ""
    for now_s in (6.0, 8.0, 60.0):  # noqa: B007
        waiting.hear(one_missing)
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "has no dma_worker, and waits" in said
    waiting.hear(Status(False, "", ["gpu_worker"], [starting], 0))
    now_s = 90.0
    waiting.hear(Status(False, "", ["gpu_worker"], [starting], 0))
    assert capsys.readouterr().err == ""
