"""What the gpu_worker reads from slots that it found in the published table, held against what is
known: it may have seen what has left since, and nothing that was never there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from orchestrator.core.events import WorkerFault

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from orchestrator.core.directory import ExpertDirectory
    from orchestrator.core.events import Passed
    from protocol.messages import Epoch, ExpertId, ExpertKey, LayerId, Routed


def have_left(
    epoch: Epoch,
    layer: LayerId,
    experts: Sequence[ExpertId],
    directory: ExpertDirectory,
    evicted: Collection[ExpertKey],
) -> bool:
    """Whether one of `experts`, which were seen in the table, has no slot any more.

    Raises:
        WorkerFault: it is not among the `evicted` of this step either.
    """
    are_there = True
    for expert in experts:
        key = (layer, expert)
        if directory.slot_of(key) is None:
            if key not in evicted:
                raise WorkerFault(epoch, f"ran expert {expert} of layer {layer}, which has no slot")
            are_there = False
    return not are_there


def check_routed(routed: Routed) -> None:
    """WorkerFault if what was routed confuses its experts."""
    experts, started = routed.experts, routed.started
    if not len(set(experts)) == len(experts) == len(routed.num_rows):
        raise WorkerFault(routed.epoch, f"routed layer {routed.layer} to experts it confuses")
    if started and not (routed.is_self_joining and set(started) <= set(experts)):
        raise WorkerFault(routed.epoch, f"began experts of layer {routed.layer} that nobody chose")


def check_passed(passed: Passed) -> None:
    """WorkerFault if what was passed confuses its experts."""
    experts = passed.experts
    if not len(set(experts)) == len(experts) == len(passed.num_rows):
        raise WorkerFault(passed.epoch, f"passed layer {passed.layer} with experts it confuses")
