"""Writes what routers chose in live runs as a routing trace, the form that `simulate` reads.

Only layer-steps of one row say who was chosen together: a decode step of one sequence. Steps of
several rows (a prompt, several sequences at once) are counted and left out. What a step has chosen
counts once the step is over, so one that a worker's death cut short leaves nothing.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from orchestrator.core.events import Passed, Submit
from protocol.messages import Routed, StartStep, StepDone

if TYPE_CHECKING:
    from pathlib import Path

    from expert_store.layout import StoreLayout
    from orchestrator.core.events import CoreCommand, CoreEvent

log = logging.getLogger("headrace")

#: A step of 48 layers and top-8 has 768 bytes: at most this many of such steps are kept.
MAX_STEPS = 1_000_000


class TraceRecorder:
    """Hears the same events and commands as the latency log; `close` writes the file."""

    def __init__(self, path: Path, layout: StoreLayout) -> None:
        self._path = path
        self._layout = layout
        self._steps: list[list[list[int]]] = []
        #: Of the step under way, by layer.
        self._chosen: dict[int, list[int]] = {}
        self._step = -1
        self._starts: list[int] = []
        self._is_new_request = True
        self.num_left_out = 0

    def hear(self, event: CoreEvent, commands: list[CoreCommand]) -> None:
        """An event, and what the core made of it."""
        match event:
            case Routed() | Passed():
                if event.step == self._step and max(event.num_rows) == 1:
                    self._chosen[event.layer] = list(event.experts)
            case StepDone():
                if event.step == self._step:
                    self._end_step()
            case Submit():
                self._is_new_request = True
            case _:
                pass
        for command in commands:
            if isinstance(command, StartStep):
                self._step = command.step
                self._chosen = {}

    def _end_step(self) -> None:
        layout = self._layout
        rows = [self._chosen.get(layer, []) for layer in range(layout.num_layers)]
        is_whole = all(len(experts) == layout.top_k for experts in rows)
        if not is_whole or len(self._steps) >= MAX_STEPS:
            self.num_left_out += 1
            return
        if self._is_new_request:
            self._starts.append(len(self._steps))
            self._is_new_request = False
        self._steps.append(rows)

    def close(self) -> None:
        """Write what was recorded; a file that cannot be written is said, not raised."""
        import numpy as np

        if not self._steps:
            log.warning("no routing was recorded: no decode step of one sequence was seen")
            return
        layout = self._layout
        try:
            with self._path.open("wb") as file:
                np.savez_compressed(
                    file,
                    ids=np.array(self._steps, np.int16),
                    num_experts=np.array(max(layout.num_experts), np.int64),
                    model=np.array(layout.model_name),
                    request_starts=np.array(self._starts, np.int32),
                    phase=np.ones(len(self._steps), np.uint8),
                    layer_ids=np.arange(layout.num_layers, dtype=np.int32),
                    expert_bytes=np.full(layout.num_layers, layout.expert_bytes, np.int64),
                )
        except OSError as error:
            log.error("the routing trace %s cannot be written: %s", self._path, error.strerror)
            return
        log.info(
            "%d decode steps recorded in %s; %d steps of several rows left out",
            len(self._steps),
            self._path,
            self.num_left_out,
        )
