"""The server's life inside the engine's event loop; see orchestrator.front.

start   listen at once, so that /health can say how far loading is
drain   nothing new comes in; what is open may finish, up to a limit
stop    the engine has told every request its end; connections close
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from typing import TYPE_CHECKING

import uvicorn

from orchestrator.http.app import make_app
from orchestrator.http.chat_template import ChatTemplate
from orchestrator.http.constraints import Constraints
from orchestrator.http.gate import Gate
from orchestrator.http.metrics import ServerMetrics
from orchestrator.http.sampling import sampling_defaults
from orchestrator.http.stats import SAMPLE_EVERY_S, StatsWindow
from orchestrator.http.tools import parser_for
from protocol.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

    from orchestrator.engine import Engine
    from orchestrator.http.admin import Trace
    from orchestrator.http.settings import ServerSettings

log = logging.getLogger("headrace")

_STOP_S = 2.0
_BACKLOG = 512


class ServerState:
    """What the endpoints share."""

    def __init__(
        self,
        engine: Engine,
        settings: ServerSettings,
        model_name: str,
        template: ChatTemplate | None,
        config: dict[str, Any],
    ) -> None:
        model_dir = engine.settings.model_dir
        self.engine = engine
        self.settings = settings
        self.model_name = model_name
        self.template = template
        #: The resolved configuration, as GET /v1/config shows it.
        self.config = config
        self.tool_form = settings.tool_call_parser or (
            parser_for(template.source) if template is not None and template.knows_tools else None
        )
        self.sampling_defaults = sampling_defaults(model_dir)
        self.constraints = Constraints()
        self.gate = Gate(engine, settings)
        self.metrics = ServerMetrics(model_name)
        self.window = StatsWindow(engine, self.metrics)
        self.metrics.watch(engine, self.window.achieved)
        #: The trace under way, see POST /admin/trace.
        self.trace: Trace | None = None
        self.created_s = int(time.time())
        self._was_ready = False

    def state(self) -> str:
        """loading, ready, degraded or draining, in one word."""
        if self.gate.is_draining:
            return "draining"
        if self.engine.status().is_ready:
            self._was_ready = True
            return "ready"
        return "degraded" if self._was_ready else "loading"


class _Uvicorn(uvicorn.Server):
    """Signals are the engine's."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class HttpFront:
    """An HTTP server as an engine's front. `listener` is bound already, so that a taken port is
    told before anything is loaded."""

    def __init__(
        self, settings: ServerSettings, listener: socket.socket, config: dict[str, Any]
    ) -> None:
        self._settings = settings
        self._listener = listener
        self._config = config
        self._state: ServerState
        self._server: _Uvicorn
        self._serving: asyncio.Task[None] | None = None
        self._ticking: asyncio.Task[None] | None = None

    async def start(self, engine: Engine) -> None:
        """Raises UserError: the chat template is broken."""
        model_dir = engine.settings.model_dir
        name = self._settings.served_model_name or model_dir.resolve().name
        template = ChatTemplate.load(model_dir, self._settings.chat_template)
        self._state = ServerState(engine, self._settings, name, template, self._config)
        config = uvicorn.Config(
            make_app(self._state),
            log_config=None,
            access_log=False,
            lifespan="off",
            server_header=False,
            backlog=_BACKLOG,
            timeout_graceful_shutdown=int(_STOP_S),
            ws="none",
        )
        self._server = _Uvicorn(config)
        self._serving = asyncio.create_task(self._server.serve([self._listener]))
        self._ticking = asyncio.create_task(self._tick())
        host, port = self._listener.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        log.warning("listening on http://%s:%d; %s is loading", shown, port, name)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(SAMPLE_EVERY_S)
            self._state.window.tick()

    async def drain(self) -> None:
        """Until nothing is open or the time is up."""
        gate, limit_s = self._state.gate, self._settings.drain_timeout_s
        gate.is_draining = True
        if gate.num_open:
            log.warning(
                "draining: %d texts are not finished; at most %.0f s more", gate.num_open, limit_s
            )
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await gate.idle.wait()

    async def stop(self) -> None:
        """Close everything, within about two seconds."""
        if self._serving is None or self._ticking is None:
            return
        self._ticking.cancel()
        self._server.should_exit = True
        _, pending = await asyncio.wait([self._serving], timeout=_STOP_S + 1)
        for task in pending:
            task.cancel()
        self._listener.close()


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens on host and port; 0 is any free port.

    Raises:
        UserError: there is no such address, or the port is taken.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError) as error:  # the latter: no name can be written like this
        raise UserError(f"There is no address {host!r} to listen on: {error}.") from None
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        listener.listen(_BACKLOG)  # who comes before the server is up waits for it
    except OSError as error:
        listener.close()
        raise UserError(
            f"Cannot listen on {host} port {port}: {error.strerror}; choose another --port or "
            "--host."
        ) from None
    return listener
