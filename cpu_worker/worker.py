"""The cpu_worker at work: computes set C of each layer-step where its weights lie.

    Execute(step, layer, experts)  ->  rows in the activation segment  ->  Executed

The weights are mapped read-only and never copied; what a call reads beyond them is a few rows. A
command is dropped, and counted, when the activation segment by now holds another step or layer
(the gpu_worker was replaced meanwhile), or when it names what does not exist.
"""

from __future__ import annotations

import contextlib
import logging
import time
from functools import partial
from typing import TYPE_CHECKING

import torch

from cpu_worker.pool import ExpertPool
from expert_kernels.native import make_expert_function
from expert_kernels.probe import measure_rate, spread_experts
from expert_kernels.reference import TORCH_DTYPE, use_one_thread
from expert_kernels.step_rows import ActivationViews, StepRows, as_tensor, run_expert
from expert_store.numa_placement import near_and_far
from expert_store.segment import StoreView
from protocol.completions import Completion, Completions
from protocol.errors import ProtocolError
from protocol.memory_nodes import page_nodes
from protocol.messages import Execute, Executed
from protocol.step_segment import ACTIVATIONS, WEIGHTS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from expert_kernels.native import MaxIsa
    from protocol.messages import WorkerCommand
    from protocol.worker_life import WorkerLink

log = logging.getLogger("headrace")

ExpertKey = tuple[int, int]  # layer, expert


class CpuWorker:
    """Maps the segments and computes; says nothing to anybody.

    Raises:
        StoreFormatError: the weights are no expert store of this version.
        ProtocolError: weights and activations do not belong to one model.
    """

    def __init__(self, link: WorkerLink, num_threads: int, max_isa: MaxIsa = "best") -> None:
        weights_fd, _ = link.segment(WEIGHTS)
        self._store = StoreView(weights_fd)
        self.layout = self._store.layout
        self._blocks = as_tensor(self._store.memory, torch.uint8, 0, [self.layout.total_bytes])
        memory, grant = link.map_segment(ACTIVATIONS, is_writable=True)
        self._views = ActivationViews(memory, grant)
        if (
            self._views.hidden.shape[1] != self.layout.form.hidden_size
            or self._views.hidden.dtype is not TORCH_DTYPE[self.layout.dtype]
        ):
            raise ProtocolError(
                f"the activation segment holds {self._views.hidden.dtype} rows of "
                f"{self._views.hidden.shape[1]}, the experts take {self.layout.dtype} rows of "
                f"{self.layout.form.hidden_size}"
            )
        self._function = make_expert_function(self.layout, max_isa=max_isa, num_threads=num_threads)
        self._tensors: dict[ExpertKey, dict[str, torch.Tensor]] = {}
        self._epoch = link.epoch
        self._completions = Completions.of(link)
        self.num_threads = num_threads
        # The native function has threads of its own.
        self.pool = ExpertPool(1 if self._function.takes_whole_steps else num_threads)
        self.num_dropped = 0

    @property
    def isa(self) -> str:
        """What the experts are computed with: "torch", or an instruction set."""
        return self._function.isa

    def execute(self, command: Execute) -> Executed | None:
        """Compute; None when the command was dropped."""
        reason = self._find_fault(command)
        if reason is not None:
            self.drop(reason)
            return None
        started_ns = time.monotonic_ns()
        num_rows = self._views.read_header()[2]
        rows = StepRows.of(
            self._views, num_rows, command.experts, rows_apart=self._views.rows_apart
        )
        num_bytes = len(command.experts) * self.layout.block_bytes
        if self._function.takes_whole_steps:
            tensors = [self._tensors_of(command.layer, expert) for expert in command.experts]
            self._function.run_step(rows, command.experts, tensors)
        else:
            self.pool.run(command.experts, partial(self._run, rows, command.layer), num_bytes)
        ended_ns = time.monotonic_ns()
        self._tell(command, started_ns, ended_ns)
        return Executed(
            self._epoch,
            command.step,
            command.layer,
            command.experts,
            started_ns,
            ended_ns,
            num_bytes,
        )

    def _tell(self, command: Execute, started_ns: int, ended_ns: int) -> None:
        """Tell a gpu_worker that waits, before the message to the orchestrator."""
        if self._completions is None:
            return
        completion = Completion(-1, self._epoch, started_ns, ended_ns)
        for expert in command.experts:
            self._completions.write(
                command.step, command.layer, expert, completion, is_waking=False
            )
        self._completions.wake()

    def drop(self, reason: str) -> None:
        """Count a command that is not obeyed; the first one is worth a warning."""
        self.num_dropped += 1
        level = logging.WARNING if self.num_dropped == 1 else logging.DEBUG
        log.log(level, "dropped a command: %s (%d so far)", reason, self.num_dropped)

    def measure_rate(self, keys: Sequence[ExpertKey] = ()) -> float:
        """Bytes/s at which this worker gets through experts of the store, or through these."""
        x = torch.linspace(-1, 1, self.layout.form.hidden_size).to(self._function.dtype)[None]

        def compute(keys: Sequence[ExpertKey]) -> None:
            if self._function.takes_whole_steps:
                self._function.run_each([self._tensors_of(*key) for key in keys], x)
                return
            self.pool.run(
                keys,
                lambda key: self._function(self._tensors_of(*key), x),
                len(keys) * self.layout.block_bytes,
            )

        batch = min(max(self.layout.top_k, self.num_threads), self.layout.total_experts)
        return measure_rate(compute, self.layout, batch=batch, keys=keys)

    def near_and_far(self, node: int) -> tuple[list[ExpertKey], list[ExpertKey]]:
        """Experts on a NUMA node and the others, each in an order that spreads them. Raises OSError
        where the system does not tell."""
        return near_and_far(self._store, spread_experts(self.layout), node)

    def weight_pages(self) -> str:
        """One line on which NUMA nodes hold the weights, from a sample of their pages."""
        try:
            pages = page_nodes(self._blocks.data_ptr(), self.layout.total_bytes)
        except OSError as error:
            return f"where the weights lie is not known: {error.strerror}"
        parts = [f"{num} on node {node}" for node, num in pages.per_node.items()]
        if pages.num_absent:
            parts.append(f"{pages.num_absent} not in memory yet")
        if pages.num_unknown:
            parts.append(f"{pages.num_unknown} unknown")
        return f"weights, by a sample of pages: {', '.join(parts) or 'none'}"

    def _run(self, rows: StepRows, layer: int, expert: int) -> None:
        run_expert(self._function, self._tensors_of(layer, expert), rows, expert)

    def _tensors_of(self, layer: int, expert: int) -> dict[str, torch.Tensor]:
        tensors = self._tensors.get((layer, expert))
        if tensors is None:
            start = self.layout.block_offset(layer, expert)
            block = self._blocks[start : start + self.layout.block_bytes]
            tensors = self._tensors[layer, expert] = self._function.tensors_of(block)
        return tensors

    def _find_fault(self, command: Execute) -> str | None:
        if command.epoch != self._epoch:
            return f"it is for epoch {command.epoch}, this is {self._epoch}"
        if not 0 <= command.layer < self.layout.num_layers:
            return f"MoE layer {command.layer} of {self.layout.num_layers}"
        num_experts = self.layout.num_experts[command.layer]
        for expert in command.experts:
            if not 0 <= expert < num_experts:
                return f"expert {expert} of {num_experts} in MoE layer {command.layer}"
        try:
            step, layer, _ = self._views.read_header()
        except ProtocolError as error:
            return str(error)
        if (step, layer) != (command.step, command.layer):
            return (
                f"it is for step {command.step} layer {command.layer}, the activations are of "
                f"step {step} layer {layer}"
            )
        return None


