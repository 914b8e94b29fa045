"""The committed demo checkpoint is what its card says: shape, size, figures, locality."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("rich")
safetensors = pytest.importorskip("safetensors")
tokenizers = pytest.importorskip("tokenizers")

MODELS = Path(__file__).resolve().parents[2] / "models"
DEMO = MODELS / "demo"

HELD_OUT = [
    "stdlib:calendar.py",
    "stdlib:configparser.py",
    "stdlib:fractions.py",
    "stdlib:ftplib.py",
    "stdlib:heapq.py",
    "stdlib:json/decoder.py",
    "stdlib:logging/handlers.py",
    "stdlib:queue.py",
    "stdlib:shlex.py",
    "stdlib:statistics.py",
    "stdlib:tempfile.py",
    "stdlib:textwrap.py",
    "docs:faq/design.rst.txt",
    "docs:howto/logging.rst.txt",
    "docs:tutorial/classes.rst.txt",
]
SMALL = "stdlib:json/decoder.py"
SNIPPET = (
    '''class Näme:\n\t"""Döc → string."""\n\n    def f(self, x=0x1F):  # tabs\tand  spaces\n\n\n'''
)


@pytest.fixture(scope="module")
def figures() -> dict[str, Any]:
    return json.loads((DEMO / "eval.json").read_text())


@pytest.fixture(scope="module")
def modules() -> Any:
    """The trainer's scoring and corpus modules, importable from ``models/``."""
    sys.path.insert(0, str(MODELS))
    try:
        import demo_corpus
        import demo_eval
    finally:
        sys.path.remove(str(MODELS))
    return demo_corpus, demo_eval


@pytest.fixture(scope="module")
def scored(modules: Any) -> tuple[Any, Any]:
    """One small held-out file of the running Python and its score, computed once."""
    corpus, scoring = modules
    document = corpus.read_document("stdlib", corpus.stdlib_dir(), SMALL.removeprefix("stdlib:"))
    assert document is not None
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # on a busy machine, threads that wait for each other cost a minute
    try:
        model, tokenizer = scoring.load(DEMO)
        return document, scoring.score(model, tokenizer, document.text)
    finally:
        torch.set_num_threads(threads)


def test_config_meets_the_requirements() -> None:
    config = json.loads((DEMO / "config.json").read_text())
    assert config["architectures"] == ["Qwen3MoeForCausalLM"]
    assert config["model_type"] == "qwen3_moe"
    assert config["num_hidden_layers"] >= 8
    assert config["num_experts"] == 24
    assert config["num_experts_per_tok"] == 4
    assert config["norm_topk_prob"] is True
    assert config["mlp_only_layers"] == []
    assert config["decoder_sparse_step"] == 1
    parsed = transformers.AutoConfig.from_pretrained(DEMO)
    assert parsed.num_experts == 24


def test_directory_is_complete_and_small() -> None:
    for name in ("generation_config.json", "tokenizer_config.json", "README.md"):
        assert (DEMO / name).stat().st_size > 0
    template = (DEMO / "chat_template.jinja").read_text()
    assert template == (DEMO.parent / "demo_chat.jinja").read_text()
    weights = list(DEMO.glob("*.safetensors"))
    assert [path.name for path in weights] == ["model.safetensors"]
    assert weights[0].stat().st_size <= 40_000_000
    card = (DEMO / "README.md").read_text()
    assert card.startswith("---\nlicense: apache-2.0\n")
    for section in ("Data", "Licence", "Recipe", "Figures", "Limits"):
        assert f"\n## {section}\n" in card


