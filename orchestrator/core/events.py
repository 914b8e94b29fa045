"""What goes into the core and what comes out, beyond the messages of the wire.

The core's one door is `Core.handle(event) -> list[Command]`. Events are facts that the shell
observed; commands are wishes that the shell carries out. Wire messages pass through unchanged: a
worker's event is a core event, and a worker command leaves the core addressed by its `epoch`.

No clock: the core never asks for the time. What needs a duration is measured by the workers (their
ns stamps) or by the shell.
"""

from __future__ import annotations

import msgspec

from orchestrator.core.fill_choice import FillBehindMode
from orchestrator.core.fixed_costs import Lag
from orchestrator.core.floor_rule import Arm
from orchestrator.core.fluid_split import BranchCosts
from orchestrator.core.planner import Split
from orchestrator.core.rate_estimates import Drift
from protocol.messages import (
    Arena,
    AttachArena,
    Copied,
    Copy,
    CopyId,
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
    SlotId,
    StartStep,
    StepDone,
    StepId,
    TokenLogprobs,
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
    #: One of split_rules.PLANNER_NAMES; what decides where the fill mode is auto.
    planner: str = "closed-form"
    fill_behind: FillBehindMode = "off"
    #: Layers ahead of which experts are guessed and copied while the link is idle; 0: none.
    prefetch: int = 0
    #: Experts per layer; 0: policies that must know find out.
    num_experts: int = 0
    #: Measured costs of both branches, in place of all that workers measure on their own.
    costs: BranchCosts | None = None
    host_bytes_per_s: float | None = None
    link_bytes_per_s: float | None = None
    #: Sequences that may be active at once: they decode together.
    max_num_seqs: int = 1
    #: Emit `Planned` for every layer-step; off, nothing is built for it.
    report_plans: bool = False
    #: The NUMA node of every (layer, expert); empty where that does not matter or is not known.
    expert_nodes: tuple[tuple[int, ...], ...] = ()
    #: Experts of each layer, to be copied into free slots while nobody asks for any; empty: none.
    preload: tuple[int, ...] = ()


class WorkerFault(ValueError):
    """A live worker said what the protocol forbids. Nothing was changed; `epoch` is to be replaced.

    Late, repeated and stale events are no fault: the core drops those without a word.
    """

    def __init__(self, epoch: Epoch, sentence: str) -> None:
        super().__init__(f"the worker of epoch {epoch} {sentence}")
        self.epoch = epoch


# --------------------------------------------------------------------------- events from the shell


class WorkerJoined(msgspec.Struct, frozen=True):
    """A worker said Ready. Epochs never repeat. `far_bytes_per_s`: of a cpu_worker, its rate over
    experts of other NUMA nodes than its own; 0.0 where it has not measured that apart."""

    epoch: Epoch
    role: Role
    bytes_per_s: float = 0.0
    arena: Arena | None = None
    numa_node: int | None = None
    far_bytes_per_s: float = 0.0


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


class Passed(msgspec.Struct, frozen=True):
    """The gpu_worker found every expert of a layer in the published table, computed them, joined
    and went on without asking. Heard in order with what it says over the wire.

    `started_ns` and `ended_ns` are of the computation, `joined_ns` of the layer before.
    """

    epoch: Epoch
    step: StepId
    layer: LayerId
    experts: list[ExpertId]
    num_rows: list[int]
    routed_ns: int
    started_ns: int
    ended_ns: int
    joined_ns: int


class Foreseen(msgspec.Struct, frozen=True):
    """An expert is likely to be demanded soon: fill it in the background if there is room."""

    layer: LayerId
    expert: ExpertId


class Retired(msgspec.Struct, frozen=True):
    """Answer to `Retire`: no look at the table from before it is in use any more."""

    copy: CopyId


class Resize(msgspec.Struct, frozen=True):
    """Use so many of the slots from now on, from 1 to what there was at the start."""

    num_slots: int


class RatesMeasured(msgspec.Struct, frozen=True):
    """Both branches were measured on this machine, alone and beside each other: plan by this from
    now on, and learn from there."""

    costs: BranchCosts


CoreEvent = (
    WorkerJoined
    | WorkerLost
    | Submit
    | Withdraw
    | Routed
    | Passed
    | Ran
    | StepDone
    | Copied
    | Executed
    | Foreseen
    | Retired
    | Resize
    | RatesMeasured
)

# --------------------------------------------------------------------------- commands to the shell


class RequestCounters(msgspec.Struct):
    """What the steps of a request have cost so far. Counts are experts per layer-step, each counted
    once; a step that several requests share counts whole for each of them."""

    layer_steps: int = 0
    hits: int = 0
    fills: int = 0
    cpu_experts: int = 0
    evictions: int = 0
    #: Copies that nobody waited for; their bytes and times are among those of the fills.
    fills_behind: int = 0
    fill_bytes: int = 0
    cpu_bytes: int = 0
    fill_busy_ns: int = 0
    cpu_busy_ns: int = 0

    def add(self, other: RequestCounters) -> None:
        """Count what `other` counts, too."""
        for name in self.__struct_fields__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


class TokenOut(msgspec.Struct, frozen=True):
    """One new token of a request, in order, each exactly once whatever happened to the workers."""

    request: RequestId
    token: int
    logits_digest: str
    #: As the gpu_worker gave them, if the request's sampling asks for them.
    logprobs: TokenLogprobs | None = None


class PromptRead(msgspec.Struct, frozen=True):
    """A part of a request's prompt is through the model, and no token is there yet: the moment to
    see whether anybody still waits for one."""

    request: RequestId
    num_read: int


class RequestDone(msgspec.Struct, frozen=True):
    """No more tokens of this request. `sentence` says why it ended in an error."""

    request: RequestId
    reason: FinishReason
    counters: RequestCounters
    sentence: str = ""


class Planned(msgspec.Struct, frozen=True):
    """The decision for one layer-step, for the latency log: M = fills + cpu, and why."""

    #: Whose rows these are, in their order.
    requests: list[RequestId]
    step: StepId
    layer: LayerId
    num_rows: int
    hits: list[ExpertId]
    fills: list[ExpertId]
    cpu: list[ExpertId]
    split: Split

    def __str__(self) -> str:
        return f"step {self.step} layer {self.layer}: {self.split.reason()}"


class Publish(msgspec.Struct, frozen=True, gc=False):
    """Write into the residency table: this expert may be read in this slot."""

    layer: LayerId
    expert: ExpertId
    slot: SlotId


class Unpublish(msgspec.Struct, frozen=True, gc=False):
    """Take an expert out of the residency table, before any later command is carried out."""

    layer: LayerId
    expert: ExpertId


class ResetTable(msgspec.Struct, frozen=True):
    """Empty the residency table and its ring; from now on they are for `epoch` (None: nobody)."""

    epoch: Epoch | None


class Retire(msgspec.Struct, frozen=True):
    """Say `Retired` as soon as whatever was looked up before now is used no more: `slot` is then
    to be overwritten with (layer, expert). Need not be answered: the gpu_worker's next `Routed` or
    `StepDone` says as much."""

    copy: CopyId
    layer: LayerId
    expert: ExpertId
    slot: SlotId


class Drifted(msgspec.Struct, frozen=True):
    """A branch is no longer as fast, or as quick to begin, as was last said; the split follows."""

    drift: Drift | Lag

    def __str__(self) -> str:
        return str(self.drift)


class ArmTaken(msgspec.Struct, frozen=True):
    """From now on misses are split, or all filled, or all run on the CPU: that is what was measured
    to be fastest."""

    arm: Arm

    def __str__(self) -> str:
        where = {"split": "are split", "fill": "pass the link", "cpu": "run on the CPU"}[self.arm]
        return f"misses {where} from now on: measured to be fastest"


class AllIn(msgspec.Struct, frozen=True, gc=False):
    """Every part of a layer-step is in, and the gpu_worker joins by itself: it owes its next
    word."""

    epoch: Epoch
    step: StepId
    layer: LayerId


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
    #: How many slots are to be used, and how many there are.
    num_slots: int
    max_slots: int
    host_bytes_per_s: float
    link_bytes_per_s: float
    #: The role that work waits for, if any.
    missing_role: Role | None
    #: Late, repeated and stale events that were dropped since the start.
    num_ignored_events: int
    #: What all steps together have cost, each counted once.
    totals: RequestCounters


CoreCommand = (
    StartStep
    | Run
    | DropSequence
    | Copy
    | AttachArena
    | DetachArena
    | Execute
    | TokenOut
    | PromptRead
    | RequestDone
    | Planned
    | Publish
    | Unpublish
    | ResetTable
    | Retire
    | Drifted
    | ArmTaken
    | AllIn
    | Stalled
)
