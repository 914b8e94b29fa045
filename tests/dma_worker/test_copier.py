"""The emulated copier and its link, on a virtual clock."""

from __future__ import annotations

import os

import numpy as np
import pytest

from dma_worker.copier import EmulatedCopier, LinkModel
from dma_worker.probe import NUM_SCRATCH_SLOTS, measure_rate
from expert_store.segment import StoreView
from tests.protocol.fake_orchestrator import make_store, small_layout

LAYOUT = small_layout()
SECOND_NS = 1_000_000_000


class Clock:
    """Time passes by sleeping alone; every sleep overshoots."""

    def __init__(self, overshoot_ns: int = 30_000) -> None:
        self.now_ns = 1_000
        self.overshoot_ns = overshoot_ns
        self.sleeps: list[float] = []

    def read(self) -> int:
        return self.now_ns

    def sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        self.now_ns += round(seconds * 1e9) + self.overshoot_ns


def make_copier(clock: Clock, bytes_per_s: float, num_slots: int = 3) -> EmulatedCopier:
    store = np.arange(LAYOUT.total_bytes, dtype=np.uint64).astype(np.uint8)
    slots = np.zeros((num_slots, LAYOUT.block_bytes + 4096), dtype=np.uint8)
    link = LinkModel(bytes_per_s)
    return EmulatedCopier(LAYOUT, store, slots, link, clock_ns=clock.read, sleep_s=clock.sleep)


def finish(copier: EmulatedCopier) -> list:
    done = []
    for _ in range(10_000):
        done += copier.poll()
        if not copier.num_in_flight:
            return done
        copier.wait()
    raise AssertionError("copies never end")


def test_copies_exactly_the_block() -> None:
    fd = make_store(LAYOUT)
    with StoreView(fd) as view:
        store = np.frombuffer(view.memory, dtype=np.uint8).copy()
    os.close(fd)
    slots = np.full((3, LAYOUT.block_bytes + 64), 0xEE, dtype=np.uint8)
    copier = EmulatedCopier(LAYOUT, store, slots, LinkModel(0.0))
    copier.submit(11, 1, 3, 2)
    (done,) = copier.poll()
    assert (done.tag, done.num_bytes) == (11, LAYOUT.block_bytes)
    start = LAYOUT.block_offset(1, 3)
    expected = np.full_like(slots, 0xEE)
    expected[2, : LAYOUT.block_bytes] = store[start : start + LAYOUT.block_bytes]
    assert np.array_equal(slots, expected)


def test_link_takes_bytes_over_rate_and_serves_in_order() -> None:
    link = LinkModel(1e9)
    assert link.transfer(100, 1000) == (100, 1100)
    assert link.transfer(200, 500) == (1100, 1600)  # the link was busy
    assert link.transfer(5000, 1) == (5000, 5001)  # it was free
    link.delay(9000)
    assert link.transfer(8000, 1000) == (9000, 10000)
    assert LinkModel(0.0).transfer(7, 10**9) == (7, 7)


def test_a_copy_is_never_reported_early_and_late_only_by_one_sleep() -> None:
    clock = Clock()
    copier = make_copier(clock, bytes_per_s=LAYOUT.block_bytes * 400.0)  # 2.5 ms each
    for copy in range(20):
        submitted_ns = clock.now_ns
        copier.submit(copy, 0, copy % 6, copy % 3)
        (done,) = finish(copier)
        assert done.ended_ns - done.started_ns == SECOND_NS // 400
        assert done.started_ns == submitted_ns
        late_ns = clock.now_ns - done.ended_ns
        assert 0 <= late_ns <= 20_000 + clock.overshoot_ns


def test_lateness_does_not_add_up_on_a_busy_link() -> None:
    clock = Clock()
    copier = make_copier(clock, bytes_per_s=LAYOUT.block_bytes * 1000.0)
    started_ns = clock.now_ns
    done = []
    copier.submit(0, 0, 0, 0)
    for copy in range(1, 100):
        copier.submit(copy, 0, copy % 6, copy % 3)
        while copier.num_in_flight > 1:
            done += copier.poll()
            copier.wait()
    done += finish(copier)
    assert [each.tag for each in done] == list(range(100))
    assert done[-1].ended_ns - started_ns == 100 * SECOND_NS // 1000
    assert clock.now_ns - done[-1].ended_ns <= 50_000 + clock.overshoot_ns


def test_sleeps_are_short_enough_to_hear_commands_and_long_enough_not_to_spin() -> None:
    clock = Clock()
    copier = make_copier(clock, bytes_per_s=LAYOUT.block_bytes * 10.0)  # 100 ms
    copier.submit(0, 0, 0, 0)
    finish(copier)
    assert max(clock.sleeps) <= 500e-6
    assert len(clock.sleeps) <= 100e-3 / 500e-6 + 10


def test_closed_copier_reports_nothing() -> None:
    clock = Clock()
    copier = make_copier(clock, bytes_per_s=1e6)
    copier.submit(0, 0, 0, 0)
    copier.close()
    clock.now_ns += SECOND_NS
    assert copier.poll() == []
    assert copier.num_in_flight == 0
    copier.wait()  # returns at once
    assert clock.sleeps == []


def test_unpaced_copy_takes_as_long_as_the_memcpy() -> None:
    clock = Clock()
    copier = make_copier(clock, bytes_per_s=0.0)
    copier.submit(0, 0, 0, 0)
    assert [each.tag for each in copier.poll()] == [0]
    assert clock.sleeps == []


@pytest.mark.parametrize("bytes_per_s", [1e8, 2e6])
def test_probe_finds_the_links_rate(bytes_per_s: float) -> None:
    clock = Clock(overshoot_ns=5_000)
    copier = make_copier(clock, bytes_per_s, NUM_SCRATCH_SLOTS)
    rate = measure_rate(copier, LAYOUT, lambda: clock.now_ns / 1e9)
    assert rate == pytest.approx(bytes_per_s, rel=0.05)
    assert rate <= bytes_per_s * 1.0001
