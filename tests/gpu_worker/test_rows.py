"""Publishing, computing and joining rows: on the host, and as on an accelerator.

`DeviceRows` runs here with the CPU as its device and a stream that counts its waits; that shows
its bookkeeping (which rows are where), not CUDA. The reference is the plain sum per row.
"""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING

import pytest
import torch

from expert_kernels.native_join import NativeJoin
from expert_kernels.native_library import NativeLibraryError
from expert_kernels.reference import TORCH_DTYPE, ExpertFunction
from expert_kernels.step_rows import ActivationViews, StepRows, run_expert
from expert_store.layout import ExpertForm, make_layout
from gpu_worker.rows import DeviceRows, HostRows, count_choices, runs_of, weighted_sum
from gpu_worker.slots import SlotViews
from protocol.step_segment import activation_grant

if TYPE_CHECKING:
    from expert_store.layout import Dtype

NUM_EXPERTS, TOP_K, HIDDEN = 6, 3, 16


class CountingStream:
    def __init__(self) -> None:
        self.waits: list[str] = []

    def synchronize(self) -> None:
        self.waits.append("synchronize")

    def mark(self) -> None:
        self.waits.append("mark")

    def wait_mark(self) -> None:
        self.waits.append("wait_mark")


class Bench:
    """Random experts in slots 0..5, an activation segment and one layer-step's input."""

    def __init__(self, num_rows: int, dtype: Dtype = "float32", max_rows: int = 40) -> None:
        form = ExpertForm(
            hidden_size=HIDDEN, intermediate_size=24, has_gate=True, has_bias=False,
            is_transposed=False, is_interleaved=False, activation="silu", gate="act_mul",
        )  # fmt: skip
        layout = make_layout(
            model_name="rows", checkpoint_fingerprint="none", form=form, dtype=dtype,
            model_layer_ids=(0,), num_experts=(NUM_EXPERTS,), top_k=TOP_K,
        )  # fmt: skip
        torch.manual_seed(num_rows)
        self.function = ExpertFunction(layout)
        memory = torch.zeros(NUM_EXPERTS, layout.block_bytes, dtype=torch.uint8)
        self.slots = SlotViews(memory, self.function)
        for expert in range(NUM_EXPERTS):
            for tensor in self.slots.tensors(expert).values():
                tensor.copy_(torch.randn(tensor.shape))
        grant = activation_grant(max_rows, TOP_K, HIDDEN, dtype)
        self.views = ActivationViews(mmap.mmap(-1, grant.num_bytes), grant)
        self.dtype = TORCH_DTYPE[dtype]
        self.hidden = torch.randn(num_rows, HIDDEN).to(self.dtype)
        scores = torch.randn(num_rows, NUM_EXPERTS).topk(TOP_K)
        self.choices, self.weights = scores.indices, scores.values.softmax(dim=-1)

    def compute_elsewhere(self, experts: list[int]) -> None:
        step_rows = StepRows.of(self.views, self.hidden.shape[0], experts)
        for expert in experts:
            run_expert(self.function, self.slots.tensors(expert), step_rows, expert)

    def expected(self) -> torch.Tensor:
        """Every expert's rows in one call, joined with plain operators in the router's order."""
        total = torch.zeros_like(self.hidden, dtype=torch.float32)
        rows = torch.zeros(*self.choices.shape, HIDDEN)
        for expert in range(NUM_EXPERTS):
            row_ids, choice_ids = torch.where(self.choices == expert)
            result = self.function(self.slots.tensors(expert), self.hidden[row_ids])
            rows[row_ids, choice_ids] = result
        for k in range(TOP_K):
            total += self.weights[:, k : k + 1] * rows[:, k]
        return total.to(self.dtype)

    def host(self) -> HostRows:
        return HostRows(self.views, self.function, self.slots)

    def device(self, stream: CountingStream) -> DeviceRows:
        return DeviceRows(self.views, self.function, self.slots, torch.device("cpu"), stream)


@pytest.mark.parametrize("num_rows", [1, 2, 40])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("num_here", [0, 1, 3, 6])
def test_the_sum_is_the_same_wherever_rows_are_computed(
    num_rows: int, dtype: Dtype, num_here: int
) -> None:
    bench = Bench(num_rows, dtype)
    stream = CountingStream()
    results = []
    for rows in (bench.host(), bench.device(stream)):
        bench.views.rows.fill_(float("nan"))  # a row that nobody computed would show
        experts = list(rows.route(bench.hidden, bench.choices))
        rows.publish(4, 2)
        assert bench.views.read_header() == (4, 2, num_rows)
        here, elsewhere = experts[:num_here], experts[num_here:]
        for expert in reversed(here):
            rows.compute([expert], [expert])
            assert rows.wait_computed() > 0
        bench.compute_elsewhere(elsewhere)
        results.append(rows.join(bench.weights, bench.dtype))
    assert torch.equal(results[0], results[1])
    torch.testing.assert_close(results[0], bench.expected())
    num_waits = min(num_here, len(experts))
    assert stream.waits == ["synchronize", *["mark", "wait_mark"] * num_waits]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("weights_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_native_join_adds_in_the_routers_order(
    dtype: torch.dtype, weights_dtype: torch.dtype
) -> None:
    try:
        join = NativeJoin()
    except NativeLibraryError as error:
        pytest.skip(str(error))
    for num_rows, top_k, hidden in ((1, 4, 128), (3, 1, 7), (5, 8, 600)):
        rows = torch.randn(num_rows, top_k, hidden) * 3
        rows[0, 0, :4] = torch.tensor([1e-8, 7e4, -3e-6, 0.0])  # subnormal and infinite as float16
        weights = torch.rand(num_rows, top_k).to(weights_dtype)
        total = weights[:, :1].float() * rows[:, 0]
        for k in range(1, top_k):
            total = total + weights[:, k : k + 1].float() * rows[:, k]
        assert torch.equal(join(rows, weights, dtype), total.to(dtype))
        torch.testing.assert_close(join(rows, weights, dtype), weighted_sum(rows, weights, dtype))


def test_device_rows_of_one_step_do_not_leak_into_the_next() -> None:
    bench = Bench(3)
    rows = bench.device(CountingStream())
    experts = list(rows.route(bench.hidden, bench.choices))
    rows.publish(1, 0)
    rows.compute(experts, experts)
    first = rows.join(bench.weights, bench.dtype)
    bench.hidden = bench.hidden + 1.0
    rows.route(bench.hidden, bench.choices)
    rows.publish(1, 1)
    bench.compute_elsewhere(experts)
    second = rows.join(bench.weights, bench.dtype)
    torch.testing.assert_close(second, bench.expected())
    assert not torch.equal(first, second)


def test_experts_are_counted_in_the_routers_order() -> None:
    assert count_choices([[4, 1, 2]]) == {4: 1, 1: 1, 2: 1}
    counts = count_choices([[4, 1], [0, 4], [4, 0]])
    assert list(counts.items()) == [(4, 3), (1, 1), (0, 2)]


def test_runs_cover_exactly_the_places() -> None:
    places = [0, 1, 2, 5, 7, 8, 20]
    assert runs_of(places) == [(0, 3), (5, 6), (7, 9), (20, 21)]
    assert [place for start, end in runs_of(places) for place in range(start, end)] == places
