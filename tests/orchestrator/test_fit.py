"""`headrace plan`: the arithmetic of fitting."""

from __future__ import annotations

import pytest

from expert_store.layout import ExpertForm, make_layout
from expert_store.memory import MemoryRoom
from expert_store.reports import Inspection
from orchestrator.fit import DEVICE_RESERVE_BYTES, Fit, Question, plan_fit
from protocol.errors import UserError

GB = 1_000_000_000


def inspection(num_layers: int = 4, num_experts: int = 32, top_k: int = 4) -> Inspection:
    form = ExpertForm(
        hidden_size=1024,
        intermediate_size=512,
        has_gate=True,
        has_bias=False,
        is_transposed=False,
        is_interleaved=False,
        activation="silu",
        gate="act_mul",
    )
    layout = make_layout(
        model_name="demo",
        checkpoint_fingerprint="",
        form=form,
        dtype="bfloat16",
        model_layer_ids=tuple(range(num_layers)),
        num_experts=(num_experts,) * num_layers,
        top_k=top_k,
    )
    return Inspection(
        layout=layout,
        architecture="DemoForCausalLM",
        model_type="demo",
        num_hidden_layers=num_layers,
        vocab_size=100,
        context_length=4096,
        dense_bytes=50_000_000,
        kv_bytes_per_token=1000,
        checkpoint_bytes=0,
        num_ignored=0,
    )


def ask(
    question: Question,
    available_bytes: int = 100 * GB,
    memlock_bytes: int | None = None,
    shm: tuple[int | None, int | None] = (64_000_000, 64_000_000),
) -> Fit:
    room = MemoryRoom(available_bytes, "the machine's available memory")
    return plan_fit(inspection(), question, room, memlock_bytes, shm)


def verdicts(fit: Fit) -> dict[str, str]:
    return {finding.resource: finding.verdict for finding in fit.findings}


def test_each_request_at_once_has_a_cache_of_its_own() -> None:
    one, four = (ask(Question(context=100, max_num_seqs=number)) for number in (1, 4))
    assert (one.kv_bytes, four.kv_bytes) == (100_000, 400_000)
    assert four.host_needed_bytes - one.host_needed_bytes == 300_000


def test_slots_that_fit_leave_room_for_everything_else() -> None:
    block_bytes = inspection().layout.block_bytes
    budget = 50_000_000 + 4096 * 1000 + DEVICE_RESERVE_BYTES + 20 * block_bytes
    for extra, slots in ((0, 20), (block_bytes - 1, 20), (block_bytes, 21), (-1, 19)):
        fit = ask(Question(device="cuda", vram_bytes=budget + extra))
        assert fit.slots == slots
        assert fit.fits
    assert ask(Question(device="cuda", vram_bytes=100 * GB)).slots == 128


def test_a_shorter_context_leaves_more_slots() -> None:
    short = ask(Question(device="cuda", vram_bytes=GB, context=16))
    long = ask(Question(device="cuda", vram_bytes=GB, context=4096))
    assert short.slots > long.slots
    assert ask(Question(context=10**9)).context == 4096


def test_no_room_for_one_expert() -> None:
    fit = ask(Question(device="cuda", vram_bytes=DEVICE_RESERVE_BYTES))
    assert (fit.slots, fit.fits) == (0, False)
    assert verdicts(fit)["device memory"] == "no"


@pytest.mark.parametrize(("slots", "verdict"), [("15", "note"), ("16", "yes"), ("100%", "yes")])
def test_lru_cliff_below_layers_times_top_k(slots: str, verdict: str) -> None:
    assert verdicts(ask(Question(slots=slots)))["cache"] == verdict


def test_host_memory_counts_the_arena_on_cpu() -> None:
    on_cpu, on_cuda = (ask(Question(device=device, slots="100%")) for device in ("cpu", "cuda"))
    assert on_cpu.host_needed_bytes > on_cuda.host_needed_bytes + on_cpu.arena_bytes
    enough = on_cpu.host_needed_bytes
    assert ask(Question(slots="100%"), available_bytes=enough).fits
    short = ask(Question(slots="100%"), available_bytes=enough - 1)
    assert not short.fits
    assert verdicts(short)["host memory"] == "no"


def test_limits_never_stop_it() -> None:
    tight = ask(Question(), memlock_bytes=8_000_000, shm=(None, None))
    assert tight.fits
    assert verdicts(tight)["memlock"] == "note"
    assert verdicts(tight)["/dev/shm"] == "yes"
    assert verdicts(ask(Question()))["memlock"] == "yes"


def test_senseless_slots() -> None:
    with pytest.raises(UserError, match="no expert slot"):
        ask(Question(slots="0"))
