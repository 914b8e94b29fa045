"""Between loading and serving: what is checked, what is made."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from expert_store.memory import MemoryRoom
from orchestrator import set_up
from orchestrator.set_up import check_settings, core_config, make_segments, worker_setup
from orchestrator.settings import PipelineSettings
from protocol.errors import UserError
from tests.orchestrator.test_fit import inspection

LAYOUT = inspection().layout
SETTINGS = PipelineSettings(model_dir=Path("models"), run_dir=Path("run"))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"slots": "0"}, "no expert slot"),
        ({"slots": "x"}, "not a number"),
        ({"policy": "magic"}, "magic"),
        ({"fill": "some"}, "fill mode"),
        ({"fill": "none", "num_cpu_workers": 0}, "--fill none leaves .* --cpu-workers 0"),
        ({"fill": "0", "num_cpu_workers": 0}, "--fill 0 leaves .* or another --fill"),
        ({"planner": "cpu-only", "num_cpu_workers": 0}, "--planner cpu-only leaves"),
    ],
)
def test_what_no_model_can_mend(change: dict[str, Any], says: str) -> None:
    check_settings(SETTINGS)
    with pytest.raises(UserError, match=says):
        check_settings(msgspec.structs.replace(SETTINGS, **change))


@pytest.mark.parametrize("change", [{"fill": "all"}, {"fill": "1"}, {"planner": "fill-only"}])
def test_without_a_cpu_worker_misses_are_filled(change: dict[str, Any]) -> None:
    check_settings(msgspec.structs.replace(SETTINGS, num_cpu_workers=0, **change))


def test_a_device_that_cannot_be_had_is_told_before_loading(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_driver(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr("ctypes.CDLL", no_driver)
    check_settings(SETTINGS)
    with pytest.raises(UserError, match="no NVIDIA driver"):
        check_settings(msgspec.structs.replace(SETTINGS, device="cuda"))


def test_segments_are_made_and_closed() -> None:
    with contextlib.ExitStack() as stack:
        weights_fd = os.memfd_create("weights")
        stack.callback(os.close, weights_fd)
        grants, fds = make_segments(SETTINGS, LAYOUT, 7, weights_fd, stack)
        assert [grant.name for grant in grants] == [
            "weights", "activations", "residency", "completions", "arena", "wake",
        ]  # fmt: skip
        assert grants[4].num_bytes == 7 * LAYOUT.block_bytes
        assert [os.fstat(fd).st_size for fd in fds[1:]] == [grant.num_bytes for grant in grants[1:]]
        os.eventfd_write(fds[5], 3)
        assert os.eventfd_read(fds[5]) == 3
    for fd in fds:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)


def test_slots_on_a_device_take_no_host_memory() -> None:
    on_device = msgspec.structs.replace(SETTINGS, device="cuda")
    with contextlib.ExitStack() as stack:
        weights_fd = os.memfd_create("weights")
        stack.callback(os.close, weights_fd)
        grants, _ = make_segments(on_device, LAYOUT, 7, weights_fd, stack)
    assert [grant.name for grant in grants] == [
        "weights", "activations", "residency", "completions", "wake",
    ]  # fmt: skip


def test_too_little_memory_is_told_with_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(set_up, "memory_room", lambda: MemoryRoom(5_000_000, "the limit"))
    with (
        contextlib.ExitStack() as stack,
        pytest.raises(UserError, match=r"100 slots .* need \d+ MB .* the limit is 5\.00 MB"),
    ):
        make_segments(SETTINGS, LAYOUT, 100, -1, stack)


def test_rates_in_bytes_per_second() -> None:
    stated = msgspec.structs.replace(SETTINGS, host_gbps=2.5, emulate_link_gbps=0.5)
    config = core_config(stated, LAYOUT, 9, 64)
    assert (config.host_bytes_per_s, config.link_bytes_per_s) == (2.5e9, None)
    assert (config.num_slots, config.max_sequence_tokens, config.top_k) == (9, 64, 4)
    cpu, dma = (worker_setup(stated, LAYOUT, 9, 64, role) for role in ("cpu_worker", "dma_worker"))
    assert (cpu.is_rate_stated, dma.is_rate_stated) == (True, False)
    assert dma.emulate_link_bytes_per_s == 0.5e9
    assert Path(cpu.model_dir).is_absolute()
