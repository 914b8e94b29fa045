"""A small orchestrator for worker tests: real sockets and memory, no decisions of its own.

It makes the run directory, an expert store of random weights, the activation segment and, if asked,
an arena; hands them to workers over the life line; and passes messages on. Tests say what is sent
and look at what came. Run as a program it serves workers until it is killed:

    python -m tests.protocol.fake_orchestrator RUN_DIR
"""

from __future__ import annotations

import asyncio
import mmap
import os
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from expert_store.layout import Dtype, ExpertForm, StoreLayout, encode_header, make_layout
from expert_store.segment import SegmentMap, create_segment, size_segment
from protocol.channel import RouterChannel
from protocol.codec import to_orchestrator
from protocol.lifeline import Grant, SegmentGrant, listen, send_grant
from protocol.messages import (
    Epoch,
    Hello,
    Message,
    Ready,
    Refused,
    Welcome,
    WorkerSetup,
)
from protocol.run_dir import LockedRunDir
from protocol.step_segment import ACTIVATIONS, ARENA, WEIGHTS, activation_grant

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

M = TypeVar("M", bound=Message)

#: A worker imports torch, and several test runs may share two cores.
JOIN_TIMEOUT_S = 60.0
ANSWER_TIMEOUT_S = 30.0
NO_EPOCH = Epoch(0)


def small_layout(
    dtype: Dtype = "float32",
    *,
    hidden_size: int = 64,
    intermediate_size: int = 32,
    num_experts: tuple[int, ...] = (6, 4),
    top_k: int = 2,
) -> StoreLayout:
    """Gated SiLU experts, as Qwen3-MoE has them."""
    return make_layout(
        model_name="random",
        checkpoint_fingerprint="0" * 32,
        form=ExpertForm(
            hidden_size=hidden_size,
            intermediate_size=intermediate_size,
            has_gate=True,
            has_bias=False,
            is_transposed=False,
            is_interleaved=False,
            activation="silu",
            gate="act_mul",
        ),
        dtype=dtype,
        model_layer_ids=tuple(range(len(num_experts))),
        num_experts=num_experts,
        top_k=top_k,
    )


def make_store(layout: StoreLayout, seed: int = 0) -> int:
    """A loaded store of random weights; the caller owns the descriptor."""
    fd = create_segment("headrace-test-weights")
    size_segment(fd, layout.total_bytes)
    store = SegmentMap(fd, writable=True)
    memory = np.frombuffer(store.memory, dtype=np.uint8)
    rng = np.random.default_rng(seed)
    for index in range(layout.total_experts):
        for tensor in layout.tensors:
            start = layout.blocks_offset_bytes + index * layout.block_bytes + tensor.offset_bytes
            values = rng.standard_normal(tensor.shape, dtype=np.float32) * 0.2
            memory[start : start + tensor.num_bytes] = as_bytes(values, tensor.dtype)
    header = encode_header(layout)
    memory[: len(header)] = np.frombuffer(header, dtype=np.uint8)
    del memory
    store.close()
    return fd


def as_bytes(values: np.ndarray[Any, Any], dtype: Dtype) -> np.ndarray[Any, Any]:
    """float32 values in the store's dtype (bfloat16 by truncation), as flat bytes."""
    if dtype == "bfloat16":
        values = (np.ascontiguousarray(values).view(np.uint32) >> 16).astype(np.uint16)
    elif dtype == "float16":
        values = values.astype(np.float16)
    return np.ascontiguousarray(values).view(np.uint8).reshape(-1)


@dataclass
class Worker:
    """A worker process that the test started, and what it said."""

    process: subprocess.Popen[bytes]
    stderr_path: Path
    connection: socket.socket | None = None
    identity: bytes = b""
    epoch: Epoch = NO_EPOCH
    messages: list[Message] = field(default_factory=list)

    @property
    def stderr(self) -> str:
        return self.stderr_path.read_text(errors="replace")

    def wait(self, timeout_s: float = ANSWER_TIMEOUT_S) -> int:
        """Exit code."""
        return self.process.wait(timeout_s)


