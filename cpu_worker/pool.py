"""A few threads that share out the experts of one call.

torch gives up Python's lock while it computes, so threads run experts side by side; each expert is
computed by one thread alone (expert_kernels.reference says why). The calling thread works too: a
pool of 1 has no other.

Waking a thread costs 10-50 us, as much as a small expert, so a call engages a helper only for
every further `BYTES_PER_THREAD` of weights. A call is over when its experts are done, not when its
helpers have woken: one that comes late finds nothing left and goes back to sleep.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from typing import TYPE_CHECKING, Generic, TypeVar

import torch

from expert_kernels.reference import use_one_thread

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

T = TypeVar("T")

#: About 100 us of reading at the 10 GB/s of one core: several times what waking a thread costs.
BYTES_PER_THREAD = 1024 * 1024


class _Call(Generic[T]):
    """One `run`: items nobody has taken yet, and a word from the helpers for each they finished."""

    def __init__(self, items: Sequence[T], work: Callable[[T], object]) -> None:
        self.items = deque(items)
        self.work = work
        self.finished: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()


class ExpertPool:
    """`num_threads` threads including the caller's. Use from one thread at a time."""

    def __init__(self, num_threads: int) -> None:
        self.num_threads = num_threads
        self._inboxes: list[queue.SimpleQueue[_Call | None]] = [
            queue.SimpleQueue() for _ in range(num_threads - 1)
        ]
        self._threads = [
            threading.Thread(target=_help, args=(inbox,), daemon=True, name=f"expert-{index + 1}")
            for index, inbox in enumerate(self._inboxes)
        ]
        for thread in self._threads:
            thread.start()

    def run(self, items: Sequence[T], work: Callable[[T], object], num_bytes: int) -> None:
        """`work(item)` for every item; returns when all are done. `num_bytes`: weights of all.

        Raises:
            Exception: the first one that `work` raised, once no thread works on this call.
        """
        num_helpers = min(len(self._inboxes), len(items) - 1, num_bytes // BYTES_PER_THREAD)
        if num_helpers <= 0:
            for item in items:
                work(item)
            return
        call = _Call(items, work)
        for inbox in self._inboxes[:num_helpers]:
            inbox.put(call)
        num_own = 0
        fault: BaseException | None = None
        while fault is None:
            try:
                item = call.items.popleft()
            except IndexError:
                break
            num_own += 1
            try:
                work(item)
            except Exception as error:
                fault = error
        num_given_up = len(_drain(call.items)) if fault is not None else 0
        for _ in range(len(items) - num_own - num_given_up):
            fault = call.finished.get() or fault
        if fault is not None:
            raise fault

    def close(self) -> None:
        """End the threads."""
        for inbox in self._inboxes:
            inbox.put(None)
        for thread in self._threads:
            thread.join()


def _drain(items: deque[T]) -> list[T]:
    """Take what is left, one by one: other threads take from the same end."""
    taken: list[T] = []
    while True:
        try:
            taken.append(items.popleft())
        except IndexError:
            return taken


def _help(inbox: queue.SimpleQueue[_Call | None]) -> None:
    use_one_thread()
    with torch.inference_mode():
        while (call := inbox.get()) is not None:
            while True:
                try:
                    item = call.items.popleft()
                except IndexError:
                    break
                try:
                    call.work(item)
                except Exception as error:
                    call.finished.put(error)
                else:
                    call.finished.put(None)
            del call  # its items hold views of shared memory
