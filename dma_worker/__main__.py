"""`python -m dma_worker`: never loads torch, so it is there in a fraction of a second."""

from __future__ import annotations

import os
import sys

from dma_worker.worker import serve
from protocol.logs import set_up_logging
from protocol.messages import Capabilities
from protocol.worker_flags import worker_parser
from protocol.worker_life import run_worker

PROG = "headrace dma-worker"

_DESCRIPTION = """\
Copies experts from the weights in shared memory into the gpu_worker's slots: over PCIe from pinned
memory, or by memcpy where the slots lie in shared memory too (--device cpu), then paced to
--emulate-link-gbps if the orchestrator was given one. Start it after (or up to --wait seconds
before) the orchestrator; it may be stopped and started again at any time."""

_EPILOG = """\
It takes all that matters from the orchestrator. On a machine with several NUMA nodes keep it on the
node that the GPU hangs on:

  numactl --cpunodebind=0 headrace dma-worker"""


def main(argv: list[str] | None = None) -> int:
    """Run the worker; returns its exit code."""
    options = worker_parser(PROG, _DESCRIPTION, _EPILOG, os.environ).parse_args(argv)
    set_up_logging("dma_worker", options.log_level, options.log_format)
    return run_worker("dma_worker", options.run_dir, options.wait, Capabilities, serve)


if __name__ == "__main__":
    sys.exit(main())
