"""Everything that crosses between the processes, in one file.

Every message is a MessagePack map with the key `type`, whose value is the class name below.
Worker -> orchestrator messages are **events**, in the past tense. Orchestrator -> worker messages
are **commands**, in the imperative. Clients (`headrace generate`) speak `ClientRequest` and hear
`ClientReply`. Bulk bytes never travel here: hidden rows and result rows lie in the activation
segment, weights in the store, and a message names where.

`epoch` is the orchestrator's number for one incarnation of one worker. It only grows, so it also
is the worker's identity inside the core: a replaced worker has another epoch, and what an earlier
one still says is told apart and dropped. Times are CLOCK_MONOTONIC in ns, which all processes of
one machine share. `layer` counts MoE layers from 0, not decoder layers.

How tokens are chosen is said in protocol.sampling; its structs are parts of messages here.
docs/protocol.md describes the same for people who write a worker in another way.
"""

from __future__ import annotations

from typing import Literal, NewType

import msgspec

from protocol.sampling import Sampled as Sampled
from protocol.sampling import SamplingParams as SamplingParams
from protocol.sampling import TokenLogprobs as TokenLogprobs

#: Raised on every incompatible change; a worker of another version is refused by name.
PROTOCOL_VERSION = 3
#: No control message comes near this. Larger frames are dropped before they are decoded.
MAX_MESSAGE_BYTES = 4 * 1024 * 1024

StepId = NewType("StepId", int)
LayerId = NewType("LayerId", int)
ExpertId = NewType("ExpertId", int)
SlotId = NewType("SlotId", int)
SequenceId = NewType("SequenceId", int)
Epoch = NewType("Epoch", int)
CopyId = NewType("CopyId", int)
RequestId = NewType("RequestId", str)
ExpertKey = tuple[LayerId, ExpertId]

Role = Literal["gpu_worker", "cpu_worker", "dma_worker"]
FinishReason = Literal["stop", "length", "cancelled", "error"]


class Message(msgspec.Struct, frozen=True, tag_field="type", tag=True, gc=False):
    """Base of everything that is sent."""


# --------------------------------------------------------------------------- life of a worker


class Capabilities(msgspec.Struct, frozen=True, omit_defaults=True):
    """Facts about one worker, said at HELLO; shown by `headrace doctor`-like reports and logs."""

    device: str = "cpu"
    num_threads: int = 1
    cpus: list[int] = []
    numa_node: int | None = None  # that memory and threads are bound to
    numa_note: str = ""  # one plain line on how binding went, or why it did not
    isa: str = ""
    build: str = ""


class Hello(Message, frozen=True):
    """First message of a worker; `token` is what the life line handed out (protocol.lifeline)."""

    protocol_version: int
    role: Role
    pid: int
    token: str
    capabilities: Capabilities = Capabilities()


class Progress(Message, frozen=True):
    """A worker is busy starting: how far it is."""

    epoch: Epoch
    done: int
    total: int
    text: str


class Ready(Message, frozen=True):
    """The worker can take commands. `bytes_per_s` is its measured rate, 0.0 when it has none.

    cpu_worker: rate of the real kernel over experts of the store (B_H); where they lie on several
    NUMA nodes, over those of its own, and `far_bytes_per_s` over the others.
    dma_worker: rate of expert-sized copies (B_P), pacing included.
    gpu_worker: `arena` says how its slots are reached.
    """

    epoch: Epoch
    bytes_per_s: float = 0.0
    arena: Arena | None = None
    far_bytes_per_s: float = 0.0


class Arena(msgspec.Struct, frozen=True):
    """Where the expert slots lie. kind "shared": segment "arena" of the life line.
    kind "cuda_ipc": a 64-byte cudaIpcMemHandle of the device `gpu_uuid`.
    kind "in_process": only the gpu_worker can fill its slots (no CUDA IPC here); it then takes
    `Copy` commands itself. kind "scratch": memory of the dma_worker's own on the device, for
    measurements."""

    kind: Literal["shared", "cuda_ipc", "in_process", "scratch"]
    num_slots: int
    slot_bytes: int
    handle: bytes = b""
    base_offset_bytes: int = 0
    gpu_uuid: str = ""


class Failed(Message, frozen=True):
    """Last words of a worker: why it is about to leave."""

    epoch: Epoch
    sentence: str
    is_user_error: bool = False


# --------------------------------------------------------------------------- events of a step


