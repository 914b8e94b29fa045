"""Traces: what is read, and that a bad file is one sentence."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import numpy as np
import pytest

from orchestrator.simulate.trace import read_trace, synthetic_trace
from protocol.errors import UserError

if TYPE_CHECKING:
    from pathlib import Path


def arrays(**changes: object) -> dict[str, object]:
    ids = np.array([[[0, 1], [2, 3]], [[3, 0], [1, 2]], [[1, 0], [0, 3]]], np.int16)
    return {"ids": ids, "num_experts": np.int32(4), "model": np.array("tiny")} | changes


def written(folder: Path, **content: object) -> Path:
    path = folder / "trace.npz"
    np.savez(path, **{name: value for name, value in content.items() if value is not None})
    return path


def test_only_decode_steps_are_read(tmp_path: Path) -> None:
    phase = np.array([0, 1, 1], np.uint8)
    sizes = np.array([100, 300])
    trace = read_trace(written(tmp_path, **arrays(phase=phase, expert_bytes=sizes)))
    assert (trace.num_steps, trace.num_layers, trace.top_k, trace.num_experts) == (2, 2, 2, 4)
    assert (trace.model, trace.expert_bytes, trace.total_experts) == ("tiny", 200, 8)
    assert trace.ids[0].tolist() == [[3, 0], [1, 2]]


def test_a_trace_needs_no_more_than_ids_and_num_experts(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path, **arrays(model=None)))
    assert (trace.num_steps, trace.model, trace.expert_bytes) == (3, "unnamed", None)


def test_parts(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path, **arrays()))
    assert trace.part(1, 1).ids.tolist() == trace.ids[1:2].tolist()
    assert trace.part(1, None).num_steps == 2
    with pytest.raises(UserError, match="3 decode steps, none from step 3 on"):
        trace.part(3, None)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"ids": None}, "it has no array 'ids'"),
        ({"num_experts": None}, "it has no array 'num_experts'"),
        ({"ids": np.zeros((2, 2), np.int16)}, "must be whole numbers"),
        ({"ids": np.zeros((2, 2, 1))}, "must be whole numbers"),
        ({"ids": np.zeros((0, 2, 1), np.int16)}, "holds no steps"),
        ({"num_experts": np.array([4, 4])}, "must be one whole number"),
        ({"num_experts": np.float64(4.0)}, "must be one whole number"),
        ({"num_experts": np.int32(3)}, "experts 0 to 3, but there are 3"),
        ({"ids": np.full((1, 1, 1), -1, np.int16)}, "experts -1 to -1"),
        ({"ids": np.ones((1, 1, 2), np.int16)}, "the same expert twice"),
        ({"phase": np.ones(2, np.uint8)}, "one entry per step"),
        ({"phase": np.zeros(3, np.uint8)}, "no decode step"),
        ({"expert_bytes": np.array([0, 5])}, "must be positive"),
        ({"expert_bytes": np.array([5.0, np.inf])}, "must be positive"),
        ({"expert_bytes": np.array([5j])}, "must be positive"),
        ({"model": np.array([], str)}, "'model' must be one name"),
        ({"model": np.array("a\nb")}, "'model' must be one name"),
        ({"expert_bytes": np.array([0.5])}, "must be positive, from 1 "),
        ({"expert_bytes": np.array([np.inf])}, "must be positive, from 1 to 1e"),
        ({"expert_bytes": np.array([1e300, 5])}, "must be positive, from 1 to 1e"),
        ({"ids": np.array([[[{}]]], object)}, "is not a readable .npz trace"),
    ],
)
def test_a_wrong_trace_is_one_sentence(
    tmp_path: Path, changes: dict[str, object], sentence: str
) -> None:
    path = written(tmp_path, **arrays(**changes))
    with pytest.raises(UserError, match=sentence) as caught:
        read_trace(path)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"not a zip", b"PK\x03\x04 cut off"])
def test_a_file_that_is_no_archive_is_one_sentence(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "bad.npz"
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"bad\.npz") as caught:
        read_trace(path)
    assert "pickle" not in str(caught.value)


def test_damage_anywhere_is_one_sentence_or_none(tmp_path: Path) -> None:
    """Every byte flipped in turn: a file that can still be read is, every other is told. Which
    errors come out of numpy, zipfile and zlib then is nobody's promise."""
    whole = tmp_path / "whole.npz"
    content = {name: np.asarray(value) for name, value in arrays().items()}
    np.savez_compressed(whole, **content)  # type: ignore[arg-type]
    data = whole.read_bytes()
    path = tmp_path / "flipped.npz"
    sentences = []
    for place in range(len(data)):
        for flip in (0x01, 0x80, 0xFF):
            damaged = bytearray(data)
            damaged[place] ^= flip
            path.write_bytes(damaged)
            try:
                read_trace(path)
            except UserError as error:
                sentences.append(str(error))
    assert len(sentences) > len(data)
    assert not any("\n" in sentence for sentence in sentences)
    assert all(str(path) in sentence for sentence in sentences)


def test_a_member_packed_by_a_method_that_nobody_knows_is_one_sentence(tmp_path: Path) -> None:
    path = written(tmp_path, **arrays())
    data = bytearray(path.read_bytes())
    for signature, place in ((b"PK\x03\x04", 8), (b"PK\x01\x02", 10)):
        at = data.index(signature) + place
        data[at : at + 2] = (98).to_bytes(2, "little")
    path.write_bytes(data)
    with pytest.raises(UserError, match="is not a readable"):
        read_trace(path)


def test_absent_folders_and_single_arrays_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="There is no trace"):
        read_trace(tmp_path / "none.npz")
    with pytest.raises(UserError, match="no ordinary file"):
        read_trace(tmp_path)
    np.save(tmp_path / "one.npy", np.zeros(3))
    with pytest.raises(UserError, match="single array"):
        read_trace(tmp_path / "one.npy")


def test_a_made_up_trace_keeps_what_it_is_told_to() -> None:
    trace = synthetic_trace(200, 3, 16, 4, keep=0.5)
    assert trace.ids.shape == (200, 3, 4)
    assert all(len(set(row)) == 4 for step in trace.ids.tolist() for row in step)
    kept = np.mean(
        [
            len(set(now) & set(before)) / 4
            for now, before in zip(
                trace.ids[1:].reshape(-1, 4).tolist(),
                trace.ids[:-1].reshape(-1, 4).tolist(),
                strict=True,
            )
        ]
    )
    assert 0.5 < kept < 0.8  # what is drawn anew may be what was there
    assert (synthetic_trace(5, 3, 16, 4, seed=1).ids != synthetic_trace(5, 3, 16, 4).ids).any()
    assert (
        synthetic_trace(5, 3, 16, 4, seed=1).ids == synthetic_trace(5, 3, 16, 4, seed=1).ids
    ).all()
    with pytest.raises(ValueError, match="cannot choose 5 of 4"):
        synthetic_trace(1, 1, 4, 5)


def test_a_pipe_is_no_trace(tmp_path: Path) -> None:
    path = tmp_path / "pipe.npz"
    os.mkfifo(path)
    with pytest.raises(UserError, match="is no ordinary file"):
        read_trace(path)
