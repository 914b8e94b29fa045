"""Binding a worker to one NUMA node, and proof from inside that it worked.

`bind_node` must run before torch (or anything else that starts threads) is imported: the kernel
keeps cpus and memory policy per thread, and new threads inherit both from the one that makes them.

Two steps, of which containers often forbid the second (Docker's default seccomp profile answers
set_mempolicy with EPERM):

1. sched_setaffinity to the node's cpus that we may use. First touch then places new pages on the
   node for as long as it has free memory: nearly as good.
2. set_mempolicy(MPOL_BIND): the kernel may take pages from this node alone.

Each step is verified by asking the kernel back, and whatever cannot be had is left out with one
clear line: membind -> cpu-only -> none. Only a node that the machine does not have is an error.

A process started by `numactl --membind` has its policy before its first line runs; that is found
and reported, and kept when no node is asked for.

`read_mapping`, and `page_nodes` of protocol.memory_nodes, answer the other question: where do the
pages of a buffer lie? The store's pages were placed by the loader (expert_store.numa_placement), or
by whoever touched them first, which no policy set here changes.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from protocol.errors import UserError
from protocol.machine import ROOT, NumaNode, format_cpu_list, read_cpus, read_nodes
from protocol.memory_nodes import MAX_NODES, WORD_BITS, libc_syscall, node_mask

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

#: include/uapi/linux/mempolicy.h; the bits above the low byte are flags.
_POLICY_NAMES = ("default", "preferred", "bind", "interleave", "local", "preferred-many")
_MPOL_BIND = 2
_MPOL_MODE_MASK = 0xFF

Level = Literal["membind", "cpu-only", "none"]


@dataclass(frozen=True)
class BindReport:
    """What the process is bound to now, as the kernel says, and the one line that tells it.

    `level` is what holds: cpus and memory, cpus alone, or nothing. `is_inherited` is true when
    the memory policy was there before we came (numactl). `policy` and `policy_nodes` are the
    kernel's own answer; "unknown" where it may not be asked. `cpus` are those allowed now.
    `is_complete` is false when something asked for could not be had.
    """

    node: int | None
    level: Level
    is_inherited: bool
    is_complete: bool
    cpus: tuple[int, ...]
    policy: str
    policy_nodes: tuple[int, ...]
    message: str


@dataclass(frozen=True)
class Mapping:
    """One line of numa_maps: its policy (`default`, `bind:0`, ...) and pages per node."""

    policy: str
    per_node: dict[int, int]


def _set_cpus(cpus: Iterable[int]) -> None:
    os.sched_setaffinity(0, cpus)


def _get_cpus() -> set[int]:
    return os.sched_getaffinity(0)


@dataclass(frozen=True)
class Kernel:
    """The calls that change or ask; a test puts its own in their place."""

    syscall: Callable[..., int] = field(default=libc_syscall)
    set_cpus: Callable[[Iterable[int]], None] = field(default=_set_cpus)
    get_cpus: Callable[[], set[int]] = field(default=_get_cpus)


def bind_node(node: int | None, *, root: Path = ROOT, kernel: Kernel | None = None) -> BindReport:
    """Bind the calling thread, and the threads it will start, to a NUMA node.

    With `node` None nothing is changed and the report says what was inherited. Raises UserError
    for a node that this machine does not have; anything the system forbids only lowers `level`.
    """
    kernel = kernel or Kernel()
    nodes = read_nodes(root)
    if node is None:
        return _report_inherited(nodes, kernel)
    wanted = next((each for each in nodes if each.node == node), None)
    if wanted is None:
        raise UserError(
            f"--numa-node {node}: this machine has no such NUMA node; "
            f"it has {_name_nodes(each.node for each in nodes)}"
        )

    policy_before, nodes_before = _read_policy(kernel)
    is_inherited = policy_before == "bind" and nodes_before == (node,)
    reason = _bind_cpus(wanted, root, kernel)
    if reason is not None:
        level: Level = "none"
    else:
        reason = None if is_inherited else _bind_memory(wanted, kernel)
        level = "membind" if reason is None else "cpu-only"

    policy, policy_nodes = _read_policy(kernel)
    cpus = tuple(sorted(kernel.get_cpus()))
    where = f"cpus {format_cpu_list(cpus)}"
    if level == "membind":
        who = " (memory by numactl)" if is_inherited else ""
        message = f"bound to NUMA node {node}: {where} and memory{who}"
    elif level == "cpu-only":
        message = (
            f"bound to NUMA node {node} by {where} only: {reason}; "
            "pages still go to this node while it has room"
        )
    else:
        message = f"not bound to NUMA node {node}: {reason}; going on with {where}"
    return BindReport(
        node=node,
        level=level,
        is_inherited=is_inherited,
        is_complete=level == "membind",
        cpus=cpus,
        policy=policy,
        policy_nodes=policy_nodes,
        message=message,
    )


def _report_inherited(nodes: tuple[NumaNode, ...], kernel: Kernel) -> BindReport:
    policy, policy_nodes = _read_policy(kernel)
    cpus = tuple(sorted(kernel.get_cpus()))
    inside = [each.node for each in nodes if set(cpus) <= set(each.cpus)]
    node = inside[0] if inside else None
    is_bound = policy == "bind" and (node is None or policy_nodes == (node,))
    where = f"cpus {format_cpu_list(cpus)}"
    level: Level = "none"
    if policy == "bind":
        level = "membind" if is_bound else "none"
        message = f"numactl bound this process: {where}, memory of {_name_nodes(policy_nodes)}"
        if not is_bound:
            message += f"; these cpus belong to node {node}, so every read crosses the nodes"
    elif node is not None and len(nodes) > 1:
        level = "cpu-only"
        message = f"the affinity mask keeps this process on NUMA node {node}: {where}"
    elif len(nodes) > 1:
        message = f"not bound to a NUMA node, though the machine has {len(nodes)}: {where}"
    else:
        node = nodes[0].node
        message = f"the machine has one NUMA node, so there is nothing to bind: {where}"
    return BindReport(
        node=node,
        level=level,
        is_inherited=policy == "bind",
        is_complete=policy != "bind" or is_bound,
        cpus=cpus,
        policy=policy,
        policy_nodes=policy_nodes,
        message=message,
    )


def _bind_cpus(node: NumaNode, root: Path, kernel: Kernel) -> str | None:
    """None when the thread now runs on the node's cpus alone, else why it does not."""
    allowed = read_cpus(root, affinity=kernel.get_cpus()).allowed
    cpus = sorted(set(allowed) & set(node.cpus))
    if not node.cpus:
        return "it has memory but no cpus"
    if not cpus:
        return (
            f"its cpus {format_cpu_list(node.cpus)} are not among those allowed here "
            f"({format_cpu_list(allowed)})"
        )
    try:
        kernel.set_cpus(cpus)
    except OSError as error:
        return f"the system forbids setting cpus ({_name_error(error)})"
    if not kernel.get_cpus() <= set(cpus):
        return "the system took the setting of cpus but does not keep to it"
    return None


