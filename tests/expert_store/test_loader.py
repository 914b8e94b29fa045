"""Loading: conversions of dtype and layout, progress, and everything a checkpoint can get wrong."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from transformers.core_model_loading import (
    Chunk,
    Concatenate,
    MergeModulelist,
    Transpose,
    WeightConverter,
)

import expert_store.conversion
import expert_store.keys
from expert_store import loader, reading, store_room
from expert_store.checkpoint import CheckpointError, open_checkpoint
from expert_store.layout import WrongMagicError
from expert_store.loader import Plan, load
from expert_store.memory import MemoryRoom, NotEnoughMemoryError
from expert_store.segment import StoreView

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from expert_store.layout import StoreLayout
    from expert_store.reports import Progress

EXPERT_3 = "model.layers.1.mlp.experts.3.up_proj.weight"


@pytest.fixture
def qwen(checkpoint_of: Callable[..., Path]) -> Path:
    return checkpoint_of("qwen3_moe")


@pytest.fixture
def broken(qwen: Path, broken_copy: Callable[[Path], Path]) -> Path:
    return broken_copy(qwen)


def refusal(directory: Path, segment: int, dtype: str = "auto") -> str:
    with pytest.raises(CheckpointError) as caught:
        load(Plan(open_checkpoint(directory), dtype), segment, lambda _: None)
    message = str(caught.value)
    assert "\n" not in message
    assert str(directory) in message
    return message


def floats(array: np.ndarray[Any, Any], dtype: str) -> torch.Tensor:
    tensor = torch.from_numpy(array.copy())
    return tensor.view(torch.bfloat16) if dtype == "bfloat16" else tensor


# --- what is loaded -------------------------------------------------------------------------


def test_sharded_equals_single(
    qwen: Path,
    checkpoint_of: Callable[..., Path],
    load_into: Callable[..., StoreLayout],
    segment: int,
) -> None:
    sharded = checkpoint_of("qwen3_moe", sharded=True)
    assert len(open_checkpoint(sharded).file_bytes) >= 3
    layout = load_into(qwen)
    other = os.memfd_create("other", os.MFD_ALLOW_SEALING)
    load(Plan(open_checkpoint(sharded), "auto"), other, lambda _: None)
    size = layout.total_bytes - layout.blocks_offset_bytes
    assert os.fstat(other).st_size == layout.total_bytes
    assert os.pread(segment, size, layout.blocks_offset_bytes) == os.pread(
        other, size, layout.blocks_offset_bytes
    )
    os.close(other)


@pytest.mark.parametrize("stored", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("wanted", ["float32", "bfloat16", "float16"])
def test_every_dtype_becomes_every_other(
    stored: str,
    wanted: str,
    checkpoint_of: Callable[..., Path],
    load_into: Callable[..., StoreLayout],
    segment: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Pieces far smaller than a tensor, so that the arithmetic of pieces is exercised too.
    monkeypatch.setattr(loader, "PIECE_BYTES", 1024)
    directory = checkpoint_of("gpt_oss", dtype=stored)
    layout = load_into(directory, wanted)
    assert layout.dtype == wanted
    checkpoint = open_checkpoint(directory)
    with StoreView(segment) as view:
        for layer in range(layout.num_layers):
            for ours, theirs in (("gate_up", "gate_up_proj"), ("down_bias", "down_proj_bias")):
                entry = checkpoint.tensors[f"model.layers.{layer}.mlp.experts.{theirs}"]
                raw = (directory / entry.file_name).read_bytes()
                source = torch.frombuffer(
                    bytearray(raw[entry.offset_bytes : entry.offset_bytes + entry.num_bytes]),
                    dtype=getattr(torch, stored),
                ).reshape(entry.shape)
                for expert in range(8):
                    found = floats(view.tensors(layer, expert)[ours], wanted)
                    assert torch.equal(found, source[expert].to(getattr(torch, wanted)))


def test_auto_follows_the_config_and_then_the_weights(
    checkpoint_of: Callable[..., Path], broken_copy: Callable[[Path], Path]
) -> None:
    directory = broken_copy(checkpoint_of("qwen3_moe", dtype="bfloat16"))
    assert Plan(open_checkpoint(directory), "auto").dtype == "bfloat16"
    config = json.loads((directory / "config.json").read_text())
    del config["dtype"]
    (directory / "config.json").write_text(json.dumps(config))
    assert Plan(open_checkpoint(directory), "auto").dtype == "bfloat16"
    (directory / "config.json").write_text(json.dumps({**config, "dtype": "float64"}))
    with pytest.raises(CheckpointError, match="float64"):
        Plan(open_checkpoint(directory), "auto")
    assert Plan(open_checkpoint(directory), "float16").dtype == "float16"


def test_progress_never_falls_and_ends_complete(
    qwen: Path, load_into: Callable[..., StoreLayout]
) -> None:
    seen: list[Progress] = []
    load_into(qwen, report=seen.append)
    done = [progress.done_bytes for progress in seen]
    assert done == sorted(done)
    assert done[0] == 0
    assert done[-1] == seen[-1].total_bytes == open_checkpoint(qwen).data_bytes


def test_inspection_counts_what_is_there(qwen: Path) -> None:
    checkpoint = open_checkpoint(qwen)
    told = Plan(checkpoint, "auto").inspection()
    experts = sum(t.num_bytes for name, t in checkpoint.tensors.items() if ".experts." in name)
    assert told.layout.expert_bytes * told.layout.total_experts == experts
    assert told.dense_bytes == checkpoint.data_bytes - experts
    assert (told.num_hidden_layers, told.vocab_size, told.context_length) == (3, 272, 512)
    assert told.architecture == "Qwen3MoeForCausalLM"
    assert told.num_ignored == 0


# --- conversions beyond stacking ------------------------------------------------------------


def store_transposed(path: Path, replace_tensor: Callable[..., None]) -> None:
    """Rewrite layer experts as two fused tensors [experts, inputs, outputs] of made-up names."""
    checkpoint = open_checkpoint(path)
    data = (path / "model.safetensors").read_bytes()

    def tensor(name: str) -> torch.Tensor:
        entry = checkpoint.tensors[name]
        raw = bytearray(data[entry.offset_bytes : entry.offset_bytes + entry.num_bytes])
        return torch.frombuffer(raw, dtype=torch.float32).reshape(entry.shape)

    for layer in range(3):
        prefix = f"model.layers.{layer}.mlp.experts"
        for part in ("gate_proj", "up_proj", "down_proj"):
            names = [f"{prefix}.{expert}.{part}.weight" for expert in range(8)]
            fused = torch.stack([tensor(name) for name in names]).transpose(1, 2).contiguous()
            for name in names[1:]:
                replace_tensor(path / "model.safetensors", name, {})
            new = {f"{prefix}.all_{part}": ("F32", list(fused.shape), fused.numpy().tobytes())}
            replace_tensor(path / "model.safetensors", names[0], new)


@pytest.mark.parametrize("is_whole_layer", [False, True])
def test_other_converters_run_as_transformers_wrote_them(
    is_whole_layer: bool,
    qwen: Path,
    broken: Path,
    replace_tensor: Callable[..., None],
    load_into: Callable[..., StoreLayout],
    segment: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The same weights, stored fused and transposed, make the same blocks."""
    store_transposed(broken, replace_tensor)

    class Flip(Transpose):
        """Transpose both matrices before they are concatenated."""

        def convert(self, input_dict: Any, **kwargs: Any) -> Any:  # type: ignore[override]
            return {
                name: torch.transpose(value[0] if isinstance(value, list) else value, 1, 2)
                for name, value in input_dict.items()
            }

    def mapping(_: Any) -> list[WeightConverter]:
        return [
            WeightConverter(
                ["experts.all_gate_proj", "experts.all_up_proj"],
                "experts.gate_up_proj",
                [Flip(1, 2), Concatenate(dim=1)],
            ),
            WeightConverter("experts.all_down_proj", "experts.down_proj", [Transpose(1, 2)]),
        ]

    monkeypatch.setattr(expert_store.keys, "get_model_conversion_mapping", mapping)
    if is_whole_layer:
        monkeypatch.setattr(expert_store.conversion, "_is_per_expert", lambda _: False)
    plan = Plan(open_checkpoint(broken), "auto")
    assert len(plan.conversions) == 6
    load(plan, segment, lambda _: None)
    monkeypatch.undo()
    other = os.memfd_create("other", os.MFD_ALLOW_SEALING)
    load(Plan(open_checkpoint(qwen), "auto"), other, lambda _: None)
    with StoreView(segment) as found, StoreView(other) as expected:
        for layer in range(3):
            for expert in range(8):
                assert found.block(layer, expert) == expected.block(layer, expert)
    os.close(other)


