"""Words of finished parts: told apart by step, layer, expert and lane; and the wake beside them."""

from __future__ import annotations

import os
import threading

from protocol.completions import (
    MAX_LAYERS,
    MAX_SLOTS,
    Completion,
    Completions,
    completions_grant,
    new_wake_fd,
)
from protocol.membarrier import MemoryBarrier

ROWS, COPY = Completion(-1, 7, 100, 200), Completion(3, 8, 10, 20)


def segment(wake_fd: int = -1, barrier: MemoryBarrier | None = None) -> Completions:
    grant = completions_grant(5)
    return Completions(bytearray(grant.num_bytes), grant, wake_fd, barrier)


def test_a_word_is_of_one_part_alone() -> None:
    words = segment()
    assert words.landed(1, 0, range(5)) == []  # fresh memory says nothing; steps begin at 1
    words.write(9, 2, 1, ROWS)
    words.write(9, 2, 4, COPY)
    assert words.landed(9, 2, [4, 0, 1]) == [(4, 3), (1, -1)]
    for step, layer in ((8, 2), (10, 2), (9, 1), (9, 3)):
        assert words.landed(step, layer, range(5)) == []
    assert words.read(9, 2, 1) == ROWS
    assert words.read(9, 2, 4, 3) == COPY
    assert words.read(9, 2, 4, 2) is None
    assert words.read(9, 2, 4) is None
    assert words.spin(9, 2, [0], spin_us=1) == []
    assert words.spin(9, 2, [1], spin_us=1_000_000) == [(1, -1)]


def test_lanes_do_not_write_over_each_other() -> None:
    words = segment()
    words.write(9, 2, 1, ROWS)
    words.write(8, 0, 1, COPY)  # a late copy, for a step that is over
    assert words.landed(9, 2, [1]) == [(1, -1)]


def test_the_largest_numbers_fit() -> None:
    words = segment()
    step, layer, slot = 2**31 - 1, MAX_LAYERS - 1, MAX_SLOTS - 1
    words.write(step, layer, 4, Completion(slot, 2**40, 2**62, 2**62))
    assert words.landed(step, layer, [4]) == [(4, slot)]
    assert words.landed(step - 1, layer, [4]) == []


def test_a_sleeper_is_woken_by_any_word_and_only_once() -> None:
    fd = new_wake_fd()
    try:
        words = segment(fd)
        thread = threading.Thread(target=words.write, args=(1, 0, 0, ROWS))
        thread.start()
        os.set_blocking(fd, True)
        words.forget_wakes()  # sleeps until there is one
        thread.join()
        os.set_blocking(fd, False)
        words.forget_wakes()
        words.write(1, 0, 1, ROWS, is_waking=False)
        words.forget_wakes()
        os.eventfd_write(fd, 2**64 - 2)
        words.wake()  # the counter is full: nothing to add, and no error
        assert os.eventfd_read(fd) == 2**64 - 2
    finally:
        os.close(fd)


def test_where_stores_may_be_swapped_a_barrier_stands_before_the_word() -> None:
    seen: list[list[tuple[int, int]]] = []

    class Barrier(MemoryBarrier):
        def run(self) -> bool:
            seen.append(words.landed(1, 0, [2]))
            return True

    words = segment(barrier=Barrier())
    words.write(1, 0, 2, COPY)
    assert seen == [[]]
    assert words.landed(1, 0, [2]) == [(2, 3)]
