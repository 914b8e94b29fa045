"""Is there room for a store? Asked before loading, because the kernel's own answer is SIGKILL.

Two limits apply: what the machine can give (``MemAvailable``) and what each memory control group
above this process still allows. A group's headroom is its limit minus its usage, plus the page
cache that it can drop (inactive file pages).
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from protocol.errors import UserError

WORKING_BYTES = 400 * 1000 * 1000
"""Allowance for the processes themselves, beside the store and the dense weights."""


class NotEnoughMemoryError(UserError):
    """The model does not fit in the memory that this machine or container has left."""


class MemoryRoom(msgspec.Struct, frozen=True):
    """The tightest limit on new memory, in bytes, and whose it is."""

    available_bytes: int
    limit_name: str


def memory_room(root: Path = Path("/")) -> MemoryRoom:
    """The least of MemAvailable and the headroom of each control group (v1 or v2).

    ``root`` stands for the file system, so that tests can state a machine.
    """
    rooms = [MemoryRoom(_available_bytes(root), "the machine's available memory")]
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, group = line.split(":", 2)
        if controllers == "":
            rooms += _group_rooms(
                root / "sys/fs/cgroup", group, "memory.max", "memory.current", "inactive_file"
            )
        elif "memory" in controllers.split(","):
            rooms += _group_rooms(
                root / "sys/fs/cgroup/memory",
                group,
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
                "total_inactive_file",
            )
    return min(rooms, key=lambda room: room.available_bytes)


def require_memory(store_bytes: int, dense_bytes: int, room: MemoryRoom) -> None:
    """Raises NotEnoughMemoryError, with the numbers, when store and dense weights do not fit."""
    needed_bytes = store_bytes + dense_bytes + WORKING_BYTES
    if needed_bytes > room.available_bytes:
        raise NotEnoughMemoryError(
            f"not enough memory: the experts need {_gb(store_bytes)}, the dense weights"
            f" {_gb(dense_bytes)} and the processes {_gb(WORKING_BYTES)}, together"
            f" {_gb(needed_bytes)}, but {room.limit_name} is {_gb(room.available_bytes)};"
            " free memory, raise the limit or choose a smaller model or dtype"
        )


def _available_bytes(root: Path) -> int:
    for line in _read(root / "proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 2**63  # unknown, so no reason to refuse


def _group_rooms(
    mount: Path, group: str, limit_file: str, usage_file: str, reclaimable: str
) -> list[MemoryRoom]:
    """Headroom of the group and all above it. In a container the mount may itself be the group."""
    rooms = []
    directory = mount / group.lstrip("/")
    for level in (directory, *directory.parents):
        if level != mount and mount not in level.parents:
            break
        limit, usage = _read(level / limit_file).strip(), _read(level / usage_file).strip()
        if not limit.isdigit() or not usage.isdigit():
            continue  # "max", or no such file: no limit at this level
        cache_bytes = 0
        for line in _read(level / "memory.stat").splitlines():
            if line.startswith(f"{reclaimable} "):
                cache_bytes = int(line.split()[1])
        headroom_bytes = max(int(limit) - int(usage) + cache_bytes, 0)
        name = "/" + str(level.relative_to(mount)).strip(".")
        rooms.append(MemoryRoom(headroom_bytes, f"what memory control group {name} allows"))
    return rooms


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB"
