"""A layer in one native call beside the same layer in Python: the same bits, words and reports."""

from __future__ import annotations

import mmap
import random
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from expert_kernels.native import NativeExpertFunction
from expert_kernels.native_join import NativeJoin
from expert_kernels.native_library import NativeLibraryError, load_library
from expert_kernels.reference import TORCH_DTYPE
from expert_kernels.step_rows import ActivationViews
from expert_store.layout import ExpertForm, make_layout
from gpu_worker.exchange import Exchange
from gpu_worker.resident_layers import ResidentLayers
from gpu_worker.routing_replay import RoutingReplay
from gpu_worker.rows import HostRows
from gpu_worker.slots import SlotViews
from protocol.errors import ProtocolError
from protocol.messages import ExpertId, Routed, Run, SlotId, StepId
from protocol.residency import ResidencyReader, ResidencyWriter, residency_grant
from protocol.step_segment import activation_grant

if TYPE_CHECKING:
    from expert_store.layout import Dtype

NUM_LAYERS, NUM_EXPERTS, NUM_SLOTS, TOP_K, HIDDEN, NUM_REPORTS = 3, 8, 24, 3, 48, 4
EPOCH = 5


@pytest.fixture(autouse=True)
def _library() -> None:
    try:
        load_library()
    except NativeLibraryError as error:
        pytest.skip(str(error))


class Side:
    """One gpu_worker's exchange over memory of its own; what it must ask for, `asked` counts and a
    `Run` of everything answers."""

    def __init__(
        self, dtype: Dtype, *, is_native: bool, replay: RoutingReplay | None = None
    ) -> None:
        form = ExpertForm(
            hidden_size=HIDDEN, intermediate_size=40, has_gate=True, has_bias=False,
            is_transposed=False, is_interleaved=False, activation="silu", gate="act_mul",
        )  # fmt: skip
        layout = make_layout(
            model_name="resident", checkpoint_fingerprint="none", form=form, dtype=dtype,
            model_layer_ids=tuple(range(NUM_LAYERS)), num_experts=(NUM_EXPERTS,) * NUM_LAYERS,
            top_k=TOP_K,
        )  # fmt: skip
        function = NativeExpertFunction(layout, num_threads=2)
        slots = SlotViews(torch.zeros(NUM_SLOTS, layout.block_bytes, dtype=torch.uint8), function)
        torch.manual_seed(7)
        for slot in range(NUM_SLOTS):
            for tensor in slots.tensors(slot).values():
                tensor.copy_(torch.randn(tensor.shape) / 4)
        grant = activation_grant(4, TOP_K, HIDDEN, dtype)
        self.views = views = ActivationViews(mmap.mmap(-1, grant.num_bytes), grant)
        residency = residency_grant(NUM_LAYERS, NUM_EXPERTS, NUM_EXPERTS, NUM_REPORTS)
        memory = bytearray(residency.num_bytes)
        self.writer = ResidencyWriter(memory, residency)
        self.writer.reset(EPOCH)
        self.reader = ResidencyReader(memory, residency)
        self.resident = ResidentLayers(function, views, slots, self.reader)
        self.asked: list[Routed] = []
        link: Any = SimpleNamespace(epoch=EPOCH, send=self._hear)
        self.exchange = Exchange(
            link, HostRows(views, function, slots, NativeJoin()), TOP_K, NUM_SLOTS,
            self._answer, lambda _: None, self.reader, replay,
            resident=self.resident if is_native else None,
        )  # fmt: skip

    def _hear(self, event: Any) -> None:
        if isinstance(event, Routed):
            self.asked.append(event)

    def _answer(self, wake_fd: int) -> Any:
        routed = self.asked[-1]
        slots = [expert + NUM_EXPERTS * routed.layer for expert in routed.experts]
        return Run(EPOCH, routed.step, routed.layer, routed.experts, slots, True)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_both_ways_say_and_compute_the_same(dtype: Dtype) -> None:
    sides = [Side(dtype, is_native=is_native) for is_native in (True, False)]
    rng = random.Random(1)
    num_asked = num_passed = 0
    for step in range(1, 60):
        for side in sides:
            side.exchange.begin_step(StepId(step))
        for layer in range(NUM_LAYERS):
            for _ in range(6):
                place = rng.randrange(NUM_EXPERTS)
                slot = NUM_EXPERTS * layer + place
                is_there = rng.random() < 0.9
                for side in sides:
                    if is_there:
                        side.writer.publish(layer, place, slot)
                    else:
                        side.writer.unpublish(layer, place)
            hidden = torch.randn(1, HIDDEN).to(TORCH_DTYPE[dtype])
            scores = torch.randn(1, NUM_EXPERTS).topk(TOP_K)
            choices, weights = scores.indices, scores.values.softmax(dim=-1)
            if rng.random() < 0.1:
                choices[0, 2] = choices[0, 0]  # a row that names an expert twice
            native, python = (
                side.exchange(layer, hidden, choices, weights.to(TORCH_DTYPE[dtype]))
                for side in sides
            )
            assert torch.equal(native, python)
        if rng.random() < 0.8:  # else the ring gets full
            taken = [side.writer.take(side.reader.num_reports) for side in sides]
            assert [report[:5] for report in taken[0]] == [report[:5] for report in taken[1]]
            for report in taken[0]:
                assert report.routed_ns <= report.started_ns <= report.ended_ns
            num_passed += len(taken[0])
            assert sides[0].exchange.joined_ns > 0
        assert sides[0].reader.fence % 2 == sides[1].reader.fence % 2 == 0
        assert sides[0].reader.head == sides[1].reader.head
        num_asked = len(sides[0].asked)
        assert [a.num_reports for a in sides[0].asked] == [a.num_reports for a in sides[1].asked]
        assert [bool(a.joined_ns) for a in sides[0].asked] == [
            bool(a.joined_ns) for a in sides[1].asked
        ]
    assert num_asked > 20
    assert num_passed > 20


