"""Checkpoints are built once per session and only read; who wants to break one copies it."""

from __future__ import annotations

import json
import os
import shutil
import struct
from typing import TYPE_CHECKING, Any

import pytest

from expert_store.checkpoint import open_checkpoint
from expert_store.segment import create_reserved_segment, create_segment, most_free
from protocol.machine import read_huge_pages

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from expert_store.layout import StoreLayout
    from expert_store.reports import Progress


@pytest.fixture(scope="session")
def checkpoint_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """family, options of make_checkpoint -> directory, made at most once."""
    root = tmp_path_factory.mktemp("checkpoints")
    made: dict[tuple[Any, ...], Path] = {}

    def get(family: str, **options: Any) -> Path:
        key = (family, *sorted(options.items()))
        if key not in made:
            from tests.checkpoints import make_checkpoint  # torch: only who needs it pays

            made[key] = make_checkpoint(family, root / f"{family}-{len(made)}", **options)
        return made[key]

    return get


@pytest.fixture
def broken_copy(tmp_path: Path) -> Callable[[Path], Path]:
    """directory -> a copy of its own that a test may spoil."""

    def get(source: Path) -> Path:
        return shutil.copytree(source, tmp_path / "model")

    return get


@pytest.fixture
def segment() -> Iterator[int]:
    fd = create_segment("test")
    yield fd
    os.close(fd)


@pytest.fixture
def reserved() -> Iterator[int]:
    """An empty segment of huge pages that were set aside."""
    pool = most_free(read_huge_pages().pools)
    if pool is None or pool.num_free * pool.page_bytes < 16 << 20:
        pytest.skip("fewer than 16 MiB of huge pages are set aside here (sysctl vm.nr_hugepages)")
    fd = create_reserved_segment("reserved", pool)
    assert fd is not None
    yield fd
    os.close(fd)


@pytest.fixture
def load_into(segment: int) -> Callable[..., StoreLayout]:
    """directory, dtype -> the layout, loaded into ``segment`` in this process."""

    def get(
        directory: Path, dtype: str = "auto", report: Callable[[Progress], None] = lambda _: None
    ) -> StoreLayout:
        from expert_store.loader import Plan, load

        return load(Plan(open_checkpoint(directory), dtype), segment, report).layout

    return get


Header = dict[str, dict[str, Any]]


@pytest.fixture(scope="session")
def edit_shard() -> Callable[..., None]:
    """Rewrite a safetensors file through a function of its header and data, both changed freely."""

    def edit(path: Path, change: Callable[[Header, bytearray], Any]) -> None:
        raw = path.read_bytes()
        (length,) = struct.unpack("<Q", raw[:8])
        header, data = json.loads(raw[8 : 8 + length]), bytearray(raw[8 + length :])
        change(header, data)
        text = json.dumps(header).encode()
        path.write_bytes(struct.pack("<Q", len(text)) + text + data)

    return edit


@pytest.fixture(scope="session")
def replace_tensor(edit_shard: Callable[..., None]) -> Callable[..., None]:
    """path, old name, {new name: (dtype, shape, bytes)}: take one tensor out, append others."""

    def replace(path: Path, old: str | None, new: dict[str, tuple[str, list[int], bytes]]) -> None:
        def change(header: Header, data: bytearray) -> None:
            if old is not None:
                begin, end = header.pop(old)["data_offsets"]
                del data[begin:end]
                for name, entry in header.items():
                    if name != "__metadata__" and entry["data_offsets"][0] >= end:
                        entry["data_offsets"] = [x - (end - begin) for x in entry["data_offsets"]]
            for name, (dtype, shape, raw) in new.items():
                offsets = [len(data), len(data) + len(raw)]
                header[name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
                data += raw

        edit_shard(path, change)

    return replace
