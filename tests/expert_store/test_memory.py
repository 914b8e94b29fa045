"""Memory limits, read from a file system that the test states."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from expert_store.memory import MemoryRoom, NotEnoughMemoryError, memory_room, require_memory

if TYPE_CHECKING:
    from pathlib import Path


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


MEMINFO = {"proc/meminfo": "MemTotal: 9000 kB\nMemAvailable:    8000 kB\n"}


def test_without_groups_the_machine_decides(tmp_path: Path) -> None:
    room = memory_room(write(tmp_path, MEMINFO))
    assert room == MemoryRoom(8000 * 1024, "the machine's available memory")


def test_v2_takes_the_tightest_level_and_counts_reclaimable_cache(tmp_path: Path) -> None:
    room = memory_room(
        write(
            tmp_path,
            {
                **MEMINFO,
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/a/b/memory.max": "max\n",
                "sys/fs/cgroup/a/b/memory.current": "10\n",
                "sys/fs/cgroup/a/memory.max": "5000\n",
                "sys/fs/cgroup/a/memory.current": "4000\n",
                "sys/fs/cgroup/a/memory.stat": "anon 3\ninactive_file 700\n",
            },
        )
    )
    assert room.available_bytes == 5000 - 4000 + 700
    assert "/a " in room.limit_name


def test_v2_container_whose_mount_is_its_group(tmp_path: Path) -> None:
    room = memory_room(
        write(
            tmp_path,
            {
                **MEMINFO,
                "proc/self/cgroup": "0::/\n",
                "sys/fs/cgroup/memory.max": "3000\n",
                "sys/fs/cgroup/memory.current": "3500\n",
            },
        )
    )
    assert room.available_bytes == 0


def test_v1(tmp_path: Path) -> None:
    room = memory_room(
        write(
            tmp_path,
            {
                **MEMINFO,
                "proc/self/cgroup": "8:pids:/\n4:cpu,memory:/x\n0::/\n",
                "sys/fs/cgroup/memory/x/memory.limit_in_bytes": "4096\n",
                "sys/fs/cgroup/memory/x/memory.usage_in_bytes": "1096\n",
                "sys/fs/cgroup/memory/x/memory.stat": "inactive_file 1\ntotal_inactive_file 50\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
                "sys/fs/cgroup/memory/memory.usage_in_bytes": "5\n",
            },
        )
    )
    assert room.available_bytes == 4096 - 1096 + 50


def test_the_refusal_has_the_numbers() -> None:
    room = MemoryRoom(3_000_000_000, "what memory control group /x allows")
    require_memory(2_000_000_000, 600_000_000, room)  # exactly fits, with the 400 MB beside
    with pytest.raises(NotEnoughMemoryError) as caught:
        require_memory(2_000_000_001, 600_000_000, room)
    for number in ("2.00 GB", "0.60 GB", "0.40 GB", "3.00 GB", "group /x"):
        assert number in str(caught.value)
