"""Copies of whole experts from the store in host memory into slots on a CUDA device.

Used by the dma_worker on memory of the gpu_worker, and by the gpu_worker itself where CUDA IPC
does not exist. Nothing here launches a kernel: a context that only copies shares the device with
one that computes without taking turns with it.

`PinnedStore` registers the store's mapping so that the copy engine reads it directly. Registration
is per process; a single call over hundreds of GB fails on some drivers, so it goes in chunks that
end between experts; and two processes that register the same pages at once can fail, so each
chunk is registered under a lock. Where registration fails (WSL2, locked-memory limits) copies
still work, through the driver's staging buffer, at a third of the speed.

`CopyStream` enqueues copies on one stream, in order, with an event behind each. A copy counts as
done when the host has seen its event: that alone makes it visible to kernels launched afterwards
by another process.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from expert_kernels.cuda_runtime import CudaError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from expert_kernels.cuda_runtime import CudaRuntime
    from expert_store.layout import StoreLayout

log = logging.getLogger("headrace")

MAX_CHUNK_BYTES = 64 * 1024**3
_LOCK_TIMEOUT_S = 120.0
_LOCK_POLL_S = 0.05


def chunks_of(layout: StoreLayout, max_chunk_bytes: int = MAX_CHUNK_BYTES) -> list[tuple[int, int]]:
    """(offset, length) in bytes of the pieces to register: all blocks, whole experts each."""
    per_chunk = max(1, max_chunk_bytes // layout.block_bytes)
    return [
        (
            layout.blocks_offset_bytes + first * layout.block_bytes,
            min(per_chunk, layout.total_experts - first) * layout.block_bytes,
        )
        for first in range(0, layout.total_experts, per_chunk)
    ]


class PinnedStore:
    """The store's blocks, registered with CUDA as far as the system allows.

    `address` is where the segment is mapped in this process, writable: registering a read-only
    mapping is not supported everywhere. `fd` is the segment. `reason` is "" when all of
    `pinned_bytes` are registered, else why not.
    """

    def __init__(
        self,
        runtime: CudaRuntime,
        address: int,
        layout: StoreLayout,
        fd: int,
        *,
        max_chunk_bytes: int = MAX_CHUNK_BYTES,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> None:
        self._runtime = runtime
        self._registered: list[int] = []
        self.pinned_bytes = 0
        self.reason = ""
        pieces = chunks_of(layout, max_chunk_bytes)
        total_bytes = sum(length for _, length in pieces)
        for offset_bytes, length in pieces:
            try:
                with _registration_lock(fd):
                    runtime.host_register(address + offset_bytes, length)
            except (CudaError, TimeoutError) as error:
                self.reason = str(error)
                log.warning(
                    "pinned %.2f of %.2f GB of expert weights (%s); the rest is copied at a lower "
                    "rate, through the driver's own buffer",
                    self.pinned_bytes / 1e9,
                    total_bytes / 1e9,
                    error,
                )
                break
            self._registered.append(address + offset_bytes)
            self.pinned_bytes += length
            if on_progress is not None:
                on_progress(self.pinned_bytes, total_bytes)

    def close(self) -> None:
        """Unregister; to be done before the segment is unmapped."""
        while self._registered:
            address = self._registered.pop()
            try:
                self._runtime.host_unregister(address)
            except CudaError as error:
                log.warning("%s", error)


@contextlib.contextmanager
def _registration_lock(fd: int) -> Iterator[None]:
    """Held by one process at a time among those that map the segment.

    The descriptor came from another process and shares its open file with it, and a flock belongs
    to the open file: so the segment is opened anew.

    Raises:
        TimeoutError: somebody holds it for minutes.
    """
    own_fd = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    try:
        deadline_s = time.monotonic() + _LOCK_TIMEOUT_S
        while True:
            try:
                fcntl.flock(own_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline_s:
                    raise TimeoutError(
                        "another process has been pinning the same memory for too long"
                    ) from None
                time.sleep(_LOCK_POLL_S)
        yield
    finally:
        os.close(own_fd)


@dataclass(frozen=True)
class DoneCopy:
    """A copy that the host has seen end. `tag` is what the caller named it."""

    tag: int
    started_ns: int
    ended_ns: int
    num_bytes: int


class CopyStream:
    """One stream of copies on the runtime's current device; use from one thread."""

    def __init__(
        self, runtime: CudaRuntime, clock_ns: Callable[[], int] = time.monotonic_ns
    ) -> None:
        self._runtime = runtime
        self._clock_ns = clock_ns
        self._stream = runtime.stream_create()
        self._idle_events: list[int] = []
        self._in_flight: deque[tuple[int, int, int, int]] = deque()  # tag, event, since, bytes
        self._last_end_ns = 0

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    def submit(self, tag: int, target: int, source: int, num_bytes: int) -> None:
        """Enqueue one copy from host address `source` to device address `target`."""
        submitted_ns = self._clock_ns()
        event = self._idle_events.pop() if self._idle_events else self._runtime.event_create()
        try:
            self._runtime.copy_to_device(target, source, num_bytes, self._stream)
            self._runtime.event_record(event, self._stream)
        except CudaError:
            self._idle_events.append(event)
            raise
        self._in_flight.append((tag, event, submitted_ns, num_bytes))

    def poll(self) -> list[DoneCopy]:
        """Copies that have ended since the last call, in order.

        `started_ns` is when the copy was submitted or the one before it was seen to end, whichever
        is later; `ended_ns` is when its end was seen.
        """
        done: list[DoneCopy] = []
        while self._in_flight and self._runtime.is_event_done(self._in_flight[0][1]):
            tag, event, submitted_ns, num_bytes = self._in_flight.popleft()
            ended_ns = self._clock_ns()
            done.append(DoneCopy(tag, max(submitted_ns, self._last_end_ns), ended_ns, num_bytes))
            self._last_end_ns = ended_ns
            self._idle_events.append(event)
        return done

    def drain(self) -> None:
        """Wait for everything in flight and forget it: nobody wants to hear of it any more."""
        self._runtime.stream_synchronize(self._stream)
        while self._in_flight:
            self._idle_events.append(self._in_flight.popleft()[1])

    def close(self) -> None:
        """Wait for what is in flight and give everything back."""
        self.drain()
        while self._idle_events:
            self._runtime.event_destroy(self._idle_events.pop())
        self._runtime.stream_destroy(self._stream)
