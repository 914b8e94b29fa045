"""Fill a segment with a model's experts, streaming from the checkpoint.

    open and check headers -> shape of the model -> keys sorted -> room in memory? -> size the
    segment -> copies in file order on a few threads, then converters -> dense weights looked
    through -> header

The header is written last, so that a segment whose loading died never passes for a store. The
dense weights are only read for values that are not finite: who loads them later would generate
nonsense from a NaN, far from its cause.
"""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from operator import attrgetter
from typing import TYPE_CHECKING

import torch

from expert_store.checkpoint import Checkpoint, CheckpointError
from expert_store.conversion import converted_experts, direct_copies
from expert_store.expert_dtype import parse_expert_dtype, rows_dtype
from expert_store.expert_matrices import (
    MatrixJob,
    Part,
    QuantisedWriter,
    as_model_has_it,
    concatenated_bias,
    matrix_jobs,
    oriented,
    parts_of,
)
from expert_store.families import (
    ModelShape,
    choose_dtype,
    dense_bytes,
    kv_bytes_per_token,
    read_model_shape,
    store_layout,
)
from expert_store.kept_formats import choose_weights, packed_sources
from expert_store.keys import ExpertParameter, KeyMap, map_keys
from expert_store.layout import Dtype, StoreLayout, encode_header
from expert_store.memory import WORKING_BYTES
from expert_store.packed import gather_packed
from expert_store.reading import (
    PIECE_BYTES,
    TORCH_DTYPE,
    Copy,
    PieceBuffers,
    SourceFiles,
)
from expert_store.reports import Inspection, Loaded, Progress, QuantisationErrors
from expert_store.store_room import make_room
from protocol.sizes import part_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import numpy as np
    import numpy.typing as npt

    from expert_store.checkpoint import TensorEntry
    from expert_store.layout import TensorName
    from expert_store.reading import Write

NUM_THREADS = 2
_MAX_THREADS = 16  # of quantising
_SPAN_BYTES = 32 * 1024 * 1024  # what a thread takes at a time: long enough to read ahead
_PROGRESS_S = 0.2


class Plan:
    """What a load will do: made from headers alone, so it is also what `inspect` tells."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        dtype: str,
        expert_dtype: str = "auto",
        dense_dtype: str = "auto",
    ) -> None:
        self.checkpoint = checkpoint = gather_packed(checkpoint)
        self.shape: ModelShape = read_model_shape(checkpoint)
        self.keys: KeyMap = map_keys(self.shape, checkpoint)
        wanted = rows_dtype(dtype, expert_dtype)
        self.dtype: Dtype = choose_dtype(self.shape, checkpoint, wanted)
        weights = choose_weights(self.keys, checkpoint, expert_dtype)
        self.layout: StoreLayout = store_layout(self.shape, checkpoint, self.dtype, weights)
        self.dense_bytes = dense_bytes(self.shape, self.dtype, parse_expert_dtype(dense_dtype))
        self.copies: list[Copy] = []
        self.jobs: list[MatrixJob] = []
        self.conversions: list[ExpertParameter] = []
        for parameter in self.keys.experts:
            if parameter.sources:  # else a further target of another parameter's converter
                self._place(parameter, keeps_values=expert_dtype == "auto")
        for name in self.keys.dense:
            entry = checkpoint.tensors[name]
            if entry.dtype in TORCH_DTYPE:
                self.copies.append(Copy(entry, 0, entry.num_bytes, None, self.keys.dense[name]))
        self.total_bytes = (
            sum(copy.num_bytes for copy in self.copies)
            + sum(job.num_bytes for job in self.jobs)
            + sum(
                source.num_bytes
                for parameter in self.conversions
                for group in parameter.sources.values()
                for source in group
            )
        )

    def turns_bias(self, name: TensorName) -> bool:
        """Quantised stores have gates and ups apart, whatever order the model has them in."""
        is_interleaved = self.shape.form.is_interleaved and self.layout.weights is not None
        return name == "gate_up_bias" and is_interleaved

    def _place(self, parameter: ExpertParameter, *, keeps_values: bool) -> None:
        """Choose how the parameter gets into its blocks: bytes copied, one expert after the other
        made anew, or a converter of transformers'."""
        checkpoint, num_experts = self.checkpoint, self.layout.num_experts[parameter.layer]
        packed = packed_sources(parameter)
        is_coded = self.layout.weights is not None and not parameter.name.endswith("bias")
        is_turned = self.turns_bias(parameter.name)
        if is_coded or packed or is_turned:
            jobs = matrix_jobs(parameter, self.shape, checkpoint, num_experts)
            if jobs is not None:
                self.jobs += jobs
                return
            if packed and keeps_values:
                raise CheckpointError(
                    f"{checkpoint.directory / packed[0].file_name}: tensors like {packed[0].name},"
                    f" quantised ({packed[0].kind}), would have to be rearranged by value to make"
                    f" {parameter.path}; say --expert-dtype bf16, or a format, to have them"
                    " converted"
                )
        else:
            copies = direct_copies(parameter, self.layout, checkpoint)
            if copies is not None:
                self.copies += copies
                return
        self.conversions.append(parameter)

    def inspection(self) -> Inspection:
        config = self.shape.text_config
        return Inspection(
            layout=self.layout,
            architecture=self.shape.model_class.__name__,
            model_type=self.shape.config.model_type,
            num_hidden_layers=config.num_hidden_layers,
            vocab_size=config.vocab_size,
            context_length=getattr(config, "max_position_embeddings", None),
            dense_bytes=self.dense_bytes,
            kv_bytes_per_token=kv_bytes_per_token(config, self.dtype),
            checkpoint_bytes=self.checkpoint.data_bytes,
            num_ignored=len(self.keys.ignored),
        )


