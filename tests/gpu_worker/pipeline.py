"""A pipeline of one: a gpu_worker and, in the test, everything around it.

`TinyStore` puts the experts of a small transformers model into a segment, as the loader would.
`Pipeline` grants the segments, speaks the protocol and plays the orchestrator: by default every
expert is resident in the slot with its block's number, and every layer is answered with one `Run`.
The worker is a real process, or, where the process is not what is tested, its `serve` in a thread
of the test: that saves the seconds that importing transformers takes.
"""

from __future__ import annotations

import gc
import mmap
import os
import queue
import select
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import zmq
from transformers import AutoConfig, AutoModelForCausalLM

from expert_kernels.native import make_expert_function
from expert_kernels.reference import ExpertFunction
from expert_kernels.step_rows import ActivationViews, StepRows, as_tensor, run_expert
from expert_store.layout import ExpertForm, StoreLayout, encode_header, make_layout
from expert_store.segment import StoreView, create_segment, size_segment
from gpu_worker.worker import serve
from protocol.codec import encode, to_orchestrator
from protocol.completions import (
    COMPLETIONS,
    WAKE_GRANT,
    Completions,
    completions_grant,
    new_wake_fd,
)
from protocol.errors import OrchestratorGone, UserError
from protocol.lifeline import Grant, SegmentGrant, listen, send_grant
from protocol.messages import (
    Arena,
    Failed,
    Hello,
    Progress,
    Ready,
    Routed,
    Run,
    SamplingParams,
    Shutdown,
    StartStep,
    StepDone,
    StepPart,
    Welcome,
    WorkerSetup,
)
from protocol.residency import RESIDENCY, ResidencyWriter, residency_grant
from protocol.run_dir import LockedRunDir
from protocol.step_segment import ACTIVATIONS, ARENA, WEIGHTS, activation_grant

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

REPO_ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 60.0
_BASE = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "max_position_embeddings": 256,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}
_LATENT = {
    "num_key_value_heads": 4,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "n_group": 2,
    "topk_group": 1,
}
#: Small configurations, every one with something that another family lacks.
FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {
        **_BASE,
        "intermediate_size": 48,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 8,
    },
    "qwen2_moe": {
        **_BASE,
        "intermediate_size": 48,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 24,
        "num_experts": 6,
        "num_experts_per_tok": 2,
    },
    "qwen3_moe": {
        **_BASE,
        "intermediate_size": 48,
        "moe_intermediate_size": 16,
        "num_experts": 8,
        "num_experts_per_tok": 4,
        "head_dim": 8,
    },
    "olmoe": {**_BASE, "intermediate_size": 16, "num_experts": 6, "num_experts_per_tok": 2},
    "deepseek_v2": {
        **_BASE,
        **_LATENT,
        "q_lora_rank": None,
        "topk_method": "group_limited_greedy",
    },
    "deepseek_v3": {**_BASE, **_LATENT, "q_lora_rank": 16},
    "gpt_oss": {
        **_BASE,
        "intermediate_size": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "head_dim": 8,
        "sliding_window": 8,
    },
    "glm4_moe": {
        **_BASE,
        "intermediate_size": 48,
        "moe_intermediate_size": 16,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "head_dim": 8,
    },
    "granitemoe": {
        **_BASE,
        "intermediate_size": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
}


def make_model(family: str, dtype: str = "float32", **changes: Any) -> Any:
    """A random model of a family, its weights large enough that its greedy text wanders."""
    torch.manual_seed(1)
    config = AutoConfig.for_model(family, **{**FAMILIES[family], **changes})
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(20.0)
    return model.to(getattr(torch, dtype))


def experts_of(model: Any) -> list[Any]:
    return [module for module in model.modules() if hasattr(module, "is_concatenated")]


def layout_of(model: Any, dtype: str) -> StoreLayout:
    experts = experts_of(model)
    first = experts[0]
    gate_up = first.gate_up_proj
    hidden, up_rows = gate_up.shape[1:] if first.is_transposed else gate_up.shape[:0:-1]
    is_alpha = not first.is_concatenated
    form = ExpertForm(
        hidden_size=hidden,
        intermediate_size=up_rows // 2,
        has_gate=True,
        has_bias=first.has_bias,
        is_transposed=first.is_transposed,
        is_interleaved=not first.is_concatenated,
        activation="silu",
        gate="alpha_swiglu" if is_alpha else "act_mul",
        alpha=first.alpha if is_alpha else None,
        limit=first.limit if is_alpha else None,
    )
    return make_layout(
        model_name="tiny",
        checkpoint_fingerprint="none",
        form=form,
        dtype=dtype,
        model_layer_ids=tuple(range(len(experts))),
        num_experts=tuple(module.gate_up_proj.shape[0] for module in experts),
        top_k=model.config.num_experts_per_tok,
    )


