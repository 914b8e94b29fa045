"""What the doctor's facts mean for Headrace: pure, so that every machine can be tested.

Each function takes facts and gives findings: a fact in plain words, and what it means or what to
do. A finding is `ok`, `note` (works, could be better), `warn` (works, but badly) or `fail`
(Headrace cannot run).
"""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from protocol.machine import Cpus, Machine, format_cpu_list, worker_threads
from protocol.sizes import size

Status = Literal["ok", "note", "warn", "fail"]
GIB = 1 << 30
#: Under this, not even small MoE models fit beside the rest of a system.
_SMALL_MEMORY_BYTES = 4 * GIB
#: cpuinfo flag -> what it is called outside, the one that kernels cannot do without first.
X86_FEATURES = {
    "avx2": "AVX2",
    "avx512f": "AVX-512",
    "avx512_bf16": "AVX-512 bf16",
    "avx512_vnni": "AVX-512 VNNI",
    "avx_vnni": "AVX-VNNI",
    "amx_tile": "AMX",
    "amx_bf16": "AMX bf16",
    "amx_int8": "AMX int8",
}
ARM_FEATURES = {
    "asimd": "NEON",
    "asimddp": "dot product",
    "bf16": "bf16",
    "i8mm": "int8 matrix",
    "sve": "SVE",
    "sve2": "SVE2",
}

_NO_NUMACTL = (
    "the program numactl is not installed (a package of the system, not of Python), nor needed"
)


class Finding(msgspec.Struct, frozen=True):
    """One line of the report."""

    topic: str
    status: Status
    fact: str
    meaning: str


class CudaFacts(msgspec.Struct, frozen=True):
    """What a short-lived process found out through torch.

    `error` is why torch could not be asked at all. `has_driver` says that a driver library is
    there even if torch cannot use it. `can_pin`, `can_register` and `can_share` are None where
    they were not tried, else "" for yes or the reason for no.
    """

    torch_version: str = ""
    cuda_version: str = ""
    is_available: bool = False
    has_driver: bool = False
    devices: list[str] = []
    total_bytes: int = 0
    can_pin: str | None = None
    can_register: str | None = None
    can_share: str | None = None
    error: str = ""


class BindFacts(msgspec.Struct, frozen=True):
    """How binding to a NUMA node went in a short-lived process of its own."""

    level: str = ""
    message: str = ""
    error: str = ""


class KernelFacts(msgspec.Struct, frozen=True):
    """Calls of the running kernel that Headrace builds on."""

    has_memfd: bool = True
    has_pidfd: bool = True
    has_populate: bool = True


def cores(cpus: Cpus) -> list[Finding]:
    num_threads = worker_threads(cpus)
    findings = [
        Finding(
            "cores",
            "ok" if num_threads > 1 else "warn",
            f"{len(cpus.physical)} physical, {len(cpus.allowed)} logical allowed "
            f"(cpus {format_cpu_list(cpus.allowed)})",
            f"a cpu-worker uses {num_threads} thread{'s' if num_threads > 1 else ''}: one per "
            "physical core, and no more than the cgroup grants"
            + ("" if num_threads > 1 else "; it competes with the other processes for that core"),
        )
    ]
    if cpus.quota is not None:
        is_binding = math.ceil(cpus.quota) < len(cpus.physical)
        findings.append(
            Finding(
                "cpu quota",
                "note" if is_binding else "ok",
                f"the cgroup grants {cpus.quota:g} cpus",
                "threads are cut to that, as more would be stopped in turns; raise the limit "
                "(docker: --cpus) for more host bandwidth"
                if is_binding
                else "more than the cores that are allowed, so it costs nothing",
            )
        )
    if cpus.efficiency:
        findings.append(
            Finding(
                "hybrid cores",
                "note",
                f"{len(cpus.performance)} performance cores "
                f"({format_cpu_list(cpus.performance)}), {len(cpus.efficiency)} efficiency cores "
                f"({format_cpu_list(cpus.efficiency)})",
                "slow cores hold up fast ones at the end of a layer; compare with "
                f"`taskset -c {format_cpu_list(cpus.performance)} headrace cpu-worker`",
            )
        )
    return findings


