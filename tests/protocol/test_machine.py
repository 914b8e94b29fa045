"""Machines written as files: what the reader must make of each."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol import machine

if TYPE_CHECKING:
    from pathlib import Path

GIB = 1 << 30


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return root


def cores(num_cpus: int, threads_per_core: int = 1) -> dict[str, str]:
    """Cpu numbers as Linux gives them: the second threads follow after all the first ones."""
    num_cores = num_cpus // threads_per_core
    files = {
        f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list": ",".join(
            str(cpu % num_cores + num_cores * thread) for thread in range(threads_per_core)
        )
        for cpu in range(num_cpus)
    }
    files["sys/devices/system/cpu/online"] = f"0-{num_cpus - 1}"
    files["proc/self/status"] = f"Cpus_allowed_list:\t0-{num_cpus - 1}\nMems_allowed_list:\t0"
    return files


def cgroup_v2(own: str, mount_root: str = "/") -> dict[str, str]:
    return {
        "proc/self/cgroup": f"0::{own}",
        "proc/self/mountinfo": f"30 23 0:26 {mount_root} /sys/fs/cgroup rw - cgroup2 cgroup2 rw",
    }


@given(st.sets(st.integers(0, 300)))
def test_cpu_lists_survive_being_written_and_read(cpus: set[int]) -> None:
    assert machine.parse_cpu_list(machine.format_cpu_list(cpus)) == tuple(sorted(cpus))


def test_cpu_list_as_the_kernel_writes_it() -> None:
    assert machine.parse_cpu_list("0-2,8,10-11\n") == (0, 1, 2, 8, 10, 11)
    assert machine.format_cpu_list([8, 0, 1, 2]) == "0-2,8"
    with pytest.raises(ValueError, match="invalid literal"):
        machine.parse_cpu_list("0-x")


def test_second_threads_of_a_core_add_no_worker_thread(tmp_path: Path) -> None:
    cpus = machine.read_cpus(write(tmp_path, cores(8, threads_per_core=2)))
    assert cpus.allowed == tuple(range(8))
    assert cpus.physical == (0, 1, 2, 3)
    assert machine.worker_threads(cpus) == 4


def test_affinity_that_allows_only_second_threads(tmp_path: Path) -> None:
    root = write(tmp_path, cores(8, threads_per_core=2))
    cpus = machine.read_cpus(root, affinity={3, 4, 5, 7})
    assert cpus.physical == (3, 4, 5)  # 7 is the second thread of 3


def test_topology_unknown_means_each_cpu_is_a_core(tmp_path: Path) -> None:
    root = write(tmp_path, {"proc/self/status": "Cpus_allowed_list:\t2-5"})
    assert machine.read_cpus(root).physical == (2, 3, 4, 5)


def test_offline_cpus_do_not_count(tmp_path: Path) -> None:
    root = write(tmp_path, cores(4) | {"sys/devices/system/cpu/online": "0,2"})
    assert machine.read_cpus(root).allowed == (0, 2)


def test_quota_is_rounded_up_and_never_below_one_thread(tmp_path: Path) -> None:
    root = write(tmp_path, cores(8) | cgroup_v2("/box"))
    write(root, {"sys/fs/cgroup/box/cpu.max": "250000 100000"})
    assert machine.read_cpus(root).quota == 2.5
    assert machine.worker_threads(machine.read_cpus(root)) == 3
    write(root, {"sys/fs/cgroup/box/cpu.max": "10000 100000"})
    assert machine.worker_threads(machine.read_cpus(root)) == 1
    write(root, {"sys/fs/cgroup/box/cpu.max": "max 100000"})
    assert machine.read_cpus(root).quota is None


def test_the_least_quota_on_the_way_up_holds(tmp_path: Path) -> None:
    root = write(tmp_path, cores(8) | cgroup_v2("/pod/box"))
    write(
        root,
        {
            "sys/fs/cgroup/pod/cpu.max": "150000 100000",
            "sys/fs/cgroup/pod/box/cpu.max": "400000 100000",
        },
    )
    assert machine.read_cpus(root).quota == 1.5


def test_cpuset_of_the_cgroup_narrows_the_mask(tmp_path: Path) -> None:
    root = write(tmp_path, cores(8) | cgroup_v2("/box"))
    write(root, {"sys/fs/cgroup/box/cpuset.cpus.effective": "4-9"})
    assert machine.read_cpus(root).allowed == (4, 5, 6, 7)


def test_container_that_sees_the_hosts_path_but_only_its_own_mount(tmp_path: Path) -> None:
    root = write(tmp_path, cores(8) | cgroup_v2("/docker/abc", mount_root="/docker/abc"))
    write(root, {"sys/fs/cgroup/cpu.max": "200000 100000"})
    assert machine.read_cpus(root).quota == 2.0


def test_path_outside_the_namespace_falls_back_to_the_mount(tmp_path: Path) -> None:
    root = write(tmp_path, cores(8) | cgroup_v2("/../../other"))
    write(root, {"sys/fs/cgroup/cpu.max": "200000 100000"})
    assert machine.read_cpus(root).quota == 2.0


def test_cgroup_v1(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        cores(8)
        | {
            "proc/self/cgroup": "4:cpu,cpuacct:/box\n5:memory:/box\n6:cpuset:/box",
            "proc/self/mountinfo": "\n".join(
                f"3{i} 31 0:3{i} / /sys/fs/cgroup/{name} rw - cgroup cgroup rw,{name}"
                for i, name in enumerate(["cpu,cpuacct", "memory", "cpuset"])
            ),
            "proc/meminfo": "MemTotal: 67108864 kB\nMemAvailable: 33554432 kB",
            "sys/fs/cgroup/cpu,cpuacct/box/cpu.cfs_quota_us": "300000",
            "sys/fs/cgroup/cpu,cpuacct/box/cpu.cfs_period_us": "100000",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000",
            "sys/fs/cgroup/cpuset/box/cpuset.cpus": "0-5",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
            "sys/fs/cgroup/memory/box/memory.limit_in_bytes": str(8 * GIB),
            "sys/fs/cgroup/memory/box/memory.usage_in_bytes": str(5 * GIB),
            "sys/fs/cgroup/memory/box/memory.stat": f"cache 1\ntotal_inactive_file {GIB}",
        },
    )
    cpus = machine.read_cpus(root)
    assert (cpus.quota, cpus.allowed) == (3.0, (0, 1, 2, 3, 4, 5))
    memory = machine.read_memory(root)
    assert memory.cgroup_limit_bytes == 8 * GIB
    assert memory.headroom_bytes == 4 * GIB


def test_memory_headroom_is_the_least_of_host_and_cgroups(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        cgroup_v2("/pod/box")
        | {
            "proc/meminfo": f"MemTotal: {64 << 20} kB\nMemAvailable: {40 << 20} kB",
            "sys/fs/cgroup/pod/memory.max": str(32 * GIB),
            "sys/fs/cgroup/pod/memory.current": str(30 * GIB),
            "sys/fs/cgroup/pod/box/memory.max": "max",
            "sys/fs/cgroup/pod/box/memory.current": str(GIB),
        },
    )
    memory = machine.read_memory(root)
    assert memory.total_bytes == 64 * GIB
    assert memory.available_bytes == 40 * GIB
    assert memory.headroom_bytes == 2 * GIB
    write(root, {"sys/fs/cgroup/pod/memory.max": str(48 * GIB)})
    assert machine.read_memory(root).headroom_bytes == 18 * GIB
    write(root, {"sys/fs/cgroup/pod/memory.max": "max"})
    assert machine.read_memory(root).cgroup_limit_bytes is None
    assert machine.read_memory(root).headroom_bytes == 40 * GIB


def test_intel_hybrid_cores(tmp_path: Path) -> None:
    files = cores(8)
    for cpu in range(4):  # two performance cores with two threads each
        pair = "0-1" if cpu < 2 else "2-3"
        files[f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"] = pair
    files |= {"sys/devices/cpu_core/cpus": "0-3", "sys/devices/cpu_atom/cpus": "4-7"}
    cpus = machine.read_cpus(write(tmp_path, files))
    assert cpus.performance == (0, 2)
    assert cpus.efficiency == (4, 5, 6, 7)
    assert machine.worker_threads(cpus) == 6


def test_arm_capacities(tmp_path: Path) -> None:
    capacities = {0: 250, 1: 250, 2: 800, 3: 1024}
    files = {
        f"sys/devices/system/cpu/cpu{cpu}/cpu_capacity": str(capacity)
        for cpu, capacity in capacities.items()
    }
    cpus = machine.read_cpus(write(tmp_path, cores(4) | files))
    assert (cpus.performance, cpus.efficiency) == ((2, 3), (0, 1))


def test_equal_cores_are_neither_kind(tmp_path: Path) -> None:
    cpus = machine.read_cpus(write(tmp_path, cores(4)))
    assert (cpus.performance, cpus.efficiency) == ((), ())


def test_numa_nodes(tmp_path: Path) -> None:
    files = cores(8) | {
        "sys/devices/system/node/node0/cpulist": "0-3",
        "sys/devices/system/node/node0/meminfo": "Node 0 MemTotal: 1024 kB\nNode 0 MemFree: 5 kB",
        "sys/devices/system/node/node1/cpulist": "4-7",
        "sys/devices/system/node/node1/meminfo": "Node 1 MemTotal: 2048 kB\nNode 1 MemFree: 7 kB",
        "sys/devices/system/node/node10/cpulist": "",
        "sys/devices/system/node/possible": "0-31",
    }
    nodes = machine.read_nodes(write(tmp_path, files))
    assert [node.node for node in nodes] == [0, 1, 10]
    assert nodes[1] == machine.NumaNode(1, (4, 5, 6, 7), 2 << 20, 7 << 10, False)
    assert nodes[0].is_memory_allowed
    assert nodes[2].cpus == ()


def test_kernel_without_numa_is_one_node(tmp_path: Path) -> None:
    root = write(tmp_path, cores(4) | {"proc/meminfo": "MemTotal: 4 kB\nMemFree: 3 kB"})
    assert machine.read_nodes(root) == (machine.NumaNode(0, (0, 1, 2, 3), 4096, 3072, True),)


def test_huge_pages_and_limits(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        {
            "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never",
            "sys/kernel/mm/transparent_hugepage/shmem_enabled": "always within_size [advise] never",
            "sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages": "12",
            "sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages": "9",
            "proc/self/limits": "Limit  Soft  Hard  Units\n"
            "Max locked memory         8388608              unlimited            bytes",
        },
    )
    pages = machine.read_huge_pages(root)
    assert (pages.transparent, pages.shared_memory) == ("madvise", "advise")
    assert pages.pools == (machine.HugetlbPool(2 << 20, 12, 9),)
    assert machine.read_memlock(root) == 8388608
    unlimited = "Max locked memory         unlimited            unlimited            bytes"
    write(root, {"proc/self/limits": unlimited})
    assert machine.read_memlock(root) is None


def test_containers_and_flags(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        {
            ".dockerenv": "",
            "proc/1/cgroup": "0::/kubepods/burstable/pod1",
            "proc/version": "Linux version 6.6 Microsoft WSL2",
            "proc/self/status": "Seccomp:\t2",
            "proc/cpuinfo": "processor\t: 0\nflags\t\t: fpu avx2 avx512f\n\nprocessor: 1\nflags: x",
        },
    )
    assert machine.read_containers(root) == ("docker", "kubernetes", "wsl2", "seccomp filter")
    assert machine.read_cpu_flags(root) == {"fpu", "avx2", "avx512f"}


def test_empty_root_gives_no_errors(tmp_path: Path) -> None:
    found = machine.read_machine(tmp_path)
    assert found.memory.headroom_bytes == 0
    assert found.shm_total_bytes is None
    assert found.containers == ()
    assert machine.worker_threads(found.cpus) >= 1


def test_shm_size_comes_from_the_mount(tmp_path: Path) -> None:
    (tmp_path / "dev/shm").mkdir(parents=True)
    found = os.statvfs(tmp_path)
    total, _ = machine.read_shm(tmp_path)
    assert total == found.f_blocks * found.f_frsize


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="needs Linux's /proc")
def test_this_machine() -> None:
    found = machine.read_machine()
    assert set(found.cpus.allowed) == os.sched_getaffinity(os.getpid())
    assert 0 < found.memory.headroom_bytes <= found.memory.total_bytes
    assert 1 <= machine.worker_threads(found.cpus) <= len(found.cpus.allowed)
