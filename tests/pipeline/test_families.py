"""Greedy tokens of the whole pipeline are those of transformers' own `generate`, family by family.

A quarter of the experts has slots and the split is adaptive, so hits, fills and CPU experts all
take part in every run.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from tests.checkpoints import FAMILIES, MORE_FAMILIES, PAD_ID, make_checkpoint

if TYPE_CHECKING:
    from pathlib import Path

    from tests.process.pipelines import Processes

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]

PROMPT = "The channel brings water to the wheel."
NUM_TOKENS = 64


def transformers_tokens(model_dir: Path) -> list[int]:
    """What transformers decodes greedily after PROMPT; a byte is a token here."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    # None in the settings given to generate() would be filled in from here.
    model.generation_config.eos_token_id = None
    prompt = torch.tensor([list(PROMPT.encode())])
    settings = GenerationConfig(
        max_new_tokens=NUM_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=PAD_ID
    )
    with torch.inference_mode():
        output = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), generation_config=settings
        )
    return [int(token) for token in output[0, prompt.shape[1] :]]


@pytest.mark.parametrize(
    ("family", "dense_path"),
    [(family, "native") for family in (*FAMILIES, *MORE_FAMILIES)] + [("qwen3_moe", "traced")],
)
def test_greedy_tokens_equal_transformers(
    family: str, dense_path: str, tmp_path: Path, processes: Processes
) -> None:
    # Both layouts of files, in turn: every other family is sharded.
    is_sharded = list(FAMILIES).index(family) % 2 == 1 if family in FAMILIES else False
    model_dir = make_checkpoint(family, tmp_path / family, sharded=is_sharded)
    expected = transformers_tokens(model_dir)
    assert len(expected) == NUM_TOKENS
    done = processes.call(
        "generate", "--model", model_dir, "--prompt", PROMPT, "--max-tokens", NUM_TOKENS,
        "--temperature", 0, "--ignore-eos", "--slots", "25%", "--host-gbps", 2, "--link-gbps", 1,
        "--dense-path", dense_path, "--json", timeout_s=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["token_ids"] == expected
    assert result["prompt_tokens"] == len(PROMPT)
    assert min(result["hits"], result["fills"], result["cpu_experts"]) > 0
