"""From settings and a loaded layout to what the core, the workers and the memory need.

Values only, and the segments: everything here happens once, between loading and serving.
"""

from __future__ import annotations

import ctypes
import os
from typing import TYPE_CHECKING

from expert_store.memory import memory_room
from expert_store.numa_placement import expert_nodes
from expert_store.segment import create_reserved_segment, create_segment, most_free
from orchestrator.calibrate.profile import find_profile, key_of
from orchestrator.core.events import CoreConfig
from orchestrator.core.fill_choice import FillBehind
from orchestrator.core.fluid_split import BranchCosts
from orchestrator.core.planner import FillMode
from orchestrator.core.policies import make_policy
from orchestrator.core.split_rules import make_planner
from orchestrator.latency_log import LOG_VERSION, LogHeader
from orchestrator.settings import MANY_EXPERTS, PipelineSettings, count_slots
from protocol.completions import (
    MAX_LAYERS,
    MAX_SLOTS,
    WAKE_GRANT,
    completions_grant,
    new_wake_fd,
)
from protocol.errors import UserError
from protocol.lifeline import SegmentGrant
from protocol.machine import ROOT, format_cpu_list, parse_cpu_list, read_huge_pages, read_nodes
from protocol.messages import Role, WorkerSetup
from protocol.residency import residency_grant
from protocol.routing import ROUTING, routing_grant
from protocol.sizes import size
from protocol.step_segment import ARENA, WEIGHTS, activation_grant

if TYPE_CHECKING:
    import contextlib

    from expert_store.layout import StoreLayout
    from orchestrator.replayed_routing import ReplayedRouting

#: Beside slots and activations; what the processes themselves need is checked at loading.
_SPARE_BYTES = 64 * 1024 * 1024
#: For asking whether a name is known.
_NO_COSTS = BranchCosts(1, 0.0, 0.0, 0.0, 0.0)


def check_settings(settings: PipelineSettings) -> None:
    """Find what is wrong before anything heavy begins.

    Raises:
        UserError: slots, policy, planner or fill mode make no sense, whatever the model, nobody
            would be there for misses, or the device or a NUMA node cannot be had here.
    """
    count_slots(settings.slots, MANY_EXPERTS)
    here = [node.node for node in read_nodes(ROOT)]
    if not set(parse_cpu_list(settings.numa_nodes)) <= set(here):
        raise UserError(
            f"--numa-nodes {settings.numa_nodes}: this machine has no such NUMA nodes, only "
            f"{format_cpu_list(here)}."
        )
    if settings.device == "cuda":
        try:  # to load it touches no device; loading a model first would cost minutes
            ctypes.CDLL("libcuda.so.1")
        except OSError:
            raise UserError(
                "--device cuda needs a GPU, but no NVIDIA driver is here (libcuda.so.1); say "
                "--device cpu, or ask `headrace doctor`."
            ) from None
    try:
        make_policy(settings.policy)
        make_planner(settings.planner, _NO_COSTS)
        FillBehind(settings.fill_behind, _NO_COSTS)
        fill = FillMode.parse(settings.fill)
    except ValueError as error:
        raise UserError(f"The pipeline cannot run this way: {error}.") from None
    _refuse_nobody_for_misses(settings, fill)


def _refuse_nobody_for_misses(settings: PipelineSettings, fill: FillMode) -> None:
    if settings.num_cpu_workers:
        return
    if fill.kind == "none" or (fill.kind == "at_most" and fill.limit == 0):
        flag = f"--fill {fill}"
    elif fill.kind == "auto" and settings.planner == "cpu-only":
        flag = "--planner cpu-only"
    else:
        return
    raise UserError(
        f"{flag} leaves all misses to the CPU, and --cpu-workers 0 starts nobody there; say "
        f"--cpu-workers 1, or another {flag.split()[0]}."
    )


def calibrated_costs(settings: PipelineSettings, layout: StoreLayout) -> BranchCosts | None:
    """What `headrace calibrate` has measured on this machine for experts like these; None where it
    has not, where a person states a rate, or where there are several cpu_workers."""
    folder, is_stated = settings.calibration_dir, settings.host_gbps or settings.link_gbps
    if folder is None or is_stated or settings.num_cpu_workers > 1:
        return None
    key = key_of(layout, settings.device, settings.emulate_link_bytes_per_s)
    profile = find_profile(key, folder)
    return None if profile is None else profile.costs(layout.expert_bytes)


def core_config(
    settings: PipelineSettings,
    layout: StoreLayout,
    num_slots: int,
    context: int,
    numa_nodes: tuple[int, ...] = (),
) -> CoreConfig:
    """What the core decides by. `context` bounds the tokens of one sequence; experts were divided
    among `numa_nodes` when they were loaded."""
    return CoreConfig(
        num_layers=layout.num_layers,
        top_k=layout.top_k,
        expert_bytes=layout.expert_bytes,
        num_slots=num_slots,
        max_rows=settings.max_rows,
        max_sequence_tokens=context,
        fill_mode=settings.fill,
        policy=settings.policy,
        planner=settings.planner,
        fill_behind=settings.fill_behind,
        prefetch=settings.prefetch,
        num_experts=max(layout.num_experts),
        costs=calibrated_costs(settings, layout),
        host_bytes_per_s=settings.host_bytes_per_s,
        link_bytes_per_s=settings.link_bytes_per_s,
        max_num_seqs=settings.max_num_seqs,
        report_plans=True,
        expert_nodes=expert_nodes(layout, numa_nodes),
        preload=_preloaded(settings, layout, num_slots),
    )


