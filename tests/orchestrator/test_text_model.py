"""Tokens to text piece by piece, and what a checkpoint's files say."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from orchestrator.text_model import Detokenizer, TextModel
from protocol.errors import UserError
from tests.orchestrator.byte_model import byte_tokenizer

DEMO = Path(__file__).resolve().parents[2] / "models/demo"


def write_model(path: Path, **config: object) -> Path:
    byte_tokenizer().save(str(path / "tokenizer.json"))
    values = {"vocab_size": 256, "max_position_embeddings": 64, "eos_token_id": 3, **config}
    (path / "config.json").write_text(json.dumps(values))
    return path


BYTES = TextModel(byte_tokenizer(), frozenset(), 64, 256)


@given(prompt=st.text(max_size=8), text=st.text(max_size=40))
@example(prompt="\ufffd", text="")  # a mark that is meant
@example(prompt="\ufffd", text="\ufffda")
def test_pieces_are_the_text_and_never_half_a_character(prompt: str, text: str) -> None:
    detokenizer = Detokenizer(BYTES, BYTES.encode(prompt))
    pieces = [detokenizer.push(token) for token in BYTES.encode(text)]
    assert "".join(pieces) + detokenizer.finish() == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


@given(st.lists(st.integers(0, 255), max_size=40))
def test_rubbish_bytes_come_out_at_the_end_at_the_latest(tokens: list[int]) -> None:
    detokenizer = Detokenizer(BYTES, [])
    pieces = [detokenizer.push(token) for token in tokens]
    assert "".join(pieces) + detokenizer.finish() == BYTES.decode(tokens)
    # What is held back is at most one unfinished character.
    assert len(BYTES.decode(tokens)) - len("".join(pieces)) <= 3


def test_a_character_that_the_prompt_began_is_told_when_it_is_whole() -> None:
    first, *rest = BYTES.encode("€")
    detokenizer = Detokenizer(BYTES, [first])
    assert "".join(detokenizer.push(token) for token in rest) + detokenizer.finish() == "€"


def test_first_piece_keeps_its_space() -> None:
    vocabulary = {"▁The": 0, "▁cat": 1, "s": 2}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.decoder = decoders.Metaspace()
    model = TextModel(tokenizer, frozenset(), 64, 3)
    detokenizer = Detokenizer(model, [0])
    assert [detokenizer.push(token) for token in (1, 2, 1)] == [" cat", "s", " cat"]


def test_reads_limits_and_ends(tmp_path: Path) -> None:
    model = TextModel.load(write_model(tmp_path))
    assert (model.context, model.vocab_size, model.eos_tokens) == (64, 256, frozenset({3}))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 6]}')
    assert TextModel.load(tmp_path).eos_tokens == frozenset({5, 6})
    assert TextModel.load(tmp_path, max_context=10).context == 10
    assert TextModel.load(tmp_path, max_context=1000).context == 64


@pytest.mark.parametrize("value", ['"</s>"', "true", "[3, null]", "2.5"])
def test_an_end_that_is_no_token_is_told_and_the_next_one_holds(tmp_path: Path, value: str) -> None:
    """Without one, every text would go on until --max-tokens."""
    write_model(tmp_path)
    (tmp_path / "generation_config.json").write_text(f'{{"eos_token_id": {value}}}')
    told: list[str] = []
    model = TextModel.load(tmp_path, tell=told.append)
    assert model.eos_tokens == frozenset({3})
    [note] = told
    assert f"{tmp_path}/generation_config.json: eos_token_id is" in note


def test_nested_text_config(tmp_path: Path) -> None:
    write_model(
        tmp_path,
        max_position_embeddings=None,
        eos_token_id=None,
        text_config={"max_position_embeddings": 77, "eos_token_id": 9},
    )
    # A null at the top hides the nested one only where the top is meant: ends, not lengths.
    assert TextModel.load(tmp_path).context == 77


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("tokenizer.json", None, "no tokenizer.json"),
        ("tokenizer.json", "{", "is not a tokenizer"),
        ("tokenizer.json", "[]", "is not a tokenizer"),
        ("config.json", None, "no config.json"),
        ("config.json", "{", "cannot be read"),
        ("config.json", "[1]", "holds no JSON object"),
        ("generation_config.json", "nonsense", "cannot be read"),
    ],
)
def test_broken_files_are_one_sentence(
    tmp_path: Path, name: str, content: str | None, says: str
) -> None:
    write_model(tmp_path)
    if content is None:
        (tmp_path / name).unlink()
    else:
        (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=says) as caught:
        TextModel.load(tmp_path)
    assert "\n" not in str(caught.value)


def test_other_threads_run_while_a_long_text_is_tokenised() -> None:
    """The loop of the orchestrator is such a thread: a large prompt must not stop every stream."""
    model = TextModel.load(DEMO)
    beats = [0]
    is_over = threading.Event()

    def beat() -> None:
        while not is_over.wait(0.001):
            beats[0] += 1

    beating = threading.Thread(target=beat)
    beating.start()
    try:
        before = beats[0]
        tokens = model.encode("some words " * 40_000)
        between = beats[0]
        text = model.decode(tokens * 5)
        after = beats[0]
    finally:
        is_over.set()
        beating.join()
    assert between - before > 5
    assert after - between > 5
    short = model.encode("some words " * 40)
    assert tokens[: len(short) - 1] == short[:-1]
    assert text == "some words " * 200_000
