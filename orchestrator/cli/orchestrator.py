"""`headrace orchestrator`: load a model, then direct the workers that join."""

from __future__ import annotations

import argparse
import os

from orchestrator.cli.options import (
    add_log_level,
    add_model,
    add_pipeline_flags,
    add_run_dir,
    settings_from,
)

_DESCRIPTION = """\
Load a model's experts into shared memory and direct the workers that join in the run directory.
Workers may come in any order, before or after the model is loaded, and be replaced at any time.
Ctrl-C, or the end of this process however it comes, ends them as well."""

_EPILOG = """\
example, each line in a terminal of its own:
  headrace orchestrator --model DIR --slots 25%
  headrace gpu-worker
  headrace dma-worker
  numactl --cpunodebind=0 --membind=0 headrace cpu-worker
  headrace generate --prompt "Once upon a time"

With --supervise this one command starts the workers too, and starts them again when they die."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register `orchestrator` with the command line."""
    parser = subparsers.add_parser(
        "orchestrator",
        help="load a model and direct the workers that join",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_model(parser, required=True)
    add_run_dir(parser, "one per user")
    parser.add_argument(
        "--supervise", action="store_true", help="start the workers and keep them running"
    )
    parser.add_argument("--parent-fd", type=int, help=argparse.SUPPRESS)
    add_pipeline_flags(parser)
    add_log_level(parser)
    parser.set_defaults(func=run)


def run(options: argparse.Namespace) -> int:
    """Returns the exit code; raises UserError."""
    from orchestrator.calibrate.profile import cache_dir
    from orchestrator.process import run_orchestrator
    from protocol.logs import set_up_logging
    from protocol.run_dir import default_run_dir

    log_level = options.log_level or "warning"
    set_up_logging("orchestrator", log_level)
    settings = settings_from(
        options,
        options.run_dir or default_run_dir(os.environ),
        calibration_dir=cache_dir(os.environ),
        is_supervising=options.supervise,
        parent_fd=options.parent_fd,
        log_level=log_level,
    )
    return run_orchestrator(settings)
