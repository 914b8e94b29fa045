"""Binding to a NUMA node: decisions on machines made of files, and the real calls on this one."""

from __future__ import annotations

import ctypes
import errno
import json
import mmap
import os
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from cpu_worker.affinity import Kernel, bind_node, read_mapping
from protocol.errors import UserError
from protocol.memory_nodes import page_nodes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

GET, SET, MOVE = "get_mempolicy", "set_mempolicy", "move_pages"


class FakeKernel:
    """Remembers cpus and policy like a kernel; `forbidden` calls answer with that error."""

    def __init__(self, cpus: Iterable[int], forbidden: dict[str, int] | None = None) -> None:
        self.cpus = set(cpus)
        self.forbidden = forbidden or {}
        self.policy = (0, 0)  # mode, mask of the first 64 nodes
        self.page_status: Callable[[int], int] = lambda _page: 0

    def calls(self) -> Kernel:
        return Kernel(syscall=self.syscall, set_cpus=self.set_cpus, get_cpus=self.get_cpus)

    def _refuse(self, name: str) -> None:
        if name in self.forbidden:
            raise OSError(self.forbidden[name], "refused")

    def set_cpus(self, cpus: Iterable[int]) -> None:
        self._refuse("sched_setaffinity")
        self.cpus = set(cpus)

    def get_cpus(self) -> set[int]:
        return set(self.cpus)

    def syscall(self, name: str, *arguments: Any) -> int:
        self._refuse(name)
        if name == SET:
            mode, mask, _ = arguments
            self.policy = (mode.value, mask[0])
        elif name == GET:
            mode, mask = arguments[0]._obj, arguments[1]
            mode.value, mask[0] = self.policy
        else:
            _, count, pages, _, status, _ = arguments
            for index in range(count.value):
                status[index] = self.page_status(pages[index])
        return 0


@pytest.fixture
def two_nodes(tmp_path: Path) -> Path:
    files = {
        "sys/devices/system/node/node0/cpulist": "0-3",
        "sys/devices/system/node/node0/meminfo": "Node 0 MemTotal: 1024 kB",
        "sys/devices/system/node/node1/cpulist": "4-7",
        "sys/devices/system/node/node1/meminfo": "Node 1 MemTotal: 1024 kB",
        "sys/devices/system/cpu/online": "0-7",
        "proc/self/status": "Cpus_allowed_list:\t0-7\nMems_allowed_list:\t0-1",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    return tmp_path


def test_binds_cpus_and_memory(two_nodes: Path) -> None:
    kernel = FakeKernel(range(8))
    report = bind_node(1, root=two_nodes, kernel=kernel.calls())
    assert report.level == "membind"
    assert report.is_complete
    assert not report.is_inherited
    assert report.cpus == (4, 5, 6, 7)
    assert (report.policy, report.policy_nodes) == ("bind", (1,))
    assert kernel.policy == (2, 0b10)
    assert report.message == "bound to NUMA node 1: cpus 4-7 and memory"


def test_keeps_to_the_cpus_that_are_allowed(two_nodes: Path) -> None:
    report = bind_node(1, root=two_nodes, kernel=FakeKernel({1, 2, 5, 6}).calls())
    assert report.cpus == (5, 6)


@pytest.mark.parametrize("node", [2, -1])
def test_a_node_that_is_not_there_names_those_that_are(two_nodes: Path, node: int) -> None:
    kernel = FakeKernel(range(8))
    with pytest.raises(UserError, match=rf"^--numa-node {node}: .*has nodes 0-1$") as caught:
        bind_node(node, root=two_nodes, kernel=kernel.calls())
    assert caught.value.exit_code == 2
    assert kernel.cpus == set(range(8))


@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOSYS])
def test_memory_forbidden_leaves_cpus(two_nodes: Path, number: int) -> None:
    kernel = FakeKernel(range(8), {SET: number})
    report = bind_node(0, root=two_nodes, kernel=kernel.calls())
    assert report.level == "cpu-only"
    assert not report.is_complete
    assert report.cpus == (0, 1, 2, 3)
    assert errno.errorcode[number] in report.message
    assert "\n" not in report.message


def test_everything_forbidden_changes_nothing(two_nodes: Path) -> None:
    forbidden = dict.fromkeys(("sched_setaffinity", SET, GET), errno.EPERM)
    kernel = FakeKernel(range(8), forbidden)
    report = bind_node(0, root=two_nodes, kernel=kernel.calls())
    assert report.level == "none"
    assert report.cpus == tuple(range(8))
    assert report.policy == "unknown"
    assert "not bound to NUMA node 0" in report.message


