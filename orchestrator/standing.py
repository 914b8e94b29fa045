"""Who is here, who is missing, and whether that is enough to generate."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from protocol.messages import Role, Status

if TYPE_CHECKING:
    from collections.abc import Mapping

    from orchestrator.hub import Hub
    from orchestrator.settings import PipelineSettings

ROLES: tuple[Role, ...] = ("gpu_worker", "dma_worker", "cpu_worker")


def status_of(
    settings: PipelineSettings,
    hub: Hub,
    text: str,
    num_restarts: Mapping[Role, int],
    num_dropped_messages: int,
    waiting: list[int] | None = None,
    *,
    is_preloading: bool = False,
) -> Status:
    """The status of a pipeline that is doing `text`. `is_preloading`: experts are being copied
    before the first request, which is asked to wait. `waiting`: while the model is loaded, the
    processes that wait for it. Workers say only later who they are, so who is missing then, and is
    to be started by hand, is what their command lines tell.
    """
    if waiting is not None:
        if waiting:
            text = f"{text}; already here, until then idle: {', '.join(map(_named, waiting))}"
        to_start = [] if settings.is_supervising else _absent(waiting)
        return Status(False, text, to_start, hub.statuses(num_restarts), num_dropped_messages)
    wanted: dict[Role, int] = dict.fromkeys(ROLES, 1)
    if settings.is_supervising:
        wanted["cpu_worker"] = settings.num_cpu_workers
    missing: list[str] = [role for role, num in wanted.items() if hub.num_ready(role) < num]
    # By hand, a person may well want to do without one of the two branches.
    has_branch = "dma_worker" not in missing or "cpu_worker" not in missing
    is_ready = (
        not missing if settings.is_supervising else "gpu_worker" not in missing and has_branch
    )
    if is_ready and is_preloading:
        is_ready, text = False, "copying experts into free slots"
    if missing and text == "serving":
        text = f"serving without {' and '.join(missing)}"
    return Status(is_ready, text, missing, hub.statuses(num_restarts), num_dropped_messages)


def _absent(waiting: list[int]) -> list[str]:
    """Roles that none of these processes has; none where a command line does not show its role."""
    here = {_role_of(pid) for pid in waiting}
    return [] if None in here else [role for role in ROLES if role not in here]


def _named(pid: int) -> str:
    role = _role_of(pid)
    return f"process {pid}" if role is None else f"{role} (process {pid})"


def _role_of(pid: int) -> Role | None:
    """A worker's role where its command line shows it."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:  # it is gone, or another user's
        return None
    return next((role for role in ROLES if role.encode() in words), None)
