"""The orchestrator as a process: its event loop, and an engine's life inside it."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING

from orchestrator.engine import Engine

if TYPE_CHECKING:
    from collections.abc import Callable

    from orchestrator.front import Front
    from orchestrator.settings import PipelineSettings


def run_orchestrator(settings: PipelineSettings, front: Front | None = None) -> int:
    """The whole life of the process, with something in front of it or not. Returns its exit code.

    Raises:
        UserError: bad input or surroundings.
    """
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        ending = runner.run(Engine(settings, front).run())
    if ending.sentence:
        print(f"headrace: {ending.sentence}", file=sys.stderr, flush=True)  # noqa: T201
    return ending.exit_code


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    try:
        import uvloop
    except ImportError:  # a platform without it; everything works, a little slower
        return asyncio.new_event_loop
    return uvloop.new_event_loop