def load(
    plan: Plan,
    fd: int,
    report: Callable[[Progress], None],
    numa_nodes: tuple[int, ...] = (),
    reserved_fd: int | None = None,
) -> Loaded:
    """Size the empty memfd ``fd`` and fill it, experts divided among ``numa_nodes`` if there are
    any; or ``reserved_fd``, one of reserved huge pages, if there are enough of those. ``report`` is
    called from this thread only.

    Raises CheckpointError and NotEnoughMemoryError; then no segment holds a valid header.
    """
    layout = plan.layout
    started = time.monotonic()

    def tell_room(done_bytes: int) -> None:
        text = part_of(done_bytes, layout.total_bytes)
        report(Progress(0, plan.total_bytes, f"making room in huge pages: {text}"))

    room = make_room(fd, reserved_fd, layout, plan.dense_bytes, numa_nodes, tell_room)
    # Cached file pages can be dropped by the kernel, but under a tight limit it is better not to
    # let them pile up; with room to spare they make the next start fast.
    is_tight = room.spare_bytes - WORKING_BYTES < 2 * plan.total_bytes
    files = SourceFiles(plan.checkpoint, drop_cache=is_tight)
    try:
        errors = _Run(plan, room.write, files).run(report)
    finally:
        files.close()
    room.write(memoryview(encode_header(layout)), 0)
    room.tell_placement(layout)
    seconds = max(time.monotonic() - started, 1e-9)
    return Loaded(
        layout,
        seconds,
        plan.total_bytes / seconds,
        errors,
        room.huge_page_bytes,
        room.is_reserved,
        room.reserved_note,
        room.numa_nodes,
        room.numa_note,
    )