def test_replayed_routing_goes_the_native_way_too() -> None:
    ids = np.array([[[5, 1, 2], [0, 7, 3], [6, 2, 4]], [[3, 4, 1], [2, 6, 5], [1, 0, 7]]], np.int16)
    replay = RoutingReplay(ids, torch.device("cpu"))
    native, python = (
        Side("float32", is_native=is_native, replay=replay) for is_native in (True, False)
    )
    outputs = []
    for step, position in enumerate((0, 1, 2), start=1):
        replay.begin_step([position])
        for side in (native, python):
            side.exchange.begin_step(StepId(step))
        for layer in range(NUM_LAYERS):
            for side in (native, python):
                for expert in range(NUM_EXPERTS):
                    side.writer.publish(layer, expert, NUM_EXPERTS * layer + expert)
            hidden, weights = torch.randn(1, HIDDEN), torch.rand(1, TOP_K)
            chosen = torch.tensor([[0, 1, 2]])
            output = native.exchange(layer, hidden, chosen, weights)
            assert torch.equal(output, python.exchange(layer, hidden, chosen, weights))
            outputs.append(output)
        reports = [side.writer.take(side.reader.num_reports) for side in (native, python)]
        for found in reports:
            assert [report.experts for report in found] == ids[position % 2].tolist()
    # Native layers give back a tensor of their own, the same one in each step.
    assert outputs[0] is outputs[3] is outputs[6]
    assert not native.asked


def test_sharing_the_processors_changes_no_bits() -> None:
    side = Side("bfloat16", is_native=True)
    side.resident.begin_step(EPOCH, 1, starts_some=False)
    hidden, weights = torch.randn(1, HIDDEN).bfloat16(), torch.rand(1, TOP_K).bfloat16()
    assert side.resident.begin(0, 1, hidden, torch.tensor([[4, 0, 6]]), weights) == "routed"
    found = []
    for num_elsewhere in (0, 1, 60):
        side.views.places.zero_()
        side.resident.compute([ExpertId(6), ExpertId(4)], [SlotId(6), SlotId(4)], num_elsewhere)
        found.append(side.views.places.clone())
    assert found[0].any()
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_what_is_not_one_row_of_this_store_is_left_to_python() -> None:
    side = Side("float32", is_native=True)
    for expert in range(NUM_EXPERTS):
        side.writer.publish(0, expert, expert)
    side.resident.begin_step(EPOCH, 1, starts_some=False)
    hidden, choices = torch.randn(1, HIDDEN), torch.tensor([[1, 2, 3]])
    weights = torch.rand(1, TOP_K)
    wide = torch.randn(1, 2 * HIDDEN)[:, ::2]
    for arguments in (
        (torch.randn(2, HIDDEN), choices.repeat(2, 1), weights.repeat(2, 1)),
        (hidden.bfloat16(), choices, weights),
        (hidden, choices.int(), weights),
        (hidden, choices, weights.double()),
        (hidden, torch.tensor([[1, 2]]), weights[:, :2]),
        (hidden, torch.tensor([[1, 2, NUM_EXPERTS]]), weights),
        (hidden, torch.tensor([[1, 2, -1]]), weights),
        (wide, choices, weights),
    ):
        assert side.resident.begin(0, 1, *arguments) is None
        assert side.reader.fence == side.reader.head == 0
    assert side.resident.begin(1, 1, hidden, choices, weights) == "routed"
    assert (side.reader.fence, side.reader.head) == (2, 0)
    assert side.resident.begin(0, 1, hidden, choices, weights) is not None
    assert (side.reader.fence, side.reader.head) == (4, 1)


def test_a_slot_that_does_not_exist_is_a_fault() -> None:
    side = Side("float32", is_native=True)
    for expert in range(NUM_EXPERTS):
        side.writer.publish(0, expert, NUM_SLOTS)
    side.resident.begin_step(EPOCH, 1, starts_some=False)
    with pytest.raises(ProtocolError, match="slot that does not exist"):
        side.resident.begin(
            0, 1, torch.randn(1, HIDDEN), torch.tensor([[1, 2, 3]]), torch.rand(1, TOP_K)
        )
    assert (side.reader.fence, side.reader.head) == (2, 0)
