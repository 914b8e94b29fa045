"""Experts divided among NUMA nodes: the rule, what the kernel is asked for, what it made of it."""

from __future__ import annotations

import errno
import itertools
import mmap
import os
from typing import TYPE_CHECKING

import msgspec
import pytest

from expert_store import numa_placement
from expert_store.checkpoint import open_checkpoint
from expert_store.layout import ExpertForm, make_layout
from expert_store.loader import Plan, load
from expert_store.numa_placement import (
    expert_nodes,
    near_and_far,
    node_ranges,
    prefer_nodes,
    tell_placement,
)
from expert_store.segment import StoreView, size_segment
from protocol import memory_nodes
from protocol.machine import read_nodes

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from expert_store.layout import StoreLayout

FORM = ExpertForm(
    hidden_size=64, intermediate_size=96, has_gate=True, has_bias=False, is_transposed=False,
    is_interleaved=False, activation="silu", gate="act_mul",
)  # fmt: skip
PAGE = mmap.PAGESIZE


def layout_of(*num_experts: int) -> StoreLayout:
    return make_layout(
        model_name="toy", checkpoint_fingerprint="", form=FORM, dtype="float32",
        model_layer_ids=tuple(range(len(num_experts))), num_experts=num_experts, top_k=1,
    )  # fmt: skip


@pytest.fixture
def toy(checkpoint_of: Callable[..., Path]) -> Plan:
    return Plan(open_checkpoint(checkpoint_of("qwen3_moe")), "auto")


def test_every_layer_is_spread_evenly_over_all_nodes() -> None:
    assert expert_nodes(layout_of(4, 2), (0, 1)) == ((0, 0, 1, 1), (0, 1))
    assert expert_nodes(layout_of(5), (3, 7)) == ((3, 3, 3, 7, 7),)
    assert expert_nodes(layout_of(3), (1,)) == ((1, 1, 1),)
    assert expert_nodes(layout_of(3), ()) == ()
    for count in range(1, 40):
        (nodes,) = expert_nodes(layout_of(count), (0, 1, 2))
        sizes = [nodes.count(node) for node in (0, 1, 2)]
        assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("page_bytes", [PAGE, 1 << 16, 1 << 21])
def test_ranges_cover_the_segment_and_cut_at_pages(page_bytes: int) -> None:
    layout = layout_of(7, 40, 8)
    ranges = list(node_ranges(layout, (0, 1), page_bytes))
    assert ranges[0][0] == 0
    assert ranges[-1][1] == layout.total_bytes
    for (_, end, _), (start, _, _) in itertools.pairwise(ranges):
        assert start == end
        assert start % page_bytes == 0
    if page_bytes == PAGE:
        for layer, nodes in enumerate(expert_nodes(layout, (0, 1))):
            for expert, node in enumerate(nodes):
                offset = layout.block_offset(layer, expert)
                (found,) = [place for start, end, place in ranges if start <= offset < end]
                assert found == node
    assert list(node_ranges(layout, (1,), page_bytes)) == [(0, layout.total_bytes, 1)]


def test_the_kernel_is_asked_for_every_range(segment: int, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = layout_of(4, 4)
    size_segment(segment, layout.total_bytes)
    asked: list[tuple[int, int, int]] = []
    monkeypatch.setattr(memory_nodes, "prefer_node", lambda *call: asked.append(call))
    with mmap.mmap(segment, layout.total_bytes) as region:
        assert prefer_nodes(region, layout, (0, 1), segment) == ""
    first = asked[0][0]
    assert [(start - first, start - first + count, node) for start, count, node in asked] == list(
        node_ranges(layout, (0, 1), PAGE)
    )


@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOSYS])
def test_where_it_is_forbidden_the_load_says_so_once_and_goes_on(
    number: int, segment: int, toy: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    def refuse(name: str, *_: object) -> int:
        calls.append(name)
        raise OSError(number, "refused")

    def prefer(address: int, num_bytes: int, node: int) -> None:
        real_prefer(address, num_bytes, node, refuse)

    real_prefer = memory_nodes.prefer_node
    monkeypatch.setattr(memory_nodes, "prefer_node", prefer)
    loaded = load(toy, segment, lambda _: None, (0, 1))
    assert calls == ["mbind"]
    assert loaded.numa_nodes == ()
    assert errno.errorcode[number] in loaded.numa_note
    assert os.fstat(segment).st_size == loaded.layout.total_bytes


def test_weights_lie_where_the_kernel_was_asked_to_put_them(segment: int, toy: Plan) -> None:
    """The real calls, on the nodes of this machine; what pwrite touches first follows mbind."""
    usable = tuple(node.node for node in read_nodes() if node.is_memory_allowed)
    loaded = load(toy, segment, lambda _: None, usable)
    if not loaded.numa_nodes:
        pytest.skip(f"this system does not let memory be placed: {loaded.numa_note}")
    assert loaded.numa_nodes == usable
    number, total = loaded.numa_note.split(" sampled")[0].split(" of ")
    assert number == total


def test_a_worker_finds_what_lies_near(
    segment: int, toy: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = load(toy, segment, lambda _: None).layout
    keys = [(1, 2), (0, 0), (1, 1), (0, 3)]
    with StoreView(segment) as store:
        offsets: list[int] = []

        def answer(addresses: list[int]) -> list[int]:
            first = addresses[1] - layout.block_offset(0, 0) - layout.block_bytes // 2
            offsets.extend(address - first for address in addresses)
            return [1, 0, -errno.ENOENT, 1]

        monkeypatch.setattr(memory_nodes, "nodes_of_pages", answer)
        assert near_and_far(store, keys, 1) == ([(1, 2), (0, 3)], [(0, 0), (1, 1)])
        middle = layout.block_bytes // 2
        assert offsets == [layout.block_offset(*key) + middle for key in keys]


def test_pages_elsewhere_are_told(segment: int, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = layout_of(4, 4)
    size_segment(segment, layout.total_bytes)
    monkeypatch.setattr(memory_nodes, "nodes_of_pages", lambda addresses: [1] * len(addresses))
    told = tell_placement(segment, layout, (0, 1))
    ranges = len(list(node_ranges(layout, (0, 1), PAGE)))
    assert told == (
        f"{2 * ranges} of {4 * ranges} sampled pages lie on their expert's node"
        f" ({4 * ranges} on node 1)"
    )
    monkeypatch.setattr(memory_nodes, "nodes_of_pages", refuse_to_tell)
    assert "not known" in tell_placement(segment, layout, (0, 1))


def refuse_to_tell(_: object) -> list[int]:
    raise OSError(errno.EPERM, "Operation not permitted")


def test_the_loaders_report_keeps_its_nodes() -> None:
    from expert_store.reports import Loaded, decode_report, encode_report

    report = Loaded(layout_of(2), 1.0, 1.0, numa_nodes=(0, 1), numa_note="as asked")
    assert decode_report(encode_report(report)) == report
    assert msgspec.structs.asdict(report)["numa_nodes"] == (0, 1)
    assert numa_placement.node_of(0, 1, (5, 6)) == 5
