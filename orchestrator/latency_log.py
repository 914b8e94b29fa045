"""Where each microsecond of a step went: a fold over what passes between the core and the workers.

The fold sees every event and then the commands that followed, after they were sent, so that it
costs the workers no time. It builds one `LayerRecord` per layer-step and one `StepRecord` per step,
and adds their stages to the running statistics of the request. With a log file it also writes each
record as one JSON line; without one the encoder is never called. All stamps are CLOCK_MONOTONIC in
ns: workers stamp what they did, this process stamps when it planned. docs/latency-log.md explains
the fields to readers of the file.

A step that a worker's death cut short leaves records with `is_complete` false; they are logged, and
count in no statistic.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import msgspec

from orchestrator.core.events import (
    ArmTaken,
    CoreCommand,
    CoreEvent,
    Drifted,
    Passed,
    Planned,
)
from orchestrator.core.fixed_costs import Lag
from orchestrator.stage_times import StageTimes
from protocol.messages import (
    Copied,
    Copy,
    CopyId,
    Executed,
    Ran,
    RequestId,
    Routed,
    StartStep,
    StepDone,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

LOG_VERSION = 1
#: The stage of which all others take a share.
WHOLE = "step"
#: Whole numbers of a log as a reader takes them: the difference of any two fits 64 bits.
LogInt = Annotated[int, msgspec.Meta(ge=-(1 << 62), le=(1 << 62) - 1)]


class GpuSpan(msgspec.Struct):
    """One `Run` on the device."""

    experts: list[LogInt]
    started_ns: LogInt
    ended_ns: LogInt


class DmaSpan(msgspec.Struct):
    """One fill: the copy of an expert into its slot."""

    worker: LogInt
    expert: LogInt
    slot: LogInt
    num_bytes: LogInt
    started_ns: LogInt
    ended_ns: LogInt


class CpuSpan(msgspec.Struct):
    """One `Execute` on one cpu_worker."""

    worker: LogInt
    experts: list[LogInt]
    num_bytes: LogInt
    started_ns: LogInt
    ended_ns: LogInt


class LayerRecord(msgspec.Struct, tag="layer", tag_field="kind"):
    """One MoE layer of one step."""

    request: str
    step: LogInt
    layer: LogInt
    num_rows: LogInt
    m: LogInt
    q: LogInt
    hits: Sequence[LogInt]
    fills: Sequence[LogInt]
    cpu: Sequence[LogInt]
    fill_bytes: LogInt
    cpu_bytes: LogInt
    reason: str
    routed_ns: LogInt
    planned_ns: LogInt
    joined_ns: LogInt
    #: From the end of the layer before (or the start of the step) to this layer's routing.
    dense_ns: LogInt
    gpu_hits: list[GpuSpan]
    gpu_fills: list[GpuSpan]
    dma: list[DmaSpan]
    cpu_runs: list[CpuSpan]
    is_complete: bool


class StepRecord(msgspec.Struct, tag="step", tag_field="kind"):
    """One pass of tokens through the model. Of several sequences that decode together, `request`
    names all, with commas between, and `start` is the first one's."""

    request: str
    step: LogInt
    start: LogInt
    num_tokens: LogInt
    started_ns: LogInt
    joined_ns: LogInt
    done_ns: LogInt
    is_sampled: bool
    is_complete: bool


class WorkerRecord(msgspec.Struct, tag="worker", tag_field="kind"):
    """A worker came or went; names the tracks of a trace."""

    worker: LogInt
    role: str
    pid: LogInt
    change: str
    at_ns: LogInt


class LogHeader(msgspec.Struct, tag="log", tag_field="kind"):
    """First line of a log."""

    version: LogInt
    model: str
    dtype: str
    num_layers: LogInt
    top_k: LogInt
    expert_bytes: LogInt
    num_slots: LogInt
    total_experts: LogInt


class DriftRecord(msgspec.Struct, tag="drift", tag_field="kind"):
    """A branch is no longer as fast as was last said; the splits that follow reckon with it."""

    branch: str
    is_beside: bool
    old_bytes_per_s: float
    new_bytes_per_s: float
    at_ns: LogInt


class LagRecord(msgspec.Struct, tag="lag", tag_field="kind"):
    """A fixed cost (a field of BranchCosts) has changed; the splits that follow reckon with it."""

    cost: str
    old_us: float
    new_us: float
    at_ns: LogInt


class ArmRecord(msgspec.Struct, tag="arm", tag_field="kind"):
    """From now on misses are split, or all filled, or all on the CPU: what was measured fastest."""

    arm: str
    at_ns: LogInt


