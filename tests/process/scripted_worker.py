"""A worker of any role in a few lines, for tests of the orchestrator: no torch, starts at once.

The "model" is a hash: which experts a layer asks for and which token follows depend on the tokens
so far and nothing else, so any run of the same prompt must give the same tokens, whatever happens
to the workers. It is not blind, though: the dma_worker writes into a slot which expert it holds and
the gpu_worker reads that again, and the cpu_worker marks the rows it computes, so an expert that
was run from the wrong slot, or not at all, ends the pipeline.

    python scripted_worker.py ROLE --run-dir DIR [--ill WAY]
"""

from __future__ import annotations

import argparse
import hashlib
import struct
import sys
import time
from collections import Counter
from pathlib import Path

from expert_store.layout import HEADER_BYTES, StoreLayout, decode_header
from protocol.messages import (
    Arena,
    Capabilities,
    Copied,
    Copy,
    DropSequence,
    Epoch,
    Execute,
    Executed,
    ExpertId,
    LayerId,
    Ran,
    Role,
    Routed,
    Run,
    Sampled,
    StartStep,
    StepDone,
)
from protocol.step_segment import ACTIVATIONS, ARENA, WEIGHTS
from protocol.worker_life import WorkerLink, run_worker

#: What a slot holds, in its first bytes; what a computed row holds, at its place in the segment.
#: Said by the gpu_worker on stderr when it is well on its way.
BUSY = "at its 20th step"
_MARK = struct.Struct("<qq")


def _layout(link: WorkerLink) -> StoreLayout:
    memory, _ = link.map_segment(WEIGHTS, is_writable=False)
    return decode_header(memory[:HEADER_BYTES])


def _digest(*values: object) -> int:
    return int.from_bytes(hashlib.sha256(repr(values).encode()).digest()[:8], "little")


class Marks:
    """Which experts of which layer-step the CPU has computed, in the activation segment."""

    def __init__(self, link: WorkerLink) -> None:
        self._memory, grant = link.map_segment(ACTIVATIONS, is_writable=True)
        self._offset = grant.fields["rows"].offset_bytes

    def write(self, step: int, layer: int, expert: int) -> None:
        _MARK.pack_into(self._memory, self._offset + expert * _MARK.size, step, layer)

    def read(self, expert: int) -> tuple[int, ...]:
        return _MARK.unpack_from(self._memory, self._offset + expert * _MARK.size)


def serve_gpu(link: WorkerLink, ill: str) -> None:
    layout = _layout(link)
    arena, _ = link.map_segment(ARENA, is_writable=True)
    marks = Marks(link)
    link.ready(arena=Arena("shared", link.setup.num_slots, layout.block_bytes))
    caches: dict[int, list[int]] = {}
    num_steps = 0
    while True:
        command = link.receive()
        if isinstance(command, DropSequence):
            caches.pop(command.sequence, None)
        if not isinstance(command, StartStep):
            continue
        num_steps += 1
        if num_steps == 20:
            print(BUSY, file=sys.stderr, flush=True)  # noqa: T201
        for part in command.parts:
            tokens = caches.setdefault(part.sequence, [])
            if part.start == 0:
                tokens.clear()
            assert part.start == len(tokens), (command, len(tokens))
            tokens += part.tokens
        held = [caches[part.sequence] for part in command.parts]
        joined_ns = 0
        for layer in range(layout.num_layers):
            num_rows: Counter[ExpertId] = Counter()
            for tokens in held:
                seed, num_experts = _digest(tokens, layer), layout.num_experts[layer]
                num_rows.update(
                    {ExpertId((seed >> (8 * k)) % num_experts) for k in range(layout.top_k)}
                )
            experts = sorted(num_rows)
            link.send(
                Routed(
                    link.epoch,
                    command.step,
                    LayerId(layer),
                    experts,
                    [num_rows[expert] for expert in experts],
                    time.monotonic_ns(),
                    joined_ns,
                )
            )
            if ill == "babbles" and num_steps == 2 and layer == 0:
                _babble(link, command)
            if ill == "hangs" and num_steps == 2:
                time.sleep(60)
            joined_ns = _layer(link, command, layer, set(experts), arena, marks, layout)
        sampled = [
            None if part.sampling is None else Sampled(_digest(tokens) % 256)
            for part, tokens in zip(command.parts, held, strict=True)
        ]
        done_ns = time.monotonic_ns()
        link.send(StepDone(link.epoch, command.step, sampled, joined_ns, done_ns))


