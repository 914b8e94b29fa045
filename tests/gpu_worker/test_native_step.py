"""The native decode step against the recorded one, whole and broken."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from expert_kernels.native_dense import OP_CODES, DenseKernels, Op
from expert_kernels.native_library import NativeLibraryError
from gpu_worker.dense_path import set_up_dense_path
from gpu_worker.joint_step import JointStep
from gpu_worker.model import load_dense_model
from gpu_worker.native_step import NativeStep
from tests.checkpoints import make_checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from gpu_worker.model import DenseModel

CPU = torch.device("cpu")
PROMPT = [7, 1, 9, 4, 4, 200, 31, 6, 2]
LONG_PROMPT = PROMPT * 6 + [5] * 5
#: Plain, sliding windows with sinks, latent attention with groups of experts, shared experts.
FAMILIES = ("mixtral", "gpt_oss", "deepseek_v3", "qwen2_moe")
DTYPES = {"float32": 1e-3, "bfloat16": 0.2}


def _load(family: str, path: Path, dtype: str = "float32", **config: Any) -> DenseModel:
    directory = make_checkpoint(family, path, dtype=dtype, **config)
    model = load_dense_model(directory, getattr(torch, dtype), CPU, 300)
    assert model.prepare_decode() is None
    return model


def _by_weights(
    layer: int, hidden: torch.Tensor, choices: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    return (hidden * weights.sum(1, keepdim=True) * (layer + 1) / 4).to(hidden.dtype)


def _decode(
    run: Callable[..., torch.Tensor],
    model: DenseModel,
    tokens: list[int],
    prompt: list[int] = PROMPT,
) -> list[torch.Tensor]:
    """Logits of every one of `tokens`, after a prompt, which torch runs."""
    model.connect(_by_weights)
    cache = model.new_cache()
    model.forward(prompt, cache)
    return [run(token, len(prompt) + n, cache) for n, token in enumerate(tokens)]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """As in the worker; torch's threads wait for each other where others want the processor."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> DenseModel:
    with torch.inference_mode():
        return _load("mixtral", tmp_path_factory.mktemp("models") / "mixtral")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_native_and_traced_logits_agree(family: str, dtype: str, tmp_path: Path) -> None:
    """The tokens pass windows and the first room of every cache."""
    model = _load(family, tmp_path, dtype)
    assert model.use_native(DenseKernels()) is None
    native, traced = model.native_step, model.decode_step
    assert native is not None
    assert traced is not None
    assert native.num_native == traced.num_segments
    tokens = [(11 * n) % 250 for n in range(10)]
    expected = _decode(traced.run, model, tokens, LONG_PROMPT)
    found = _decode(native.run, model, tokens, LONG_PROMPT)
    for wanted, logits in zip(expected, found, strict=True):
        scale = float(wanted.abs().max())
        assert float((wanted.float() - logits.float()).abs().max()) < DTYPES[dtype] * scale


@torch.inference_mode()
def test_bits_do_not_hang_on_threads_instruction_sets_or_company(tmp_path: Path) -> None:
    model = _load("gpt_oss", tmp_path, "bfloat16", hidden_size=512, intermediate_size=512)
    step = model.decode_step
    assert step is not None
    tokens = [5, 9, 2, 77]
    steps = [
        NativeStep(step, DenseKernels(max_isa=isa, num_threads=threads))  # type: ignore[arg-type]
        for isa, threads in (("best", 1), ("scalar", 3), ("best", 2))
    ]
    expected = _decode(steps[0].run, model, tokens)
    for native in steps[1:]:
        found = _decode(native.run, model, tokens)
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))

    joint = JointStep(_by_weights)
    model.connect(joint)
    caches = [model.new_cache() for _ in range(3)]
    for number, cache in enumerate(caches):
        model.forward(PROMPT[number:], cache)
    for n, token in enumerate(tokens):
        together = joint.run(
            [
                lambda c=cache, k=number: steps[0].run(token, len(PROMPT) - k + n, c)  # noqa: B023
                for number, cache in enumerate(caches)
            ]
        )
        assert torch.equal(together[0], expected[n])


@torch.inference_mode()
def test_prompts_and_single_tokens_share_a_cache(mixtral: DenseModel) -> None:
    """Torch adds a chunk after native tokens, and the other way round."""
    model = mixtral
    model.connect(_by_weights)
    whole, mixed = model.new_cache(), model.new_cache()
    tokens = [(7 * n) % 200 for n in range(150)]
    expected = model.forward(tokens, whole)
    assert model.use_native(DenseKernels()) is None
    model.connect(_by_weights)
    for start, end in ((0, 1), (1, 30), (30, 31), (31, 32), (32, 90), (90, 91), (91, 150)):
        logits = model.forward(tokens[start:end], mixed)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    layer = mixed.layers[0]
    assert layer.keys is not None
    torch.testing.assert_close(layer.keys, whole.layers[0].keys, rtol=1e-4, atol=1e-4)


#: What an operation becomes; None: it reads another place, or chooses the least.
_WRONG = {
    "mul": "add", "add": "sub", "rsqrt": "sqrt", "mean": "sum", "cos": "sin", "neg": "copy",
    "linear": None, "attend": None, "topk": None, "embedding": None,
}  # fmt: skip


@pytest.mark.parametrize("name", _WRONG)
@torch.inference_mode()
def test_a_broken_kernel_is_noticed(
    name: str, mixtral: DenseModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_broken = 0

    def break_it(op: Op) -> None:
        wrong = _WRONG[name]
        if wrong is not None:
            op.code = OP_CODES[wrong]
        elif name == "topk":
            op.m ^= 1
        elif name == "attend":
            op.x *= 1.5
        else:
            op.a.offset += 64

    build = NativeStep._build

    def build_broken(self: NativeStep) -> None:
        nonlocal num_broken
        build(self)
        for op in self._program._ops:
            if op.code == OP_CODES[name]:
                break_it(op)
                num_broken += 1

    monkeypatch.setattr(NativeStep, "_build", build_broken)
    mixtral._native = None
    why_not = mixtral.use_native(DenseKernels())
    assert num_broken > 0
    assert why_not is not None
    assert mixtral.native_step is None


@torch.inference_mode()
def test_a_segment_without_a_kernel_stays_with_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gpu_worker import native_ops

    monkeypatch.delitem(native_ops._OWN, "aten.softmax.int")
    model = _load("qwen3_moe", tmp_path)
    assert model.use_native(DenseKernels()) is None
    native = model.native_step
    assert native is not None
    assert list(native.reasons.values()) == ["aten.softmax.int"]
    assert native.num_native == 4  # embedding, two middles, logits of 7; the routers are torch's
    expected = _decode(model.decode_step.run, model, [1, 2, 3])  # type: ignore[union-attr]
    found = _decode(native.run, model, [1, 2, 3])
    for a, b in zip(expected, found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@torch.inference_mode()
def test_without_the_library_the_recording_is_replayed(
    mixtral: DenseModel, caplog: pytest.LogCaptureFixture
) -> None:
    def none_there() -> DenseKernels:
        raise NativeLibraryError("they have not been built")

    model = mixtral
    assert set_up_dense_path(model, "native", lambda *_: None, none_there) == "traced"
    assert caplog.messages == [
        "single tokens do not run natively, and slower: they have not been built"
    ]
    assert set_up_dense_path(model, "native", lambda *_: None) == "traced"
    assert set_up_dense_path(model, "native", lambda *_: None, DenseKernels) == "native"
