"""What this machine gives us: cores, memory, NUMA nodes and limits, as the kernel tells it.

Everything is read from the text files of /proc and /sys below a `root` that the caller may choose,
so a test describes a machine by writing files. Nothing here changes anything, and nothing is
remembered between calls: limits move while a container runs.

Three numbers are easy to get wrong, and this module is where they are got right:

* The cpus that we may use are the affinity mask and the cgroup's cpuset and the online cpus, all
  three at once; a container with `--cpus 2` on a 64-core host has 64 of them and a quota of 2.
* A cgroup's limit holds for every cgroup below it, so limits are the least one met on the way from
  our own cgroup up to the mount. A file that a container hides is no limit.
* What is free in a cgroup is its limit less its usage, plus the page cache that the kernel would
  drop first.
"""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

ROOT = Path("/")
#: cgroup v1 writes "no limit" as a number near 2**63.
_V1_UNLIMITED_BYTES = 1 << 60
#: On Arm, a core of less than this share of the fastest core's capacity is an efficiency core.
_EFFICIENCY_CAPACITY_SHARE = 0.6


@dataclass(frozen=True)
class Cpus:
    """The logical cpus that this process may use, and how they are grouped into cores.

    `physical` holds one cpu (the lowest allowed) of every physical core; `performance` and
    `efficiency` split `physical` on a hybrid machine and are empty on any other.
    `quota` is the cgroup's limit in cpus (1.5 = one and a half), None without one.
    """

    allowed: tuple[int, ...]
    physical: tuple[int, ...]
    performance: tuple[int, ...]
    efficiency: tuple[int, ...]
    quota: float | None


@dataclass(frozen=True)
class Memory:
    """Host memory in bytes. `headroom_bytes` is what may still be taken before a limit is hit."""

    total_bytes: int
    available_bytes: int
    cgroup_limit_bytes: int | None
    cgroup_free_bytes: int | None
    headroom_bytes: int


@dataclass(frozen=True)
class NumaNode:
    """One NUMA node; `cpus` are all of its cpus, whether or not this process may use them."""

    node: int
    cpus: tuple[int, ...]
    total_bytes: int
    free_bytes: int
    is_memory_allowed: bool


@dataclass(frozen=True)
class HugetlbPool:
    """Pages of one size that the administrator has set aside."""

    page_bytes: int
    num_reserved: int
    num_free: int


@dataclass(frozen=True)
class HugePages:
    """Transparent huge pages as set (`always`, `madvise`, `never`, ...; "" where unknown)."""

    transparent: str
    shared_memory: str
    pools: tuple[HugetlbPool, ...]


@dataclass(frozen=True)
class Machine:
    """All of it. `memlock_bytes` None means unlimited; `/dev/shm` figures None mean no such mount.

    `containers` holds hints such as "docker", "wsl2" or "seccomp filter", not proof.
    """

    cpus: Cpus
    memory: Memory
    nodes: tuple[NumaNode, ...]
    huge_pages: HugePages
    memlock_bytes: int | None
    shm_total_bytes: int | None
    shm_free_bytes: int | None
    containers: tuple[str, ...]


def read_machine(root: Path = ROOT) -> Machine:
    """Read everything that this module knows. Raises nothing for files that are missing."""
    shm_total_bytes, shm_free_bytes = read_shm(root)
    return Machine(
        cpus=read_cpus(root),
        memory=read_memory(root),
        nodes=read_nodes(root),
        huge_pages=read_huge_pages(root),
        memlock_bytes=read_memlock(root),
        shm_total_bytes=shm_total_bytes,
        shm_free_bytes=shm_free_bytes,
        containers=read_containers(root),
    )


def worker_threads(cpus: Cpus) -> int:
    """Compute threads for one worker: min(allowed cpus, ceil(cgroup quota), physical cores).

    More threads than that only wait for each other: an expert is read at memory speed, which the
    second hardware thread of a core does not raise.
    """
    num_threads = min(len(cpus.allowed), len(cpus.physical))
    if cpus.quota is not None:
        num_threads = min(num_threads, math.ceil(cpus.quota))
    return max(num_threads, 1)


