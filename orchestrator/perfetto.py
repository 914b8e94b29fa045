"""A latency log as a Chrome/Perfetto trace: one track per process, arrows along each layer-step.

Format: the Trace Event Format's JSON object. `ph` "X" is a slice with a duration, "M" names a
track, "s" / "f" begin and end an arrow, bound to the slice that encloses their time stamp. Times
are in us from the first stamp of the log.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from orchestrator.latency_log import LayerRecord, LogRecord, StepRecord, WorkerRecord
from protocol.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

#: Trace "processes" are numbered by us: the orchestrator, the gpu_worker (one track across its
#: restarts, since steps do not say which of them ran), then each other worker by its epoch.
_ORCHESTRATOR = 1
_GPU = 2
_FIRST_WORKER = 10


def trace_of(records: list[LogRecord]) -> bytes:
    """The trace as JSON."""
    events = list(_Trace(records).events())
    return msgspec.json.encode({"traceEvents": events, "displayTimeUnit": "ms"})


def write_trace(records: list[LogRecord], path: Path) -> None:
    """Raises UserError when the file cannot be written."""
    try:
        path.write_bytes(trace_of(records))
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}.") from None


class _Trace:
    def __init__(self, records: list[LogRecord]) -> None:
        self._records = records
        self._start_ns = min(
            (
                record.started_ns if isinstance(record, StepRecord) else record.routed_ns
                for record in records
                if isinstance(record, (StepRecord, LayerRecord))
            ),
            default=0,
        )
        self._num_arrows = 0

    def events(self) -> Iterable[dict[str, Any]]:
        names = {_ORCHESTRATOR: "orchestrator", _GPU: "gpu_worker"}
        for record in self._records:
            match record:
                case WorkerRecord() if record.role != "gpu_worker":
                    names[_FIRST_WORKER + record.worker] = f"{record.role} (pid {record.pid})"
                case StepRecord(is_complete=True):
                    yield self._slice(
                        _ORCHESTRATOR,
                        2,
                        f"step {record.step}",
                        record.started_ns,
                        record.done_ns,
                        {"tokens": record.num_tokens, "start": record.start},
                    )
                    yield self._slice(_GPU, 1, "sample", record.joined_ns, record.done_ns, {})
                case LayerRecord(is_complete=True):
                    yield from self._layer(record)
                case _:
                    pass
        for process, name in names.items():
            yield {
                "ph": "M",
                "name": "process_name",
                "pid": process,
                "tid": 1,
                "args": {"name": name},
            }

    def _layer(self, record: LayerRecord) -> Iterable[dict[str, Any]]:
        of = f"layer {record.layer}"
        yield self._slice(
            _GPU, 1, f"dense, {of}", record.routed_ns - record.dense_ns, record.routed_ns, {}
        )
        args = {"step": record.step, "q": record.q, "m": record.m, "reason": record.reason}
        yield self._slice(
            _ORCHESTRATOR, 1, f"plan, {of}", record.routed_ns, record.planned_ns, args
        )
        ends = [record.planned_ns]
        for spans, what in ((record.gpu_hits, "hits"), (record.gpu_fills, "filled")):
            for run in spans:
                experts = {"experts": run.experts}
                yield self._slice(_GPU, 2, f"{what}, {of}", run.started_ns, run.ended_ns, experts)
                yield from self._arrow(record, _GPU, 2, run.started_ns)
                ends.append(run.ended_ns)
        for fill in record.dma:
            track = _FIRST_WORKER + fill.worker
            args = {"slot": fill.slot, "bytes": fill.num_bytes}
            yield self._slice(
                track, 1, f"fill {fill.expert}, {of}", fill.started_ns, fill.ended_ns, args
            )
            yield from self._arrow(record, track, 1, fill.started_ns)
        for execute in record.cpu_runs:
            track = _FIRST_WORKER + execute.worker
            args = {"experts": execute.experts, "bytes": execute.num_bytes}
            yield self._slice(
                track, 1, f"experts, {of}", execute.started_ns, execute.ended_ns, args
            )
            yield from self._arrow(record, track, 1, execute.started_ns)
            ends.append(execute.ended_ns)
        yield self._slice(_GPU, 1, f"join, {of}", max(ends), record.joined_ns, {})

    def _slice(
        self,
        process: int,
        track: int,
        name: str,
        started_ns: int,
        ended_ns: int,
        args: dict[str, Any],
    ) -> dict[str, Any]:
        return {
            "ph": "X",
            "name": name,
            "cat": "headrace",
            "pid": process,
            "tid": track,
            "ts": (started_ns - self._start_ns) / 1e3,
            "dur": max(ended_ns - started_ns, 0) / 1e3,
            "args": args,
        }

    def _arrow(
        self, record: LayerRecord, process: int, track: int, at_ns: int
    ) -> Iterable[dict[str, Any]]:
        """From the decision to what it caused."""
        self._num_arrows += 1
        arrow = {
            "name": f"step {record.step}, layer {record.layer}",
            "cat": "flow",
            "id": self._num_arrows,
        }
        yield {
            **arrow,
            "ph": "s",
            "pid": _ORCHESTRATOR,
            "tid": 1,
            "ts": (record.routed_ns - self._start_ns) / 1e3,
        }
        yield {
            **arrow,
            "ph": "f",
            "bp": "e",
            "pid": process,
            "tid": track,
            "ts": (at_ns - self._start_ns) / 1e3,
        }
