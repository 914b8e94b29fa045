"""Two cpu_workers on a machine that has, as all its processes believe, two NUMA nodes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from expert_store.numa_placement import node_of
from tests.checkpoints import make_checkpoint
from tests.process.pipelines import Pipeline, Processes

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]

NUM_TOKENS = 24
FLAGS = (
    "--supervise", "--slots", "25%", "--fill", "none", "--digest-logits",
    "--host-gbps", "2", "--link-gbps", "1",
)  # fmt: skip


@pytest.fixture
def two_nodes(tmp_path: Path) -> Path:
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) < 2:
        pytest.skip("two nodes need a cpu each, and this process may use one")
    allowed = f"Cpus_allowed_list:\t{','.join(map(str, cpus))}\nMems_allowed_list:\t0-1"
    files = {"proc/self/status": allowed}
    for node in (0, 1):
        base = f"sys/devices/system/node/node{node}"
        files[f"{base}/cpulist"] = ",".join(map(str, cpus[node::2]))
        files[f"{base}/meminfo"] = f"Node {node} MemTotal: 8388608 kB"
    for name, text in files.items():
        path = tmp_path / "machine" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return tmp_path / "machine"


@pytest.fixture
def on_two_nodes(tmp_path: Path, two_nodes: Path) -> Iterator[Processes]:
    logs = tmp_path / "logs-two-nodes"
    logs.mkdir()
    started = Processes(
        logs,
        python_path=[Path(__file__).with_name("two_nodes")],
        environment={"FAKE_MACHINE_ROOT": str(two_nodes)},
    )
    try:
        yield started
    finally:
        started.end()


def test_each_cpu_worker_gets_the_experts_of_its_node_and_no_bit_changes(
    on_two_nodes: Processes, processes: Processes, tmp_path: Path
) -> None:
    model = make_checkpoint("qwen3_moe", tmp_path / "model")
    log = tmp_path / "log.jsonl"
    pipeline = Pipeline(
        on_two_nodes, model, tmp_path / "run", "--numa-nodes", "0,1", "--latency-log", str(log),
        *FLAGS,
    )  # fmt: skip
    status = pipeline.wait_for(lambda status: status.is_ready)
    node_of_worker = {
        worker.epoch: worker.capabilities.numa_node
        for worker in status.workers
        if worker.role == "cpu_worker"
    }
    assert sorted(node_of_worker.values(), key=str) == [0, 1]
    result = pipeline.generate(NUM_TOKENS)

    (header,) = [record for record in records_of(log) if record["kind"] == "log"]
    num_experts = header["total_experts"] // header["num_layers"]
    num_near, seen = 0, set()
    for record in layer_records(log):
        homes = {
            expert: node_of(expert, num_experts, (0, 1))
            for run in record["cpu_runs"]
            for expert in run["experts"]
        }
        far = [
            expert
            for run in record["cpu_runs"]
            for expert in run["experts"]
            if homes[expert] != node_of_worker[run["worker"]]
        ]
        num_near += len(homes) - len(far)
        seen |= {run["worker"] for run in record["cpu_runs"]}
        if record["num_rows"] == 1:
            # Rates are alike, so half of what one node has more than the other goes over, no more.
            surplus = abs(2 * sum(homes.values()) - len(homes))
            assert len(far) == surplus // 2, record
    assert num_near > 100
    assert seen == set(node_of_worker)

    plain = Pipeline(processes, model, tmp_path / "plain", *FLAGS)
    plain.wait_for(lambda status: status.is_ready)
    expected = plain.generate(NUM_TOKENS)
    assert result["token_ids"] == expected["token_ids"]
    assert result["logits_digest"] == expected["logits_digest"]


def test_a_node_that_is_not_there_is_told(on_two_nodes: Processes, tmp_path: Path) -> None:
    model = make_checkpoint("qwen3_moe", tmp_path / "model")
    done = on_two_nodes.call("generate", "--model", model, "--prompt", "x", "--numa-nodes", "0,2")
    assert done.returncode == 2
    assert "no such NUMA nodes, only 0-1" in done.stderr


def layer_records(log: Path) -> list[dict[str, Any]]:
    found = [record for record in records_of(log) if record["kind"] == "layer"]
    assert found
    return [record for record in found if record["is_complete"]]


def records_of(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.read_text().splitlines()]