def test_cpus_of_the_node_are_not_ours(two_nodes: Path) -> None:
    kernel = FakeKernel({4, 5})
    report = bind_node(0, root=two_nodes, kernel=kernel.calls())
    assert report.level == "none"
    assert kernel.cpus == {4, 5}
    assert kernel.policy == (0, 0)  # memory of one node for cpus of another would be the worst
    assert "0-3" in report.message


def test_memory_outside_the_cpuset(two_nodes: Path) -> None:
    (two_nodes / "proc/self/status").write_text("Mems_allowed_list:\t0\n")
    report = bind_node(1, root=two_nodes, kernel=FakeKernel(range(8)).calls())
    assert report.level == "cpu-only"
    assert "cpuset" in report.message


def test_node_without_cpus(two_nodes: Path) -> None:
    (two_nodes / "sys/devices/system/node/node1/cpulist").write_text("\n")
    report = bind_node(1, root=two_nodes, kernel=FakeKernel(range(8)).calls())
    assert (report.level, report.policy) == ("none", "default")
    assert "no cpus" in report.message


def test_a_kernel_that_only_pretends_is_not_believed(two_nodes: Path) -> None:
    kernel = FakeKernel(range(8))
    honest = kernel.calls()

    def forgets(name: str, *arguments: Any) -> int:
        return 0 if name == SET else honest.syscall(name, *arguments)

    report = bind_node(0, root=two_nodes, kernel=Kernel(forgets, honest.set_cpus, honest.get_cpus))
    assert report.level == "cpu-only"
    assert "reports default" in report.message
    report = bind_node(0, root=two_nodes, kernel=Kernel(forgets, lambda _: None, lambda: {0, 7}))
    assert report.level == "none"


def test_numactl_is_found_with_and_without_a_wish(two_nodes: Path) -> None:
    kernel = FakeKernel({4, 5, 6, 7})
    kernel.policy = (2, 0b10)
    for node in (None, 1):
        report = bind_node(node, root=two_nodes, kernel=kernel.calls())
        assert report.is_inherited
        assert report.level == "membind"
        assert report.node == 1
        assert "numactl" in report.message


def test_numactl_that_splits_cpus_from_memory_is_told(two_nodes: Path) -> None:
    kernel = FakeKernel({4, 5})
    kernel.policy = (2, 0b01)
    report = bind_node(None, root=two_nodes, kernel=kernel.calls())
    assert (report.level, report.is_complete) == ("none", False)
    assert "crosses" in report.message


def test_no_wish_changes_nothing(two_nodes: Path) -> None:
    kernel = FakeKernel(range(8))
    report = bind_node(None, root=two_nodes, kernel=kernel.calls())
    assert (report.level, report.node, kernel.policy) == ("none", None, (0, 0))
    report = bind_node(None, root=two_nodes, kernel=FakeKernel({0, 1}).calls())
    assert (report.level, report.node) == ("cpu-only", 0)


