"""`headrace gpu-worker`: the program. Only this file reads arguments and the environment."""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path

from protocol.logs import set_up_logging
from protocol.machine import read_cpus, worker_threads
from protocol.messages import Capabilities
from protocol.worker_flags import add_max_isa, number, worker_parser
from protocol.worker_life import run_worker

_DESCRIPTION = """\
Runs the dense half of the model (attention, norms, routers, shared experts, sampler) and the
experts that are resident in its slots. It joins the orchestrator that waits in the run directory
and leaves with it. Stop it, kill it, start another in its place at any time: running requests go
on with the same tokens once the new one has loaded.
"""
_EPILOG = """\
Model, dtype and number of slots come from the orchestrator. Start that first:
  headrace orchestrator --model DIR
  headrace gpu-worker
"""


def main(argv: list[str] | None = None) -> int:
    parser = worker_parser("headrace gpu-worker", _DESCRIPTION, _EPILOG, os.environ)
    parser.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="cpu: slots in host memory, no GPU is touched; cuda: slots in device memory; "
        "auto: what the orchestrator was started with (default: %(default)s)",
    )
    parser.add_argument(
        "--threads",
        type=number(int, 1, "threads"),
        metavar="N",
        help="threads that compute resident experts on --device cpu (default: one per physical "
        "core allowed here)",
    )
    add_max_isa(parser)
    parser.add_argument(
        "--eager",
        action="store_true",
        help="run single tokens through transformers' own forward (default: as the orchestrator "
        "was started)",
    )
    arguments = parser.parse_args(argv)
    set_up_logging("gpu_worker", arguments.log_level, arguments.log_format)
    # Where what is compiled is kept for the next start.
    cache = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache / "headrace" / "inductor"))
    # What importing and loading make stays: looking for garbage meanwhile costs a sixth of it.
    # worker.serve enables it again.
    gc.disable()
    # After the flags are read: these take seconds. Before joining: the model loads meanwhile.
    import torch

    from gpu_worker.worker import serve

    # torch with one thread: the order of every addition stays fixed. The native kernels' does so
    # with any number of threads.
    torch.set_num_threads(1)
    torch.set_num_interop_threads(1)
    return run_worker(
        "gpu_worker",
        arguments.run_dir,
        arguments.wait,
        lambda: _capabilities(arguments.device),
        lambda link: serve(
            link,
            arguments.device,
            max_isa=arguments.max_isa,
            num_threads=arguments.threads or worker_threads(read_cpus()),
            dense_path="eager" if arguments.eager else None,
        ),
    )


def _capabilities(device: str) -> Capabilities:
    import torch
    import transformers

    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return Capabilities(
        device=device,
        num_threads=1,
        cpus=sorted(os.sched_getaffinity(0)),
        isa=torch.backends.cpu.get_cpu_capability(),
        build=f"torch {torch.__version__}, transformers {transformers.__version__}",
    )


if __name__ == "__main__":
    sys.exit(main())
