"""The native kernels: right by the definition, near to torch, and the same bits everywhere."""

from __future__ import annotations

import hashlib
import logging
import platform
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import pytest
import torch

from cpu_worker.isa import read_isa
from expert_kernels import native
from expert_kernels.native import MaxIsa, NativeExpertFunction, make_expert_function
from expert_kernels.native_library import (
    _ACTIVATIONS,
    NativeLibraryError,
    load_library,
    open_library,
    usable_isas,
)
from expert_kernels.reference import ExpertFunction, use_one_thread
from expert_kernels.step_rows import StepRows
from expert_store.gates import expert_rows
from protocol.worker_flags import MAX_ISAS
from tests.expert_kernels.test_reference import (
    DTYPES,
    FORMS,
    block_of,
    form_of,
    input_of,
    layout_of,
    moved,
)
from tests.expert_kernels.test_step_rows import make_views
from tests.protocol.fake_orchestrator import small_layout

if TYPE_CHECKING:
    from expert_store.layout import Dtype, ExpertForm

REPO_ROOT = Path(__file__).resolve().parents[2]
HAS_COMPILER = any(shutil.which(name) for name in ("c++", "g++", "clang++"))


def find_isas() -> list[str]:
    try:
        return usable_isas(load_library())
    except NativeLibraryError:
        return []


ISAS = find_isas()
needs_library = pytest.mark.skipif(not ISAS, reason="the native kernels have not been built")

ODD = {
    "odd": form_of(hidden_size=37, intermediate_size=21),
    "odd, one wide": form_of(hidden_size=1, intermediate_size=1, has_bias=True),
    "odd, interleaved": form_of(hidden_size=67, intermediate_size=5, is_interleaved=True),
    "odd gpt-oss": form_of(
        "alpha_swiglu",
        hidden_size=37,
        intermediate_size=21,
        has_bias=True,
        is_transposed=True,
        is_interleaved=True,
    ),
    "several tiles": form_of(hidden_size=531, intermediate_size=433),
    "several tiles, transposed": form_of(
        hidden_size=531, intermediate_size=433, is_transposed=True, has_bias=True
    ),
    "deep": form_of(hidden_size=2083, intermediate_size=5),
    "no gate, wide": form_of("act", hidden_size=301, intermediate_size=997, activation="relu2"),
}
ALL_FORMS = FORMS | ODD
NUM_ROWS = (1, 2, 3, 4, 5, 7, 8, 12, 13, 33)
#: Those that multiply pairs of bfloat16 numbers, each in an order of its own.
LAID_ISAS = ("avx512_bf16", "amx")


def make_native(
    form: ExpertForm, dtype: Dtype, max_isa: MaxIsa = "best", num_threads: int = 1
) -> NativeExpertFunction:
    return NativeExpertFunction(layout_of(form, dtype), max_isa=max_isa, num_threads=num_threads)


def adds_in_its_own_order(isa: str, form: ExpertForm, dtype: str) -> bool:
    """bfloat16 where there are instructions for its products: near to the scalar kernels; the same
    bits for any rows and threads."""
    return isa in LAID_ISAS and dtype == "bfloat16" and not form.is_transposed


def assert_nearly_equal(found: torch.Tensor, expected: torch.Tensor) -> None:
    """bfloat16 results of two orders of additions: here and there one that is rounded otherwise."""
    assert relative_error(found, expected.double()) < 2.0**-7
    assert (found == expected).float().mean() > 0.95


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.int32)


def exact(function: ExpertFunction, tensors: dict[str, torch.Tensor], x: Any) -> torch.Tensor:
    """The definition, in float64 from the same stored weights."""
    weights = {
        name.replace("gate_up", "gate_up_proj").replace("down", "down_proj")
        if name != "up" and name != "up_bias"
        else name.replace("up", "up_proj"): tensor.double()
        for name, tensor in tensors.items()
    }
    return expert_rows(function.layout.form, weights, x.double())


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected).abs().max() / expected.abs().max().clamp(min=1e-30))


@pytest.mark.skipif(not HAS_COMPILER, reason="no C++ compiler here")
def test_a_machine_with_a_compiler_has_the_library() -> None:
    """Where it could be built, its absence would silently skip all that follows."""
    assert ISAS, "run scripts/setup (or build CMakeLists.txt) to have the native kernels"
    assert ISAS[0] == "scalar"
    if platform.machine() == "aarch64":
        assert "neon" in ISAS