def fill_store(fd: int, model: Any, layout: StoreLayout) -> None:
    size_segment(fd, layout.total_bytes)
    os.pwrite(fd, encode_header(layout), 0)
    function = ExpertFunction(layout)
    with StoreView(fd, writable=True) as store:
        for layer, module in enumerate(experts_of(model)):
            for expert in range(layout.num_experts[layer]):
                block = as_tensor(store.block(layer, expert), torch.uint8, 0, [layout.block_bytes])
                for name, tensor in function.tensors_of(block).items():
                    weight = name if name.endswith("_bias") else f"{name}_proj"
                    weight = weight.replace("_bias", "_proj_bias")
                    tensor.copy_(getattr(module, weight)[expert].detach())
                del block, tensor


class Pipeline:
    """One model, one gpu_worker. `answer` decides how a routed layer is answered.

    `answer(pipeline, routed)` sends whatever commands it likes; the default is one `Run` of all.
    """

    def __init__(
        self,
        path: Path,
        model: Any,
        dtype: str = "float32",
        *,
        max_rows: int = 32,
        in_process: bool = True,
        environment: dict[str, str] | None = None,
        store_model: Any = None,
        device: str = "cpu",
        num_reports: int = 0,
        has_words: bool = False,
    ) -> None:
        self.has_words = has_words
        self.model_dir = path / "model"
        model.save_pretrained(self.model_dir)
        self.layout = layout_of(store_model or model, dtype)
        self.answer: Callable[[Pipeline, Routed], None] = run_all
        self.routed: list[Routed] = []
        self.done: StepDone | None = None
        self.others: list[Any] = []
        self._num_steps = 0
        self.epoch = 7
        layout = self.layout
        activations = activation_grant(max_rows, layout.top_k, layout.form.hidden_size, dtype)
        arena_bytes = layout.total_experts * layout.block_bytes
        self._fds = [create_segment(name) for name in (WEIGHTS, ACTIVATIONS, ARENA)]
        fill_store(self._fds[0], store_model or model, layout)
        size_segment(self._fds[1], activations.num_bytes)
        size_segment(self._fds[2], arena_bytes)
        self._grants = [
            SegmentGrant(WEIGHTS, layout.total_bytes),
            activations,
            SegmentGrant(ARENA, arena_bytes),
        ]
        self.table: ResidencyWriter | None = None
        if num_reports:
            self._publish_all(num_reports)
        memory = mmap.mmap(self._fds[1], activations.num_bytes)
        self.views = ActivationViews(memory, activations)
        self.function = make_expert_function(layout)
        self.store = StoreView(self._fds[0])
        blocks = self.store.memory[layout.blocks_offset_bytes :]
        os.pwrite(self._fds[2], blocks, 0)
        self.setup = WorkerSetup(
            model_dir=str(self.model_dir),
            dtype=dtype,
            device=device,
            num_slots=layout.total_experts,
            max_rows=max_rows,
            max_sequence_tokens=200,
            digest_logits=True,
        )
        segments = list(zip(self._grants, self._fds, strict=True))
        self.worker: ProcessWorker | ThreadWorker
        if in_process:
            self.worker = ThreadWorker(self.epoch, self.setup, segments)
        else:
            self.worker = ProcessWorker(path, environment)
        try:
            self.worker.join(self.epoch, self.setup, segments)
            self.progress: list[Progress] = []
            while isinstance(event := self.receive(), Progress):
                self.progress.append(event)
            if isinstance(event, Failed):
                raise WorkerFailed(event)
            assert isinstance(event, Ready)
            self.ready = event
        except BaseException:
            self.close()
            raise

    def _publish_all(self, num_reports: int) -> None:
        layout = self.layout
        most = max(layout.num_experts)
        if self.has_words:
            words = completions_grant(most)
            self._fds += [create_segment(COMPLETIONS), new_wake_fd()]
            size_segment(self._fds[-2], words.num_bytes)
            self._grants += [words, WAKE_GRANT]
            memory = mmap.mmap(self._fds[-2], words.num_bytes)
            self.completions = Completions(memory, words, self._fds[-1])
        grant = residency_grant(layout.num_layers, most, most, num_reports)
        self._fds.append(create_segment(RESIDENCY))
        size_segment(self._fds[-1], grant.num_bytes)
        self._grants.append(grant)
        self.table = ResidencyWriter(mmap.mmap(self._fds[-1], grant.num_bytes), grant)
        self.table.reset(self.epoch)
        for layer, num_experts in enumerate(layout.num_experts):
            for expert in range(num_experts):
                self.table.publish(layer, expert, layout.block_index(layer, expert))

    def send(self, message: Any) -> None:
        self.worker.send(message)

    def receive(self) -> Any:
        return self.worker.receive()

    def step(
        self,
        tokens: list[int],
        start: int,
        sampling: SamplingParams | None = None,
        sequence: int = 0,
    ) -> Any:
        """One step of one sequence, driven to its end: what was sampled, if anything."""
        (sampled,) = self.joint_step([StepPart(sequence, start, tokens, sampling)])
        return sampled

    def joint_step(self, parts: list[StepPart]) -> list[Any]:
        """One step, driven to its end: what was sampled for each part."""
        self._num_steps += 1
        self.routed = []
        self.send(StartStep(self.epoch, self._num_steps, parts))
        while True:
            event = self.receive()
            if isinstance(event, Routed):
                assert event.step == self._num_steps
                assert event.layer == len(self.routed)
                self.routed.append(event)
                self.answer(self, event)
            elif isinstance(event, StepDone):
                assert event.step == self._num_steps
                self.done = event
                return event.sampled
            elif isinstance(event, Failed):
                raise WorkerFailed(event)
            else:
                self.others.append(event)

    def generate(
        self,
        prompt: list[int],
        num_tokens: int,
        sampling: SamplingParams | None = None,
        chunk: int = 32,
        sequence: int = 0,
    ) -> tuple[list[int], list[str]]:
        """Tokens that follow `prompt`, and the digest of the logits of each."""
        sampling = sampling or SamplingParams()
        for start in range(0, len(prompt), chunk):
            part = prompt[start : start + chunk]
            is_last = start + chunk >= len(prompt)
            done = self.step(part, start, sampling if is_last else None, sequence)
            assert (done is not None) is is_last
        tokens, digests = [done.token], [done.logits_digest]
        while len(tokens) < num_tokens:
            start = len(prompt) + len(tokens) - 1
            done = self.step([tokens[-1]], start, sampling, sequence)
            tokens.append(done.token)
            digests.append(done.logits_digest)
        return tokens, digests

    def slot_of(self, layer: int, expert: int) -> int:
        return self.layout.block_index(layer, expert)

    def run(self, routed: Routed, experts: list[int], *, join: bool) -> None:
        slots = [self.slot_of(routed.layer, expert) for expert in experts]
        self.send(Run(self.epoch, routed.step, routed.layer, experts, slots, join))

    def compute_here(self, routed: Routed, experts: list[int]) -> None:
        """Be a cpu_worker: the rows of `experts`, straight from the store."""
        step, layer, num_rows = self.views.read_header()
        assert (step, layer) == (routed.step, routed.layer)
        apart = self.views.rows_apart
        step_rows = StepRows.of(self.views, num_rows, experts, rows_apart=apart)
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        for expert in experts:
            block = as_tensor(
                self.store.block(layer, expert), torch.uint8, 0, [self.layout.block_bytes]
            )
            run_expert(self.function, self.function.tensors_of(block), step_rows, expert)
        torch.set_num_threads(threads)

    def close(self) -> None:
        """Tell the worker to leave and see that it does. A second call is fine."""
        if not self._fds:
            return
        self.exit_code = self.worker.close(Shutdown(self.epoch, "the test is over"))
        self.store.close()
        while self._fds:
            os.close(self._fds.pop())

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class ProcessWorker:
    """`python -m gpu_worker`, spoken to over the real sockets."""

    def __init__(self, path: Path, environment: dict[str, str] | None) -> None:
        self._stderr_path = path / "stderr"
        self._run_dir = LockedRunDir(path / "r")
        self._listener = listen(self._run_dir)
        self._lifeline: socket.socket | None = None
        self._context = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.set(zmq.LINGER, 0)
        self._router.bind(self._run_dir.control_endpoint)
        self._decoder = to_orchestrator()
        self._identity = b""
        with self._stderr_path.open("wb") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "gpu_worker", "--run-dir", str(self._run_dir.path)],
                cwd=REPO_ROOT,
                env=environment or dict(os.environ),
                stderr=stderr,
            )

    def join(
        self, epoch: int, setup: WorkerSetup, segments: list[tuple[SegmentGrant, int]]
    ) -> None:
        self._listener.settimeout(TIMEOUT_S)
        self._lifeline, _ = self._listener.accept()
        grants, fds = zip(*segments, strict=True)
        send_grant(self._lifeline, Grant("secret", list(grants)), list(fds))
        hello = self.receive()
        assert isinstance(hello, Hello)
        assert hello.token == "secret"
        assert hello.pid == self.process.pid
        self.send(Welcome(epoch, setup))

    def send(self, message: Any) -> None:
        self._router.send_multipart((self._identity, encode(message)))

    def receive(self) -> Any:
        deadline_s = time.monotonic() + TIMEOUT_S
        while not self._router.poll(200):
            if self.process.poll() is not None or time.monotonic() > deadline_s:
                raise AssertionError(f"no event: {self.stderr()}")
        self._identity, frame = self._router.recv_multipart()
        return self._decoder.decode(frame)

    def stderr(self) -> str:
        return self._stderr_path.read_text()

    def close(self, shutdown: Shutdown) -> int:
        if self.process.poll() is None and self._identity:
            self.send(shutdown)
        try:
            self.process.wait(20 if self._identity else 0.1)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if self._lifeline is not None:
            self._lifeline.close()
        self._listener.close()
        self._router.close(0)
        self._context.term()
        self._run_dir.close()
        return self.process.returncode


