"""A trace to replay: a wrong one is told before anything is loaded for it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from expert_store.reports import Progress
from orchestrator import engine as engine_module
from orchestrator.engine import Engine
from orchestrator.replayed_routing import ReplayedRouting
from orchestrator.settings import PipelineSettings
from orchestrator.simulate.trace import synthetic_trace
from protocol.errors import EXIT_USER_ERROR, UserError
from tests.protocol.fake_orchestrator import small_layout

if TYPE_CHECKING:
    from orchestrator.ending import Ending

DEMO = Path(__file__).resolve().parents[2] / "models/demo"
LAYOUT = small_layout(num_experts=(6, 6))


def trace_of(folder: Path, num_layers: int, num_experts: int, top_k: int) -> Path:
    trace = synthetic_trace(5, num_layers, num_experts, top_k)
    path = folder / "trace.npz"
    np.savez(path, ids=trace.ids, num_experts=num_experts)
    return path


def test_a_model_follows_its_part_of_a_trace(tmp_path: Path) -> None:
    path = trace_of(tmp_path, 3, 5, 2)
    replayed = ReplayedRouting(path)
    path.unlink()  # it was read, and is not read again
    ids = replayed.ids(LAYOUT)
    assert (ids.shape, ids.dtype) == ((5, 2, 2), np.int16)
    assert ids.flags.c_contiguous


@pytest.mark.parametrize("shape", [(1, 6, 2), (2, 7, 2), (2, 6, 3)])
def test_another_shape_is_one_sentence(shape: tuple[int, int, int], tmp_path: Path) -> None:
    replayed = ReplayedRouting(trace_of(tmp_path, *shape))
    with pytest.raises(UserError, match=f"records {shape[0]} layers of {shape[1]} experts"):
        replayed.check(LAYOUT)


def ending_of(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> Ending:
    """The end of an engine that is to replay `path`. `said`: how far its loader came."""

    async def load_store(*arguments: Any) -> None:
        on_progress = next(filter(callable, arguments))
        said.append("begun")
        on_progress(Progress(0, 1, "loading", LAYOUT))
        said.append("loaded")
        raise UserError("It was loaded.")

    monkeypatch.setattr(engine_module, "load_store", load_store)
    settings = PipelineSettings(model_dir=DEMO, run_dir=tmp_path / "run", replay_routing=path)
    return asyncio.run(asyncio.wait_for(Engine(settings).run(), 60))


def test_what_is_no_trace_is_told_before_loading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "trace.npz"
    path.write_bytes(b"no trace")
    said: list[str] = []
    ending = ending_of(path, tmp_path, monkeypatch, said)
    assert ending.exit_code == EXIT_USER_ERROR
    assert "is not a routing trace" in ending.sentence
    assert said == []


def test_a_trace_of_another_shape_is_told_before_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    ending = ending_of(trace_of(tmp_path, 2, 6, 3), tmp_path, monkeypatch, said)
    assert "top-3, and the model has 2 of 6, top-2" in ending.sentence
    assert said == ["begun"]
    said.clear()
    ending = ending_of(trace_of(tmp_path, 2, 6, 2), tmp_path, monkeypatch, said)
    assert ending.sentence == "It was loaded."