LogRecord = (
    LogHeader | WorkerRecord | StepRecord | LayerRecord | DriftRecord | LagRecord | ArmRecord
)


def _drift_record(drifted: Drifted, at_ns: int) -> DriftRecord | LagRecord:
    drift = drifted.drift
    if isinstance(drift, Lag):
        return LagRecord(drift.cost, drift.old_s * 1e6, drift.new_s * 1e6, at_ns)
    return DriftRecord(
        drift.branch, drift.is_beside, drift.old_bytes_per_s, drift.new_bytes_per_s, at_ns
    )


def layer_stages(record: LayerRecord) -> Iterator[tuple[str, int]]:
    """Stages of a complete layer-step and their durations in ns. Branches run side by side, so
    `gpu_hits`, `dma`, `gpu_fills` and `cpu` overlap and do not add up to `layer`."""
    yield "dense", record.dense_ns
    yield "plan", record.planned_ns - record.routed_ns
    parts_end_ns = record.planned_ns
    for stage, spans in (
        ("gpu_hits", record.gpu_hits),
        ("dma", record.dma),
        ("gpu_fills", record.gpu_fills),
        ("cpu", record.cpu_runs),
    ):
        if spans:
            ended_ns = max(span.ended_ns for span in spans)
            yield stage, ended_ns - min(span.started_ns for span in spans)
            if ended_ns > parts_end_ns:
                parts_end_ns = ended_ns
    # A device may report an end that it noticed after the sum was queued.
    yield "join", max(record.joined_ns - parts_end_ns, 0)
    yield "layer", record.joined_ns - record.routed_ns


def step_stages(record: StepRecord) -> Iterator[tuple[str, int]]:
    """Stages of a complete step outside its layers, and the step itself."""
    yield "sample", record.done_ns - record.joined_ns
    yield WHOLE, record.done_ns - record.started_ns


