"""The command line that all workers share: where to meet, how long to wait, how much to log.

A mistake on it is one sentence and exit code 2, like every mistake a person makes here.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from protocol.errors import EXIT_USER_ERROR
from protocol.logs import LOG_FORMATS
from protocol.run_dir import default_run_dir

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from _typeshed import SupportsWrite

#: "torch" is no native code at all; the others are ceilings, "best" is none.
MAX_ISAS = (
    "torch",
    "scalar",
    "avx2",
    "avx512",
    "avx512_vnni",
    "avx512_bf16",
    "amx",
    "neon",
    "best",
)
#: No flag needs more, and what is sent between processes holds no longer number.
_MOST = 2**63 - 1
#: As much of a mistyped value as a sentence repeats.
_TOLD_CHARACTERS = 60
LOG_LEVELS = ("debug", "info", "warning", "error")


class SentenceParser(argparse.ArgumentParser):
    """argparse, without the usage in front of every complaint."""

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_USER_ERROR, f"{self.prog}: {message}; see {self.prog} --help\n")

    def _print_message(self, message: str, file: SupportsWrite[str] | None = None) -> None:
        """argparse itself takes a help that could not be written for a success."""
        if file is not None and file is sys.stdout:
            file.write(message)
        else:
            super()._print_message(message, file)


def worker_parser(
    prog: str, description: str, epilog: str, environ: Mapping[str, str]
) -> SentenceParser:
    """A parser with --run-dir, --wait and --log-level; the worker adds its own flags."""
    parser = SentenceParser(
        prog=prog,
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--run-dir",
        type=Path,
        metavar="DIR",
        default=default_run_dir(environ),
        help="directory in which the orchestrator waits (default: %(default)s)",
    )
    parser.add_argument(
        "--wait",
        type=number(float, 0, "seconds"),
        metavar="SECONDS",
        default=10.0,
        help="how long to wait for an orchestrator to appear there (default: %(default)g)",
    )
    parser.add_argument(
        "--log-level",
        choices=LOG_LEVELS,
        default="info",
        help="least level of the lines written to stderr (default: %(default)s)",
    )
    parser.add_argument(
        "--log-format",
        choices=LOG_FORMATS,
        default="text",
        help="lines for people, or one JSON object per line (default: %(default)s)",
    )
    return parser


def add_max_isa(parser: argparse.ArgumentParser) -> None:
    """--max-isa, for the workers that compute experts on the processor."""
    parser.add_argument(
        "--max-isa",
        choices=MAX_ISAS,
        metavar="ISA",
        default="best",
        help=f"the most to use of this processor for experts, one of {', '.join(MAX_ISAS)}; the "
        "bits of the results are the same for all of them but torch and, for bfloat16 experts, "
        "avx512_bf16 and amx; so every worker "
        "of a pipeline must be given the same (default: %(default)s)",
    )


def number(
    kind: type[int] | type[float], least: float, what: str, most: float = _MOST
) -> Callable[[str], float]:
    """An argparse type: a number of `kind`, in ASCII digits, at least `least` (a tiny one: above 0)
    and at most `most`."""
    bound = "above 0" if 0 < least < 1e-6 else f">= {least:g}"

    def parse(text: str) -> float:
        try:
            # Python's numbers may be in the digits of any script; a typo is likelier here.
            value = kind(text) if text.isascii() else kind(-1)
        except ValueError:
            value = kind(-1)
        if least <= value <= most:
            return value
        above = f" and <= {most:g}" if most < value < float("inf") else ""
        raise argparse.ArgumentTypeError(
            f"{text[:_TOLD_CHARACTERS]!r} does not serve: say a number {bound}{above} ({what})"
        )

    return parse