class Routed(Message, frozen=True):
    """gpu_worker: the router of `layer` has chosen; hidden rows and choices are in the segment.

    `experts`: each chosen one once, in the router's order (row by row, best first), chosen by
    `num_rows` rows each. `joined_ns`: when the layer before was joined (0 in the first of a step).
    `num_reports`, here and below: reports left in the residency segment before this was said.
    `is_self_joining`: the worker looks for finished parts in the completions segment and joins by
    itself when all are in; it is told of hits only, and not of the `started` ones: those it saw in
    the table and computes from there, in the fence until it has reported them.
    """

    epoch: Epoch
    step: StepId
    layer: LayerId
    experts: list[ExpertId]
    num_rows: list[int]
    routed_ns: int
    joined_ns: int = 0
    num_reports: int = 0
    is_self_joining: bool = False
    started: list[ExpertId] = []


class Ran(Message, frozen=True):
    """gpu_worker: the experts of one `Run` are computed, their slots are no longer read."""

    epoch: Epoch
    step: StepId
    layer: LayerId
    experts: list[ExpertId]
    started_ns: int
    ended_ns: int
    num_reports: int = 0


class StepDone(Message, frozen=True):
    """gpu_worker: the last layer is through. `sampled[i]` is set when part i was to sample."""

    epoch: Epoch
    step: StepId
    sampled: list[Sampled | None]
    joined_ns: int
    done_ns: int
    num_reports: int = 0


class Copied(Message, frozen=True):
    """dma_worker: the expert lies whole in its slot."""

    epoch: Epoch
    copy: CopyId
    started_ns: int
    ended_ns: int
    num_bytes: int


class Executed(Message, frozen=True):
    """cpu_worker: result rows of `experts` are in the activation segment."""

    epoch: Epoch
    step: StepId
    layer: LayerId
    experts: list[ExpertId]
    started_ns: int
    ended_ns: int
    num_bytes: int


# --------------------------------------------------------------------------- commands


class WorkerSetup(msgspec.Struct, frozen=True):
    """What a worker must know beyond the segments; sent inside `Welcome`."""

    model_dir: str
    dtype: str
    device: str
    num_slots: int
    max_rows: int
    max_sequence_tokens: int
    emulate_link_bytes_per_s: float = 0.0
    is_rate_stated: bool = False  # by a person: skip the start-up probe
    #: Digest logits of every sampled step into StepDone.logits_digest (tests, debugging).
    digest_logits: bool = False
    seed: int = 0
    #: "eager", "traced", "compiled", "native"; and --dense-dtype (docs/protocol.md).
    dense_path: str = "eager"
    dense_dtype: str = "auto"


class Welcome(Message, frozen=True):
    """Answer to HELLO: this is your epoch, this is what to set up; say `Ready` when done."""

    epoch: Epoch
    setup: WorkerSetup


class Refused(Message, frozen=True):
    """Answer to HELLO: you cannot join, and why. The worker exits with code 2."""

    sentence: str


class StepPart(msgspec.Struct, frozen=True, omit_defaults=True):
    """One sequence's share of a step: its next `tokens`.

    `start` is the position of tokens[0]; the worker's KV cache must hold exactly `start` positions,
    and `start` 0 begins the sequence anew. `sampling` None: no token is wanted (all but the last
    prompt chunk, and tokens replayed after a crash). `num_prompt` tells the prompt's tokens from
    those that were generated.

    `allowed_tokens`, empty when anything goes: a bit per token of the vocabulary, token t at bit
    t % 8 of byte t // 8; 0 forbids the token, and so does the end of the bytes.
    """

    sequence: SequenceId
    start: int
    tokens: list[int]
    sampling: SamplingParams | None = None
    num_prompt: int = 0
    allowed_tokens: bytes = b""


class StartStep(Message, frozen=True):
    """gpu_worker: run the tokens of `parts` through the model, layer by layer all together.

    The rows of a layer-step are those of the parts, one part after the other. Either there is one
    part, or each part is of another sequence and has one token; a row of several parts must come
    out as it would alone.
    """

    epoch: Epoch
    step: StepId
    parts: list[StepPart]


class Run(Message, frozen=True):
    """gpu_worker: compute `experts` from `slots`; with `join` set, this was the last part of the
    layer: add up all rows in the router's order and go on. `experts` may be empty.
    `is_ran_wanted`: slots are short; say `Ran` at once for whatever runs in this layer-step, and
    for what has run in it."""

    epoch: Epoch
    step: StepId
    layer: LayerId
    experts: list[ExpertId]
    slots: list[SlotId]
    join: bool
    is_ran_wanted: bool = False