class LatencyFold:
    """Builds records from events and commands, in the order in which the engine passes them."""

    def __init__(self, write: Callable[[LogRecord], None] | None = None) -> None:
        self._log = self._write = write
        self._times: dict[RequestId, StageTimes] = {}
        #: Whose step is under way.
        self._requests: list[RequestId] = []
        self._step: StepRecord | None = None
        self._layer: LayerRecord | None = None
        self._copies: dict[CopyId, DmaSpan] = {}

    def watch(self, watcher: Callable[[LogRecord], None] | None) -> None:
        """Show every record to `watcher` too, from now on; None: to nobody beside the log."""
        log = self._log
        if log is None or watcher is None:
            self._write = watcher or log
            return

        def both(record: LogRecord) -> None:
            log(record)
            watcher(record)

        self._write = both

    def record(self, record: LogRecord) -> None:
        """One more record, of what is not folded here."""
        if self._write is not None:
            self._write(record)

    def begin_request(self, request: RequestId) -> None:
        self._times[request] = StageTimes()

    def end_request(self, request: RequestId) -> StageTimes:
        """The stages of a request that is over."""
        return self._times.pop(request, StageTimes())

    def event(self, event: CoreEvent) -> None:
        """An event on its way to the core."""
        match event:
            case Routed():
                self._begin_layer(event)
            case Passed():
                self._passed(event)
            case Ran():
                self._ran(event)
            case Copied():
                span = self._copies.pop(event.copy, None)
                if span is not None:
                    span.worker = event.epoch
                    span.num_bytes = event.num_bytes
                    span.started_ns = event.started_ns
                    span.ended_ns = event.ended_ns
            case Executed():
                self._executed(event)
            case StepDone():
                self._step_done(event)
            case _:
                pass

    def command(self, command: CoreCommand, now_ns: int) -> None:
        """A command that the core gave at `now_ns`."""
        match command:
            case Planned():
                self._planned(command, now_ns)
            case Drifted() if self._write is not None:
                self._write(_drift_record(command, now_ns))
            case ArmTaken() if self._write is not None:
                self._write(ArmRecord(command.arm, now_ns))
            case Copy() if command.is_awaited:
                layer = self._layer
                if layer is not None and layer.layer == command.layer:
                    span = DmaSpan(0, command.expert, command.slot, 0, 0, 0)
                    self._copies[command.copy] = span
                    layer.dma.append(span)
            case StartStep():
                self._break_off()
                self._requests = []
                self._step = StepRecord(
                    "",
                    command.step,
                    command.parts[0].start,
                    sum(len(part.tokens) for part in command.parts),
                    now_ns,
                    0,
                    0,
                    any(part.sampling is not None for part in command.parts),
                    False,
                )
            case _:
                pass

    def close(self) -> None:
        """Nothing more will come; what was under way is logged as incomplete."""
        self._break_off()

    def _passed(self, event: Passed) -> None:
        """A layer that the gpu_worker went through by itself: its look at the table is its plan."""
        self._begin_layer(event)
        layer = self._layer
        if layer is not None and (layer.step, layer.layer) == (event.step, event.layer):
            layer.planned_ns = event.started_ns
            span = GpuSpan(list(event.experts), event.started_ns, event.ended_ns)
            layer.gpu_hits.append(span)

    def _begin_layer(self, event: Routed | Passed) -> None:
        step = self._step
        if step is None or step.step != event.step:
            return
        before = self._layer
        if before is not None:
            if before.layer == event.layer:
                return  # said again
            self._end_layer(before, event.joined_ns)
        dense_ns = event.routed_ns - (event.joined_ns or step.started_ns)
        self._layer = LayerRecord(
            "",
            event.step,
            event.layer,
            sum(event.num_rows),
            0,
            0,
            [],
            [],
            [],
            0,
            0,
            "",
            event.routed_ns,
            0,
            0,
            dense_ns,
            [],
            [],
            [],
            [],
            False,
        )

    def _planned(self, planned: Planned, now_ns: int) -> None:
        layer, step = self._layer, self._step
        if layer is None or step is None or layer.step != planned.step:
            return
        if layer.layer != planned.layer:
            return
        self._requests = planned.requests
        step.request = layer.request = ",".join(planned.requests)
        layer.num_rows = planned.num_rows
        layer.hits = planned.hits
        layer.fills = planned.fills
        layer.cpu = planned.cpu
        layer.q = len(planned.fills)
        layer.m = layer.q + len(planned.cpu)
        # A layer is planned again when a worker was lost in it; the first decision's time stays.
        layer.planned_ns = layer.planned_ns or now_ns
        if self._write is not None:
            layer.reason = planned.split.reason()

    def _ran(self, event: Ran) -> None:
        layer = self._layer
        if layer is None or layer.layer != event.layer or layer.step != event.step:
            return
        if not event.experts:
            return
        span = GpuSpan(list(event.experts), event.started_ns, event.ended_ns)
        is_fill = any(expert in layer.fills for expert in event.experts)
        (layer.gpu_fills if is_fill else layer.gpu_hits).append(span)

    def _executed(self, event: Executed) -> None:
        layer = self._layer
        if layer is None or layer.layer != event.layer or layer.step != event.step:
            return
        for span in layer.cpu_runs:
            if span.worker == event.epoch and event.experts[0] in span.experts:
                return  # it was seen in shared memory, and now the message is here
        layer.cpu_runs.append(
            CpuSpan(
                event.epoch,
                list(event.experts),
                event.num_bytes,
                event.started_ns,
                event.ended_ns,
            )
        )

    def _step_done(self, event: StepDone) -> None:
        step, layer = self._step, self._layer
        if step is None or step.step != event.step:
            return
        if layer is not None:
            self._end_layer(layer, event.joined_ns)
        step.joined_ns = event.joined_ns
        step.done_ns = event.done_ns
        step.is_complete = True
        for times in self._times_of_step():
            for stage, duration_ns in step_stages(step):
                times.add(stage, duration_ns)
        if self._write is not None:
            self._write(step)
        self._step = self._layer = None
        self._copies.clear()

    def _end_layer(self, layer: LayerRecord, joined_ns: int) -> None:
        layer.joined_ns = joined_ns
        # A fill that was given up (its worker died) has no end; its expert ran elsewhere.
        layer.dma = [span for span in layer.dma if span.ended_ns]
        layer.fill_bytes = sum(span.num_bytes for span in layer.dma)
        layer.cpu_bytes = sum(span.num_bytes for span in layer.cpu_runs)
        layer.is_complete = layer.planned_ns > 0
        if layer.is_complete:
            for times in self._times_of_step():
                for stage, duration_ns in layer_stages(layer):
                    times.add(stage, duration_ns)
        if self._write is not None:
            self._write(layer)

    def _times_of_step(self) -> list[StageTimes]:
        times = [self._times.get(request) for request in self._requests]
        return [of_request for of_request in times if of_request is not None]

    def _break_off(self) -> None:
        """The step under way will not go on."""
        if self._write is not None:
            if self._layer is not None:
                self._write(self._layer)
            if self._step is not None:
                self._write(self._step)
        self._step = self._layer = None
        self._copies.clear()