class ThreadWorker:
    """`serve` in a thread; also what it takes for its WorkerLink."""

    def __init__(
        self, epoch: int, setup: WorkerSetup, segments: list[tuple[SegmentGrant, int]]
    ) -> None:
        self.epoch = epoch
        self.setup = setup
        self._segments = {grant.name: (fd, grant) for grant, fd in segments}
        self._commands: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve)
        self.exit_code = -1

    def join(self, *_: Any) -> None:
        self._thread.start()

    def _serve(self) -> None:
        torch.set_num_threads(1)
        try:
            serve(self)
        except OrchestratorGone:
            self.exit_code = 0
        except UserError as error:
            self._events.put(Failed(self.epoch, str(error), is_user_error=True))
            self.exit_code = 2
        except Exception as error:
            self._events.put(Failed(self.epoch, f"{type(error).__name__}: {error}"))
            self.exit_code = 1
        finally:
            gc.unfreeze()  # a process of its own would end here

    def send(self, message: Any) -> None:
        """Of a command by the test, of an event by the worker."""
        is_event = threading.current_thread() is self._thread
        (self._events if is_event else self._commands).put(message)

    def receive(self, timeout_s: float | None = None, wake_fd: int = -1) -> Any:
        """Of a command by the worker, of an event by the test."""
        if threading.current_thread() is not self._thread:
            return self._events.get(timeout=TIMEOUT_S)
        while True:
            try:
                command = self._commands.get(timeout=0.001 if wake_fd >= 0 else timeout_s)
                break
            except queue.Empty:
                if wake_fd < 0 or select.select([wake_fd], [], [], 0)[0]:
                    return None
        if isinstance(command, Shutdown):
            raise OrchestratorGone(command.reason)
        return command

    def segment(self, name: str) -> tuple[int, SegmentGrant]:
        return self._segments[name]

    def map_segment(self, name: str, *, is_writable: bool) -> tuple[mmap.mmap, SegmentGrant]:
        fd, grant = self._segments[name]
        access = mmap.PROT_READ | (mmap.PROT_WRITE if is_writable else 0)
        return mmap.mmap(fd, grant.num_bytes, mmap.MAP_SHARED, access), grant

    def progress(self, done: int, total: int, text: str) -> None:
        self.send(Progress(self.epoch, done, total, text))

    def ready(
        self, bytes_per_s: float = 0.0, arena: Arena | None = None, far_bytes_per_s: float = 0.0
    ) -> None:
        self.send(Ready(self.epoch, bytes_per_s, arena, far_bytes_per_s))

    def close(self, shutdown: Shutdown) -> int:
        self._commands.put(shutdown)
        self._thread.join(TIMEOUT_S)
        assert not self._thread.is_alive()
        return self.exit_code


class WorkerFailed(AssertionError):
    """The worker said its last words; `event` holds them."""

    def __init__(self, event: Failed) -> None:
        super().__init__(event.sentence)
        self.event = event


def run_all(pipeline: Pipeline, routed: Routed) -> None:
    pipeline.run(routed, routed.experts, join=True)
