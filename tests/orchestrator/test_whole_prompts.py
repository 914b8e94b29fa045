"""Families that take a prompt only as a whole: it becomes one step, or is refused."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from orchestrator.text_model import MAX_WHOLE_PROMPT, TextModel
from tests.orchestrator.byte_model import byte_tokenizer

if TYPE_CHECKING:
    from pathlib import Path


def _load(path: Path, **config: object) -> TextModel:
    byte_tokenizer().save(str(path / "tokenizer.json"))
    values = {"vocab_size": 256, "max_position_embeddings": 10_000, **config}
    (path / "config.json").write_text(json.dumps(values))
    return TextModel.load(path)


@pytest.mark.parametrize(
    "config", [{"model_type": "jamba"}, {"text_config": {"model_type": "jamba"}}]
)
def test_one_step_takes_the_longest_prompt(config: dict[str, object], tmp_path: Path) -> None:
    model = _load(tmp_path, **config)
    assert model.rows_per_step(64) == MAX_WHOLE_PROMPT
    assert model.rows_per_step(4096) == 4096
    assert model.why_wrong_length([1] * MAX_WHOLE_PROMPT) is None
    sentence = model.why_wrong_length([1] * (MAX_WHOLE_PROMPT + 1))
    assert sentence == (
        "The prompt has 2049 tokens, and this model takes a prompt only as a whole, at most 2048 "
        "tokens; shorten the prompt."
    )


def test_no_more_rows_than_the_context(tmp_path: Path) -> None:
    assert _load(tmp_path, model_type="jamba", max_position_embeddings=500).rows_per_step(64) == 500


def test_other_families_keep_their_rows(tmp_path: Path) -> None:
    model = _load(tmp_path, model_type="nemotron_h")
    assert model.rows_per_step(64) == 64
    assert model.why_wrong_length([1] * (MAX_WHOLE_PROMPT + 1)) is None
