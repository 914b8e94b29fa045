"""One layer-step as the gpu_worker lives it: say what was routed, see it done, join.

    look at the table       every expert is in a slot: compute, join, leave a report, go on
    publish rows            hidden rows and choices in the activation segment, header last
    -> Routed               the orchestrator decides who computes what
    compute                 what the table has a slot for, while it decides
    <- Run experts, slots   those are hits, too: compute them
    words in shared memory  an expert lies in this slot: compute it; or its rows are there
    all parts are in        add up and go on with the model

Where no completions segment is granted, `Run` names fills as well, and the last one says `join`.

While it waits, the worker looks at the words for `SPIN_US`, then sleeps until a word or a command
wakes it. Slots that a `Run` or a word named are read until they are reported: in the ring of the
residency segment, or by `Ran` where slots are short (`is_ran_wanted`) or there is no ring.

Other commands may arrive between these (a sequence to drop, a copy to make); they go to `on_other`.
What belongs to another step or layer is late or lost, and dropped: commands are idempotent, and the
orchestrator repeats what it still needs. A `Run` that names an expert nobody chose or a slot that
does not exist cannot be followed at all and is a fault.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch

from protocol.errors import ProtocolError
from protocol.messages import ExpertId, LayerId, Ran, Routed, Run, SlotId, StartStep, StepId
from protocol.residency import NO_SLOT

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from gpu_worker.resident_layers import ResidentLayers
    from gpu_worker.routing_replay import RoutingReplay
    from gpu_worker.rows import Rows
    from protocol.completions import Completions
    from protocol.messages import WorkerCommand, WorkerEvent
    from protocol.residency import ResidencyReader
    from protocol.worker_life import WorkerLink

#: Look for finished parts without sleeping for this long. About what being woken costs; longer
#: would take the processor from those who are to finish them.
SPIN_US = 30


class Exchange:
    """Gets routed experts computed, one layer after the other, for one step at a time.

    `receive(wake_fd)` returns the next command that is meant for this incarnation of the worker, or
    None when `wake_fd` became readable before one came; with -1 it waits for a command. Without a
    `residency` table every layer is asked for; without `completions`, or without a table, the
    orchestrator says when to join. With a `replay` it has the say, not the router. `resident` takes
    the layers that it can, with the same bits and the same reports.
    """

    def __init__(
        self,
        link: WorkerLink,
        rows: Rows,
        top_k: int,
        num_slots: int,
        receive: Callable[[int], WorkerCommand | None],
        on_other: Callable[[WorkerCommand], None],
        residency: ResidencyReader | None = None,
        replay: RoutingReplay | None = None,
        completions: Completions | None = None,
        resident: ResidentLayers | None = None,
    ) -> None:
        self._epoch = link.epoch
        self._send: Callable[[WorkerEvent], None] = link.send
        self._all_rows = rows
        #: Of the layer in progress.
        self._rows: Rows | ResidentLayers = rows
        self._top_k = top_k
        self._num_slots = num_slots
        self._receive = receive
        self._on_other = on_other
        self._residency = residency
        self._replay = replay
        self._all_completions = completions
        self._all_resident = resident
        self._table: ResidencyReader | None = None
        self._completions: Completions | None = None
        self._resident: ResidentLayers | None = None
        self._step = StepId(-1)
        self._rows_apart = False
        self._layer = LayerId(-1)
        self._is_ran_wanted = False
        self._joined_ns = 0
        #: Commands of another step or layer.
        self.num_stale = 0

    def begin_step(self, step: StepId, *, rows_apart: bool = False) -> None:
        """The layers that follow belong to `step`. `rows_apart`: each row is another sequence's and
        must come out as it would alone."""
        self._step = step
        self._rows_apart = rows_apart
        self._joined_ns = 0
        table = self._residency
        self._table = table if table is not None and table.epoch == self._epoch else None
        self._completions = None if self._table is None else self._all_completions
        self._resident = None if self._table is None else self._all_resident
        if self._resident is not None:
            self._resident.begin_step(self._epoch, step, starts_some=self._completions is not None)

    @property
    def joined_ns(self) -> int:
        """When the last layer of this step was joined; 0 before the first."""
        return self._joined_ns if self._resident is None else self._resident.joined_ns

    @property
    def num_reports(self) -> int:
        """Reports left in shared memory so far: what every event of a step says."""
        return 0 if self._table is None else self._table.num_reports

    def __call__(
        self, layer: int, hidden: torch.Tensor, choices: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """Compute the experts of one layer; see gpu_worker.model.LayerExchange.

        Raises:
            ProtocolError: a command that cannot be followed.
            OrchestratorGone: nobody is there to say who computes what.
        """
        routed_ns = time.monotonic_ns()
        table, resident = self._table, self._resident
        if self._replay is not None:
            choices = self._replay.choices(layer, choices)
        if resident is not None:
            begun = resident.begin(layer, routed_ns, hidden, choices, weights)
            if isinstance(begun, torch.Tensor):
                return begun
            if begun == "routed":
                self._rows = resident
                counts = resident.counts
                output = self._ask(layer, counts, routed_ns, resident.seen, weights, hidden.dtype)
                self._joined_ns = resident.joined_ns = time.monotonic_ns()
                return output
        if choices.shape[1] != self._top_k:
            raise ProtocolError(
                f"the router of MoE layer {layer} chose {choices.shape[1]} experts per row, "
                f"the store says {self._top_k}"
            )
        self._rows = rows = self._all_rows
        counts = rows.route(hidden, choices, rows_apart=self._rows_apart)
        experts = list(counts)
        slots = None if table is None else table.look(layer, experts)
        if table is not None and slots is not None and NO_SLOT not in slots:
            started_ns = time.monotonic_ns()
            rows.compute(experts, slots)  # type: ignore[arg-type]
            output = rows.join(weights, hidden.dtype)
            ended_ns = rows.wait_computed()
            times_ns = (routed_ns, started_ns, ended_ns, self.joined_ns)
            table.report(self._epoch, self._step, layer, experts, list(counts.values()), times_ns)
        else:
            rows.publish(self._step, layer)
            seen = {
                expert: SlotId(slot)
                for expert, slot in zip(experts, slots or (), strict=False)
                if slot != NO_SLOT
            }
            if seen and self._completions is None and table is not None:
                table.leave()
                seen = {}
            output = self._ask(layer, counts, routed_ns, seen, weights, hidden.dtype)
        self._joined_ns = time.monotonic_ns()
        if resident is not None:
            resident.joined_ns = self._joined_ns
        return output

    def _ask(
        self,
        layer: int,
        counts: dict[ExpertId, int],
        routed_ns: int,
        seen: dict[ExpertId, SlotId],
        weights: torch.Tensor,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        """Say what was routed, compute what was `seen` in slots, and have the rest computed. The
        fence, entered if anything was seen, is left here."""
        self._layer = LayerId(layer)
        self._is_ran_wanted = self._completions is None
        self._send(
            Routed(
                self._epoch,
                self._step,
                self._layer,
                list(counts),
                list(counts.values()),
                routed_ns,
                self.joined_ns,
                self.num_reports,
                self._completions is not None,
                list(seen),
            )
        )
        missing = dict.fromkeys(counts)
        if seen:
            assert self._table is not None  # it was seen there
            self._compute(list(seen), list(seen.values()), len(counts) - len(seen))
            self._table.leave()
            for expert in seen:
                del missing[expert]
        return self._share(counts, missing, weights, dtype)

    def _share(
        self,
        counts: dict[ExpertId, int],
        missing: dict[ExpertId, None],
        weights: torch.Tensor,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        """Compute what is in slots until nothing is `missing`, here or elsewhere; join."""
        step, layer, completions = self._step, self._layer, self._completions
        wake_fd, spin_us = -1, SPIN_US
        if completions is not None:
            wake_fd = completions.wake_fd
        while missing:
            if completions is not None:
                landed = completions.spin(step, layer, missing, spin_us)
                spin_us = 0  # once per rest: what follows a sleep looks once
                if landed:
                    for expert, _ in landed:
                        del missing[ExpertId(expert)]
                    fills = [(ExpertId(e), SlotId(slot)) for e, slot in landed if slot >= 0]
                    if fills:
                        self._compute([e for e, _ in fills], [slot for _, slot in fills])
                        spin_us = SPIN_US
                    continue
            command = self._receive(wake_fd)
            if command is None:
                assert completions is not None  # nobody else wakes
                completions.forget_wakes()
                continue
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
            output = self._run(command, counts, missing, weights, dtype)
            if output is not None:
                return output
        return self._rows.join(weights, dtype)

    def _run(
        self,
        command: Run,
        counts: dict[ExpertId, int],
        missing: dict[ExpertId, None],
        weights: torch.Tensor,
        dtype: torch.dtype,
    ) -> torch.Tensor | None:
        """Follow one `Run`; the joined rows if it says so."""
        if command.is_ran_wanted and not self._is_ran_wanted:
            self._is_ran_wanted = True
            if not command.experts:  # what is in the ring is heard with it
                self._send(Ran(self._epoch, self._step, self._layer, [], 0, 0, self.num_reports))
        started_ns = 0
        if command.experts:
            self._check(command, counts)
            for expert in command.experts:
                missing.pop(expert, None)
            started_ns = time.monotonic_ns()
            self._rows.compute(command.experts, command.slots)
        output = self._rows.join(weights, dtype) if command.join else None
        if command.experts:
            self._report(command.experts, started_ns)
        return output

    def _compute(
        self, experts: Sequence[ExpertId], slots: Sequence[SlotId], num_elsewhere: int = 0
    ) -> None:
        for slot in slots:
            if slot >= self._num_slots:
                raise ProtocolError(f"an expert was said to be in slot {slot} of {self._num_slots}")
        started_ns = time.monotonic_ns()
        self._rows.compute(experts, slots, num_elsewhere)
        self._report(list(experts), started_ns)

    def _report(self, experts: list[ExpertId], started_ns: int) -> None:
        """Say that the slots of the last computation are no longer read."""
        ended_ns = self._rows.wait_computed()
        epoch, step, layer, table = self._epoch, self._step, self._layer, self._table
        if (
            self._is_ran_wanted
            or table is None
            or not table.ran(epoch, step, layer, experts, started_ns, ended_ns)
        ):
            self._send(Ran(epoch, step, layer, experts, started_ns, ended_ns, self.num_reports))

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