@needs_library
@pytest.mark.parametrize("name", ALL_FORMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_right_by_the_definition_in_float64(name: str, dtype: Dtype) -> None:
    function = make_native(ALL_FORMS[name], dtype)
    tensors = function.tensors_of(block_of(function))
    tolerance = {"float32": 4e-6, "float16": 4e-3, "bfloat16": 3e-2}[dtype]
    for num_rows in NUM_ROWS:
        x = input_of(function, num_rows)
        assert relative_error(function(tensors, x), exact(function, tensors, x)) < tolerance


@needs_library
@pytest.mark.parametrize("name", ALL_FORMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_near_to_torch(name: str, dtype: Dtype) -> None:
    """Rounded where torch rounds: what differs is the order of additions, so most are equal."""
    use_one_thread()
    function = make_native(ALL_FORMS[name], dtype)
    reference = ExpertFunction(function.layout)
    tensors = function.tensors_of(block_of(function))
    x = input_of(function, 5)
    found, expected = function(tensors, x), reference(tensors, x)
    unit = {"float32": 2.0**-23, "float16": 2.0**-11, "bfloat16": 2.0**-8}[dtype]
    # torch's own order of additions differs between processors: 8.4 units were seen on AVX-512.
    assert relative_error(found, expected.double()) < 16 * unit
    if dtype == "bfloat16":
        assert (found == expected).float().mean() > 0.8


@needs_library
@pytest.mark.parametrize("activation", sorted(_ACTIVATIONS))
@pytest.mark.parametrize("dtype", DTYPES)
def test_activations_are_torchs(activation: str, dtype: Dtype) -> None:
    """A weight of 1 on each side shows the activation by itself, at both ends and around 0."""
    form = form_of("act", hidden_size=1, intermediate_size=1, activation=activation)
    function = make_native(form, dtype)
    tensors = function.tensors_of(torch.zeros(function.layout.block_bytes, dtype=torch.uint8))
    for tensor in tensors.values():
        tensor.fill_(1)
    x = torch.cat([torch.linspace(-30, 30, 401), torch.tensor([0.0, -0.0, 1e-4, -1e-4])])
    x = x.to(function.dtype)[:, None]
    torch.testing.assert_close(
        function(tensors, x),
        ExpertFunction(function.layout)(tensors, x),
        rtol={"float32": 3e-6, "float16": 2e-3, "bfloat16": 1.6e-2}[dtype],
        atol=1e-6,
    )


@needs_library
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_no_number_or_too_large_comes_out_as_in_torch(dtype: Dtype) -> None:
    function = make_native(FORMS["plain"], dtype)
    reference = ExpertFunction(function.layout)
    tensors = function.tensors_of(block_of(function))
    x = input_of(function, 3)
    x[0, 5] = float("nan")
    x[1, 7] = torch.finfo(function.dtype).max
    found, expected = function(tensors, x), reference(tensors, x)
    assert found[0].isnan().all()
    assert torch.equal(found.isfinite(), expected.isfinite())


@needs_library
@pytest.mark.parametrize("name", ALL_FORMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_same_bits_on_every_isa_and_any_number_of_threads(name: str, dtype: Dtype) -> None:
    block = None
    form = ALL_FORMS[name]
    expected: list[torch.Tensor] = []
    for max_isa in ISAS:
        for num_threads in (1, 2, 5):
            function = make_native(form, dtype, max_isa, num_threads)  # type: ignore[arg-type]
            assert function.isa == max_isa
            block = block_of(function) if block is None else block
            tensors = function.tensors_of(block)
            results = [function(tensors, input_of(function, n)) for n in NUM_ROWS]
            if num_threads == 1 and adds_in_its_own_order(max_isa, form, dtype):
                assert_nearly_equal(torch.cat(results), torch.cat(expected))
                expected = results
            expected = expected or results
            for found, wanted in zip(results, expected, strict=True):
                assert torch.equal(bits(found), bits(wanted))


@needs_library
@pytest.mark.parametrize("name", ALL_FORMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_in_any_company_and_at_any_address(name: str, dtype: Dtype) -> None:
    function = make_native(ALL_FORMS[name], dtype, num_threads=2)
    block = block_of(function)
    tensors = function.tensors_of(block)
    x = input_of(function, 33)
    together = function(tensors, x)
    for first, last in ((0, 1), (7, 9), (3, 16), (32, 33)):
        assert torch.equal(bits(function(tensors, x[first:last])), bits(together[first:last]))
    for shift_bytes in (64, 1984):
        elsewhere = function.tensors_of(moved(block, shift_bytes))
        assert torch.equal(bits(function(elsewhere, x)), bits(together))


@needs_library
def test_large_steps_over_many_threads_change_no_bit() -> None:
    """Big enough for every helper to be woken, again and again, with more threads than cores."""
    form = form_of(hidden_size=512, intermediate_size=300)
    alone, many = make_native(form, "bfloat16"), make_native(form, "bfloat16", num_threads=7)
    blocks = [alone.tensors_of(block_of(alone, seed)) for seed in range(8)]
    x = input_of(alone, 2)
    expected = alone.run_each(blocks, x)
    assert expected.shape == (8, 2, 512)
    for _ in range(40):
        assert torch.equal(bits(many.run_each(blocks, x)), bits(expected))


@needs_library
def test_callers_from_several_threads_take_turns() -> None:
    function = make_native(FORMS["plain"], "float32", num_threads=2)
    tensors = function.tensors_of(block_of(function))
    inputs = [input_of(function, n) for n in (1, 4, 9)]
    expected = [function(tensors, x) for x in inputs]
    results: list[list[torch.Tensor]] = []

    def call() -> None:
        results.extend([[function(tensors, x) for x in inputs] for _ in range(50)])

    threads = [threading.Thread(target=call) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 150
    for found in results:
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def digest() -> str:
    total = hashlib.sha256()
    for form in ALL_FORMS.values():
        for dtype in DTYPES:
            function = make_native(form, dtype)
            tensors = function.tensors_of(block_of(function))
            total.update(function(tensors, input_of(function, 3)).numpy().tobytes())
    return total.hexdigest()


@needs_library
@pytest.mark.process
def test_same_bits_in_another_process(tiny_env: dict[str, str]) -> None:
    code = "from tests.expert_kernels.test_native import digest\nprint(digest())"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=tiny_env,
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    assert done.stdout.strip() == digest()


@needs_library
@pytest.mark.parametrize("chosen", [[[3, 1]], [[3, 1], [0, 3]], [[1, 2], [0, 1], [1, 5], [4, 0]]])
def test_a_step_writes_the_places_of_its_experts_and_no_other(chosen: list[list[int]]) -> None:
    views = make_views()
    function = NativeExpertFunction(small_layout("float32"), num_threads=2)
    tensors = [function.tensors_of(block_of(function, seed)) for seed in range(6)]
    views.hidden.copy_(torch.randn(views.hidden.shape))
    views.choices[: len(chosen)] = torch.tensor(chosen, dtype=torch.int32)
    for experts in ([0, 1, 2, 3, 4, 5], [3], [5, 1], []):
        views.rows.fill_(-77)
        step_rows = StepRows.of(views, len(chosen), experts)
        function.run_step(step_rows, experts, [tensors[expert] for expert in experts])
        expected = torch.full_like(views.rows, -77)
        for expert in experts:
            row_ids, choice_ids = torch.where(torch.tensor(chosen) == expert)
            expected[row_ids, choice_ids] = function(tensors[expert], views.hidden[row_ids])
        assert torch.equal(bits(views.rows), bits(expected))


@needs_library
@pytest.mark.parametrize("name", ALL_FORMS)
def test_no_rows_give_no_rows(name: str) -> None:
    function = make_native(ALL_FORMS[name], "float32")
    x = torch.empty(0, function.hidden_size)
    assert function(function.tensors_of(block_of(function)), x).shape == (0, function.hidden_size)


@needs_library
def test_every_way_to_read_reads_the_same() -> None:
    memory = torch.randint(0, 256, (3 * 16 * 1021 * 64 + 16 * 64,), dtype=torch.uint8)
    function = make_native(FORMS["plain"], "float32", num_threads=2)
    expected = int(memory.view(torch.int64)[::8].sum()) % 2**64
    for num_streams in (1, 2, 4, 8, 16):
        assert function.read(memory, num_streams, 256) == expected


@needs_library
def test_a_closed_pool_leaves_no_thread() -> None:
    def num_threads() -> int:
        return len(list(Path("/proc/self/task").iterdir()))

    before = num_threads()
    function = make_native(FORMS["plain"], "float32", num_threads=4)
    assert num_threads() == before + 3
    function.close()
    assert num_threads() == before


def test_flags_name_what_the_kernels_know() -> None:
    assert get_args(MaxIsa) == MAX_ISAS


@needs_library
@pytest.mark.parametrize("max_isa", MAX_ISAS)
def test_max_isa_is_a_ceiling(max_isa: MaxIsa) -> None:
    function = make_expert_function(layout_of(FORMS["plain"], "float32"), max_isa=max_isa)
    if max_isa == "torch":
        assert not isinstance(function, NativeExpertFunction)
        assert function.isa == "torch"
    else:
        rank = native._RANK
        assert rank[function.isa] <= rank[max_isa]
    if max_isa == "best":
        assert function.isa == ISAS[-1]


def test_without_a_library_torch_computes_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setattr(native, "load_library", lambda: open_library([tmp_path / "none.so"]))
    monkeypatch.setattr(native, "_is_slowness_told", False)
    layout = layout_of(FORMS["plain"], "float32")
    with caplog.at_level(logging.WARNING, "headrace"):
        functions = [make_expert_function(layout, num_threads=2) for _ in range(2)]
    assert [function.isa for function in functions] == ["torch", "torch"]
    assert len(caplog.records) == 1
    assert "have not been built" in caplog.records[0].getMessage()
    tensors = functions[0].tensors_of(block_of(functions[0]))
    assert functions[0](tensors, input_of(functions[0], 2)).abs().max() > 0


def test_a_library_that_is_none_is_named(tmp_path: Path) -> None:
    path = tmp_path / "headrace_experts.so"
    path.write_bytes(b"no library at all")
    with pytest.raises(NativeLibraryError, match=r"headrace_experts\.so cannot be loaded"):
        open_library([path])


@needs_library
def test_bfloat16_instructions_of_the_processor_are_found() -> None:
    flags = read_isa(Path("/")).split()
    if "avx512_bf16" not in flags:
        pytest.skip("no AVX512_BF16 here")
    assert "avx512_bf16" in ISAS
    if "amx_bf16" not in flags:
        function = make_expert_function(layout_of(FORMS["plain"], "bfloat16"))
        assert function.isa == "avx512_bf16"