# --- cpus -------------------------------------------------------------------------------------


def read_cpus(root: Path = ROOT, affinity: Collection[int] | None = None) -> Cpus:
    """The cpus for a process with this `affinity` (default: the mask of the main thread here)."""
    allowed = _allowed_cpus(root, affinity)
    physical = _physical_cores(root, allowed)
    performance, efficiency = _hybrid_cores(root, physical)
    return Cpus(allowed, physical, performance, efficiency, _cpu_quota(root))


def parse_cpu_list(text: str) -> tuple[int, ...]:
    """`"0-3,8"` -> (0, 1, 2, 3, 8), sorted. Raises ValueError for text that is no such list."""
    found: set[int] = set()
    for part in filter(None, (part.strip() for part in text.strip().split(","))):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return tuple(sorted(found))


def format_cpu_list(cpus: Collection[int]) -> str:
    """(0, 1, 2, 3, 8) -> `"0-3,8"`, the way the kernel writes it."""
    ranges: list[list[int]] = []
    for cpu in sorted(cpus):
        if ranges and cpu == ranges[-1][1] + 1:
            ranges[-1][1] = cpu
        else:
            ranges.append([cpu, cpu])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in ranges)


def _allowed_cpus(root: Path, affinity: Collection[int] | None) -> tuple[int, ...]:
    if affinity is None:
        affinity = _status_list(root, "Cpus_allowed_list")
    online = _read_list(root / "sys/devices/system/cpu/online")
    mask = set(affinity) or set(online) or set(range(os.cpu_count() or 1))
    if online:
        mask = mask & set(online) or mask
    # The kernel keeps the mask inside the cpuset, but some sandboxes only fake one of the two.
    for directory in _cgroup_directories(root, "cpuset"):
        for name in ("cpuset.cpus.effective", "cpuset.effective_cpus", "cpuset.cpus"):
            cpuset = _read_list(directory / name)
            if cpuset:
                return tuple(sorted(mask & set(cpuset) or mask))
    return tuple(sorted(mask))


def _physical_cores(root: Path, allowed: tuple[int, ...]) -> tuple[int, ...]:
    seen: set[int] = set()
    physical = []
    for cpu in allowed:
        if cpu in seen:
            continue
        topology = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
        siblings = _read_list(topology / "thread_siblings_list")
        seen.update(siblings or _read_list(topology / "core_cpus_list"), {cpu})
        physical.append(cpu)
    return tuple(physical)