def test_pages_are_counted_per_node() -> None:
    page_bytes = os.sysconf("SC_PAGE_SIZE")
    kernel = FakeKernel({0})
    answers = {0: 0, 1: 1, 2: 1, 3: -errno.ENOENT, 4: -errno.EFAULT}
    kernel.page_status = lambda page: answers[(page or 0) // page_bytes - 100]
    found = page_nodes(100 * page_bytes + 8, 5 * page_bytes - 16, syscall=kernel.syscall)
    assert found.per_node == {0: 1, 1: 2}
    assert (found.num_absent, found.num_unknown) == (1, 1)


def test_pages_are_sampled_over_the_whole_range() -> None:
    page_bytes = os.sysconf("SC_PAGE_SIZE")
    asked: list[int] = []
    kernel = FakeKernel({0})

    def remember(page: int) -> int:
        asked.append((page or 0) // page_bytes)
        return 0

    kernel.page_status = remember
    found = page_nodes(0, 1000 * page_bytes, max_pages=10, syscall=kernel.syscall)
    assert asked == list(range(0, 1000, 100))
    assert found.per_node == {0: 10}
    assert page_nodes(0, 0, syscall=kernel.syscall).per_node == {}


def test_numa_maps_line_of_an_address(tmp_path: Path) -> None:
    assert read_mapping(0x5000, root=tmp_path) is None
    path = tmp_path / "proc/self/numa_maps"
    path.parent.mkdir(parents=True)
    path.write_text(
        "00001000 default file=/bin/x mapped=2 N0=2\n"
        "00004000 bind:1 file=/memfd:store dirty=6 N0=2 N1=4 kernelpagesize_kB=4\n"
        "00009000 default heap N1=1\n"
    )
    found = read_mapping(0x5000, root=tmp_path)
    assert found is not None
    assert (found.policy, found.per_node) == ("bind:1", {0: 2, 1: 4})
    assert read_mapping(0x10, root=tmp_path) is None


BIND_AND_TELL = """
import ctypes, json, os, sys
from cpu_worker.affinity import bind_node, read_mapping
from protocol.memory_nodes import page_nodes
node = None if sys.argv[1] == "none" else int(sys.argv[1])
report = bind_node(node)
assert "torch" not in sys.modules and "numpy" not in sys.modules
buffer = ctypes.create_string_buffer(b"x" * (1 << 20))
address = ctypes.addressof(buffer)
pages = page_nodes(address, len(buffer))
mapping = read_mapping(address)
print(json.dumps({
    "level": report.level, "is_inherited": report.is_inherited, "policy": report.policy,
    "policy_nodes": report.policy_nodes, "cpus": report.cpus, "message": report.message,
    "pages": pages.per_node, "absent": pages.num_absent,
    "mapping": mapping.policy if mapping else None,
}))
"""


def bind_in_child(environment: dict[str, str], node: str, *before: str) -> dict[str, Any]:
    """Run in a process of its own: the policy of this one must stay as it is."""
    done = subprocess.run(
        [*before, sys.executable, "-c", BIND_AND_TELL, node],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def memory_policy_or_skip() -> None:
    """Asking with flags 0 changes nothing; binding to what is allowed is tried in a child."""
    if sys.platform != "linux":
        pytest.skip("NUMA policy is Linux's")
    try:
        Kernel().syscall(
            GET,
            ctypes.byref(ctypes.c_int()),
            ctypes.c_void_p(None),
            ctypes.c_ulong(0),
            ctypes.c_void_p(None),
            ctypes.c_ulong(0),
        )
    except OSError as error:
        pytest.skip(f"this system forbids memory policies: {error}")


@pytest.mark.process
def test_real_binding(tiny_env: dict[str, str]) -> None:
    memory_policy_or_skip()
    node = next(iter(page_nodes_here()))
    told = bind_in_child(tiny_env, str(node))
    assert told["level"] in ("membind", "cpu-only")
    if told["level"] == "cpu-only":
        pytest.skip(told["message"])
    assert told["policy"] == "bind"
    assert told["policy_nodes"] == [node]
    assert set(told["pages"]) == {str(node)}
    assert told["absent"] == 0
    assert told["mapping"] in (None, f"bind:{node}")


def page_nodes_here() -> dict[int, int]:
    buffer = ctypes.create_string_buffer(b"x" * (1 << 16))
    return page_nodes(ctypes.addressof(buffer), len(buffer)).per_node


@pytest.mark.process
def test_real_numactl(tiny_env: dict[str, str]) -> None:
    memory_policy_or_skip()
    numactl = shutil.which("numactl")
    if numactl is None:
        pytest.skip("numactl is not installed")
    bind = (numactl, "--cpunodebind=0", "--membind=0")
    probe = subprocess.run([*bind, "true"], capture_output=True, timeout=60, check=False)
    if probe.returncode != 0:
        pytest.skip("numactl may not bind here")
    for node in ("none", "0"):
        told = bind_in_child(tiny_env, node, *bind)
        assert told["is_inherited"]
        assert told["level"] == "membind"
        assert told["policy_nodes"] == [0]
        assert "numactl" in told["message"]


@pytest.mark.process
def test_real_machine_without_a_wish(tiny_env: dict[str, str]) -> None:
    memory_policy_or_skip()
    told = bind_in_child(tiny_env, "none")
    assert set(told["cpus"]) == os.sched_getaffinity(0)
    assert told["policy"] != "unknown"


def test_absent_pages_are_told_apart() -> None:
    memory_policy_or_skip()
    with mmap.mmap(-1, 1 << 16) as region:
        view = (ctypes.c_char * len(region)).from_buffer(region)
        try:
            page_bytes = os.sysconf("SC_PAGE_SIZE")
            region[0] = 1
            found = page_nodes(ctypes.addressof(view), page_bytes * 4)
            assert sum(found.per_node.values()) == 1
            assert found.num_absent + found.num_unknown == 3
        finally:
            del view
