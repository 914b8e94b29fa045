"""Who may come in: not while loading or draining, not beyond the queue, and only for our model."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from orchestrator.http.errors import ApiError

if TYPE_CHECKING:
    from orchestrator.engine import Engine
    from orchestrator.front import Loaded
    from orchestrator.http.settings import ServerSettings

_RETRY_LOADING_S = 5
_RETRY_BUSY_S = 1


class Gate:
    """Counts the texts that are being made; `idle` is set when there are none."""

    def __init__(self, engine: Engine, settings: ServerSettings) -> None:
        self._engine = engine
        self._settings = settings
        self.num_open = 0
        self.is_draining = False
        self.idle = asyncio.Event()
        self.idle.set()

    def loaded(self) -> Loaded:
        """The model.

        Raises:
            ApiError: 503, it is still loading.
        """
        if self._engine.loaded is None:
            raise ApiError(
                503,
                f"The model is not loaded yet ({self._engine.status().text}); try again.",
                code="loading",
                retry_after_s=_RETRY_LOADING_S,
            )
        return self._engine.loaded

    def check_model(self, model: str | None, name: str) -> None:
        """Raises ApiError 404 if a request names another model."""
        if model is not None and model != name:
            raise ApiError(
                404,
                f"The model {model!r} is not here; this server has {name!r}.",
                param="model",
                code="model_not_found",
            )

    def enter(self, num_choices: int) -> None:
        """Let a request for so many texts in; each `enter` has its `leave`.

        Raises:
            ApiError: 503 while draining, 429 when the queue is full.
        """
        if self.is_draining:
            raise ApiError(
                503, "The server is draining and takes no new requests.", code="draining"
            )
        limit = self.loaded().settings.max_num_seqs + self._settings.max_queue
        if self.num_open + num_choices > limit:
            raise ApiError(
                429,
                f"{self.num_open} texts are being made or waited for and {limit} is the limit; try "
                "again later.",
                kind="rate_limit_error",
                code="queue_full",
                retry_after_s=_RETRY_BUSY_S,
            )
        self.num_open += num_choices
        self.idle.clear()

    def leave(self, num_choices: int) -> None:
        """They are over."""
        self.num_open -= num_choices
        if self.num_open == 0:
            self.idle.set()