class FakeOrchestrator:
    """Use as a context manager; it leaves no process, segment or socket behind."""

    def __init__(
        self,
        path: Path,
        layout: StoreLayout | None = None,
        *,
        max_rows: int = 8,
        num_slots: int = 0,
        emulate_link_bytes_per_s: float = 0.0,
        is_rate_stated: bool = False,
        environ: dict[str, str] | None = None,
    ) -> None:
        self.path = path
        self.layout = layout or small_layout()
        self.setup = WorkerSetup(
            model_dir="",
            dtype=self.layout.dtype,
            device="cpu",
            num_slots=num_slots,
            max_rows=max_rows,
            max_sequence_tokens=64,
            emulate_link_bytes_per_s=emulate_link_bytes_per_s,
            is_rate_stated=is_rate_stated,
        )
        self.num_slots = num_slots
        self.workers: list[Worker] = []
        self.strangers: list[tuple[bytes, Message]] = []
        self._environ = environ
        self._num_started = 0

    def __enter__(self) -> FakeOrchestrator:
        layout = self.layout
        self.loop = asyncio.new_event_loop()
        self.run_dir = LockedRunDir(self.path)
        self.weights_fd = make_store(layout)
        self.activations = activation_grant(
            self.setup.max_rows, layout.top_k, layout.form.hidden_size, layout.dtype
        )
        grants = [SegmentGrant(WEIGHTS, layout.total_bytes), self.activations]
        self._fds = [self.weights_fd, os.memfd_create(ACTIVATIONS, os.MFD_CLOEXEC)]
        os.ftruncate(self._fds[1], self.activations.num_bytes)
        self.activations_map = mmap.mmap(self._fds[1], self.activations.num_bytes)
        if self.num_slots:
            num_bytes = self.num_slots * layout.block_bytes
            grants.append(SegmentGrant(ARENA, num_bytes))
            self._fds.append(os.memfd_create(ARENA, os.MFD_CLOEXEC))
            os.ftruncate(self._fds[2], num_bytes)
            self.arena_map = mmap.mmap(self._fds[2], num_bytes)
        self._grants = grants
        self.listener = listen(self.run_dir)
        self.router = RouterChannel(self.run_dir, to_orchestrator(), self._hear)
        self.router.start(self.loop)
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self.workers:
            if worker.connection is not None:
                worker.connection.close()
            if worker.process.poll() is None:
                worker.process.kill()
            worker.process.wait(10)
        self.router.close()
        self.listener.close()
        for fd in self._fds:
            os.close(fd)
        self.run_dir.close()
        self.loop.close()

    def spawn(self, *command: str) -> Worker:
        """Start a process, without waiting for it to join."""
        self._num_started += 1
        stderr_path = self.path.parent / f"stderr-{self._num_started}.txt"
        with stderr_path.open("wb") as stderr:
            process = subprocess.Popen(
                [sys.executable, *command], env=self._environ, stderr=stderr, cwd=self.path.parent
            )
        worker = Worker(process, stderr_path)
        self.workers.append(worker)
        return worker

    def start_worker(self, module: str, *flags: str) -> Worker:
        """Start a worker program of the project and take it through to Ready."""
        worker = self.spawn("-P", "-m", module, "--run-dir", str(self.path), *flags)
        self.welcome(worker)
        self.expect(worker, Ready, JOIN_TIMEOUT_S)
        return worker

    def welcome(self, worker: Worker) -> Hello:
        """Hand out the memory, hear HELLO, say Welcome."""
        self.grant(worker)
        hello = self.hear_hello(worker)
        worker.epoch = Epoch(len(self.workers))
        self.send(worker, Welcome(worker.epoch, self.setup))
        return hello

    def grant(self, worker: Worker) -> None:
        """Accept the worker's life line and give it the segments."""
        token = f"token-{worker.process.pid}"
        worker.connection = self.accept(worker)
        send_grant(worker.connection, Grant(token, self._grants), self._fds)

    def accept(self, worker: Worker) -> socket.socket:
        """The life line connection of a worker that has just been started."""
        deadline = time.monotonic() + JOIN_TIMEOUT_S
        while time.monotonic() < deadline:
            try:
                connection, _ = self.listener.accept()
            except BlockingIOError:
                if worker.process.poll() is not None:
                    break
                time.sleep(0.01)
                continue
            connection.setblocking(True)
            return connection
        raise AssertionError(f"the worker did not connect:\n{worker.stderr}")

    def hear_hello(self, worker: Worker) -> Hello:
        """The HELLO with this worker's pid."""
        found: list[tuple[bytes, Hello]] = []

        def arrived() -> bool:
            found[:] = [
                (identity, message)
                for identity, message in self.strangers
                if isinstance(message, Hello) and message.pid == worker.process.pid
            ]
            return bool(found)

        self.wait_until(arrived, JOIN_TIMEOUT_S, worker)
        worker.identity, hello = found[0]
        self.strangers.remove(found[0])
        return hello

    def refuse(self, worker: Worker, sentence: str) -> None:
        self.send(worker, Refused(sentence))

    def send(self, worker: Worker, message: Message) -> None:
        assert self.router.send(worker.identity, message)

    def send_raw(self, worker: Worker, *frames: bytes) -> None:
        """Bytes that may be no message."""
        self.router._socket.send_multipart((worker.identity, *frames))

    def expect(self, worker: Worker, kind: type[M], timeout_s: float = ANSWER_TIMEOUT_S) -> M:
        """The next message of that kind from the worker; others before it are lost."""

        def arrived() -> bool:
            return any(isinstance(message, kind) for message in worker.messages)

        self.wait_until(arrived, timeout_s, worker)
        while True:
            message = worker.messages.pop(0)
            if isinstance(message, kind):
                return message

    def wait_until(
        self, condition: Callable[[], bool], timeout_s: float, worker: Worker | None = None
    ) -> None:
        """Deliver messages until `condition()` holds; AssertionError after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            self.loop.run_until_complete(asyncio.sleep(0.002))
            is_dead = worker is not None and worker.process.poll() is not None
            if time.monotonic() > deadline or (is_dead and not condition()):
                said = worker.stderr if worker is not None else ""
                raise AssertionError(f"waited in vain (worker dead: {is_dead})\n{said}")

    def _hear(self, identity: bytes, message: Message) -> None:
        for worker in self.workers:
            if worker.identity == identity:
                worker.messages.append(message)
                return
        self.strangers.append((identity, message))


def _serve_forever(path: Path) -> None:
    """Welcome every worker that comes, until killed."""
    with FakeOrchestrator(path, is_rate_stated=True, num_slots=2) as orchestrator:
        print("listening", flush=True)  # noqa: T201
        connections: list[socket.socket] = []
        while True:
            try:
                connection, _ = orchestrator.listener.accept()
            except BlockingIOError:
                orchestrator.loop.run_until_complete(asyncio.sleep(0.01))
            else:
                connection.setblocking(True)
                send_grant(connection, Grant("token", orchestrator._grants), orchestrator._fds)
                connections.append(connection)
            while orchestrator.strangers:
                identity, message = orchestrator.strangers.pop(0)
                if isinstance(message, Hello):
                    orchestrator.router.send(identity, Welcome(Epoch(1), orchestrator.setup))


if __name__ == "__main__":
    _serve_forever(Path(sys.argv[1]))
