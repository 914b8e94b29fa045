"""`headrace`: one command with a word for each thing to do.

Every command is imported when it is asked for and not before, so that `--help` and `--version` come
at once. What a person can put right is one sentence on stderr and exit code 2, never a traceback.
"""

from __future__ import annotations

import argparse
import errno
import importlib
import os
import sys
from typing import TYPE_CHECKING

from protocol.errors import EXIT_FAULT, EXIT_USER_ERROR, UserError
from protocol.worker_flags import SentenceParser

if TYPE_CHECKING:
    from collections.abc import Sequence

EXIT_INTERRUPTED = 130

_DESCRIPTION = """\
Headrace decodes Mixture-of-Experts models that are larger than the GPU's memory: experts that are
resident run on the device; of the others some are sent over the link and kept, and the CPU runs
the rest in place, both at the same time and in the proportion that this machine's bandwidths call
for."""

_EPILOG = """\
Two ways to run it:

  headrace generate --model DIR --prompt "Once upon a time"     starts and ends everything itself

  headrace orchestrator --model DIR                             or each process by hand, in any
  headrace gpu-worker                                           order after the orchestrator
  headrace dma-worker
  numactl --cpunodebind=0 --membind=0 headrace cpu-worker
  headrace generate --prompt "Once upon a time"

`headrace COMMAND --help` explains a command and shows an example."""

#: Commands of this package, each a module with `add_parser(subparsers)`: word -> what it is for.
_COMMANDS = {
    "generate": "continue a prompt, with a pipeline of its own or with one that runs",
    "serve": "answer HTTP as OpenAI's interface does, with a pipeline of its own",
    "chat": "talk to a server in the terminal",
    "top": "watch a server: tokens, hits, bandwidths, workers",
    "orchestrator": "load a model and direct the workers that join",
    "status": "who is there, and what is a running pipeline doing",
    "latency": "where the time of a run went, from its latency log",
    "plan": "does a model fit this machine, before anything is loaded",
    "calibrate": "measure link and CPU of this machine, alone and beside each other",
    "trace": "record which experts a model chooses, or look at a recording",
    "simulate": "what would a machine do with a recorded routing trace",
    "doctor": "what can this machine do, and what to change",
}
#: Other programs: word -> (package, one line for the list). They read the remaining arguments.
_WORKERS = {
    "gpu-worker": ("gpu_worker", "run the dense part and the resident experts"),
    "dma-worker": ("dma_worker", "copy experts into slots"),
    "cpu-worker": ("cpu_worker", "run misses on the CPU, in place"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    word = arguments[0] if arguments else ""
    if sys.stdout is None or sys.stderr is None:
        return _without_streams()
    if word in _WORKERS:
        return _become_worker(_WORKERS[word][0], arguments[1:])
    try:
        try:
            return _command(word, arguments)
        finally:
            sys.stdout.flush()  # as the interpreter ends, nobody could tell what is wrong
    except UserError as error:
        print(f"headrace: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output is gone (`headrace ... | head`): nothing more to say, and the
        # interpreter's own last flush must not complain either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAULT
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
            raise
        print(f"headrace: the output cannot be written: {error.strerror}.", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAULT


def _without_streams() -> int:
    """Closed where they should be open: files that are opened next would take their places."""
    if sys.stderr is not None:
        print(
            "headrace: stdout is closed; send it to a file, or to /dev/null if nobody reads it.",
            file=sys.stderr,
        )
    return EXIT_USER_ERROR


def _command(word: str, arguments: list[str]) -> int:
    if word in _COMMANDS:
        return _run(word, arguments[1:])
    parser = _parser()
    parser.parse_args(arguments)
    parser.print_help(sys.stderr)
    return EXIT_USER_ERROR


def _run(word: str, arguments: list[str]) -> int:
    module = importlib.import_module(f"orchestrator.cli.{word}")
    holder = argparse.ArgumentParser(prog="headrace", allow_abbrev=False)
    commands = holder.add_subparsers(parser_class=SentenceParser)
    module.add_parser(commands)
    # Its own parser, so that a complaint names the command and points to its --help.
    parser = commands.choices[word]
    _refuse_unknown_flags(parser, arguments)
    options = parser.parse_args(arguments)
    return int(options.func(options))


def _refuse_unknown_flags(parser: argparse.ArgumentParser, arguments: list[str]) -> None:
    """Name a mistyped flag. argparse itself would first complain of a required one that is missing,
    which, mistyped, it is."""
    for argument in arguments:
        if argument == "--":
            return
        flag = argument.partition("=")[0]
        if flag.startswith("--") and flag not in parser._option_string_actions:
            parser.error(f"unrecognized arguments: {flag}")


def _become_worker(package: str, arguments: list[str]) -> int:
    """Replace this process: a worker's pid is then the one that a person or a script has seen."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, "-P", "-m", package, *arguments])


def _parser() -> argparse.ArgumentParser:
    parser = SentenceParser(
        prog="headrace",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for word, text in _COMMANDS.items():
        commands.add_parser(word, help=text)
    for word, (_, text) in _WORKERS.items():
        commands.add_parser(word, help=text)
    return parser


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *rest: object) -> None:
        from importlib.metadata import PackageNotFoundError, version

        try:
            text = version("headrace")
        except PackageNotFoundError:
            text = "(not installed)"
        print(f"headrace {text}")
        parser.exit()


if __name__ == "__main__":
    sys.exit(main())
