"""Endpoints that change how the pipeline runs; there are none without a key (see guard)."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from starlette.responses import Response

from orchestrator.http.errors import ApiError, bad_request, json_response
from orchestrator.http.schemas import WorkerRequest

if TYPE_CHECKING:
    from fastapi import FastAPI

    from orchestrator.http.server import ServerState


def add_admin(app: FastAPI, state: ServerState) -> None:
    """Register them."""

    @app.post("/admin/drain")
    async def post_drain() -> Response:
        """Take no new requests. The process goes on, for whoever stops it when it is idle."""
        state.gate.is_draining = True
        return json_response({"status": "draining", "open": state.gate.num_open})

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
