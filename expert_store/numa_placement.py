"""On which NUMA node each expert's weights lie, when cpu_workers are bound to nodes.

    nodes (0, 1), 6 experts a layer        layer 0          layer 1
                                        0 1 2 | 3 4 5    0 1 2 | 3 4 5
                                        node 0  node 1   node 0  node 1

Every layer is spread evenly over all nodes, in neighbouring experts, so that whatever layer runs,
all cpu_workers have near memory to read, and huge pages are seldom cut. The orchestrator divides
set C by the same rule. A node is preferred, not demanded: when it is full, pages come from another,
which `tell_placement` finds by asking the kernel where pages lie.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

from protocol import memory_nodes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from expert_store.layout import StoreLayout
    from expert_store.segment import StoreView

_PAGES_PER_RANGE = 4
_MAX_SAMPLED_RANGES = 256


def node_of(expert: int, num_experts: int, nodes: Sequence[int]) -> int:
    """The node of one of a layer's experts."""
    return nodes[expert * len(nodes) // num_experts]


def expert_nodes(layout: StoreLayout, nodes: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """The node of every (layer, expert); nothing where there are no nodes to choose from."""
    if not nodes:
        return ()
    return tuple(
        tuple(node_of(expert, count, nodes) for expert in range(count))
        for count in layout.num_experts
    )


def node_ranges(
    layout: StoreLayout, nodes: Sequence[int], page_bytes: int
) -> Iterator[tuple[int, int, int]]:
    """(start, end, node) of the segment's bytes, in order, without gaps, in whole pages but for the
    last end. A page that two nodes' experts share is the later one's."""
    start, node = 0, nodes[0]
    for layer, count in enumerate(layout.num_experts):
        for expert in range(count):
            wanted = node_of(expert, count, nodes)
            if wanted != node:
                end = layout.block_offset(layer, expert) // page_bytes * page_bytes
                if end > start:
                    yield start, end, node
                start, node = end, wanted
    yield start, layout.total_bytes, node


def prefer_nodes(region: mmap.mmap, layout: StoreLayout, nodes: Sequence[int], fd: int) -> str:
    """Have the segment's pages come from their nodes when they are first touched. `region` is a
    writable shared mapping of the whole of `fd`. "" when the kernel agreed, else why it did not."""
    first = ctypes.c_char.from_buffer(region)
    try:
        address = ctypes.addressof(first)
        # What the kernel fills and splits by: huge pages where the segment has them.
        for start, end, node in node_ranges(layout, nodes, os.fstat(fd).st_blksize):
            is_last = end == layout.total_bytes  # and the segment ends with a whole page
            end = len(region) if is_last else end
            memory_nodes.prefer_node(address + start, end - start, node)
    except OSError as error:
        reason = errno.errorcode.get(error.errno or 0, str(error))
        return f"weights lie wherever the system puts them: it refuses mbind ({reason})"
    finally:
        del first  # or the mapping could not be closed
    return ""


def near_and_far(
    store: StoreView, keys: Sequence[tuple[int, int]], node: int
) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Of these (layer, expert), those that lie on `node` and those that do not, in their order. The
    page in the middle of a block speaks for it. Raises OSError where that is forbidden."""
    middles = [store.layout.block_offset(*key) + store.layout.block_bytes // 2 for key in keys]
    for middle in middles:
        _ = store.memory[middle]  # a page that this process has not touched lies nowhere for it
    address = np.frombuffer(store.memory, np.uint8).ctypes.data
    places = memory_nodes.nodes_of_pages([address + middle for middle in middles])
    near = [key for key, place in zip(keys, places, strict=True) if place == node]
    far = [key for key, place in zip(keys, places, strict=True) if place != node]
    return near, far


def tell_placement(fd: int, layout: StoreLayout, nodes: Sequence[int]) -> str:
    """One line: how many of some sampled pages lie on the node of their expert."""
    num_right, where = 0, Counter[int]()
    with mmap.mmap(fd, os.fstat(fd).st_size, prot=mmap.PROT_READ | mmap.PROT_WRITE) as region:
        ranges = list(node_ranges(layout, nodes, mmap.PAGESIZE))
        step = -(-len(ranges) // _MAX_SAMPLED_RANGES)
        wanted: list[int] = []
        offsets: list[int] = []
        for start, end, node in ranges[::step]:
            for index in range(_PAGES_PER_RANGE):
                offset = start + (end - start) * index // _PAGES_PER_RANGE
                offsets.append(offset // mmap.PAGESIZE * mmap.PAGESIZE)
                wanted.append(node)
        for offset in offsets:
            _ = region[offset]  # as above
        first = ctypes.c_char.from_buffer(region)
        try:
            address = ctypes.addressof(first)
            found = memory_nodes.nodes_of_pages([address + offset for offset in offsets])
        except OSError as error:
            return f"where the weights lie is not known: {error.strerror}"
        finally:
            del first
    for node, place in zip(wanted, found, strict=True):
        num_right += place == node
        where[place] += 1
    told = ", ".join(f"{where[node]} on node {node}" for node in sorted(where) if node >= 0)
    return f"{num_right} of {len(wanted)} sampled pages lie on their expert's node ({told})"
