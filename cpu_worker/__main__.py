"""`python -m cpu_worker`: bind this process first, then load what it needs, then join."""

from __future__ import annotations

import importlib
import os
import sys
import threading
from functools import partial
from typing import TYPE_CHECKING

from cpu_worker.affinity import bind_node
from cpu_worker.isa import read_isa
from protocol.errors import UserError
from protocol.logs import set_up_logging
from protocol.machine import ROOT, read_cpus, worker_threads
from protocol.messages import Capabilities
from protocol.worker_flags import add_max_isa, number, worker_parser
from protocol.worker_life import run_worker

if TYPE_CHECKING:
    from protocol.worker_life import WorkerLink

PROG = "headrace cpu-worker"

_DESCRIPTION = """\
Computes expert misses on the CPU, in place, from the weights in shared memory, while the link
fills the others into the device. Start it after (or up to --wait seconds before) the orchestrator;
any number may join one pipeline, and each may be stopped and started again at any time."""

_EPILOG = """\
On a machine with several NUMA nodes start one per node, bound to its cores and its memory:

  headrace cpu-worker --numa-node 0
  numactl --cpunodebind=0 --membind=0 headrace cpu-worker     the same, bound from outside

Where a container forbids binding memory, the worker says so in one line and goes on with cores
alone. `headrace doctor` shows the nodes of this machine."""


def main(argv: list[str] | None = None) -> int:
    """Run the worker; returns its exit code."""
    parser = worker_parser(PROG, _DESCRIPTION, _EPILOG, os.environ)
    parser.add_argument(
        "--numa-node",
        type=number(int, 0, "NUMA node"),
        metavar="N",
        help="bind threads and memory to this NUMA node (default: stay as started)",
    )
    parser.add_argument(
        "--threads",
        type=number(int, 1, "threads"),
        metavar="N",
        help="threads that compute experts (default: one per physical core allowed here)",
    )
    add_max_isa(parser)
    options = parser.parse_args(argv)
    set_up_logging("cpu_worker", options.log_level, options.log_format)
    try:
        # Before anything starts a thread: cpus and memory policy are per thread, and inherited.
        binding = bind_node(options.numa_node)
    except UserError as error:
        print(f"{PROG}: {error}", file=sys.stderr)
        return error.exit_code
    num_threads = options.threads or worker_threads(read_cpus())
    capabilities = Capabilities(
        num_threads=num_threads,
        cpus=list(binding.cpus),
        numa_node=None if binding.level == "none" else binding.node,
        numa_note=binding.message,
        isa=read_isa(ROOT),
    )
    # torch takes a second to import; the model's loading usually hides it.
    threading.Thread(target=importlib.import_module, args=("torch",), name="import").start()
    return run_worker(
        "cpu_worker",
        options.run_dir,
        options.wait,
        lambda: capabilities,
        partial(
            _serve,
            num_threads=num_threads,
            max_isa=options.max_isa,
            numa_node=capabilities.numa_node,
        ),
    )


def _serve(link: WorkerLink, *, num_threads: int, max_isa: str, numa_node: int | None) -> None:
    importlib.import_module("cpu_worker.worker").serve(link, num_threads, max_isa, numa_node)


if __name__ == "__main__":
    exit_code = main()
    sys.stderr.flush()
    # Nothing is left to do, and taking torch down in order, or finishing its import first, can keep
    # a busy machine for seconds. Shared memory and sockets go with the process.
    os._exit(exit_code)