def cpu_features(architecture: str, flags: frozenset[str]) -> list[Finding]:
    known = ARM_FEATURES if architecture in ("aarch64", "arm64") else X86_FEATURES
    have = [name for flag, name in known.items() if flag in flags]
    lack = [name for flag, name in known.items() if flag not in flags]
    base = next(iter(known))
    if not flags:
        return [
            Finding(
                "cpu features",
                "note",
                f"unknown ({architecture})",
                "the kernels fall back to what torch finds by itself",
            )
        ]
    return [
        Finding(
            "cpu features",
            "ok" if base in flags else "warn",
            f"found {', '.join(have) or 'none'}; missing {', '.join(lack) or 'none'}",
            "decoding is bound by memory, so these matter most for prefill and narrow formats"
            if base in flags
            else f"without {known[base]} experts on the CPU are slow; expect more fills",
        )
    ]


def memory(machine: Machine) -> list[Finding]:
    found = machine.memory
    is_small = found.headroom_bytes < _SMALL_MEMORY_BYTES
    findings = [
        Finding(
            "memory",
            "warn" if is_small else "ok",
            f"{size(found.total_bytes)}, of which {size(found.headroom_bytes)} may still be taken",
            "all experts of a model must fit in that: `headrace plan --model DIR` says whether "
            "they do" + ("; only small models will" if is_small else ""),
        )
    ]
    if found.cgroup_limit_bytes is not None and found.cgroup_limit_bytes < found.total_bytes:
        findings.append(
            Finding(
                "memory limit",
                "note",
                f"the cgroup allows {size(found.cgroup_limit_bytes)}, "
                f"{size(found.cgroup_free_bytes or 0)} of it free",
                "the expert store counts against this limit; raise it (docker: --memory) for "
                "larger models",
            )
        )
    return findings


def huge_pages(machine: Machine) -> list[Finding]:
    pages = machine.huge_pages
    is_granted = pages.shared_memory in ("always", "advise", "within_size", "force")
    findings = [
        Finding(
            "huge pages",
            "ok" if is_granted else "note",
            f"for shared memory: {pages.shared_memory or 'unknown'}; "
            f"otherwise: {pages.transparent or 'unknown'}",
            "the expert store gets huge pages, which read about a tenth faster"
            if is_granted
            else "the expert store lies in small pages; as root, `echo advise > "
            "/sys/kernel/mm/transparent_hugepage/shmem_enabled` reads about a tenth faster",
        )
    ]
    reserved = [pool for pool in pages.pools if pool.num_reserved]
    if reserved:
        told = ", ".join(
            f"{pool.num_free} of {pool.num_reserved} pages of {pool.page_bytes >> 20} MiB free"
            for pool in reserved
        )
        findings.append(
            Finding(
                "reserved pages",
                "note",
                told,
                "the experts are put there if they fit, and read about a tenth faster; as root, "
                "`sysctl vm.nr_hugepages=N` sets N pages aside",
            )
        )
    return findings


def limits(machine: Machine, kernel: KernelFacts) -> list[Finding]:
    lock = "unlimited" if machine.memlock_bytes is None else size(machine.memlock_bytes)
    if machine.shm_total_bytes is None:
        shm = "missing"
    else:
        shm = f"{size(machine.shm_total_bytes)}, {size(machine.shm_free_bytes or 0)} free"
    lacking = [
        f"{name} ({what})"
        for name, has, what in (
            ("memfd_create", kernel.has_memfd, "the expert store"),
            ("pidfd_open", kernel.has_pidfd, "seeing a worker's death"),
            ("MADV_POPULATE_WRITE", kernel.has_populate, "running out of memory as an error"),
        )
        if not has
    ]
    findings = [
        Finding(
            "locked memory",
            "ok",
            f"limit {lock}",
            "Headrace locks nothing itself; CUDA pins through its driver, which on plain Linux "
            "does not count against this limit",
        ),
        Finding(
            "/dev/shm",
            "ok",
            shm,
            "not used: segments are nameless memory that workers receive as file descriptors",
        ),
        Finding(
            "system calls",
            "ok" if not lacking else "fail" if not kernel.has_memfd else "warn",
            f"missing: {', '.join(lacking)}" if lacking else "all that Headrace builds on",
            "Linux 5.14 or newer has them; a sandbox may hide them" if lacking else "nothing to do",
        ),
    ]
    if machine.containers:
        meaning = "limits above are the container's, and binding or pinning may be forbidden"
        if "wsl2" in machine.containers:
            meaning += "; Windows lets CUDA pin only a part of the memory"
        findings.append(Finding("container", "note", ", ".join(machine.containers), meaning))
    return findings


