"""Copies that nobody waits for give way: on a virtual clock, byte for byte."""

from __future__ import annotations

import numpy as np

from dma_worker.copier import EmulatedCopier, LinkModel
from dma_worker.copy_queue import PIECES_ON_LINK, CopyQueue
from tests.protocol.fake_orchestrator import small_layout

LAYOUT = small_layout()
BLOCK = LAYOUT.block_bytes
PIECE = BLOCK // 8 + 1  # the last piece is a short one
NS_PER_BYTE = 10


class Machine:
    """A paced link, slots, and a clock that sleeping moves on."""

    def __init__(self) -> None:
        self.now_ns = 0
        self.store = np.random.default_rng(3).integers(0, 256, LAYOUT.total_bytes, np.uint8)
        self.slots = np.zeros((4, BLOCK), np.uint8)
        copier = EmulatedCopier(
            LAYOUT,
            self.store,
            self.slots,
            LinkModel(1e9 / NS_PER_BYTE),
            clock_ns=lambda: self.now_ns,
            sleep_s=self.sleep,
        )
        self.queue = CopyQueue(copier, LAYOUT, piece_bytes=PIECE)

    def sleep(self, seconds: float) -> None:
        self.now_ns += max(round(seconds * 1e9), 1)

    def finish(self) -> dict[int, tuple[int, int]]:
        """Until all has ended: copy -> (busy ns, when it was seen)."""
        ended = {}
        for _ in range(100_000):
            for done in self.queue.poll():
                assert done.num_bytes == BLOCK
                ended[done.tag] = (done.ended_ns - done.started_ns, self.now_ns)
            if not self.queue.num_in_flight:
                return ended
            self.queue.wait()
        raise AssertionError("copies never end")

    def holds(self, slot: int, layer: int, expert: int) -> bool:
        start = LAYOUT.block_offset(layer, expert)
        return bool(np.array_equal(self.slots[slot], self.store[start : start + BLOCK]))


def test_pieces_make_a_whole_copy_of_the_same_time() -> None:
    machine = Machine()
    machine.queue.submit(1, 0, 2, 3, is_awaited=False)
    ended = machine.finish()
    assert machine.holds(3, 0, 2)
    busy_ns, _ = ended[1]
    assert abs(busy_ns - BLOCK * NS_PER_BYTE) <= 8


def test_an_awaited_copy_waits_for_the_pieces_on_the_link_and_no_more() -> None:
    machine = Machine()
    for copy in (1, 2, 3):
        machine.queue.submit(copy, 0, copy, copy, is_awaited=False)
    machine.now_ns += 5
    machine.queue.submit(9, 1, 1, 0, is_awaited=True)
    ended = machine.finish()
    assert list(ended) == [9, 1, 2, 3]
    waited_ns = PIECES_ON_LINK * PIECE * NS_PER_BYTE
    assert ended[9][1] <= waited_ns + BLOCK * NS_PER_BYTE + 50_000
    assert all(machine.holds(copy, 0, copy) for copy in (1, 2, 3))
    assert machine.holds(0, 1, 1)
    # The pause is not counted as time on the link.
    assert all(abs(ended[copy][0] - BLOCK * NS_PER_BYTE) <= 8 for copy in (1, 2, 3))


def test_no_piece_is_sent_while_somebody_waits() -> None:
    machine = Machine()
    machine.queue.submit(1, 0, 0, 0, is_awaited=True)
    machine.queue.submit(2, 0, 1, 1, is_awaited=False)
    machine.queue.submit(3, 0, 2, 2, is_awaited=True)
    assert not machine.slots[1].any()
    assert list(machine.finish()) == [1, 3, 2]


def test_closed_nothing_is_reported() -> None:
    machine = Machine()
    machine.queue.submit(1, 0, 0, 0, is_awaited=False)
    machine.queue.submit(2, 0, 1, 1, is_awaited=True)
    machine.queue.close()
    machine.now_ns += 10**9
    assert machine.queue.poll() == []
    assert machine.queue.num_in_flight == 0
