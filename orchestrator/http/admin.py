"""Endpoints that change how the pipeline runs; there are none without a key (see guard)."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from starlette.responses import Response

from orchestrator.http.errors import ApiError, bad_request, json_response
from orchestrator.http.schemas import CacheRequest, TraceRequest, WorkerRequest
from orchestrator.latency_log import LogRecord, WorkerRecord
from orchestrator.perfetto import trace_of
from orchestrator.settings import count_slots
from protocol.errors import UserError
from protocol.messages import WorkerStatus

if TYPE_CHECKING:
    from fastapi import FastAPI

    from orchestrator.http.server import ServerState


#: Layer-steps and steps that a trace holds; later ones are left out. Some 200 MB at most.
MAX_RECORDS = 100_000


class Trace:
    """Records of a trace under way."""

    def __init__(self, workers: list[WorkerStatus]) -> None:
        self.records: list[LogRecord] = [
            WorkerRecord(worker.epoch, worker.role, worker.pid, "joined", time.monotonic_ns())
            for worker in workers
        ]

    def take(self, record: LogRecord) -> None:
        if len(self.records) < MAX_RECORDS:
            self.records.append(record)


def add_admin(app: FastAPI, state: ServerState) -> None:
    """Register them."""

    @app.post("/admin/drain")
    async def post_drain() -> Response:
        """Take no new requests. The process goes on, for whoever stops it when it is idle."""
        state.gate.is_draining = True
        return json_response({"status": "draining", "open": state.gate.num_open})

    @app.post("/admin/cache")
    async def post_cache(body: CacheRequest) -> Response:
        """Use so many expert slots from the next step on: a number or a share of all experts, at
        most those that the server was started with, since their memory is set aside then."""
        loaded = state.gate.loaded()
        try:
            num_slots = count_slots(str(body.slots), loaded.layout.total_experts)
        except UserError as error:
            raise bad_request(str(error), "slots") from None
        if num_slots > loaded.num_slots:
            raise bad_request(
                f"{num_slots} slots are more than the {loaded.num_slots} that the server was "
                "started with.",
                "slots",
            )
        state.engine.resize(num_slots)
        return json_response({"slots": num_slots, "most": loaded.num_slots})

    @app.post("/admin/trace")
    async def post_trace(body: TraceRequest) -> Response:
        """Start, or stop and answer with, a trace for Perfetto or chrome://tracing."""
        if body.action == "start":
            if state.trace is not None:
                raise ApiError(409, "A trace is under way; stop it first.", param="action")
            state.trace = Trace(state.engine.status().workers)
            state.engine.fold.watch(state.trace.take)
            return json_response({"status": "tracing", "most_records": MAX_RECORDS})
        if state.trace is None:
            raise ApiError(409, "No trace is under way; start one first.", param="action")
        trace, state.trace = state.trace, None
        state.engine.fold.watch(None)
        content = await asyncio.to_thread(trace_of, trace.records)
        return Response(content, media_type="application/json")

    @app.get("/admin/workers")
    async def get_workers() -> Response:
        """Who is here."""
        status = state.engine.status()
        return json_response({"workers": status.workers, "missing": status.missing_roles})

    @app.post("/admin/workers")
    async def post_workers(body: WorkerRequest) -> Response:
        """Kill a worker; the supervisor starts another, and no request is lost."""
        if not state.engine.settings.is_supervising:
            raise bad_request("Nobody would start another worker: this pipeline is not supervised.")
        if not state.engine.replace_worker(body.restart):
            raise ApiError(404, f"There is no worker of process {body.restart}.", param="restart")
        await asyncio.sleep(0)
        return json_response({"restarting": body.restart})