def test_tensors_are_named_per_expert_in_bfloat16() -> None:
    config = json.loads((DEMO / "config.json").read_text())
    with safetensors.safe_open(DEMO / "model.safetensors", "pt") as file:
        names = set(file.keys())
        for layer in range(config["num_hidden_layers"]):
            assert f"model.layers.{layer}.mlp.gate.weight" in names
            for expert in range(config["num_experts"]):
                for part in ("gate_proj", "up_proj", "down_proj"):
                    assert f"model.layers.{layer}.mlp.experts.{expert}.{part}.weight" in names
        assert {file.get_slice(name).get_dtype() for name in names} == {"BF16"}
        up = file.get_slice("model.layers.0.mlp.experts.0.up_proj.weight").get_shape()
    assert up == [config["moe_intermediate_size"], config["hidden_size"]]


def test_tokenizer_round_trips_exactly_both_ways_it_is_loaded() -> None:
    plain = tokenizers.Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    auto = transformers.AutoTokenizer.from_pretrained(DEMO)
    source = Path(__file__).read_text()
    for text in (SNIPPET, source):
        ids = plain.encode(text).ids
        assert plain.decode(ids) == text
        assert auto(text)["input_ids"] == ids
        assert auto.decode(ids) == text
    assert plain.token_to_id(auto.eos_token) == auto.eos_token_id


def test_figures_are_of_these_weights(figures: dict[str, Any]) -> None:
    weights = (DEMO / "model.safetensors").read_bytes()
    assert hashlib.sha256(weights).hexdigest() == figures["checkpoint"]["sha256"]


@pytest.mark.parametrize("name", HELD_OUT)
def test_model_beats_xz_on_the_held_out_file(figures: dict[str, Any], name: str) -> None:
    row = next(row for row in figures["files"] if row["name"] == name)
    best_xz = min(row["xz_bits_per_byte"], row["xz_raw_bits_per_byte"])
    assert row["model_bits_per_byte"] < best_xz


def test_every_held_out_module_has_figures(figures: dict[str, Any], modules: Any) -> None:
    modules_named = {f"stdlib:{name}" for name in modules[0].HELD_OUT_MODULES}
    assert modules_named <= {row["name"] for row in figures["files"]} == set(HELD_OUT)


def test_bits_per_byte_of_one_held_out_file_recomputed(
    figures: dict[str, Any], modules: Any, scored: tuple[Any, Any]
) -> None:
    document, score = scored
    row = next(row for row in figures["files"] if row["name"] == SMALL)
    if document.sha256 != row["sha256"]:
        pytest.skip(f"this Python's {SMALL} is not the text that eval.json scored")
    measured = score.bits / len(document.data)
    assert measured == pytest.approx(row["model_bits_per_byte"], rel=0.02)
    assert measured < min(modules[1].xz_bits(document.data)) / len(document.data)


def test_adjacent_tokens_share_experts_and_a_cache_profits(
    modules: Any, scored: tuple[Any, Any]
) -> None:
    _, scoring = modules
    routes = scored[1].routes
    tokens, layers, top_k = routes.shape
    overlap = sum(scoring.overlap_by_layer(routes)) / layers
    assert overlap > 2 * top_k / 24
    generator = torch.Generator().manual_seed(0)
    uniform = torch.rand(tokens, layers, 24, generator=generator).topk(top_k, -1).indices
    quarter = layers * 24 // 4
    hits = scoring.lru_hits([routes], quarter)
    assert hits > scoring.lru_hits([uniform], quarter) + 0.1


def test_held_out_files_and_their_relatives_are_not_trained_on(
    modules: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus, _ = modules
    body = '"""' + "A docstring that is long enough to be prose. " * 12 + '"""\n'
    for name in (
        "textwrap.py",
        "json/decoder.py",
        "shutil.py",
        "test/test_textwrap.py",
        "test/test_json/test_decode.py",
        "test/test_shutil.py",
        "site-packages/other.py",
    ):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{body}# {name}\n")
    (tmp_path / "copy.py").write_bytes((tmp_path / "textwrap.py").read_bytes())
    monkeypatch.setattr(corpus, "stdlib_dir", lambda: tmp_path)
    assert [document.name for document in corpus.training_documents()] == [
        "stdlib:shutil.py",
        "stdlib:shutil.py#doc",
        "stdlib:test/test_shutil.py",
    ]