class _Run:
    """One load: threads take spans of copies in file order, then parameters to convert."""

    def __init__(self, plan: Plan, write: Write, files: SourceFiles) -> None:
        self._plan, self._write_bytes, self._files = plan, write, files
        self._lock = threading.Lock()
        self._done_bytes = 0
        self._stop = threading.Event()
        self._work: Iterator[Callable[[PieceBuffers], None]] = self._tasks()
        self._writer = None if plan.layout.weights is None else QuantisedWriter(plan.layout)

    def run(self, report: Callable[[Progress], None]) -> QuantisationErrors | None:
        plan = self._plan
        text = f"loading {plan.checkpoint.name}"
        num_threads = NUM_THREADS
        if plan.layout.weights is not None:
            text += f", experts in {plan.layout.weights.name}"
            num_threads = min(max(NUM_THREADS, len(os.sched_getaffinity(0))), _MAX_THREADS)
        report(Progress(0, plan.total_bytes, text))
        with ThreadPoolExecutor(num_threads, thread_name_prefix="load") as pool:
            futures: set[Future[None]] = {pool.submit(self._take) for _ in range(num_threads)}
            try:
                while futures:
                    finished, futures = wait(futures, _PROGRESS_S, return_when=FIRST_EXCEPTION)
                    for future in finished:
                        future.result()
                    report(Progress(self._done_bytes, plan.total_bytes, text))
            finally:
                self._stop.set()
        return None if self._writer is None else self._writer.errors()

    def _tasks(self) -> Iterator[Callable[[PieceBuffers], None]]:
        copies = sorted(
            self._plan.copies,
            key=lambda copy: (copy.source.file_name, copy.source.offset_bytes + copy.skip_bytes),
        )
        span: list[Copy] = []
        span_bytes = 0
        for copy in copies:
            span.append(copy)
            span_bytes += copy.num_bytes
            if span_bytes >= _SPAN_BYTES:
                yield self._copy_span(span)
                span, span_bytes = [], 0
        yield self._copy_span(span)
        first = attrgetter("file_name", "offset_bytes")
        for job in sorted(self._plan.jobs, key=lambda job: (first(job.sources[0]), job.expert)):
            yield self._make(job)
        for parameter in self._plan.conversions:
            yield self._convert(parameter)

    def _take(self) -> None:
        torch.set_num_threads(1)  # of the calling thread: parallel are the tasks
        buffers = PieceBuffers()
        while not self._stop.is_set():
            with self._lock:
                task = next(self._work, None)
            if task is None:
                return
            task(buffers)

    def _copy_span(self, span: list[Copy]) -> Callable[[PieceBuffers], None]:
        def run(buffers: PieceBuffers) -> None:
            for copy in span:
                for piece in _pieces(copy, self._plan.dtype):
                    if self._stop.is_set():
                        return
                    self._count(
                        self._files.copy(piece, self._write_bytes, self._plan.dtype, buffers)
                    )

        return run

    def _make(self, job: MatrixJob) -> Callable[[PieceBuffers], None]:
        def run(_: PieceBuffers) -> None:
            plan, name, source = self._plan, job.parameter.name, job.sources[0]
            form = plan.shape.form
            if name.endswith("bias"):
                raw = self._files.checked_bytes(
                    concatenated_bias(job, self._files).to(TORCH_DTYPE[plan.dtype]), source
                )
            else:
                parts = parts_of(job, form, plan.layout.weights, self._files)
                raw = self._matrix_bytes(name, job.label, parts, source)
            self._write(job.parameter, job.expert, raw)
            self._count(job.num_bytes)

        return run

    def _matrix_bytes(
        self, name: TensorName, label: str, parts: list[Part], source: TensorEntry
    ) -> npt.NDArray[np.uint8]:
        """A parameter of one expert as the store has it."""
        if self._writer is not None:
            return self._writer.block_bytes(name, label, parts)
        whole = as_model_has_it(name, self._plan.shape.form, parts)
        return self._files.checked_bytes(whole.to(TORCH_DTYPE[self._plan.dtype]), source)

    def _write(self, target: ExpertParameter, expert: int, raw: npt.NDArray[np.uint8]) -> None:
        place = self._plan.layout.tensor(target.name)
        offset = self._plan.layout.block_offset(target.layer, expert) + place.offset_bytes
        self._write_bytes(raw.reshape(-1).data, offset)

    def _convert(self, parameter: ExpertParameter) -> Callable[[PieceBuffers], None]:
        plan = self._plan
        form = plan.shape.form
        by_path = {other.path: other for other in plan.keys.experts}

        def run(_: PieceBuffers) -> None:
            for path, expert, tensor, example in converted_experts(
                parameter, plan.shape, plan.layout, plan.checkpoint, self._files
            ):
                if self._stop.is_set():
                    return
                target = by_path[path]
                if self._writer is not None and not target.name.endswith("bias"):
                    parts = oriented(target.name, form, tensor)
                    raw = self._writer.block_bytes(target.name, f"{path}[{expert}]", parts)
                else:
                    if plan.turns_bias(target.name):
                        tensor = torch.cat([tensor[::2], tensor[1::2]])
                    raw = self._files.checked_bytes(tensor.to(TORCH_DTYPE[plan.dtype]), example)
                self._write(target, expert, raw)
            self._count(
                sum(source.num_bytes for group in parameter.sources.values() for source in group)
            )

        return run

    def _count(self, num_bytes: int) -> None:
        with self._lock:
            self._done_bytes += num_bytes


def _pieces(copy: Copy, dtype: Dtype) -> Iterator[Copy]:
    """The copy in pieces that fit the buffer; PIECE_BYTES is a whole number of elements."""
    if copy.num_bytes <= PIECE_BYTES:
        yield copy
        return
    target = copy.target_offset_bytes
    scale = TORCH_DTYPE[dtype].itemsize / TORCH_DTYPE[copy.source.dtype].itemsize
    for begin in range(0, copy.num_bytes, PIECE_BYTES):
        yield Copy(
            copy.source,
            copy.skip_bytes + begin,
            min(PIECE_BYTES, copy.num_bytes - begin),
            None if target is None else target + int(begin * scale),
            copy.target_name,
        )
