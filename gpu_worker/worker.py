"""The gpu_worker's life between Welcome and Shutdown: load, say Ready, follow commands.

One method per command and no `if` about policy: what is resident, what is copied and who computes
what is decided by the orchestrator. A step that goes wrong ends this process: its caches can no
longer be trusted, and the orchestrator rebuilds the sequences in the worker that follows.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import os
import select
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from expert_kernels.dequantising import torch_expert_function
from expert_kernels.native import make_expert_function
from expert_kernels.native_dense import DenseKernels
from expert_kernels.native_join import NativeJoin
from expert_kernels.native_library import NativeLibraryError
from expert_kernels.reference import TORCH_DTYPE
from expert_kernels.step_rows import ActivationViews
from expert_store.layout import HEADER_BYTES, decode_header
from gpu_worker.dense_path import quantise_dense, set_up_dense_path
from gpu_worker.exchange import Exchange
from gpu_worker.joint_step import JointStep
from gpu_worker.logit_rules import logprobs_of
from gpu_worker.model import load_dense_model
from gpu_worker.resident_layers import ResidentLayers
from gpu_worker.routing_replay import RoutingReplay
from gpu_worker.rows import HostRows, weighted_sum
from gpu_worker.sampler import LogitsError, digest, sample, scores_of
from gpu_worker.sequences import Sequences
from gpu_worker.slots import SharedSlots
from protocol.completions import Completions
from protocol.errors import ProtocolError, UserError
from protocol.membarrier import MemoryBarrier
from protocol.messages import (
    Copied,
    Copy,
    DropSequence,
    Refused,
    Sampled,
    StartStep,
    StepDone,
)
from protocol.residency import RESIDENCY, ResidencyReader
from protocol.step_segment import ACTIVATIONS, WEIGHTS

if TYPE_CHECKING:
    from collections.abc import Callable

    from expert_kernels.native import MaxIsa
    from expert_kernels.reference import ExpertFunction
    from expert_store.layout import StoreLayout
    from gpu_worker.cuda_slots import InProcessCopier
    from gpu_worker.model import DenseModel
    from gpu_worker.rows import Rows
    from gpu_worker.slots import ExpertSlots
    from protocol.messages import SequenceId, StepPart, WorkerCommand
    from protocol.worker_life import WorkerLink

log = logging.getLogger("headrace.gpu_worker")

#: While copies of our own are under way, look for their end without sleeping for this long, then
#: every millisecond: an expert takes 0.1 to 1 ms over the link.
_SPIN_S = 0.005
_NAP_S = 0.001


class GpuWorker:
    """Follows commands. `copier` is set only where this process must fill its own slots."""

    def __init__(
        self,
        link: WorkerLink,
        model: DenseModel,
        rows: Rows,
        slots: ExpertSlots,
        layout: StoreLayout,
        copier: InProcessCopier | None = None,
        residency: ResidencyReader | None = None,
        replay: RoutingReplay | None = None,
        completions: Completions | None = None,
        resident: ResidentLayers | None = None,
    ) -> None:
        self._link = link
        self._model = model
        self._slots = slots
        self._copier = copier
        self._sequences = Sequences(model.new_cache, link.setup.max_sequence_tokens)
        self._exchange = Exchange(
            link,
            rows,
            layout.top_k,
            slots.arena.num_slots,
            self._receive_or_wake,
            self._other,
            residency,
            replay,
            completions,
            resident,
        )
        self._replay = replay
        #: Sequences of the step under way, and those of them to be dropped after it.
        self._running: list[SequenceId] = []
        self._dropped: list[SequenceId] = []
        #: Commands for another incarnation, or for another role.
        self.num_dropped = 0
        self._joint = JointStep(self._exchange)
        model.connect(self._joint)

    def serve(self) -> None:
        """Follow commands until the orchestrator is gone or tells us to leave (OrchestratorGone).

        Raises:
            ProtocolError: a command that cannot be followed.
            LogitsError: a step whose logits name no token.
        """
        while True:
            command = self._receive()
            if isinstance(command, StartStep):
                self._start_step(command)
            else:
                self._other(command)

    def _start_step(self, command: StartStep) -> None:
        self._check(command)
        parts = command.parts
        caches = [
            self._sequences.begin_step(part.sequence, part.start, len(part.tokens))
            for part in parts
        ]
        self._running = [part.sequence for part in parts]
        self._exchange.begin_step(command.step, rows_apart=len(parts) > 1)
        if self._replay is not None:
            self._replay.begin_step(
                [part.start + offset for part in parts for offset in range(len(part.tokens))]
            )
        logits = self._joint.run(
            [
                functools.partial(self._model.forward, part.tokens, cache)
                for part, cache in zip(parts, caches, strict=True)
            ]
        )
        for part in parts:
            self._sequences.end_step(part.sequence, part.tokens)
        try:
            sampled = [
                self._sample(of_part, part) for of_part, part in zip(logits, parts, strict=True)
            ]
        except LogitsError as error:
            raise LogitsError(f"step {command.step}: {error}") from None
        self._link.send(
            StepDone(
                self._link.epoch,
                command.step,
                sampled,
                self._exchange.joined_ns,
                time.monotonic_ns(),
                self._exchange.num_reports,
            )
        )
        self._running = []
        for sequence in self._dropped:
            self._sequences.drop(sequence)
        self._dropped.clear()

    def _check(self, command: StartStep) -> None:
        """ProtocolError unless the step can be followed."""
        parts, setup = command.parts, self._link.setup
        num_rows = sum(len(part.tokens) for part in parts)
        if not all(part.tokens for part in parts) or not 1 <= num_rows <= setup.max_rows:
            raise ProtocolError(
                f"step {command.step} has {num_rows} tokens, 1 to {setup.max_rows} are allowed"
            )
        if len(parts) > 1 and num_rows > len(parts):
            raise ProtocolError(f"step {command.step} has several sequences and a prompt")
        if len({part.sequence for part in parts}) < len(parts):
            raise ProtocolError(f"step {command.step} names a sequence twice")
        for part in parts:
            if min(part.tokens) < 0 or max(part.tokens) >= self._model.vocab_size:
                raise ProtocolError(
                    f"step {command.step} has a token outside the vocabulary of "
                    f"{self._model.vocab_size}"
                )

    def _sample(self, logits: torch.Tensor, part: StepPart) -> Sampled | None:
        if part.sampling is None:
            return None
        params = part.sampling
        known = self._sequences.tokens(part.sequence)
        token = sample(logits, params, len(known), known, part.num_prompt, part.allowed_tokens)
        logprobs = None
        if params.num_logprobs is not None:
            logprobs = logprobs_of(scores_of(logits), token, params.num_logprobs)
        logits_digest = digest(logits) if self._link.setup.digest_logits else ""
        return Sampled(token, logits_digest, logprobs)

    def _other(self, command: WorkerCommand) -> None:
        """Commands that may come at any time, within a step too."""
        if isinstance(command, DropSequence):
            if command.sequence in self._running:
                self._dropped.append(command.sequence)  # its layers are at work on the cache
            else:
                self._sequences.drop(command.sequence)
        elif isinstance(command, Copy) and self._copier is not None:
            self._copier.submit(command)
        else:
            self.num_dropped += 1

    def _receive(self) -> WorkerCommand:
        """The next command of this epoch; reports finished copies of our own while it waits."""
        while True:
            command = self._receive_or_wake(-1)
            if command is not None:
                return command

    def _receive_or_wake(self, wake_fd: int) -> WorkerCommand | None:
        """The same, or None once `wake_fd` can be read (-1: only a command will do)."""
        while True:
            if self._copier is None:
                command = self._link.receive(None, wake_fd)
            else:
                command = self._receive_while_copying(self._copier, wake_fd)
            if command is None:
                return None
            if not isinstance(command, Refused) and command.epoch == self._link.epoch:
                return command
            self.num_dropped += 1

    def _receive_while_copying(self, copier: InProcessCopier, wake_fd: int) -> WorkerCommand | None:
        spin_until_s = time.monotonic() + _SPIN_S
        while True:
            for done in copier.finished():
                self._link.send(
                    Copied(
                        self._link.epoch, done.copy, done.started_ns, done.ended_ns, done.num_bytes
                    )
                )
            if not copier.num_pending:
                return self._link.receive(None, wake_fd)
            is_spinning = time.monotonic() < spin_until_s
            command = self._link.receive(0.0 if is_spinning else _NAP_S)
            if command is not None:
                return command
            if wake_fd >= 0 and select.select([wake_fd], [], [], 0)[0]:
                return None
            os.sched_yield()


def serve(
    link: WorkerLink,
    device_choice: str = "auto",
    *,
    max_isa: MaxIsa = "best",
    num_threads: int = 1,
    dense_path: str | None = None,
) -> None:
    """Set up, say Ready, follow commands. `device_choice` "auto" takes the orchestrator's word.

    `max_isa` and `num_threads` are for a device that is the CPU (expert_kernels.native).
    `dense_path` (gpu_worker.dense_path) overrides the orchestrator's.

    Raises:
        UserError: what was asked for cannot be set up here.
        OrchestratorGone: the end of every orderly life.
    """
    setup = link.setup
    device = resolve_device(setup.device if device_choice == "auto" else device_choice)
    fd, _ = link.segment(WEIGHTS)
    layout = decode_header(os.pread(fd, HEADER_BYTES, 0))
    if layout.dtype != setup.dtype:
        raise UserError(
            f"The expert store is in {layout.dtype}, the orchestrator asks for {setup.dtype}; "
            "run all processes from the same release."
        )
    link.progress(0, 2, "loading dense weights")
    model = load_dense_model(
        Path(setup.model_dir), TORCH_DTYPE[layout.dtype], device, setup.max_sequence_tokens
    )
    if model.num_moe_layers != layout.num_layers:
        raise UserError(
            f"{setup.model_dir} has {model.num_moe_layers} MoE layers, the expert store "
            f"{layout.num_layers}; start the orchestrator anew with this model."
        )
    link.progress(1, 2, "setting up expert slots")
    memory, grant = link.map_segment(ACTIVATIONS, is_writable=True)
    views = ActivationViews(memory, grant)
    rows: Rows
    slots: ExpertSlots
    copier = None
    if device.type == "cpu":
        function = make_expert_function(layout, max_isa=max_isa, num_threads=num_threads)
        slots = SharedSlots(link, function)
        rows = HostRows(views, function, slots, _join_function(function))
    else:
        # Only a machine with a device pays for the import.
        from gpu_worker.cuda_slots import set_up_cuda

        function = torch_expert_function(layout)
        slots, rows, copier = set_up_cuda(link, function, views, memory, device)
    try:
        with torch.inference_mode():
            kernels = functools.partial(DenseKernels, function) if device.type == "cpu" else None
            quantise_dense(model, setup.dense_dtype, kernels)
            model.warm_up()
            set_up_dense_path(model, dense_path or setup.dense_path, link.progress, kernels)
            replay = RoutingReplay.of(link, layout.num_layers, layout.num_experts, device)
            completions = Completions.of(link)
            table = _residency(link)
            resident = None
            if isinstance(slots, SharedSlots):
                resident = ResidentLayers.of(function, views, slots.views, table)
            worker = GpuWorker(
                link, model, rows, slots, layout, copier, table, replay, completions, resident
            )
            gc.enable()
            gc.collect()
            gc.freeze()  # what was loaded stays: no collection needs to look at it again
            link.ready(arena=slots.arena)
            worker.serve()
    finally:
        if copier is not None:
            copier.close()
        slots.close()


def _join_function(function: ExpertFunction) -> Callable[..., torch.Tensor]:
    """Native where the experts are."""
    if function.takes_whole_steps:
        with contextlib.suppress(NativeLibraryError):
            return NativeJoin()
    return weighted_sum


def _residency(link: WorkerLink) -> ResidencyReader | None:
    """The published table; None where the orchestrator grants none, or where this process could
    not be told of changes in it."""
    try:
        memory, grant = link.map_segment(RESIDENCY, is_writable=True)
    except KeyError:
        return None
    barrier = MemoryBarrier()
    if barrier.is_there and not barrier.register():
        log.warning("this process cannot take part in memory barriers; every layer is asked for")
        return None
    return ResidencyReader(memory, grant)


def resolve_device(name: str) -> torch.device:
    """ "auto", "cpu" or "cuda" -> a device that is there.

    Raises:
        UserError: it is not, or the name is none of these.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cpu":
        return torch.device("cpu")
    if name != "cuda":
        raise UserError(f"The device {name!r} is not known; use cpu or cuda.")
    if not torch.cuda.is_available():
        raise UserError("torch sees no CUDA device in this machine; use --device cpu.")
    return torch.device("cuda", torch.cuda.current_device())
