"""What goes into the core and what comes out, beyond the messages of the wire.

The core's one door is `Core.handle(event) -> list[Command]`. Events are facts that the shell
observed; commands are wishes that the shell carries out. Wire messages pass through unchanged: a
worker's event is a core event, and a worker command leaves the core addressed by its `epoch`.

No clock: the core never asks for the time. What needs a duration is measured by the workers (their
ns stamps) or by the shell.
"""

from __future__ import annotations

import msgspec

from orchestrator.core.planner import Split
from protocol.messages import (
    Arena,
    AttachArena,
    Copied,
    Copy,
    DetachArena,
    DropSequence,
    Epoch,
    Execute,
    Executed,
    ExpertId,
    FinishReason,
    LayerId,
    Ran,
    RequestId,
    Role,
    Routed,
    Run,
    SamplingParams,
    StartStep,
    StepDone,
    StepId,
)

# --------------------------------------------------------------------------- configuration


class CoreConfig(msgspec.Struct, frozen=True):
    """Everything the core decides by. Rates given here are stated by a person and stay; a rate of
    None is taken from the workers' Ready (the sum of all cpu_workers for the host)."""

    num_layers: int
    top_k: int
    expert_bytes: int
    num_slots: int
    max_rows: int
    max_sequence_tokens: int
    fill_mode: str = "auto"
    policy: str = "lru"
    host_bytes_per_s: float | None = None
    link_bytes_per_s: float | None = None
    #: Sequences that may be active at once; they take turns, one step each.
    max_num_seqs: int = 1
    #: Emit `Planned` for every layer-step; off, nothing is built for it.
    report_plans: bool = False


class WorkerFault(ValueError):
    """A live worker said what the protocol forbids. Nothing was changed; `epoch` is to be replaced.

    Late, repeated and stale events are no fault: the core drops those without a word.
    """

    def __init__(self, epoch: Epoch, sentence: str) -> None:
        super().__init__(f"the worker of epoch {epoch} {sentence}")
        self.epoch = epoch


# --------------------------------------------------------------------------- events from the shell


class WorkerJoined(msgspec.Struct, frozen=True):
    """A worker said Ready. Epochs never repeat."""

    epoch: Epoch
    role: Role
    bytes_per_s: float = 0.0
    arena: Arena | None = None


class WorkerLost(msgspec.Struct, frozen=True):
    """A worker's process is over for certain: nothing of it runs any more."""

    epoch: Epoch


class Submit(msgspec.Struct, frozen=True):
    """A request was accepted by the shell (tokenised, checked against the context length)."""

    request: RequestId
    prompt_tokens: list[int]
    max_tokens: int
    eos_tokens: frozenset[int]
    sampling: SamplingParams = SamplingParams()


class Withdraw(msgspec.Struct, frozen=True):
    """Nobody wants the rest of a request."""

    request: RequestId


CoreEvent = (
    WorkerJoined | WorkerLost | Submit | Withdraw | Routed | Ran | StepDone | Copied | Executed
)

# --------------------------------------------------------------------------- commands to the shell


class RequestCounters(msgspec.Struct):
    """What a request has cost so far. Counts are experts per layer-step, each counted once."""

    layer_steps: int = 0
    hits: int = 0
    fills: int = 0
    cpu_experts: int = 0
    evictions: int = 0
    fill_bytes: int = 0
    cpu_bytes: int = 0
    fill_busy_ns: int = 0
    cpu_busy_ns: int = 0


class TokenOut(msgspec.Struct, frozen=True):
    """One new token of a request, in order, each exactly once whatever happened to the workers."""

    request: RequestId
    token: int
    logits_digest: str


class RequestDone(msgspec.Struct, frozen=True):
    """No more tokens of this request."""

    request: RequestId
    reason: FinishReason
    counters: RequestCounters


class Planned(msgspec.Struct, frozen=True):
    """The decision for one layer-step, for the latency log: M = fills + cpu, and why."""

    request: RequestId
    step: StepId
    layer: LayerId
    num_rows: int
    hits: list[ExpertId]
    fills: list[ExpertId]
    cpu: list[ExpertId]
    split: Split


class Stalled(msgspec.Struct, frozen=True):
    """Work waits for a role that nobody fills; said once per stall."""

    missing_role: Role
    text: str


class CoreSnapshot(msgspec.Struct, frozen=True):
    """What the core sees, for status pages; it changes nothing to ask."""

    num_waiting: int
    num_active: int
    #: The step in flight and how many of its layers are joined; None between steps.
    step: StepId | None
    num_layers_joined: int
    gpu_epoch: Epoch | None
    dma_epoch: Epoch | None
    cpu_epochs: list[Epoch]
    num_resident: int
    num_filling: int
    num_slots: int
    host_bytes_per_s: float
    link_bytes_per_s: float
    #: The role that work waits for, if any.
    missing_role: Role | None
    #: Late, repeated and stale events that were dropped since the start.
    num_ignored_events: int


CoreCommand = (
    StartStep
    | Run
    | DropSequence
    | Copy
    | AttachArena
    | DetachArena
    | Execute
    | TokenOut
    | RequestDone
    | Planned
    | Stalled
)
