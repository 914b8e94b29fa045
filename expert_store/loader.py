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
from typing import TYPE_CHECKING

from expert_store.checkpoint import Checkpoint, CheckpointError
from expert_store.conversion import converted_experts, direct_copies
from expert_store.families import (
    ModelShape,
    choose_dtype,
    dense_bytes,
    kv_bytes_per_token,
    read_model_shape,
    store_layout,
)
from expert_store.keys import ExpertParameter, KeyMap, map_keys
from expert_store.layout import Dtype, StoreLayout, encode_header
from expert_store.memory import WORKING_BYTES, memory_room, require_memory
from expert_store.reading import (
    PIECE_BYTES,
    TORCH_DTYPE,
    Copy,
    PieceBuffers,
    SourceFiles,
    write_all,
)
from expert_store.reports import Inspection, Loaded, Progress
from expert_store.segment import size_segment

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

NUM_THREADS = 2
_SPAN_BYTES = 32 * 1024 * 1024  # what a thread takes at a time: long enough to read ahead
_PROGRESS_S = 0.2


class Plan:
    """What a load will do: made from headers alone, so it is also what `inspect` tells."""

    def __init__(self, checkpoint: Checkpoint, dtype: str) -> None:
        self.checkpoint = checkpoint
        self.shape: ModelShape = read_model_shape(checkpoint)
        self.keys: KeyMap = map_keys(self.shape, checkpoint)
        self.dtype: Dtype = choose_dtype(self.shape, checkpoint, dtype)
        self.layout: StoreLayout = store_layout(self.shape, checkpoint, self.dtype)
        self.dense_bytes = dense_bytes(self.shape, self.dtype)
        self.copies: list[Copy] = []
        self.conversions: list[ExpertParameter] = []
        for parameter in self.keys.experts:
            if not parameter.sources:
                continue  # a further target of another parameter's converter
            copies = direct_copies(parameter, self.layout, checkpoint)
            if copies is None:
                self.conversions.append(parameter)
            else:
                self.copies += copies
        for name in self.keys.dense:
            entry = checkpoint.tensors[name]
            if entry.dtype in TORCH_DTYPE:
                self.copies.append(Copy(entry, 0, entry.num_bytes, None, self.keys.dense[name]))
        self.total_bytes = sum(copy.num_bytes for copy in self.copies) + sum(
            source.num_bytes
            for parameter in self.conversions
            for group in parameter.sources.values()
            for source in group
        )

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


def load(plan: Plan, fd: int, report: Callable[[Progress], None]) -> Loaded:
    """Size the empty memfd ``fd`` and fill it. ``report`` is called from this thread only.

    Raises CheckpointError and NotEnoughMemoryError; then the segment holds no valid header.
    """
    layout = plan.layout
    room = memory_room()
    require_memory(layout.total_bytes, plan.dense_bytes, room)
    try:
        if os.fstat(fd).st_size != 0:
            raise CheckpointError(f"descriptor {fd}: not an empty segment; pass a new memfd")
        size_segment(fd, layout.total_bytes)
    except OSError as error:
        raise CheckpointError(
            f"descriptor {fd}: not a memfd that this process inherited ({error.strerror});"
            " pass the descriptor of a new memfd"
        ) from error
    # Cached file pages can be dropped by the kernel, but under a tight limit it is better not to
    # let them pile up; with room to spare they make the next start fast.
    used_bytes = layout.total_bytes + plan.dense_bytes + WORKING_BYTES
    spare_bytes = room.available_bytes - used_bytes
    started = time.monotonic()
    files = SourceFiles(plan.checkpoint, drop_cache=spare_bytes < 2 * plan.total_bytes)
    try:
        _Run(plan, fd, files).run(report)
    finally:
        files.close()
    write_all(fd, memoryview(encode_header(layout)), 0)
    seconds = max(time.monotonic() - started, 1e-9)
    return Loaded(layout, seconds, plan.total_bytes / seconds)


class _Run:
    """One load: threads take spans of copies in file order, then parameters to convert."""

    def __init__(self, plan: Plan, fd: int, files: SourceFiles) -> None:
        self._plan, self._fd, self._files = plan, fd, files
        self._lock = threading.Lock()
        self._done_bytes = 0
        self._stop = threading.Event()
        self._work: Iterator[Callable[[PieceBuffers], None]] = self._tasks()

    def run(self, report: Callable[[Progress], None]) -> None:
        plan = self._plan
        text = f"loading {plan.checkpoint.name}"
        report(Progress(0, plan.total_bytes, text))
        with ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="load") as pool:
            futures: set[Future[None]] = {pool.submit(self._take) for _ in range(NUM_THREADS)}
            try:
                while futures:
                    finished, futures = wait(futures, _PROGRESS_S, return_when=FIRST_EXCEPTION)
                    for future in finished:
                        future.result()
                    report(Progress(self._done_bytes, plan.total_bytes, text))
            finally:
                self._stop.set()

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
        for parameter in self._plan.conversions:
            yield self._convert(parameter)

    def _take(self) -> None:
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
                    self._count(self._files.copy(piece, self._fd, self._plan.dtype, buffers))

        return run

    def _convert(self, parameter: ExpertParameter) -> Callable[[PieceBuffers], None]:
        plan = self._plan
        by_path = {other.path: other for other in plan.keys.experts}

        def run(_: PieceBuffers) -> None:
            for path, expert, tensor, example in converted_experts(
                parameter, plan.shape, plan.layout, plan.checkpoint, self._files
            ):
                if self._stop.is_set():
                    return
                target = by_path[path]
                place = plan.layout.tensor(target.name)
                raw = self._files.checked_bytes(tensor.to(TORCH_DTYPE[plan.dtype]), example)
                offset = plan.layout.block_offset(target.layer, expert) + place.offset_bytes
                write_all(self._fd, raw.data, offset)
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