def _preloaded(settings: PipelineSettings, layout: StoreLayout, num_slots: int) -> tuple[int, ...]:
    """Experts of each layer that are copied before demand; none where no fill is wanted."""
    is_wanted = settings.preload == "on" or (
        settings.preload == "auto" and num_slots == layout.total_experts
    )
    if not is_wanted or settings.fill == "none" or settings.planner == "cpu-only":
        return ()
    return tuple(layout.num_experts)


def worker_setup(
    settings: PipelineSettings,
    layout: StoreLayout,
    num_slots: int,
    context: int,
    role: Role,
    is_calibrated: bool = False,
) -> WorkerSetup:
    """What a worker of `role` must know beyond the segments. Where rates are known, nobody need
    measure them at the start."""
    stated = {"cpu_worker": settings.host_gbps, "dma_worker": settings.link_gbps}
    return WorkerSetup(
        model_dir=str(settings.model_dir.resolve()),
        dtype=layout.dtype,
        device=settings.device,
        num_slots=num_slots,
        max_rows=settings.max_rows,
        max_sequence_tokens=context,
        emulate_link_bytes_per_s=settings.emulate_link_bytes_per_s,
        is_rate_stated=is_calibrated or stated.get(role) is not None,
        digest_logits=settings.digest_logits,
        dense_path=settings.dense_path,
        dense_dtype=settings.dense_dtype,
    )


def make_weight_segments(
    settings: PipelineSettings, stack: contextlib.ExitStack
) -> tuple[int, int | None]:
    """Descriptors, which `stack` closes, of two empty segments for the weights: an ordinary one,
    and one of huge pages where the machine has some set aside that are free."""
    name = "headrace-weights"
    fd = create_segment(name)
    stack.callback(os.close, fd)
    pool = most_free(read_huge_pages(ROOT).pools) if settings.huge_pages == "auto" else None
    reserved_fd = None if pool is None else create_reserved_segment(name, pool)
    if reserved_fd is not None:
        stack.callback(os.close, reserved_fd)
    return fd, reserved_fd


def make_segments(
    settings: PipelineSettings,
    layout: StoreLayout,
    num_slots: int,
    weights_fd: int,
    stack: contextlib.ExitStack,
    replayed: ReplayedRouting | None = None,
) -> tuple[list[SegmentGrant], list[int]]:
    """All shared segments and their descriptors: weights, activations, residency, completions with
    the eventfd beside them, routing that is `replayed` and, on the CPU, the slots. New descriptors
    are closed by `stack`.

    Raises:
        UserError: there is not enough memory for them; the sentence has the numbers. Or what is
            replayed is of a model of another shape.
    """
    made = [
        activation_grant(settings.max_rows, layout.top_k, layout.form.hidden_size, layout.dtype),
        residency_grant(
            layout.num_layers,
            max(layout.num_experts),
            min(max(layout.num_experts), settings.max_rows * layout.top_k),
        ),
        completions_grant(max(layout.num_experts)),
    ]
    ids = None
    if replayed is not None:
        ids = replayed.ids(layout)
        made.append(routing_grant(*ids.shape))
    if settings.device == "cpu":
        made.append(SegmentGrant(ARENA, num_slots * layout.block_bytes))
    needed_bytes = sum(segment.num_bytes for segment in made) + _SPARE_BYTES
    room = memory_room()
    if needed_bytes > room.available_bytes:
        raise UserError(
            f"{num_slots} slots and the activations need {size(needed_bytes)} beside the "
            f"loaded model, and {room.limit_name} is {size(room.available_bytes)}; take "
            "fewer --slots or free memory."
        )
    fds = [weights_fd]
    for segment in made:
        fd = os.memfd_create(f"headrace-{segment.name}", os.MFD_CLOEXEC)
        stack.callback(os.close, fd)
        os.ftruncate(fd, segment.num_bytes)
        fds.append(fd)
        if segment.name == ROUTING and ids is not None:
            os.pwrite(fd, ids.tobytes(), segment.fields["ids"].offset_bytes)
    granted = [SegmentGrant(WEIGHTS, layout.total_bytes), *made]
    # Words have no room for more; then there is none to wait for, and messages say it all.
    if layout.num_layers <= MAX_LAYERS and num_slots <= MAX_SLOTS:
        wake_fd = new_wake_fd()
        stack.callback(os.close, wake_fd)
        granted.append(WAKE_GRANT)
        fds.append(wake_fd)
    return granted, fds


def log_header(layout: StoreLayout, num_slots: int) -> LogHeader:
    """First record of a latency log: what the others are about."""
    return LogHeader(
        LOG_VERSION,
        layout.model_name,
        layout.dtype,
        layout.num_layers,
        layout.top_k,
        layout.expert_bytes,
        num_slots,
        layout.total_experts,
    )