def numa(machine: Machine, bind: BindFacts, *, has_numactl: bool) -> list[Finding]:
    """`has_numactl`: the program is there, which no package of Python brings."""
    num_nodes = len(machine.nodes)
    if num_nodes == 1:
        findings = [
            Finding("NUMA", "ok", "one node", "every core is equally near to the memory"),
        ]
    else:
        told = "; ".join(
            f"node {node.node}: cpus {format_cpu_list(node.cpus) or 'none'}, "
            f"{size(node.total_bytes)}" + ("" if node.is_memory_allowed else " (not allowed here)")
            for node in machine.nodes
        )
        usable = [node.node for node in machine.nodes if node.cpus and node.is_memory_allowed]
        findings = [
            Finding(
                "NUMA",
                "note",
                told,
                f"say `--numa-nodes {format_cpu_list(usable)}`: experts and cpu_workers are then "
                "divided among the nodes; by hand, say it to the orchestrator and start "
                + ", ".join(f"`headrace cpu-worker --numa-node {node}`" for node in usable),
            )
        ]
    if bind.error:
        findings.append(
            Finding("binding", "note", "could not be tried", f"{bind.error}; workers run unbound")
        )
        return findings
    is_bound = bind.level == "membind"
    findings.append(
        Finding(
            "binding",
            "ok" if is_bound else "note" if num_nodes == 1 else "warn",
            bind.message,
            ("--numa-node and numactl work" if has_numactl else f"--numa-node works; {_NO_NUMACTL}")
            if is_bound
            else "with one node nothing is lost"
            if num_nodes == 1
            else "allow set_mempolicy to this container (docker: --cap-add SYS_NICE), or bind "
            "with `numactl` outside it",
        )
    )
    return findings


def cuda(facts: CudaFacts) -> list[Finding]:
    if facts.error:
        return [
            Finding(
                "CUDA",
                "warn",
                f"torch could not be asked: {facts.error}",
                "the gpu-worker needs torch even without a GPU; see the packages below",
            )
        ]
    if not facts.is_available:
        if not facts.has_driver:
            fact, is_odd = "no NVIDIA driver here", False
            meaning = "use --device cpu: the same pipeline, with slots in host memory"
        elif not facts.cuda_version:
            fact, is_odd = f"torch {facts.torch_version} is built without CUDA", True
            meaning = "there is a driver: install a torch with CUDA to use --device cuda"
        else:
            fact, is_odd = "there is a driver, but torch sees no device", True
            meaning = (
                f"the driver may be older than CUDA {facts.cuda_version} needs, or the "
                "container lacks the device (docker: --gpus all); until then use --device cpu"
            )
        return [Finding("CUDA", "warn" if is_odd else "ok", fact, meaning)]
    findings = [
        Finding(
            "CUDA",
            "ok",
            f"{', '.join(facts.devices)}; {size(facts.total_bytes)} on the first; "
            f"CUDA {facts.cuda_version}",
            "use --device cuda; `headrace plan --model DIR` says how many expert slots fit",
        )
    ]
    for topic, answer, good, bad in (
        (
            "pinned memory",
            facts.can_pin,
            "staging buffers copy at full speed",
            "copies go through pageable memory, at a fraction of the link's rate",
        ),
        (
            "pinning the store",
            facts.can_register,
            "fills read the store at full speed (tried with 64 MiB; a system may refuse more)",
            "fills go through a staging buffer, which costs host bandwidth",
        ),
        (
            "CUDA IPC",
            facts.can_share,
            "a separate dma-worker can write into the slots",
            "the copies run inside the gpu-worker instead of a dma-worker of their own",
        ),
    ):
        if answer is None:
            findings.append(Finding(topic, "note", "not tried", bad))
        elif answer:
            findings.append(Finding(topic, "warn", f"refused: {answer}", bad))
        else:
            findings.append(Finding(topic, "ok", "works", good))
    return findings


def packages(python_version: str, versions: dict[str, str | None]) -> list[Finding]:
    """`versions` maps a needed package to its version, None when it is not installed."""
    missing = [name for name, version in versions.items() if version is None]
    have = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    return [
        Finding("Python", "ok", python_version, "3.11 or newer is needed"),
        Finding(
            "packages",
            "fail" if missing else "ok",
            f"missing: {', '.join(missing)}" if missing else have,
            "install Headrace again (`pip install headrace`, or scripts/setup in a checkout)"
            if missing
            else "all that are needed",
        ),
    ]