def serve(
    link: WorkerLink, num_threads: int, max_isa: MaxIsa = "best", numa_node: int | None = None
) -> None:
    """Set up, say `Ready`, then compute until the orchestrator is gone."""
    use_one_thread()
    worker = CpuWorker(link, num_threads, max_isa)
    try:
        with torch.inference_mode():
            rate, far_rate = _rates(link, worker, numa_node)
            link.ready(rate, far_bytes_per_s=far_rate)
            while True:
                _obey(link, worker, link.receive())
    finally:
        worker.pool.close()
        if worker.num_dropped:
            log.info("dropped %d commands in all", worker.num_dropped)


def _rates(link: WorkerLink, worker: CpuWorker, numa_node: int | None) -> tuple[float, float]:
    """Measured bytes/s, 0.0 when a person has stated the rate; and that over experts of other NUMA
    nodes where some lie on this worker's and some do not, else 0.0."""
    pages, num_threads = worker.weight_pages(), worker.num_threads
    log.info("%s", pages)
    if link.setup.is_rate_stated:
        return 0.0, 0.0
    link.progress(0, 1, f"measuring the rate of {num_threads} threads; {pages}")
    near: list[ExpertKey] = []
    far: list[ExpertKey] = []
    if numa_node is not None:
        with contextlib.suppress(OSError):
            near, far = worker.near_and_far(numa_node)
    is_divided = bool(near and far)
    rate = worker.measure_rate(near if is_divided else ())
    far_rate = worker.measure_rate(far) if is_divided else 0.0
    log.info(
        "computes experts at %.2f GB/s with %d threads (%s)%s",
        rate / 1e9,
        num_threads,
        worker.isa,
        f", those of other nodes at {far_rate / 1e9:.2f}" if is_divided else "",
    )
    return rate, far_rate


def _obey(link: WorkerLink, worker: CpuWorker, command: WorkerCommand | None) -> None:
    if isinstance(command, Execute):
        executed = worker.execute(command)
        if executed is not None:
            link.send(executed)
    elif command is not None:
        worker.drop(f"a cpu_worker does not know {type(command).__name__}")
