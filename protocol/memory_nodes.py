"""System calls about memory and NUMA nodes: where pages are to lie, and where they do.

Containers often forbid them (Docker's default seccomp profile answers EPERM); every function here
then raises OSError with the kernel's reason, and the caller says what that means for it.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Syscall = Callable[..., int]

#: System call numbers: arch/x86/entry/syscalls/syscall_64.tbl; include/uapi/asm-generic/unistd.h.
_SYSCALL_NUMBERS = {
    "x86_64": {"mbind": 237, "set_mempolicy": 238, "get_mempolicy": 239, "move_pages": 279},
    "aarch64": {"mbind": 235, "get_mempolicy": 236, "set_mempolicy": 237, "move_pages": 239},
}
_MPOL_PREFERRED = 1  # include/uapi/linux/mempolicy.h
#: The kernel refuses a mask narrower than its own number of possible nodes, which is at most this.
MAX_NODES = 1024
WORD_BITS = 8 * ctypes.sizeof(ctypes.c_ulong)


@dataclass(frozen=True)
class PageNodes:
    """Where sampled pages lie: node -> pages; `num_absent` are not in memory yet."""

    per_node: dict[int, int]
    num_absent: int
    num_unknown: int


def libc_syscall(name: str, *arguments: object) -> int:
    """One system call by name. Raises OSError with the kernel's reason (ENOSYS if unknown)."""
    number = _SYSCALL_NUMBERS.get(platform.machine(), {}).get(name)
    if number is None or os.name != "posix":
        raise OSError(errno.ENOSYS, f"{name} is not known on {platform.machine()}")
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    result = libc.syscall(ctypes.c_long(number), *arguments)
    if result < 0:
        reason = ctypes.get_errno()
        raise OSError(reason, os.strerror(reason))
    return int(result)


def node_mask(node: int) -> ctypes.Array[ctypes.c_ulong]:
    """The kernel's bit mask of this one node, for MAX_NODES nodes.

    The kernel reads one bit less than it is told: say MAX_NODES + 1.
    """
    mask = (ctypes.c_ulong * (MAX_NODES // WORD_BITS))()
    mask[node // WORD_BITS] = 1 << (node % WORD_BITS)
    return mask


def prefer_node(address: int, num_bytes: int, node: int, syscall: Syscall = libc_syscall) -> None:
    """Have pages of [address, address + num_bytes) that are not in memory yet come from `node`, or
    from others when it is full. `address` begins a page.

    On a shared mapping of a memfd this is a property of the memory and not of the mapping: it holds
    for whoever touches the pages first, also by writing to the file. In huge pages of hugetlbfs it
    holds within this mapping alone.
    """
    syscall(
        "mbind",
        ctypes.c_void_p(address),
        ctypes.c_ulong(num_bytes),
        ctypes.c_int(_MPOL_PREFERRED),
        node_mask(node),
        ctypes.c_ulong(MAX_NODES + 1),
        ctypes.c_uint(0),
    )


def nodes_of_pages(addresses: Sequence[int], syscall: Syscall = libc_syscall) -> list[int]:
    """The node of the page at each address, or a negated errno: -ENOENT for a page that this
    process has not touched yet. Moves nothing."""
    count = len(addresses)
    if not count:
        return []
    pages = (ctypes.c_void_p * count)(*addresses)
    status = (ctypes.c_int * count)()
    syscall(
        "move_pages",
        ctypes.c_int(0),
        ctypes.c_ulong(count),
        pages,
        ctypes.c_void_p(None),
        status,
        ctypes.c_int(0),
    )
    return list(status)


def page_nodes(
    address: int, num_bytes: int, *, max_pages: int = 512, syscall: Syscall = libc_syscall
) -> PageNodes:
    """Sample the pages of [address, address + num_bytes) evenly and ask where each lies."""
    page_bytes = os.sysconf("SC_PAGE_SIZE")
    first = address // page_bytes
    num_pages = -(-(address + num_bytes) // page_bytes) - first
    if num_bytes <= 0 or max_pages <= 0:
        return PageNodes({}, 0, 0)
    count = min(num_pages, max_pages)
    answers = Counter(
        nodes_of_pages(
            [(first + index * num_pages // count) * page_bytes for index in range(count)], syscall
        )
    )
    return PageNodes(
        per_node={node: num for node, num in sorted(answers.items()) if node >= 0},
        num_absent=answers[-errno.ENOENT],
        num_unknown=sum(num for node, num in answers.items() if node < 0 and node != -errno.ENOENT),
    )
