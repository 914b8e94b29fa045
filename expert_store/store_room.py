"""Memory for a store, before the first byte of it is written.

    reserved huge pages, if there is such a segment and it has enough of them
    else the ordinary segment: memory asked for -> sized -> NUMA nodes -> huge pages if enabled

What the kernel gives is decided here and nowhere else; who writes has one function for both.
"""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from expert_store.checkpoint import CheckpointError
from expert_store.memory import memory_room, require_memory
from expert_store.numa_placement import prefer_nodes, tell_placement
from expert_store.reading import write_all
from expert_store.segment import populate_huge_pages, reserve_pages, size_segment, write_into

if TYPE_CHECKING:
    from collections.abc import Callable

    from expert_store.layout import StoreLayout
    from expert_store.reading import Write


@dataclass
class StoreRoom:
    """Where a load writes. `huge_page_bytes` are how much of it is in huge pages of either kind;
    `spare_bytes` is the memory that the machine has left beyond store and dense weights."""

    fd: int
    write: Write
    huge_page_bytes: int
    spare_bytes: int
    is_reserved: bool
    reserved_note: str
    numa_nodes: tuple[int, ...]
    numa_note: str

    def tell_placement(self, layout: StoreLayout) -> None:
        """Once all is written: see where it has come to lie."""
        if self.numa_nodes:
            self.numa_note = tell_placement(self.fd, layout, self.numa_nodes)


def make_room(
    fd: int,
    reserved_fd: int | None,
    layout: StoreLayout,
    dense_bytes: int,
    numa_nodes: tuple[int, ...],
    told: Callable[[int], None],
) -> StoreRoom:
    """Size one of two empty segments and have its pages come from `numa_nodes`. `told` hears how
    many bytes are populated.

    Raises CheckpointError for a descriptor that is no empty memfd, and NotEnoughMemoryError.
    """
    numa_note = ""

    def prepare(region: mmap.mmap, segment_fd: int) -> None:
        nonlocal numa_note
        if numa_nodes:
            numa_note = prefer_nodes(region, layout, numa_nodes, segment_fd)

    region = None
    if reserved_fd is not None:
        region = reserve_pages(
            reserved_fd, layout.total_bytes, told, partial(prepare, segment_fd=reserved_fd)
        )
    if region is not None and reserved_fd is not None:
        machine = memory_room()
        require_memory(0, dense_bytes, machine)  # its own was set aside long ago
        return StoreRoom(
            fd=reserved_fd,
            write=partial(write_into, region),
            huge_page_bytes=len(region),
            spare_bytes=machine.available_bytes - dense_bytes,
            is_reserved=True,
            reserved_note="",
            numa_nodes=() if numa_note else numa_nodes,
            numa_note=numa_note,
        )

    machine = memory_room()
    require_memory(layout.total_bytes, dense_bytes, machine)
    try:
        if os.fstat(fd).st_size != 0:
            raise CheckpointError(f"descriptor {fd}: not an empty segment; pass a new memfd")
        size_segment(fd, layout.total_bytes)
    except OSError as error:
        raise CheckpointError(
            f"descriptor {fd}: not a memfd that this process inherited ({error.strerror});"
            " pass the descriptor of a new memfd"
        ) from error
    if numa_nodes:  # before the first page is touched
        with mmap.mmap(fd, layout.total_bytes) as whole:
            prepare(whole, fd)
    return StoreRoom(
        fd=fd,
        write=partial(write_all, fd),
        huge_page_bytes=populate_huge_pages(fd, told),
        spare_bytes=machine.available_bytes - layout.total_bytes - dense_bytes,
        is_reserved=False,
        reserved_note="" if reserved_fd is None else "; too few reserved pages are free for them",
        numa_nodes=() if numa_note else numa_nodes,
        numa_note=numa_note,
    )
