"""The loader process.

    python -m expert_store inspect --model DIR [options]        what a load would do
    python -m expert_store load --model DIR [options] --fd N    load into an inherited memfd

    --dtype auto|float32|...    type of the model's floats
    --expert-dtype auto|int4|...  how experts are stored (`expert_store.expert_dtype`)
    --numa-nodes 0,1            nodes to divide experts among (`expert_store.numa_placement`)

Standard output carries reports (`expert_store.reports`), one JSON object per line. Bad input
is one ``error`` report and exit code 2. File headers are checked before torch and transformers are
imported, which takes seconds: a truncated shard is told at once.
"""

from __future__ import annotations

import argparse
import gc
import os
import select
import sys
import threading
from pathlib import Path

from expert_store.checkpoint import open_checkpoint, refuse_dense
from expert_store.expert_dtype import parse_expert_dtype
from expert_store.packed import gather_packed
from expert_store.reports import Failure, Progress, Report, encode_report
from protocol.errors import EXIT_FAULT, EXIT_OK, EXIT_USER_ERROR, UserError
from protocol.machine import parse_cpu_list


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m expert_store")
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("inspect", "load"):
        command = commands.add_parser(name)
        command.add_argument("--model", type=Path, required=True, metavar="DIR")
        command.add_argument(
            "--dtype", choices=("auto", "float32", "bfloat16", "float16"), default="auto"
        )
        command.add_argument("--expert-dtype", default="auto", metavar="NAME")
        if name == "load":
            command.add_argument("--fd", type=int, required=True, help="empty memfd to load into")
            command.add_argument("--reserved-fd", type=int, help="another, of reserved huge pages")
            command.add_argument("--numa-nodes", type=parse_cpu_list, default=(), metavar="N,M")
        else:
            command.add_argument("--dense-dtype", default="auto", metavar="NAME")
    options = parser.parse_args(arguments)
    # Whatever a library prints must not get between the reports.
    reports = os.fdopen(os.dup(sys.stdout.fileno()), "wb", buffering=0)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def report(what: Report) -> None:
        reports.write(encode_report(what))

    try:
        parse_expert_dtype(options.expert_dtype)
        checkpoint = gather_packed(open_checkpoint(options.model))
        refuse_dense(checkpoint)
        if options.command == "load":  # the files are whole: who waits for the store may get ready
            report(Progress(0, checkpoint.data_bytes, f"loading {checkpoint.name}"))
        # Imported here: they bring torch and transformers, seconds that a bad file need not cost.
        # What imports make stays: looking for garbage meanwhile costs a sixth of them.
        gc.disable()
        import torch

        from expert_store.loader import Plan, load

        # The loader's own threads share the cores; torch's beside them would only get in their way.
        torch.set_num_threads(1)
        dense_dtype = getattr(options, "dense_dtype", "auto")
        plan = Plan(checkpoint, options.dtype, options.expert_dtype, dense_dtype)
        gc.enable()
        if options.command == "load":
            report(Progress(0, plan.total_bytes, f"loading {checkpoint.name}", plan.layout))
        report(
            plan.inspection()
            if options.command == "inspect"
            else load(plan, options.fd, report, options.numa_nodes, options.reserved_fd)
        )
    except UserError as error:
        report(Failure(str(error)))
        return EXIT_USER_ERROR
    except BrokenPipeError:
        return EXIT_FAULT  # the parent is gone and nobody wants the store any more
    return EXIT_OK


def _end_without_reader(reports_fd: int) -> None:
    """End this process once nobody can read its reports any more: a parent that was killed takes
    back nothing, and an import, a slow file or a model's making can keep it from the next report
    for long."""
    poller = select.poll()
    poller.register(reports_fd, 0)  # errors and hang-ups are always told; a file has none
    poller.poll()
    os._exit(EXIT_FAULT)


if __name__ == "__main__":
    watched = (os.dup(sys.stdout.fileno()),)
    threading.Thread(target=_end_without_reader, args=watched, daemon=True).start()
    sys.exit(main(sys.argv[1:]))
