"""The memfd's life: sized once, sealed, mapped, viewed."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import numpy as np
import pytest

from expert_store.layout import DamagedHeaderError, ExpertForm, WrongMagicError, encode_header
from expert_store.layout import make_layout as lay_out
from expert_store.segment import (
    SegmentMap,
    StoreView,
    create_reserved_segment,
    create_segment,
    huge_pages_enabled,
    most_free,
    page_bytes,
    populate_huge_pages,
    reserve_pages,
    size_segment,
    write_into,
)
from protocol.machine import HugetlbPool, read_huge_pages

if TYPE_CHECKING:
    import mmap
    from pathlib import Path

LAYOUT = lay_out(
    model_name="tiny",
    checkpoint_fingerprint="abc",
    form=ExpertForm(
        hidden_size=8,
        intermediate_size=4,
        has_gate=True,
        has_bias=False,
        is_transposed=False,
        is_interleaved=False,
        activation="silu",
        gate="act_mul",
    ),
    dtype="float32",
    model_layer_ids=(0, 1),
    num_experts=(2, 3),
    top_k=2,
)


def write_store(fd: int) -> None:
    size_segment(fd, LAYOUT.total_bytes)
    writer = SegmentMap(fd, writable=True)
    header = encode_header(LAYOUT)
    writer.memory[: len(header)] = header
    for layer, count in enumerate(LAYOUT.num_experts):
        for expert in range(count):
            start = LAYOUT.block_offset(layer, expert)
            numbers = np.full(LAYOUT.expert_bytes // 4, 10 * layer + expert, dtype=np.float32)
            writer.memory[start : start + numbers.nbytes] = numbers.tobytes()
    writer.close()


def test_a_view_shows_what_was_written(segment: int) -> None:
    write_store(segment)
    with StoreView(segment) as view:
        assert view.layout == LAYOUT
        assert len(view.block(1, 2)) == LAYOUT.block_bytes
        for layer, expert in ((0, 0), (0, 1), (1, 0), (1, 2)):
            tensors = view.tensors(layer, expert)
            assert {name: array.shape for name, array in tensors.items()} == {
                "gate_up": (8, 8),
                "down": (8, 4),
            }
            assert all((array == 10 * layer + expert).all() for array in tensors.values())
        with pytest.raises(IndexError):
            view.block(0, 2)


def test_readers_cannot_write(segment: int) -> None:
    write_store(segment)
    view = StoreView(segment)
    with pytest.raises(TypeError):
        view.block(0, 0)[0] = 1
    assert not view.tensors(0, 0)["down"].flags.writeable
    view.close()


def test_sharing_is_by_reference(segment: int) -> None:
    write_store(segment)
    view = StoreView(segment)
    before = view.tensors(0, 1)["down"]
    os.pwrite(segment, np.float32(99).tobytes(), LAYOUT.block_offset(0, 1) + 256)
    assert before[0, 0] == 99
    view.close()  # an array still looks into the mapping: it must stay readable
    assert before[0, 0] == 99


def test_a_sized_segment_is_sealed(segment: int) -> None:
    size_segment(segment, LAYOUT.total_bytes)
    for size in (0, LAYOUT.total_bytes - 1, LAYOUT.total_bytes + 1):
        with pytest.raises(PermissionError):
            os.ftruncate(segment, size)


def test_views_outlive_the_descriptor() -> None:
    fd = create_segment("short")
    write_store(fd)
    view = StoreView(fd)
    os.close(fd)
    assert view.tensors(1, 1)["gate_up"][0, 0] == 11
    view.close()


def test_empty_and_unloaded_segments_are_no_stores(segment: int) -> None:
    with pytest.raises(WrongMagicError, match="empty"):
        StoreView(segment)
    size_segment(segment, LAYOUT.total_bytes)  # as after a loader that died: no header yet
    with pytest.raises(WrongMagicError):
        StoreView(segment)


def test_a_size_other_than_the_headers_is_an_error(segment: int) -> None:
    os.ftruncate(segment, LAYOUT.total_bytes + 4096)
    os.pwrite(segment, encode_header(LAYOUT), 0)
    with pytest.raises(DamagedHeaderError, match="bytes"):
        StoreView(segment)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("always within_size advise [never] deny force", False),
        ("always within_size [advise] never deny force", True),
        ("[always] within_size advise never deny force", True),
        ("always within_size advise never [deny] force", False),
        ("", False),
    ],
)
def test_huge_pages_are_read_from_the_kernels_words(
    text: str, expected: bool, tmp_path: Path
) -> None:
    setting = tmp_path / "shmem_enabled"
    setting.write_text(text)
    assert huge_pages_enabled(setting) is expected
    assert huge_pages_enabled(tmp_path / "absent") is False


def test_populating_touches_every_page_and_counts_what_is_huge(
    segment: int, tmp_path: Path
) -> None:
    setting, counters = tmp_path / "shmem_enabled", tmp_path / "smaps_rollup"
    setting.write_text("always within_size [advise] never deny force")
    size_segment(segment, LAYOUT.total_bytes)
    counters.write_text("Rss: 8 kB\nShmemPmdMapped:     4096 kB\n")
    told: list[int] = []

    def hear(done_bytes: int) -> None:
        told.append(done_bytes)
        counters.write_text("Rss: 8 kB\nShmemPmdMapped:     6144 kB\n")

    granted = populate_huge_pages(segment, hear, setting=setting, counters=counters)
    assert granted == 2048 * 1024
    assert told == [LAYOUT.total_bytes]
    assert os.fstat(segment).st_blocks * 512 >= LAYOUT.total_bytes
    write_again = SegmentMap(segment)
    assert bytes(write_again.memory[:64]) == bytes(64)
    write_again.close()


def test_small_pages_are_left_to_the_writer(segment: int, tmp_path: Path) -> None:
    setting = tmp_path / "shmem_enabled"
    setting.write_text("always within_size advise [never] deny force")
    size_segment(segment, LAYOUT.total_bytes)
    told: list[int] = []
    assert populate_huge_pages(segment, told.append, setting=setting) == 0
    assert not told
    assert os.fstat(segment).st_blocks == 0


# ---- huge pages that were set aside ----

POOLS = [HugetlbPool(2 << 20, 64, 40), HugetlbPool(1 << 30, 2, 0)]


def test_the_pool_with_the_most_free_memory_is_chosen() -> None:
    assert most_free(POOLS) == POOLS[0]
    assert most_free([*POOLS, HugetlbPool(1 << 30, 1, 1)]) == HugetlbPool(1 << 30, 1, 1)
    assert most_free([HugetlbPool(2 << 20, 64, 0)]) is None
    assert most_free([]) is None


def test_a_reserved_segment_holds_a_store(reserved: int) -> None:
    told: list[int] = []
    prepared: list[int] = []

    def prepare(region: mmap.mmap) -> None:
        prepared.append(len(region))

    region = reserve_pages(reserved, LAYOUT.total_bytes, told.append, prepare)
    assert region is not None
    size = page_bytes(reserved)
    assert size >= 2 << 20
    assert told == prepared == [len(region)]
    assert len(region) % size == 0
    assert LAYOUT.total_bytes <= len(region) < LAYOUT.total_bytes + size
    with pytest.raises(PermissionError):
        os.ftruncate(reserved, 0)
    offset = LAYOUT.block_offset(1, 0)
    write_into(region, memoryview(b"\x07" * 64), offset)
    write_into(region, memoryview(encode_header(LAYOUT)), 0)
    with StoreView(reserved) as view:
        assert view.layout == LAYOUT
        assert view.has_huge_pages
        assert bytes(view.block(1, 0)[:65]) == b"\x07" * 64 + b"\0"
    region.close()


def test_too_few_reserved_pages_leave_the_segment_empty(reserved: int) -> None:
    pool = most_free(read_huge_pages().pools)
    assert pool is not None
    too_many = (pool.num_free + 4096) * pool.page_bytes
    assert reserve_pages(reserved, too_many, lambda _: None) is None
    assert os.fstat(reserved).st_size == 0
    assert most_free(read_huge_pages().pools) == pool  # and none was kept


def test_a_page_size_that_the_kernel_has_not_is_no_segment() -> None:
    assert create_reserved_segment("none", HugetlbPool(1 << 13, 1, 1)) is None
