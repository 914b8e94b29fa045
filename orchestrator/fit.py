"""Does a model fit? Arithmetic over what its headers say and what the machine has.

Device memory:   slots x block + dense weights + KV cache + reserve   <= budget
Host memory:     store + (device cpu: slots, dense weights, KV cache; else pinned staging is the
                 store itself) + the processes                        <= what may still be taken

A cache of fewer slots than num_layers x top_k meets the LRU cliff: one token demands that many
experts, so by the time a layer's turn comes again, all of its experts were evicted by the layers
between.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import msgspec

from expert_store.memory import WORKING_BYTES, MemoryRoom
from orchestrator.settings import DEFAULT_MAX_ROWS, DEFAULT_SLOTS, count_slots
from protocol.sizes import size
from protocol.step_segment import activation_grant

if TYPE_CHECKING:
    from expert_store.reports import Inspection

#: The device's own context, library workspaces and the allocator's rounding.
DEVICE_RESERVE_BYTES = 800_000_000
_DEFAULT_CONTEXT = 8192

Verdict = Literal["yes", "note", "no"]


class Question(msgspec.Struct, frozen=True):
    """What to plan for. Either `vram_bytes` (how many slots fit?) or `slots` as on the command
    line; neither means the default number of slots."""

    device: str = "cpu"
    vram_bytes: int | None = None
    slots: str | None = None
    context: int | None = None
    #: Requests at once, each with a KV cache of its own.
    max_num_seqs: int = 1


class FitFinding(msgspec.Struct, frozen=True):
    """One resource: enough ("yes"), worth knowing ("note"), or not enough ("no")."""

    resource: str
    verdict: Verdict
    text: str


class Fit(msgspec.Struct, frozen=True, kw_only=True):
    """The answer. All sizes in bytes."""

    fits: bool
    model: str
    architecture: str
    dtype: str
    expert_format: str | None
    """Name of the format of quantised experts; None: they are floats of `dtype`."""
    num_layers: int
    total_experts: int
    top_k: int
    expert_bytes: int
    store_bytes: int
    dense_bytes: int
    kv_bytes: int
    context: int
    max_num_seqs: int
    slots: int
    arena_bytes: int
    host_needed_bytes: int
    host_available_bytes: int
    findings: list[FitFinding]


def plan_fit(
    inspection: Inspection,
    question: Question,
    room: MemoryRoom,
    memlock_bytes: int | None,
    shm: tuple[int | None, int | None],
) -> Fit:
    """Answer `question`. `memlock_bytes` None is unlimited; `shm` is (total, free) of /dev/shm.

    Raises:
        UserError: the slots make no sense.
    """
    layout = inspection.layout
    limit = inspection.context_length or _DEFAULT_CONTEXT
    context = min(question.context or min(limit, _DEFAULT_CONTEXT), limit)
    kv_bytes = inspection.kv_bytes_per_token * context * question.max_num_seqs
    findings: list[FitFinding] = []
    if question.vram_bytes is not None:
        slots = _slots_in(inspection, question.vram_bytes, kv_bytes, findings)
    else:
        slots = count_slots(question.slots or DEFAULT_SLOTS, layout.total_experts)
        on_device_bytes = (
            slots * layout.block_bytes + inspection.dense_bytes + kv_bytes + DEVICE_RESERVE_BYTES
        )
        if question.device == "cuda":
            findings.append(
                FitFinding(
                    "device memory",
                    "note",
                    f"{slots} slots need {size(on_device_bytes)} in all; say --vram-gb to check it",
                )
            )
    if slots:
        findings.append(_cliff(slots, layout.num_layers, layout.top_k, layout.total_experts))
    activations = activation_grant(
        DEFAULT_MAX_ROWS, layout.top_k, layout.form.hidden_size, layout.dtype
    )
    host_bytes = layout.total_bytes + activations.num_bytes + WORKING_BYTES
    if question.device == "cpu":
        host_bytes += slots * layout.block_bytes + inspection.dense_bytes + kv_bytes
    findings.append(_host_memory(host_bytes, room))
    findings += _limits(layout.total_bytes, question.device, memlock_bytes, shm)
    return Fit(
        fits=all(finding.verdict != "no" for finding in findings),
        model=layout.model_name,
        architecture=inspection.architecture,
        dtype=layout.dtype,
        expert_format=None if layout.weights is None else layout.weights.name,
        num_layers=layout.num_layers,
        total_experts=layout.total_experts,
        top_k=layout.top_k,
        expert_bytes=layout.expert_bytes,
        store_bytes=layout.total_bytes,
        dense_bytes=inspection.dense_bytes,
        kv_bytes=kv_bytes,
        context=context,
        max_num_seqs=question.max_num_seqs,
        slots=slots,
        arena_bytes=slots * layout.block_bytes,
        host_needed_bytes=host_bytes,
        host_available_bytes=room.available_bytes,
        findings=findings,
    )


def _slots_in(
    inspection: Inspection, vram_bytes: int, kv_bytes: int, findings: list[FitFinding]
) -> int:
    layout = inspection.layout
    left_bytes = vram_bytes - inspection.dense_bytes - kv_bytes - DEVICE_RESERVE_BYTES
    slots = min(max(left_bytes // layout.block_bytes, 0), layout.total_experts)
    used = (
        f"dense weights {size(inspection.dense_bytes)}, KV cache {size(kv_bytes)} and "
        f"{size(DEVICE_RESERVE_BYTES)} in reserve"
    )
    if slots < 1:
        findings.append(
            FitFinding(
                "device memory",
                "no",
                f"of {size(vram_bytes)}, {used} leave no room for one expert of "
                f"{size(layout.block_bytes)}; take a larger device or a shorter --context",
            )
        )
    else:
        share = 100 * slots / layout.total_experts
        findings.append(
            FitFinding(
                "device memory",
                "yes",
                f"{slots} slots fit in {size(vram_bytes)} ({share:.0f} % of all experts) beside "
                f"{used}; start with --slots {slots}",
            )
        )
    return slots


def _cliff(slots: int, num_layers: int, top_k: int, total_experts: int) -> FitFinding:
    demand = num_layers * top_k
    if slots >= total_experts:
        return FitFinding("cache", "yes", "every expert stays resident once it was used")
    if slots < demand:
        return FitFinding(
            "cache",
            "note",
            f"{slots} slots are fewer than the {demand} experts that one token asks for "
            f"({num_layers} layers x {top_k}): plain LRU evicts each expert before the next token "
            "can use it again, so expect hardly any hits; take more slots if you can",
        )
    return FitFinding(
        "cache",
        "yes",
        f"{slots} slots keep the experts of the last {slots / demand:.1f} tokens ({demand} each)",
    )


def _host_memory(host_bytes: int, room: MemoryRoom) -> FitFinding:
    numbers = f"{size(host_bytes)} needed, {room.limit_name} is {size(room.available_bytes)}"
    if host_bytes > room.available_bytes:
        return FitFinding(
            "host memory",
            "no",
            f"{numbers}; free memory, raise the limit or choose a smaller model or dtype",
        )
    return FitFinding("host memory", "yes", numbers)


def _limits(
    store_bytes: int, device: str, memlock_bytes: int | None, shm: tuple[int | None, int | None]
) -> list[FitFinding]:
    _, shm_free_bytes = shm
    free = "not there" if shm_free_bytes is None else f"{size(shm_free_bytes)} free"
    findings = [
        FitFinding(
            "/dev/shm", "yes", f"{free}; not used, since weights lie in anonymous shared memory"
        )
    ]
    if memlock_bytes is None:
        findings.append(FitFinding("memlock", "yes", "unlimited"))
    elif memlock_bytes >= store_bytes:
        findings.append(FitFinding("memlock", "yes", f"{size(memlock_bytes)} may be locked"))
    else:
        effect = (
            "fills come from memory that the device driver pins by itself, which this limit does "
            "not stop; if pinning fails, raise it with `ulimit -l unlimited`"
            if device == "cuda"
            else "nothing is pinned without a GPU, so this does no harm"
        )
        findings.append(
            FitFinding(
                "memlock",
                "note",
                f"{size(memlock_bytes)} may be locked, the store has {size(store_bytes)}: {effect}",
            )
        )
    return findings
