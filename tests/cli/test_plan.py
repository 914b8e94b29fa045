"""`headrace plan`: what it says beside the arithmetic of `tests/orchestrator/test_fit.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from orchestrator.cli.plan import text_findings
from tests.orchestrator.test_text_model import write_model

if TYPE_CHECKING:
    from pathlib import Path


def test_what_keeps_text_from_becoming_tokens(tmp_path: Path) -> None:
    """generate and serve would refuse the model that plan has just said fits."""
    write_model(tmp_path)
    assert text_findings(tmp_path) == []
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": "x"}')
    [finding] = text_findings(tmp_path)
    assert finding.verdict == "note"
    assert "eos_token_id is 'x'" in finding.text
    (tmp_path / "generation_config.json").unlink()
    (tmp_path / "tokenizer.json").unlink()
    [finding] = text_findings(tmp_path)
    assert finding.verdict == "note"
    assert "no tokenizer.json" in finding.text
    assert finding.text.endswith("`headrace generate` and `serve` refuse the model as it is.")
