"""What a person may choose about a pipeline: one frozen value, made at the command line.

Nothing below the command line reads flags or the environment. A value of None means "find out";
what is found is put into the core's own configuration, never back into this one.
"""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

from orchestrator.core.fill_choice import FillBehindMode
from protocol.errors import UserError
from protocol.machine import parse_cpu_list

#: How misses are treated unless a person says otherwise; docs/policies.md has the reasons.
DEFAULT_POLICY = "reuse-tables"
DEFAULT_PLANNER = "fluid"
DEFAULT_FILL_BEHIND: FillBehindMode = "auto"
DEFAULT_SLOTS = "25%"
DEFAULT_WORKER_TIMEOUT_S = 60.0
#: Rows of the activation segment: how many prompt tokens go through the model in one step.
DEFAULT_MAX_ROWS = 64
DEFAULT_MAX_NUM_SEQS = 4
BYTES_PER_GB = 1e9
#: More than any model has: for checking a number of slots before the model is known.
MANY_EXPERTS = 10**12


class PipelineSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How one pipeline runs. Rates are in GB/s (10^9 bytes)."""

    model_dir: Path
    run_dir: Path
    device: str = "cpu"
    dtype: str = "auto"
    expert_dtype: str = "auto"
    slots: str = DEFAULT_SLOTS
    fill: str = "auto"
    policy: str = DEFAULT_POLICY
    planner: str = DEFAULT_PLANNER
    fill_behind: FillBehindMode = DEFAULT_FILL_BEHIND
    #: Layers ahead; 0: nothing is guessed.
    prefetch: int = 0
    host_gbps: float | None = None
    link_gbps: float | None = None
    emulate_link_gbps: float | None = None
    num_cpu_workers: int = 1
    #: "0,1": experts are divided among these NUMA nodes, and cpu_workers bound to them; "": none.
    numa_nodes: str = ""
    #: "auto": huge pages that were set aside are used if enough are free; "off": left alone.
    huge_pages: str = "auto"
    max_rows: int = DEFAULT_MAX_ROWS
    max_context: int | None = None
    #: Requests that are served at once; more wait.
    max_num_seqs: int = DEFAULT_MAX_NUM_SEQS
    #: Where `headrace calibrate` keeps what it measured; None: not looked for.
    calibration_dir: Path | None = None
    #: Whether both branches are measured at the start; "auto": unless they are known, or the
    #: experts are so few that a cache may hold them.
    probe: str = "auto"
    #: Whether free slots are filled before anybody asks for an expert; "auto": where all fit.
    preload: str = "auto"
    latency_log: Path | None = None
    #: Where to write what routers choose, and what experts to take in their place.
    record_routing: Path | None = None
    replay_routing: Path | None = None
    worker_timeout_s: float = DEFAULT_WORKER_TIMEOUT_S
    digest_logits: bool = False
    #: How single tokens run through the dense part. Recording costs a start some hundredths of a
    #: second per layer; compiling takes minutes and rounds elsewhere, so a person asks for it.
    #: "native" is "traced" where there is no native library, or an accelerator.
    dense_path: str = "native"
    #: How large linear layers outside the experts are stored (expert_store.dense_linears).
    dense_dtype: str = "auto"
    #: The most that workers may use of the processor for experts.
    max_isa: str = "best"
    is_supervising: bool = False
    #: Read end of a pipe whose other end the parent holds: its end ends the pipeline.
    parent_fd: int | None = None
    log_level: str = "warning"
    log_format: str = "text"

    @property
    def log_flags(self) -> list[str]:
        """How workers are told to log."""
        return ["--log-level", self.log_level, "--log-format", self.log_format]

    @property
    def kernel_flags(self) -> list[str]:
        """What workers that compute experts are told besides."""
        return ["--max-isa", self.max_isa]

    @property
    def cpu_worker_flags(self) -> list[list[str]]:
        """What each cpu_worker is told besides: they take turns at the nodes."""
        nodes = parse_cpu_list(self.numa_nodes)
        if not nodes:
            return [[]] * self.num_cpu_workers
        return [
            ["--numa-node", str(nodes[index % len(nodes)])] for index in range(self.num_cpu_workers)
        ]

    @property
    def host_bytes_per_s(self) -> float | None:
        return None if self.host_gbps is None else self.host_gbps * BYTES_PER_GB

    @property
    def link_bytes_per_s(self) -> float | None:
        return None if self.link_gbps is None else self.link_gbps * BYTES_PER_GB

    @property
    def emulate_link_bytes_per_s(self) -> float:
        return (self.emulate_link_gbps or 0.0) * BYTES_PER_GB


def count_slots(text: str, total_experts: int) -> int:
    """`N`, or `P%` of all experts (rounded down, at least one).

    Raises:
        UserError: not a number, nothing at all, or more than there are experts.
    """
    match = re.fullmatch(r"(\d{1,12}|\d{1,12}\.\d{1,6}|\.\d{1,6})(%?)", text.strip(), re.ASCII)
    if match is None or (match[2] == "" and "." in match[1]):
        raise UserError(
            f"--slots {text!r} is not a number of experts; say for example --slots 64, or "
            "--slots 25% of all experts."
        )
    if float(match[1]) == 0:
        raise UserError(
            f"--slots {text} leaves no expert slot and a pipeline needs at least one; say "
            "--slots 1 or more."
        )
    if match[2]:
        if float(match[1]) > 100:
            raise UserError(f"--slots {text} is more than all experts; say --slots 100% or less.")
        return max(1, int(total_experts * float(match[1]) / 100))
    num_slots = int(match[1])
    if num_slots > total_experts:
        raise UserError(
            f"--slots {num_slots} is more than the {total_experts} experts of the model; say "
            f"--slots {total_experts} or less."
        )
    return num_slots
