"""The gpu_worker on a real CUDA device. Skipped where there is none.

The arena is filled by the test as a dma_worker would: through the handle that the worker exports,
or, where CUDA IPC is missing, with `Copy` commands to the worker itself.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from expert_kernels.cuda_runtime import CudaRuntime
from gpu_worker.cuda_slots import CudaSlots, InProcessCopier
from gpu_worker.rows import CudaStream, DeviceRows, HostRows
from gpu_worker.slots import SlotViews
from protocol.messages import Copied, Copy, Routed, SamplingParams
from tests.gpu_worker.pipeline import Pipeline, make_model, run_all
from tests.gpu_worker.test_rows import NUM_EXPERTS, Bench

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.gpu

REPO_ROOT = Path(__file__).resolve().parents[2]
PROMPT = [5, 17, 3, 42, 8, 77, 21, 9, 60, 33, 12, 2, 58]

#: Opens an exported arena in a process of its own and writes stdin's bytes to its beginning.
_IMPORTER = """
import ctypes, sys
from expert_kernels.cuda_runtime import CudaRuntime
handle, data = bytes.fromhex(sys.argv[1]), sys.stdin.buffer.read()
runtime = CudaRuntime.load()
runtime.set_device(0)
base = runtime.ipc_open_handle(handle)
stream = runtime.stream_create()
source = (ctypes.c_uint8 * len(data)).from_buffer_copy(data)
runtime.copy_to_device(base, ctypes.addressof(source), len(data), stream)
runtime.stream_synchronize(stream)
runtime.ipc_close_handle(base)
"""


def _fill_through_handle(handle: bytes, data: bytes) -> None:
    result = subprocess.run(
        [sys.executable, "-c", _IMPORTER, handle.hex()],
        input=data,
        cwd=REPO_ROOT,
        capture_output=True,
        timeout=100,
        check=False,
    )
    assert result.returncode == 0, result.stderr.decode()


def _fill(pipeline: Pipeline) -> None:
    """Make every expert resident in the slot of its block's number."""
    layout, arena = pipeline.layout, pipeline.ready.arena
    assert arena is not None
    if arena.kind == "cuda_ipc":
        blocks = bytes(pipeline.store.memory[layout.blocks_offset_bytes :])
        _fill_through_handle(arena.handle, blocks)
        return
    for layer in range(layout.num_layers):
        for expert in range(layout.num_experts[layer]):
            slot = layout.block_index(layer, expert)
            pipeline.send(Copy(pipeline.epoch, slot, layer, expert, slot))
            event = pipeline.receive()
            assert isinstance(event, Copied)
            assert event.copy == slot


@pytest.fixture(params=["qwen3_moe", "deepseek_v3", "gpt_oss"])
def on_device(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Any, Pipeline]]:
    model = make_model(request.param)
    with Pipeline(tmp_path, model, in_process=False, device="cuda") as pipeline:
        _fill(pipeline)
        yield model, pipeline


@pytest.mark.process
def test_logits_and_tokens_agree_with_transformers(on_device: tuple[Any, Pipeline]) -> None:
    """Teacher-forced, so that one near tie cannot make the rest of the text differ."""
    model, pipeline = on_device
    expected = model.generate(
        torch.tensor([PROMPT]),
        attention_mask=torch.ones(1, len(PROMPT), dtype=torch.int64),
        max_new_tokens=16,
        do_sample=False,
    )[0, len(PROMPT) :].tolist()
    tokens = [pipeline.step(PROMPT, 0, SamplingParams()).token]
    for index, token in enumerate(expected[:-1]):
        tokens.append(pipeline.step([token], len(PROMPT) + index, SamplingParams()).token)
    num_equal = sum(a == b for a, b in zip(tokens, expected, strict=True))
    assert num_equal >= 15


def _split(pipeline: Pipeline, routed: Routed) -> None:
    pipeline.run(routed, routed.experts[::2], join=False)
    pipeline.compute_here(routed, routed.experts[1::2])
    pipeline.run(routed, [], join=True)


@pytest.mark.process
def test_rows_of_a_cpu_worker_join_on_the_device(on_device: tuple[Any, Pipeline]) -> None:
    _, pipeline = on_device
    expected = [pipeline.step(PROMPT, 0, SamplingParams()).token]
    expected.append(pipeline.step([expected[0]], len(PROMPT), SamplingParams()).token)
    pipeline.answer = _split
    found = [pipeline.step(PROMPT, 0, SamplingParams(), sequence=1).token]
    found.append(pipeline.step([found[0]], len(PROMPT), SamplingParams(), sequence=1).token)
    assert found == expected
    pipeline.answer = run_all


@pytest.mark.parametrize("num_rows", [1, 2, 40])
@pytest.mark.parametrize("num_here", [0, 1, 3, 6])
def test_device_rows_agree_with_host_rows(num_rows: int, num_here: int) -> None:
    bench, device = Bench(num_rows), torch.device("cuda", 0)
    memory = bench.slots._memory.to(device)
    slots = SlotViews(memory, bench.function)
    device_rows = DeviceRows(bench.views, bench.function, slots, device, CudaStream(device))
    host_rows = HostRows(bench.views, bench.function, bench.slots)
    experts = list(device_rows.route(bench.hidden.to(device), bench.choices.to(device)))
    device_rows.publish(1, 0)
    device_rows.compute(experts[:num_here], experts[:num_here])
    bench.compute_elsewhere(experts[num_here:])
    found = device_rows.join(bench.weights.to(device), bench.dtype)
    if num_here:
        assert device_rows.wait_computed() > 0
    host_rows.route(bench.hidden, bench.choices)
    host_rows.publish(1, 0)
    host_rows.compute(experts, experts)
    expected = host_rows.join(bench.weights, bench.dtype)
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-3, atol=1e-3)


def test_slots_are_filled_from_another_process() -> None:
    bench, runtime = Bench(1), CudaRuntime.load()
    slots = CudaSlots(runtime, NUM_EXPERTS, bench.function, 0)
    if slots.arena.kind != "cuda_ipc":
        pytest.skip("no CUDA IPC here")
    block_bytes = bench.function.layout.block_bytes
    data = torch.randint(0, 256, (3 * block_bytes,), dtype=torch.uint8)
    _fill_through_handle(slots.arena.handle, data.numpy().tobytes())
    for slot in range(3):
        block = data[slot * block_bytes : (slot + 1) * block_bytes]
        for name, tensor in bench.function.tensors_of(block).items():
            found = slots.tensors(slot)[name].cpu()
            assert torch.equal(found.view(torch.uint8), tensor.view(torch.uint8))
    slots.close()


def test_the_in_process_copier_fills_slots() -> None:
    bench, runtime = Bench(1), CudaRuntime.load()
    slots = CudaSlots(runtime, NUM_EXPERTS, bench.function, 0)
    layout = bench.function.layout
    store = torch.randint(0, 256, (layout.total_bytes,), dtype=torch.uint8)
    copier = InProcessCopier(runtime, 0, layout, store.data_ptr(), slots.base, NUM_EXPERTS)
    copier.submit(Copy(1, 8, 0, 2, 4))
    while copier.num_pending:
        for done in copier.finished():
            assert done.num_bytes == layout.block_bytes
    start = layout.block_offset(0, 2)
    expected = bench.function.tensors_of(store[start : start + layout.block_bytes])
    for name, tensor in expected.items():
        found = slots.tensors(4)[name].cpu()
        assert torch.equal(found.view(torch.uint8), tensor.view(torch.uint8))
    copier.close()
    slots.close()
