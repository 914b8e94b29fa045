"""The endpoints, by path, and how what goes wrong becomes an answer."""

from __future__ import annotations

import logging
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import FileResponse, Response

from orchestrator.http.admin import add_admin
from orchestrator.http.chat import chat_completions
from orchestrator.http.completions import completions, detokenize, tokenize
from orchestrator.http.errors import ApiError, from_validation, json_response
from orchestrator.http.guard import Guard
from orchestrator.http.metrics import CONTENT_TYPE
from orchestrator.http.schemas import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from orchestrator.http.server import ServerState

log = logging.getLogger("headrace")

_PAGE = Path(__file__).with_name("page.html")
_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"description": text}
    for status, text in {
        400: "The request is not valid; `error.param` names the field.",
        401: "The key is missing or wrong.",
        404: "No such model.",
        413: "The body is too large.",
        429: "The queue is full; see Retry-After.",
        503: "Loading, draining, or the pipeline met a fault.",
    }.items()
}


def make_app(state: ServerState) -> ASGIApp:
    """The application: guard, endpoints, errors."""
    app = FastAPI(
        title="Headrace",
        version=package_version(),
        docs_url=None,  # their pages load scripts from elsewhere
        redoc_url=None,
        openapi_url="/openapi.json",
    )
    _add_errors(app)
    _add_openai(app, state)
    _add_state(app, state)
    add_admin(app, state)
    guarded: ASGIApp = Guard(app, state.settings, state.metrics)
    if state.settings.cors_origins:
        guarded = CORSMiddleware(
            guarded,
            allow_origins=state.settings.cors_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["authorization", "content-type", "x-request-id"],
            expose_headers=["x-request-id", "retry-after"],
        )
    return guarded


def package_version() -> str:
    try:
        return version("headrace")
    except PackageNotFoundError:
        return "0"


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(ApiError)
    async def api_error(request: Request, error: ApiError) -> Response:
        return error.response()

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        return from_validation(list(error.errors())).response()

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        sentence = {
            # Of a body of JSON the framework says no more than that.
            400: "The body cannot be read; send a JSON object in UTF-8, not too deeply nested.",
            404: f"There is nothing at {request.url.path}.",
            405: f"{request.method} is not for {request.url.path}.",
        }.get(error.status_code, str(error.detail))
        response = ApiError(error.status_code, sentence).response()
        response.headers.update(error.headers or {})
        return response

    @app.exception_handler(Exception)
    async def fault(request: Request, error: Exception) -> Response:
        return ApiError(500, "The server met a fault of its own; its log says more.").response()


def _add_openai(app: FastAPI, state: ServerState) -> None:
    @app.post("/v1/chat/completions", responses=_ERRORS)
    async def post_chat(request: Request, body: ChatRequest) -> Response:
        return await chat_completions(state, request, body)

    @app.post("/v1/completions", responses=_ERRORS)
    async def post_completion(request: Request, body: CompletionRequest) -> Response:
        return await completions(state, request, body)

    @app.post("/tokenize", responses=_ERRORS)
    async def post_tokenize(request: Request, body: TokenizeRequest) -> Response:
        return await tokenize(state, request, body)

    @app.post("/detokenize", responses=_ERRORS)
    async def post_detokenize(request: Request, body: DetokenizeRequest) -> Response:
        return await detokenize(state, request, body)

    @app.get("/v1/models", responses=_ERRORS)
    async def get_models() -> Response:
        return json_response({"object": "list", "data": [_model_card(state)]})

    @app.get("/v1/models/{model:path}", responses=_ERRORS)
    async def get_model(model: str) -> Response:
        state.gate.check_model(model, state.model_name)
        return json_response(_model_card(state))


def _model_card(state: ServerState) -> dict[str, Any]:
    loaded = state.engine.loaded
    return {
        "id": state.model_name,
        "object": "model",
        "created": state.created_s,
        "owned_by": "headrace",
        "root": state.engine.settings.model_dir.name,
        "max_model_len": loaded.text_model.context if loaded else None,
    }


def _add_state(app: FastAPI, state: ServerState) -> None:
    unwell: dict[int | str, dict[str, Any]] = {503: _ERRORS[503]}

    @app.get("/", include_in_schema=False)
    async def get_page() -> Response:
        return FileResponse(
            _PAGE,
            media_type="text/html; charset=utf-8",
            headers={
                "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; "
                "script-src 'unsafe-inline'; connect-src 'self'; img-src data:",
                "cache-control": "no-cache",
            },
        )

    # Load balancers ask with HEAD.
    @app.head("/health", include_in_schema=False)
    @app.get("/health", responses=unwell)
    async def get_health() -> Response:
        """200 when all is well; 503 while loading (with how far it is), when a worker is missing
        (with its name) and while draining."""
        word = state.state()
        status = state.engine.status()
        body: dict[str, Any] = {"status": word, "text": status.text}
        if word == "degraded":
            body["missing_workers"] = status.missing_roles
            body["text"] = f"no {' and no '.join(status.missing_roles)}"
        return json_response(body, 200 if word == "ready" else 503)

    @app.head("/ready", include_in_schema=False)
    @app.get("/ready", responses=unwell)
    async def get_ready() -> Response:
        """200 when a request would be taken: a missing worker is made up for by the others, or
        waited for."""
        is_ready = state.state() in ("ready", "degraded")
        return json_response({"ready": is_ready}, 200 if is_ready else 503)

    @app.get("/version")
    async def get_version() -> Response:
        return json_response({"version": package_version()})

    @app.get("/metrics", responses={401: _ERRORS[401]})
    async def get_metrics() -> Response:
        return Response(state.metrics.text(), media_type=CONTENT_TYPE)

    @app.get("/v1/stats", responses={401: _ERRORS[401]})
    async def get_stats() -> Response:
        return json_response(state.window.stats(state.state()))

    @app.get("/v1/config", responses={401: _ERRORS[401]})
    async def get_config() -> Response:
        return json_response(state.config)
