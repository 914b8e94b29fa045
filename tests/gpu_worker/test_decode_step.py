"""The recorded decode step against the model that it was recorded from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from gpu_worker import compilation
from gpu_worker.compilation import CompileFailed, compile_kinds
from gpu_worker.dense_path import set_up_dense_path
from gpu_worker.model import load_dense_model
from protocol.errors import UserError
from tests.checkpoints import FAMILIES, MORE_FAMILIES, make_checkpoint

if TYPE_CHECKING:
    from pathlib import Path

    from gpu_worker.model import DenseModel

CPU = torch.device("cpu")
#: Plain, sliding with sinks, latent, and one that is not recorded; the others are slow tests.
QUICK_FAMILIES = {"mixtral", "gpt_oss", "deepseek_v3", "qwen3_next"}
#: Families with state beside keys and values: transformers runs their single tokens.
EAGER_FAMILIES = {"qwen3_next", "lfm2_moe", "jamba", "deepseek_v4"}


def _load(family: str, path: Path, dtype: torch.dtype = torch.float32, **config: Any) -> DenseModel:
    return load_dense_model(make_checkpoint(family, path, **config), dtype, CPU, 300)


def _by_choices(
    layer: int, hidden: torch.Tensor, choices: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    return (hidden * (weights * (choices + layer)).sum(1, keepdim=True) / 8).to(hidden.dtype)


def _decode(model: DenseModel, num_tokens: int) -> list[torch.Tensor]:
    """Logits after a prompt of 9 tokens and then token by token."""
    model.connect(_by_choices)
    cache = model.new_cache()
    logits = [model.forward([7, 1, 9, 4, 4, 200, 31, 6, 2], cache)]
    while len(logits) < num_tokens:
        logits.append(model.forward([int(logits[-1].argmax())], cache))
    return logits


@pytest.mark.parametrize(
    "family",
    [
        family if family in QUICK_FAMILIES else pytest.param(family, marks=pytest.mark.slow)
        for family in (*FAMILIES, *MORE_FAMILIES)
    ],
)
@torch.inference_mode()
def test_a_recording_gives_the_very_bits(family: str, tmp_path: Path) -> None:
    """20 steps pass gpt_oss's window of 16; prompt chunks and single tokens share the cache."""
    model = _load(family, tmp_path)
    expected = _decode(model, 20)
    assert model.prepare_decode() is None or family in EAGER_FAMILIES
    assert (model.decode_step is None) is (family in EAGER_FAMILIES)
    found = _decode(model, 20)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@torch.inference_mode()
def test_deeper_models_have_no_more_kinds_of_segments(tmp_path: Path) -> None:
    counts = []
    for num_layers in (3, 6):
        model = _load("qwen3_moe", tmp_path / str(num_layers), num_hidden_layers=num_layers)
        assert set_up_dense_path(model, "traced", lambda *_: None) == "traced"
        step = model.decode_step
        assert step is not None
        counts.append((len(step.kinds), step.num_segments))
    # embedding .. attention | .. experts | .. attention | .. logits
    assert counts == [(4, 7), (4, 13)]


@torch.inference_mode()
def test_a_recording_that_differs_is_not_used(tmp_path: Path) -> None:
    model = _load("mixtral", tmp_path)
    forward = model._model.forward
    model._model.forward = lambda *args, position_ids=None, **kwargs: forward(*args, **kwargs)
    assert model.prepare_decode() == "its recording computes something else"
    assert model.decode_step is None


@torch.inference_mode()
def test_a_forward_that_looks_at_positions_is_not_recorded(tmp_path: Path) -> None:
    model = _load("mixtral", tmp_path)
    forward = model._model.forward

    def looks(*args: Any, position_ids: torch.Tensor | None = None, **kwargs: Any) -> Any:
        if position_ids is not None and int(position_ids.max()) > 4:
            kwargs["position_ids"] = position_ids
        return forward(*args, **kwargs)

    model._model.forward = looks
    why_not = model.prepare_decode()
    assert why_not is not None
    assert model.decode_step is None


@torch.inference_mode()
def test_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = _load("mixtral", tmp_path)
    texts: list[str] = []
    assert set_up_dense_path(model, "eager", lambda *_: None) == "eager"
    with pytest.raises(UserError, match="'fast' is not known"):
        set_up_dense_path(model, "fast", lambda *_: None)

    def fail(kind: object) -> None:
        raise RuntimeError("no C++ compiler\nand a long story")

    monkeypatch.setattr(compilation, "_compile", fail)
    progress = lambda _done, _total, text: texts.append(text)  # noqa: E731
    assert set_up_dense_path(model, "compiled", progress) == "traced"
    assert model.decode_step is not None
    assert any("compiling" in text for text in texts)
    with pytest.raises(CompileFailed, match=r"^RuntimeError: no C\+\+ compiler$"):
        compile_kinds(model.decode_step.kinds, lambda *_: None)


def test_compiling_ends_when_its_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    release = threading.Event()
    monkeypatch.setattr(compilation, "_compile", lambda kind: release.wait(30))
    try:
        with pytest.raises(CompileFailed, match="longer than 0 s"):
            compile_kinds([object(), object()], lambda *_: None, max_s=0.05)  # type: ignore[list-item]
    finally:
        release.set()


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")  # inductor's own
@torch.inference_mode()
def test_a_compiled_step_is_close_and_is_compiled_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    model = _load("qwen3_moe", tmp_path / "model", num_hidden_layers=2)
    expected = _decode(model, 200)
    assert set_up_dense_path(model, "compiled", lambda *_: None) == "compiled"
    monkeypatch.setattr(compilation, "_compile", None)  # whatever is left to compile would fail
    torch._dynamo.utils.counters.clear()
    found = _decode(model, 200)
    assert not torch._dynamo.utils.counters["inductor"]
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    again = _decode(model, 200)
    assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))
