"""One layer-step as the gpu_worker lives it: say what was routed, do what is told, join.

    look at the table       every expert is in a slot: compute, join, leave a report, go on
    publish rows            hidden rows and choices in the activation segment, header last
    -> Routed               the orchestrator decides who computes what
    <- Run experts, slots   compute them; -> Ran when their slots are no longer read
    <- Run ... join         that was the last part: add up and go on with the model

Other commands may arrive between these (a sequence to drop, a copy to make); they go to `on_other`.
What belongs to another step or layer is late or lost, and dropped: commands are idempotent, and the
orchestrator repeats what it still needs. A `Run` that names an expert nobody chose or a slot that
does not exist cannot be followed at all and is a fault.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from protocol.errors import ProtocolError
from protocol.messages import LayerId, Ran, Routed, Run, StartStep, StepId

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from gpu_worker.routing_replay import RoutingReplay
    from gpu_worker.rows import Rows
    from protocol.messages import ExpertId, WorkerCommand, WorkerEvent
    from protocol.residency import ResidencyReader
    from protocol.worker_life import WorkerLink


class Exchange:
    """Gets routed experts computed, one layer after the other, for one step at a time.

    `receive` returns the next command that is meant for this incarnation of the worker. Without a
    `residency` table every layer is asked for. With a `replay` it has the say, not the router.
    """

    def __init__(
        self,
        link: WorkerLink,
        rows: Rows,
        top_k: int,
        num_slots: int,
        receive: Callable[[], WorkerCommand],
        on_other: Callable[[WorkerCommand], None],
        residency: ResidencyReader | None = None,
        replay: RoutingReplay | None = None,
    ) -> None:
        self._epoch = link.epoch
        self._send: Callable[[WorkerEvent], None] = link.send
        self._rows = rows
        self._top_k = top_k
        self._num_slots = num_slots
        self._receive = receive
        self._on_other = on_other
        self._residency = residency
        self._replay = replay
        self._table: ResidencyReader | None = None
        self._step = StepId(-1)
        self._rows_apart = False
        self.joined_ns = 0
        #: Commands of another step or layer.
        self.num_stale = 0

    def begin_step(self, step: StepId, *, rows_apart: bool = False) -> None:
        """The layers that follow belong to `step`. `rows_apart`: each row is another sequence's and
        must come out as it would alone."""
        self._step = step
        self._rows_apart = rows_apart
        self.joined_ns = 0
        table = self._residency
        self._table = table if table is not None and table.epoch == self._epoch else None

    @property
    def num_reports(self) -> int:
        """Layers reported in shared memory so far: what every event of a step says."""
        return 0 if self._table is None else self._table.num_reports

    def __call__(
        self, layer: int, hidden: torch.Tensor, choices: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """Compute the experts of one layer; see gpu_worker.model.LayerExchange.

        Raises:
            ProtocolError: a command that cannot be followed.
            OrchestratorGone: nobody is there to say who computes what.
        """
        if choices.shape[1] != self._top_k:
            raise ProtocolError(
                f"the router of MoE layer {layer} chose {choices.shape[1]} experts per row, "
                f"the store says {self._top_k}"
            )
        if self._replay is not None:
            choices = self._replay.choices(layer, choices)
        routed_ns = time.monotonic_ns()
        step, started_ns = self._step, 0
        counts = self._rows.route(hidden, choices, rows_apart=self._rows_apart)
        experts = list(counts)
        table = self._table
        if table is not None:
            slots = table.look(layer, experts)
            if slots is not None:
                started_ns = time.monotonic_ns()
                self._rows.compute(experts, slots)  # type: ignore[arg-type]
                output = self._rows.join(weights, hidden.dtype)
                ended_ns = self._rows.wait_computed()
                times_ns = (routed_ns, started_ns, ended_ns, self.joined_ns)
                table.report(self._epoch, step, layer, experts, list(counts.values()), times_ns)
                self.joined_ns = time.monotonic_ns()
                return output
        self._rows.publish(step, layer)
        self._send(
            Routed(
                self._epoch,
                step,
                LayerId(layer),
                experts,
                list(counts.values()),
                routed_ns,
                self.joined_ns,
                self.num_reports,
            )
        )
        while True:
            command = self._receive()
            if type(command) is not Run:
                if type(command) is StartStep:
                    raise ProtocolError(
                        f"step {command.step} was started within step {step}, layer {layer}"
                    )
                self._on_other(command)
                continue
            if command.step != step or command.layer != layer:
                self.num_stale += 1
                continue
            if command.experts:
                self._check(command, counts)
                started_ns = time.monotonic_ns()
                self._rows.compute(command.experts, command.slots)
            joined = self._rows.join(weights, hidden.dtype) if command.join else None
            if joined is not None:
                self.joined_ns = time.monotonic_ns()
            if command.experts:
                ended_ns = self._rows.wait_computed()
                self._send(
                    Ran(
                        self._epoch,
                        step,
                        command.layer,
                        command.experts,
                        started_ns,
                        ended_ns,
                        self.num_reports,
                    )
                )
            if joined is not None:
                return joined

    def _check(self, command: Run, counts: dict[ExpertId, int]) -> None:
        if len(command.experts) != len(command.slots):
            raise ProtocolError(
                f"Run names {len(command.experts)} experts and {len(command.slots)} slots"
            )
        for expert, slot in zip(command.experts, command.slots, strict=True):
            if expert not in counts:
                raise ProtocolError(f"Run names expert {expert}, which no row of the layer chose")
            if not 0 <= slot < self._num_slots:
                raise ProtocolError(f"Run names slot {slot} of {self._num_slots}")