def _bind_memory(node: NumaNode, kernel: Kernel) -> str | None:
    """None when the kernel confirms the memory policy, else why it does not hold."""
    if not node.is_memory_allowed:
        return "the cpuset allows no memory of this node"
    try:
        kernel.syscall(
            "set_mempolicy",
            ctypes.c_int(_MPOL_BIND),
            node_mask(node.node),
            ctypes.c_ulong(MAX_NODES + 1),
        )
    except OSError as error:
        return f"the system forbids binding memory ({_name_error(error)})"
    policy, nodes = _read_policy(kernel)
    if policy == "unknown":  # it may be set but not asked: believe the answer of the first call
        return None
    if policy != "bind" or nodes != (node.node,):
        return f"the kernel took the memory policy but reports {policy} {_name_nodes(nodes)}"
    return None


def _read_policy(kernel: Kernel) -> tuple[str, tuple[int, ...]]:
    """The calling thread's memory policy and its nodes; ("unknown", ()) if not to be asked."""
    mode = ctypes.c_int(0)
    mask = (ctypes.c_ulong * (MAX_NODES // WORD_BITS))()
    try:
        kernel.syscall(
            "get_mempolicy",
            ctypes.byref(mode),
            mask,
            ctypes.c_ulong(MAX_NODES + 1),
            ctypes.c_void_p(None),
            ctypes.c_ulong(0),
        )
    except OSError:
        return "unknown", ()
    number = mode.value & _MPOL_MODE_MASK
    name = _POLICY_NAMES[number] if number < len(_POLICY_NAMES) else f"policy {number}"
    nodes = tuple(
        index * WORD_BITS + bit
        for index, word in enumerate(mask)
        if word
        for bit in range(WORD_BITS)
        if word >> bit & 1
    )
    return name, nodes


def read_mapping(address: int, *, root: Path = ROOT) -> Mapping | None:
    """The mapping around this address, from /proc/self/numa_maps; None if there is no such file.

    The file gives where mappings begin but not where they end: the last one that begins at or
    below the address is taken, so the address must be mapped.
    """
    try:
        lines = (root / "proc/self/numa_maps").read_text(errors="replace").splitlines()
    except OSError:
        return None
    best: tuple[int, str] | None = None
    for line in lines:
        start_text, _, rest = line.partition(" ")
        start = int(start_text, 16)
        if start <= address and (best is None or start > best[0]):
            best = (start, rest)
    if best is None:
        return None
    policy = best[1].split(" ", 1)[0]
    found = re.findall(r"\bN(\d+)=(\d+)", best[1])
    return Mapping(policy, {int(node): int(num_pages) for node, num_pages in found})


def _name_nodes(nodes: Iterable[int]) -> str:
    numbers = sorted(nodes)
    if not numbers:
        return "no node"
    return f"node{'s' if len(numbers) > 1 else ''} {format_cpu_list(numbers)}"


def _name_error(error: OSError) -> str:
    return errno.errorcode.get(error.errno or 0, str(error))
