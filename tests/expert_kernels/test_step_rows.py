"""Finding, gathering and scattering rows, and the probe over it."""

from __future__ import annotations

import mmap

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from expert_kernels.probe import measure_rate, spread_experts
from expert_kernels.reference import ExpertFunction, use_one_thread
from expert_kernels.step_rows import ActivationViews, StepRows, as_tensor, rows_of, run_expert
from protocol.errors import ProtocolError
from protocol.step_segment import activation_grant
from tests.protocol.fake_orchestrator import small_layout


def make_views(max_rows: int = 6, top_k: int = 2, dtype: str = "float32") -> ActivationViews:
    grant = activation_grant(max_rows, top_k, 64, dtype)
    return ActivationViews(mmap.mmap(-1, grant.num_bytes), grant)


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_rows_of_finds_every_choice_once(data: st.DataObject) -> None:
    num_rows = data.draw(st.integers(1, 12))
    top_k = data.draw(st.integers(1, 5))
    row = st.permutations(range(7)).map(lambda order: order[:top_k])
    chosen = data.draw(st.lists(row, min_size=num_rows, max_size=num_rows))
    experts = data.draw(st.permutations(range(8)))
    choices = torch.full((num_rows + 3, top_k), 2, dtype=torch.int32)  # rows beyond are no rows
    choices[:num_rows] = torch.tensor(chosen, dtype=torch.int32)
    found = rows_of(choices, num_rows, experts)
    assert list(found) == experts
    for expert, (row_ids, place_ids) in found.items():
        expected = [(r, r * top_k + k) for r in range(num_rows) for k in range(top_k)
                    if chosen[r][k] == expert]  # fmt: skip
        assert list(zip(row_ids.tolist(), place_ids.tolist(), strict=True)) == expected


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "chosen", [[[3, 1]], [[2, 2]], [[3, 1], [0, 3]], [[1, 2], [0, 1], [1, 5], [4, 0]]]
)
def test_run_expert_writes_its_places_and_no_other(chosen: list[list[int]], dtype: str) -> None:
    use_one_thread()
    views = make_views(dtype=dtype)
    function = ExpertFunction(small_layout(dtype))  # type: ignore[arg-type]
    tensors = function.tensors_of(torch.zeros(function.layout.block_bytes, dtype=torch.uint8))
    for tensor in tensors.values():
        tensor.copy_(torch.randn(tensor.shape) * 0.2)
    views.hidden.copy_(torch.randn(views.hidden.shape))
    views.choices[: len(chosen)] = torch.tensor(chosen, dtype=torch.int32)
    for expert in range(6):
        views.rows.fill_(-77)
        run_expert(function, tensors, StepRows.of(views, len(chosen), range(6)), expert)
        row_ids, choice_ids = torch.where(torch.tensor(chosen) == expert)
        expected = torch.full_like(views.rows, -77)
        if len(row_ids):
            expected[row_ids, choice_ids] = function(tensors, views.hidden[row_ids])
        assert torch.equal(views.rows, expected)


def test_single_row_input_is_as_aligned_as_a_gathered_one() -> None:
    views = make_views()
    assert views.first_row.data_ptr() % 64 == 0
    assert views.first_row.is_contiguous()
    assert views.hidden.index_select(0, torch.tensor([3])).data_ptr() % 64 == 0


def test_views_lie_over_the_segment_and_header_is_checked() -> None:
    grant = activation_grant(6, 2, 64, "float16")
    memory = mmap.mmap(-1, grant.num_bytes)
    views = ActivationViews(memory, grant)
    assert views.hidden.shape == (6, 64)
    assert views.hidden.dtype is torch.float16
    assert views.choices.shape == (6, 2)
    assert views.rows.shape == (6, 2, 64)
    views.write_header(2**40, 3, 6)
    assert memory[:24] == b"".join(n.to_bytes(8, "little") for n in (2**40, 3, 6))
    assert views.read_header() == (2**40, 3, 6)
    views.rows[5, 1, 63] = 1.0
    last = grant.fields["rows"].offset_bytes + 4 * 6 * 2 * 64
    assert memory[last - 4 : last] == b"\x00\x00\x80\x3f"
    for num_rows in (7, -1):
        views.write_header(1, 0, num_rows)
        with pytest.raises(ProtocolError, match=f"claims {num_rows} of 6 rows"):
            views.read_header()


def test_read_only_memory_gives_a_tensor_without_a_warning() -> None:
    memory = memoryview(bytes(range(64))).toreadonly()
    assert as_tensor(memory, torch.uint8, 4, [2, 3]).tolist() == [[4, 5, 6], [7, 8, 9]]


def test_probe_walks_the_whole_store_and_takes_the_median() -> None:
    layout = small_layout()
    assert sorted(spread_experts(layout)) == [(0, e) for e in range(6)] + [(1, e) for e in range(4)]
    now, seen, costs = [0.0], set(), iter([5.0, 0.001, 0.001, 0.05])

    def compute(keys: object) -> None:
        seen.update(keys)  # type: ignore[call-overload]
        now[0] += next(costs, 0.001)

    rate = measure_rate(compute, layout, batch=2, budget_s=0.15, clock=lambda: now[0])
    # A slow first call is not timed; one interrupted slice does not move the median.
    assert rate == pytest.approx(2 * layout.block_bytes / 0.001)
    assert seen == set(spread_experts(layout))


def test_probe_is_bounded_when_one_call_outlasts_the_budget() -> None:
    layout, now, calls = small_layout(), [0.0], []

    def compute(keys: object) -> None:
        calls.append(keys)
        now[0] += 3.0

    rate = measure_rate(compute, layout, batch=2, clock=lambda: now[0])
    assert rate == pytest.approx(2 * layout.block_bytes / 3.0)
    assert len(calls) == 2