class DropSequence(Message, frozen=True):
    """gpu_worker: forget the KV cache of a sequence."""

    epoch: Epoch
    sequence: SequenceId


class Copy(Message, frozen=True):
    """dma_worker: copy one expert's block from the store into a slot. A copy that is not awaited
    lets all those pass that are. `step` says whose gpu_worker waits for a word in the completions
    segment; 0: none does."""

    epoch: Epoch
    copy: CopyId
    layer: LayerId
    expert: ExpertId
    slot: SlotId
    is_awaited: bool = True
    step: StepId = StepId(0)


class AttachArena(Message, frozen=True):
    """dma_worker: the slots are here now (again after each new gpu_worker); old copies are void."""

    epoch: Epoch
    arena: Arena


class DetachArena(Message, frozen=True):
    """dma_worker: the gpu_worker is gone; close imports of its memory at once."""

    epoch: Epoch


class Execute(Message, frozen=True):
    """cpu_worker: compute `experts` of a layer in place, for the rows that chose them."""

    epoch: Epoch
    step: StepId
    layer: LayerId
    experts: list[ExpertId]


class Shutdown(Message, frozen=True):
    """Leave now, in order."""

    epoch: Epoch
    reason: str


# --------------------------------------------------------------------------- clients


class Generate(Message, frozen=True):
    """Client: continue `prompt` (text, or token ids when `prompt_tokens` is given)."""

    request: RequestId
    prompt: str = ""
    prompt_tokens: list[int] | None = None
    max_tokens: int = 128
    ignore_eos: bool = False
    sampling: SamplingParams = SamplingParams()


class Cancel(Message, frozen=True):
    """Client: stop working on a request."""

    request: RequestId


class GetStatus(Message, frozen=True):
    """Client: who is there and how far is loading?"""


class StageStats(msgspec.Struct, frozen=True):
    """Durations of one stage over the layer-steps of a request, in us."""

    p50_us: float
    p95_us: float
    p99_us: float
    max_us: float
    share: float
    num_samples: int


class RequestStats(msgspec.Struct, frozen=True):
    """What one request cost. Counts are experts per layer-step, each expert counted once."""

    prompt_tokens: int = 0
    generated_tokens: int = 0
    elapsed_s: float = 0.0
    tokens_per_s: float = 0.0
    ttft_s: float = 0.0
    layer_steps: int = 0
    hits: int = 0
    fills: int = 0
    cpu_experts: int = 0
    fills_behind: int = 0  # nobody waited; in `fill_bytes` and `evictions` too
    evictions: int = 0
    fill_bytes: int = 0
    cpu_bytes: int = 0
    fill_busy_s: float = 0.0
    cpu_busy_s: float = 0.0
    worker_restarts: int = 0
    slots: int = 0
    total_experts: int = 0
    stages: dict[str, StageStats] = {}
    #: Running hash over the logits of all sampled steps; "" unless asked for.
    logits_digest: str = ""


class Accepted(Message, frozen=True):
    """The request is queued; `prompt_tokens` as tokenised."""

    request: RequestId
    prompt_tokens: int


class Generated(Message, frozen=True):
    """New tokens of a request and the text they add (never half a UTF-8 character). `logprobs`
    has an entry per token if the request asked for them, else none."""

    request: RequestId
    tokens: list[int]
    text: str
    logprobs: list[TokenLogprobs] = []


class Finished(Message, frozen=True):
    """The request is over."""

    request: RequestId
    reason: FinishReason
    stats: RequestStats
    text: str = ""
    sentence: str = ""


class Rejected(Message, frozen=True):
    """The request cannot be served; one sentence says why."""

    request: RequestId
    sentence: str


class WorkerStatus(msgspec.Struct, frozen=True):
    """One worker as the orchestrator sees it."""

    role: Role
    pid: int
    epoch: Epoch
    is_ready: bool
    bytes_per_s: float
    capabilities: Capabilities
    num_restarts: int


class Status(Message, frozen=True):
    """Answer to GetStatus. `missing_roles`: what is not ready; none while the model loads."""

    is_ready: bool
    text: str
    missing_roles: list[str]
    workers: list[WorkerStatus]
    num_dropped_messages: int


WorkerEvent = Hello | Progress | Ready | Failed | Routed | Ran | StepDone | Copied | Executed
WorkerCommand = (
    Welcome | Refused | StartStep | Run | DropSequence
    | Copy | AttachArena | DetachArena | Execute | Shutdown
)  # fmt: skip
ClientRequest = Generate | Cancel | GetStatus
ClientReply = Accepted | Generated | Finished | Rejected | Status