def _babble(link: WorkerLink, step: StartStep) -> None:
    """Well-formed messages that this worker may not say, or not now."""
    epoch, layer = link.epoch, LayerId(0)
    link.send(Executed(epoch, step.step, layer, [ExpertId(0)], 1, 2, 3))
    link.send(StepDone(Epoch(999), step.step, [Sampled(1)], 1, 2))
    link.ready()


def _layer(
    link: WorkerLink,
    step: StartStep,
    layer: int,
    left: set[int],
    arena: object,
    marks: Marks,
    layout: StoreLayout,
) -> int:
    """Follow `Run`s until the layer is joined; returns the time of the join."""
    while True:
        command = link.receive()
        if not isinstance(command, Run) or command.step != step.step or command.layer != layer:
            continue
        started_ns = time.monotonic_ns()
        for expert, slot in zip(command.experts, command.slots, strict=True):
            held = _MARK.unpack_from(arena, slot * layout.block_bytes)  # type: ignore[arg-type]
            assert held == (layer, expert), f"slot {slot} holds {held}, not {(layer, expert)}"
            left.remove(expert)
        if command.experts:
            link.send(
                Ran(
                    link.epoch,
                    command.step,
                    command.layer,
                    command.experts,
                    started_ns,
                    time.monotonic_ns(),
                )
            )
        if command.join:
            for expert in left:
                found = marks.read(expert)
                assert found == (step.step, layer), f"expert {expert} was not computed: {found}"
            return time.monotonic_ns()


def serve_dma(link: WorkerLink, ill: str) -> None:
    layout = _layout(link)
    arena, _ = link.map_segment(ARENA, is_writable=True)
    link.ready(1e9)
    num_copies = 0
    while True:
        command = link.receive()
        if not isinstance(command, Copy):
            continue
        num_copies += 1
        if ill == "hangs" and num_copies == 3:
            time.sleep(60)
        started_ns = time.monotonic_ns()
        _MARK.pack_into(arena, command.slot * layout.block_bytes, command.layer, command.expert)
        link.send(
            Copied(link.epoch, command.copy, started_ns, time.monotonic_ns(), layout.expert_bytes)
        )


def serve_cpu(link: WorkerLink, ill: str) -> None:
    layout = _layout(link)
    marks = Marks(link)
    link.ready(2e9)
    num_runs = 0
    while True:
        command = link.receive()
        if not isinstance(command, Execute):
            continue
        num_runs += 1
        if ill == "hangs" and num_runs == 3:
            time.sleep(60)
        started_ns = time.monotonic_ns()
        for expert in command.experts:
            marks.write(command.step, command.layer, expert)
        link.send(
            Executed(
                link.epoch,
                command.step,
                command.layer,
                command.experts,
                started_ns,
                time.monotonic_ns(),
                len(command.experts) * layout.expert_bytes,
            )
        )


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("role", choices=("gpu_worker", "dma_worker", "cpu_worker"))
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--ill", choices=("no", "hangs", "babbles"), default="no")
    options = parser.parse_args()
    serve = {"gpu_worker": serve_gpu, "dma_worker": serve_dma, "cpu_worker": serve_cpu}
    role: Role = options.role
    return run_worker(
        role, options.run_dir, 60, Capabilities, lambda link: serve[role](link, options.ill)
    )


if __name__ == "__main__":
    sys.exit(main())
