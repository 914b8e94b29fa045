"""Who is here, who is missing, and whether that is enough to generate."""

from __future__ import annotations

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
) -> Status:
    """The status of a pipeline that is doing `text`."""
    wanted: dict[Role, int] = dict.fromkeys(ROLES, 1)
    if settings.is_supervising:
        wanted["cpu_worker"] = settings.num_cpu_workers
    missing: list[str] = [role for role, num in wanted.items() if hub.num_ready(role) < num]
    # By hand, a person may well want to do without one of the two branches.
    has_branch = "dma_worker" not in missing or "cpu_worker" not in missing
    is_ready = (
        not missing if settings.is_supervising else "gpu_worker" not in missing and has_branch
    )
    if missing and text == "serving":
        text = f"serving without {' and '.join(missing)}"
    return Status(is_ready, text, missing, hub.statuses(num_restarts), num_dropped_messages)