def _hybrid_cores(root: Path, physical: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    performance = set(_read_list(root / "sys/devices/cpu_core/cpus"))
    if not performance:  # not Intel's way of saying it; Arm gives every cpu a capacity
        capacity = {
            cpu: _read_int(root / f"sys/devices/system/cpu/cpu{cpu}/cpu_capacity") or 0
            for cpu in physical
        }
        least = _EFFICIENCY_CAPACITY_SHARE * max(capacity.values(), default=0)
        performance = {cpu for cpu, value in capacity.items() if value >= least}
    fast = tuple(cpu for cpu in physical if cpu in performance)
    slow = tuple(cpu for cpu in physical if cpu not in performance)
    return (fast, slow) if slow else ((), ())


def _cpu_quota(root: Path) -> float | None:
    quotas = []
    for directory in _cgroup_directories(root, "cpu"):
        words = _read_text(directory / "cpu.max").split()
        if not words:
            words = [
                _read_text(directory / "cpu.cfs_quota_us"),
                _read_text(directory / "cpu.cfs_period_us"),
            ]
        if len(words) == 2 and words[0].isdigit() and words[1].isdigit() and int(words[1]) > 0:
            quotas.append(int(words[0]) / int(words[1]))
    return min(quotas, default=None)


# --- memory -----------------------------------------------------------------------------------


def read_memory(root: Path = ROOT) -> Memory:
    """Host memory and what the cgroup leaves of it, in bytes."""
    info = _read_kilobytes(root / "proc/meminfo")
    total_bytes = info.get("MemTotal", 0)
    available_bytes = info.get("MemAvailable", info.get("MemFree", 0))
    limits, frees = [], []
    for directory in _cgroup_directories(root, "memory"):
        limit_bytes = _cgroup_memory_limit(directory)
        if limit_bytes is None:
            continue
        limits.append(limit_bytes)
        used_bytes = _read_int(directory / "memory.current")
        if used_bytes is None:
            used_bytes = _read_int(directory / "memory.usage_in_bytes") or 0
        frees.append(max(limit_bytes - used_bytes + _droppable_bytes(directory), 0))
    # A group's free bytes may be more than the whole host has left, or the other way round.
    return Memory(
        total_bytes=total_bytes,
        available_bytes=available_bytes,
        cgroup_limit_bytes=min(limits, default=None),
        cgroup_free_bytes=min(frees, default=None),
        headroom_bytes=min([available_bytes, *frees]),
    )


def _cgroup_memory_limit(directory: Path) -> int | None:
    limits = [
        limit
        for name in ("memory.max", "memory.high", "memory.limit_in_bytes")
        if (limit := _read_int(directory / name)) is not None and limit < _V1_UNLIMITED_BYTES
    ]
    return min(limits, default=None)


def _droppable_bytes(directory: Path) -> int:
    """Page cache charged to this cgroup that nobody has used lately."""
    for key in ("total_inactive_file", "inactive_file"):  # v1 with its children, v2
        found = re.search(rf"^{key} (\d+)$", _read_text(directory / "memory.stat"), re.MULTILINE)
        if found:
            return int(found[1])
    return 0


def read_nodes(root: Path = ROOT) -> tuple[NumaNode, ...]:
    """The NUMA nodes in order; one node 0 with everything where the kernel knows none."""
    allowed = _status_list(root, "Mems_allowed_list")
    nodes = []
    base = root / "sys/devices/system/node"
    for directory in base.glob("node[0-9]*"):
        number = int(directory.name.removeprefix("node"))
        meminfo = _read_kilobytes(directory / "meminfo")
        nodes.append(
            NumaNode(
                node=number,
                cpus=_read_list(directory / "cpulist"),
                total_bytes=meminfo.get("MemTotal", 0),
                free_bytes=meminfo.get("MemFree", 0),
                is_memory_allowed=number in allowed if allowed else True,
            )
        )
    if not nodes:
        memory = read_memory(root)
        cpus = read_cpus(root).allowed
        nodes = [NumaNode(0, cpus, memory.total_bytes, memory.available_bytes, True)]
    return tuple(sorted(nodes, key=lambda node: node.node))


def read_huge_pages(root: Path = ROOT) -> HugePages:
    """Settings of transparent huge pages and the pools set aside."""
    base = root / "sys/kernel/mm"
    pools = []
    for directory in (base / "hugepages").glob("hugepages-*kB"):
        page_kilobytes = int(directory.name.removeprefix("hugepages-").removesuffix("kB"))
        reserved = _read_int(directory / "nr_hugepages") or 0
        free = _read_int(directory / "free_hugepages") or 0
        pools.append(HugetlbPool(page_kilobytes * 1024, reserved, free))
    return HugePages(
        transparent=_chosen(base / "transparent_hugepage/enabled"),
        shared_memory=_chosen(base / "transparent_hugepage/shmem_enabled"),
        pools=tuple(sorted(pools, key=lambda pool: pool.page_bytes)),
    )


def read_memlock(root: Path = ROOT) -> int | None:
    """RLIMIT_MEMLOCK (the soft limit) in bytes; None when unlimited or not told."""
    found = re.search(r"^Max locked memory +(\d+)", _read_text(root / "proc/self/limits"), re.M)
    return int(found[1]) if found else None


def read_shm(
    root: Path = ROOT, statvfs: Callable[[Path], os.statvfs_result] = os.statvfs
) -> tuple[int | None, int | None]:
    """(total, free) bytes of /dev/shm; (None, None) where it is missing."""
    try:
        stats = statvfs(root / "dev/shm")
    except OSError:
        return None, None
    return stats.f_blocks * stats.f_frsize, stats.f_bavail * stats.f_frsize


def read_containers(root: Path = ROOT) -> tuple[str, ...]:
    """Hints that something stands between us and the machine, e.g. ("docker",)."""
    hints = []
    if (root / ".dockerenv").exists():
        hints.append("docker")
    if (root / "run/.containerenv").exists():
        hints.append("podman")
    found = re.search(r"kubepods|lxc|garden", _read_text(root / "proc/1/cgroup"))
    if found:
        hints.append({"kubepods": "kubernetes"}.get(found[0], found[0]))
    if "microsoft" in _read_text(root / "proc/version").lower():
        hints.append("wsl2")
    if re.search(r"^Seccomp:\s+2$", _read_text(root / "proc/self/status"), re.MULTILINE):
        hints.append("seccomp filter")
    return tuple(hints)


def read_cpu_flags(root: Path = ROOT) -> frozenset[str]:
    """Instruction set flags of the first cpu: `flags` on x86, `Features` on Arm."""
    found = re.search(r"^(?:flags|Features)\s*:(.*)$", _read_text(root / "proc/cpuinfo"), re.M)
    return frozenset(found[1].split()) if found else frozenset()


# --- files ------------------------------------------------------------------------------------


def _cgroup_directories(root: Path, controller: str) -> Iterator[Path]:
    """Our cgroup's directory for this controller and those above it, innermost first.

    A mount shows the part of the tree below its own root (field 4 of mountinfo), and a container
    without a cgroup namespace sees its path from the host's root: the one is cut off the other.
    """
    paths: dict[str, str] = {}
    for line in _read_text(root / "proc/self/cgroup").splitlines():
        _, names, path = line.split(":", 2)
        for name in names.split(","):
            paths[name] = path
    for line in _read_text(root / "proc/self/mountinfo").splitlines():
        head, separator, tail = line.partition(" - ")
        fields, tail_fields = head.split(), tail.split()
        if not separator or len(fields) < 5 or len(tail_fields) < 3:
            continue
        mount_root, mount_point = fields[3], fields[4]
        is_v1 = tail_fields[0] == "cgroup" and controller in tail_fields[2].split(",")
        if not is_v1 and tail_fields[0] != "cgroup2":
            continue
        own_path = paths.get(controller if is_v1 else "")
        if own_path is None:
            continue
        inside = PurePosixPath(own_path)
        if inside.is_relative_to(mount_root):
            inside = inside.relative_to(mount_root)
        else:
            inside = inside.relative_to("/") if inside.is_absolute() else inside
        base = root / mount_point.lstrip("/")
        directory = base / inside
        if ".." in inside.parts or not directory.is_dir():
            directory = base
        while True:
            yield directory
            if directory == base:
                break
            directory = directory.parent


def _read_text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def _read_int(path: Path) -> int | None:
    text = _read_text(path)
    return int(text) if text.isdigit() else None


def _read_list(path: Path) -> tuple[int, ...]:
    try:
        return parse_cpu_list(_read_text(path))
    except ValueError:
        return ()


def _read_kilobytes(path: Path) -> dict[str, int]:
    """`MemTotal:  100 kB` (also with `Node 0` before it) -> {"MemTotal": 102400}."""
    found = re.findall(r"(\w+):\s+(\d+) kB", _read_text(path))
    return {name: int(kilobytes) * 1024 for name, kilobytes in found}


def _status_list(root: Path, key: str) -> tuple[int, ...]:
    found = re.search(rf"^{key}:\s*(\S+)$", _read_text(root / "proc/self/status"), re.MULTILINE)
    return parse_cpu_list(found[1]) if found else ()


def _chosen(path: Path) -> str:
    """`always [madvise] never` -> "madvise"."""
    found = re.search(r"\[(.+?)\]", _read_text(path))
    return found[1] if found else ""