def test_only_operations_known_to_be_local_run_per_expert() -> None:
    is_per_expert = expert_store.conversion._is_per_expert
    assert is_per_expert([MergeModulelist(dim=0), Concatenate(dim=2)])
    assert is_per_expert([Transpose(1, 2)])
    assert not is_per_expert([Transpose(1, 2, check_dims=True)])  # compares with the whole shape
    assert not is_per_expert([Transpose(0, 1)])
    assert not is_per_expert([Chunk(dim=0)])
    assert not is_per_expert([MergeModulelist(dim=1)])


def test_a_converter_that_makes_another_shape_is_an_error(
    broken: Path,
    segment: int,
    replace_tensor: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store_transposed(broken, replace_tensor)
    monkeypatch.setattr(
        expert_store.keys,
        "get_model_conversion_mapping",
        lambda _: [
            WeightConverter(
                ["experts.all_gate_proj", "experts.all_up_proj"],
                "experts.gate_up_proj",
                [Concatenate(dim=1)],  # forgets to transpose
            ),
            WeightConverter("experts.all_down_proj", "experts.down_proj", [Transpose(1, 2)]),
        ],
    )
    assert "gate_up_proj of shape [1, 128, 32]" in refusal(broken, segment)


# --- what is refused ------------------------------------------------------------------------


def spoil(path: Path, name: str, values: bytes, position: int) -> None:
    entry = open_checkpoint(path).tensors[name]
    with (path / entry.file_name).open("r+b") as file:
        file.seek(entry.offset_bytes + position)
        file.write(values)


@pytest.mark.parametrize("name", [EXPERT_3, "model.layers.2.self_attn.q_proj.weight"])
@pytest.mark.parametrize(
    ("value", "word"), [(np.nan, "NaN"), (-np.inf, "infinite"), (np.inf, "infinite")]
)
def test_values_that_are_not_finite_are_named(
    name: str, value: float, word: str, broken: Path, segment: int
) -> None:
    spoil(broken, name, np.float32(value).tobytes(), 4000)
    message = refusal(broken, segment)
    assert name in message
    assert word in message
    with pytest.raises(WrongMagicError):  # and what was loaded is no store
        StoreView(segment)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_finite_is_exact_at_the_edges(dtype: torch.dtype) -> None:
    info = torch.finfo(dtype)
    edges = [0.0, -0.0, info.max, info.min, info.tiny, -info.tiny, info.smallest_normal / 4]

    def is_finite(values: list[float]) -> bool:
        tensor = torch.tensor(values, dtype=torch.float64).to(dtype)
        return reading.all_finite(tensor.view(torch.uint8).numpy(), dtype)

    assert is_finite(edges)
    for bad in (float("inf"), float("-inf"), float("nan"), -float("nan")):
        for position in range(len(edges) + 1):
            assert not is_finite([*edges[:position], bad, *edges[position:]])
    assert is_finite([])


def test_overflow_in_conversion_is_told_apart(broken: Path, segment: int) -> None:
    spoil(broken, EXPERT_3, np.float32(1e6).tobytes(), 0)
    message = refusal(broken, segment, "float16")
    assert EXPERT_3 in message
    assert "too large for float16" in message


def test_missing_experts_are_listed(
    broken: Path, segment: int, replace_tensor: Callable[..., None]
) -> None:
    replace_tensor(broken / "model.safetensors", EXPERT_3, {})
    message = refusal(broken, segment)
    assert f"lacks {EXPERT_3}" in message
    replace_tensor(broken / "model.safetensors", EXPERT_3.replace("3", "5"), {})
    assert "and 1 more of that kind (experts 3, 5 of" in refusal(broken, segment)


def test_missing_whole_parts_and_dense_tensors(
    broken: Path, segment: int, replace_tensor: Callable[..., None]
) -> None:
    for expert in range(8):
        name = f"model.layers.1.mlp.experts.{expert}.up_proj.weight"
        replace_tensor(broken / "model.safetensors", name, {})
    assert "no tensor like mlp.experts.*.up_proj.weight" in refusal(broken, segment)
    replace_tensor(broken / "model.safetensors", "model.norm.weight", {})
    assert "lacks the weights of model.norm.weight" in refusal(broken, segment)


def test_wrong_shapes(broken: Path, segment: int, replace_tensor: Callable[..., None]) -> None:
    wrong = {EXPERT_3: ("F32", [64, 32], bytes(64 * 32 * 4))}
    replace_tensor(broken / "model.safetensors", EXPERT_3, wrong)
    message = refusal(broken, segment)
    assert f"tensor {EXPERT_3} has shape [64, 32]" in message
    assert "[32, 64]" in message


def test_wrong_shape_of_a_dense_tensor(
    broken: Path, segment: int, replace_tensor: Callable[..., None]
) -> None:
    wrong = {"model.norm.weight": ("F32", [63], bytes(63 * 4))}
    replace_tensor(broken / "model.safetensors", "model.norm.weight", wrong)
    message = refusal(broken, segment)
    assert "model.norm.weight has shape [63]" in message
    assert "[64]" in message


@pytest.mark.parametrize("dtype", ["U32", "I32"])
def test_whole_numbers_are_no_dense_weights(
    dtype: str, broken: Path, segment: int, replace_tensor: Callable[..., None]
) -> None:
    wrong = {"model.norm.weight": (dtype, [64], bytes(64 * 4))}
    replace_tensor(broken / "model.safetensors", "model.norm.weight", wrong)
    assert f"tensor model.norm.weight has dtype {dtype}" in refusal(broken, segment)


@pytest.mark.parametrize(("dtype", "size"), [("I32", 4), ("F8_E4M3", 1), ("F64", 8)])
def test_wrong_dtypes(
    dtype: str, size: int, broken: Path, segment: int, replace_tensor: Callable[..., None]
) -> None:
    wrong = {EXPERT_3: (dtype, [32, 64], bytes(32 * 64 * size))}
    replace_tensor(broken / "model.safetensors", EXPERT_3, wrong)
    assert f"tensor {EXPERT_3} has dtype {dtype}" in refusal(broken, segment)


def test_experts_beyond_the_config(
    broken: Path, segment: int, replace_tensor: Callable[..., None]
) -> None:
    for part, shape in (("gate_proj", [32, 64]), ("up_proj", [32, 64]), ("down_proj", [64, 32])):
        extra = {f"model.layers.1.mlp.experts.8.{part}.weight": ("F32", shape, bytes(8192))}
        replace_tensor(broken / "model.safetensors", None, extra)
    message = refusal(broken, segment)
    assert "9 tensors" in message
    assert "8 experts" in message


def test_leftover_expert_tensors(
    broken: Path, segment: int, replace_tensor: Callable[..., None]
) -> None:
    name = "model.layers.1.mlp.experts.3.up_proj.scale"
    replace_tensor(broken / "model.safetensors", None, {name: ("F32", [1], bytes(4))})
    assert f"tensor {name} belongs to the experts" in refusal(broken, segment)


def test_other_leftovers_are_counted_not_refused(
    broken: Path, replace_tensor: Callable[..., None]
) -> None:
    extra = {"vision_tower.patch.weight": ("F32", [1], bytes(4))}
    replace_tensor(broken / "model.safetensors", None, extra)
    assert Plan(open_checkpoint(broken), "auto").inspection().num_ignored == 1


def test_layers_for_multi_token_prediction_are_ignored(
    broken: Path, replace_tensor: Callable[..., None]
) -> None:
    """A fourth layer's experts in the files of a model of three: not ours, not an error."""
    extra = {"model.layers.3.mlp.experts.0.up_proj.weight": ("F32", [32, 64], bytes(8192))}
    replace_tensor(broken / "model.safetensors", None, extra)
    assert Plan(open_checkpoint(broken), "auto").inspection().num_ignored == 1


def test_one_expert_given_under_two_names(
    checkpoint_of: Callable[..., Path],
    broken_copy: Callable[[Path], Path],
    segment: int,
    replace_tensor: Callable[..., None],
) -> None:
    directory = broken_copy(checkpoint_of("mixtral"))
    extra = {"model.layers.0.mlp.experts.5.w1.weight": ("F32", [48, 64], bytes(48 * 64 * 4))}
    replace_tensor(directory / "model.safetensors", None, extra)
    message = refusal(directory, segment)
    assert "gives expert 5 of model.layers.0.mlp.experts.gate_up_proj twice" in message


def test_two_tensors_for_one_place(
    broken: Path, segment: int, replace_tensor: Callable[..., None]
) -> None:
    extra = {"norm.weight": ("F32", [64], bytes(256))}  # transformers completes the prefix
    replace_tensor(broken / "model.safetensors", None, extra)
    message = refusal(broken, segment)
    assert "model.norm.weight" in message
    assert "norm.weight are both" in message


def test_fused_and_separate_experts_at_once(
    broken: Path, segment: int, replace_tensor: Callable[..., None]
) -> None:
    fused = {"model.layers.1.mlp.experts.down_proj": ("F32", [8, 64, 32], bytes(8 * 8192))}
    replace_tensor(broken / "model.safetensors", None, fused)
    assert "a second time" in refusal(broken, segment)


def test_a_file_that_shrinks_while_it_is_read(
    broken: Path, segment: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = Plan(open_checkpoint(broken), "auto")
    path = broken / "model.safetensors"
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(CheckpointError, match="became shorter"):
        load(plan, segment, lambda _: None)


def test_memory_is_asked_for_before_anything_is_sized(
    qwen: Path, segment: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_room, "memory_room", lambda: MemoryRoom(1000, "the test's limit"))
    with pytest.raises(NotEnoughMemoryError, match=r"the test's limit is 0\.00 GB"):
        load(Plan(open_checkpoint(qwen), "auto"), segment, lambda _: None)
    assert os.fstat(segment).st_size == 0


def test_a_tight_limit_lets_go_of_the_page_cache(
    qwen: Path, load_into: Callable[..., StoreLayout], monkeypatch: pytest.MonkeyPatch
) -> None:
    advice: list[int] = []
    real = os.posix_fadvise

    def spy(fd: int, offset: int, length: int, what: int) -> None:
        advice.append(what)
        real(fd, offset, length, what)

    monkeypatch.setattr(reading.os, "posix_fadvise", spy)
    monkeypatch.setattr(store_room, "memory_room", lambda: MemoryRoom(10**12, "plenty"))
    load_into(qwen)
    assert os.POSIX_FADV_DONTNEED not in advice
    monkeypatch.setattr(store_room, "memory_room", lambda: MemoryRoom(402_000_000, "tight"))
    other = os.memfd_create("other", os.MFD_ALLOW_SEALING)
    load(Plan(open_checkpoint(qwen), "auto"), other, lambda _: None)
    os.close(other)
    assert os.POSIX_FADV_DONTNEED in advice


def test_descriptors_that_are_no_new_segment(qwen: Path, tmp_path: Path) -> None:
    plan = Plan(open_checkpoint(qwen), "auto")
    with pytest.raises(CheckpointError, match="not a memfd"):
        load(plan, 987, lambda _: None)
    with (tmp_path / "file").open("w+b") as file:
        with pytest.raises(CheckpointError, match="not a memfd"):
            load(plan, file.fileno(), lambda _: None)
        file.truncate(5)
        with pytest.raises(CheckpointError, match="not an empty segment"):
            load(plan, file.fileno(), lambda _: None)
