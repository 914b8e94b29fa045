"""From a request's fields, and the checkpoint's defaults, to what the sampler is told."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from orchestrator.http.sampling import SamplingDefaults, sampling_defaults, sampling_of
from orchestrator.http.schemas import CompletionRequest

if TYPE_CHECKING:
    from pathlib import Path


def defaults_of(config: dict[str, Any], folder: Path) -> SamplingDefaults:
    (folder / "generation_config.json").write_text(json.dumps(config))
    return sampling_defaults(folder)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"temperature": "hot"}, "temperature is 'hot', which is no number."),
        ({"temperature": True}, "temperature is True, which is no number."),
        ({"top_k": 1.5}, "top_k is 1.5, which is no whole number."),
        ({"temperature": 0.5, "top_p": 2.0}, "top_p is 2.0; it must be above 0"),
        ({"temperature": float("nan")}, "temperature is nan; it must be 0"),
    ],
)
def test_defaults_that_cannot_be_used_are_told(
    config: dict[str, Any], says: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert defaults_of({"do_sample": True, **config}, tmp_path) == SamplingDefaults()
    [line] = caplog.messages
    assert f"{tmp_path}/generation_config.json: {says}" in line


def test_defaults_that_can_be_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    given = {"temperature": 1, "top_p": None, "top_k": -1, "eos_token_id": "x"}
    assert defaults_of(given, tmp_path) == SamplingDefaults()
    assert defaults_of({"do_sample": True, **given}, tmp_path).top_k == -1
    assert not caplog.messages


def test_seeds_of_chance_and_others() -> None:
    def seed_of(seed: int | None) -> int:
        body = CompletionRequest(prompt="x", seed=seed)
        return sampling_of(body, SamplingDefaults(), None, 9).seed

    for chance in (None, -1):
        assert len({seed_of(chance) for _ in range(3)}) == 3
    for seed in (-(2**63), -2, 0, 7, 2**63 - 1):
        assert seed_of(seed) == seed_of(seed)
        assert 0 <= seed_of(seed) < 2**63
