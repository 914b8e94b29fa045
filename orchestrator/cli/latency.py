"""`headrace latency`: where the time of a run went, from the file that `--latency-log` wrote."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from protocol.errors import EXIT_OK, UserError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from orchestrator.latency_log import LogRecord

_EPILOG = """\
examples:
  headrace generate --model DIR --prompt "Hello" --latency-log run.jsonl
  headrace latency run.jsonl
  headrace latency run.jsonl --trace run.trace.json     then open it in https://ui.perfetto.dev

docs/latency-log.md explains the stages."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register `latency` with the command line."""
    parser = subparsers.add_parser(
        "latency",
        help="where the time of a run went, from its latency log",
        description="Percentiles of every stage, overall and per layer, each stage's share of the "
        "steps,\nand the slowest steps.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("log", type=Path, metavar="FILE", help="what --latency-log wrote")
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="OUT",
        help="also write a Chrome/Perfetto trace, one track per process",
    )
    parser.set_defaults(func=run_latency)


def run_latency(options: argparse.Namespace) -> int:
    """Returns the exit code; raises UserError for a log that cannot be read."""
    from orchestrator.cli import latency_report

    if options.trace is not None and _is_same(options.trace, options.log):
        raise UserError(
            f"--trace {options.trace} is the log itself, which would be lost; name another file."
        )
    records = list(read_log(options.log))
    report = latency_report.summarise(records)
    if not report.num_steps:
        raise UserError(
            f"{options.log} holds no complete step; was it written by --latency-log in a run that "
            "generated something?"
        )
    if options.trace is not None:
        from orchestrator.perfetto import write_trace

        write_trace(records, options.trace)
        print(f"headrace: wrote {options.trace}", file=sys.stderr)
    if options.json:
        sys.stdout.write(latency_report.as_json(report) + "\n")
    else:
        latency_report.show(report)
    return EXIT_OK


def _is_same(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other)
    except OSError:  # one of them is not there
        return False


def read_log(path: Path) -> Iterator[LogRecord]:
    """The records of a log, in order. A last line cut short (its writer was killed) is told on
    stderr and left out.

    Raises:
        UserError: the file cannot be read, or a line is damaged; the sentence names the line.
    """
    import msgspec

    from orchestrator.latency_log import LOG_VERSION, LogHeader, LogRecord

    decoder: msgspec.json.Decoder[LogRecord] = msgspec.json.Decoder(LogRecord)
    try:
        with path.open("rb") as lines:
            number = 0
            for number, line in enumerate(lines, start=1):
                try:
                    record = decoder.decode(line)
                except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                    if number == 1:
                        raise UserError(
                            f"{path} is not a latency log (`--latency-log FILE` writes one)."
                        ) from None
                    if not line.endswith(b"\n"):
                        print(
                            f"headrace: line {number} of {path} was cut short and is left out",
                            file=sys.stderr,
                        )
                        return
                    raise UserError(
                        f"Line {number} of {path} is not a record of a latency log: {error}."
                    ) from None
                if number == 1 and not isinstance(record, LogHeader):
                    raise UserError(
                        f"Line 1 of {path} is not the head of a latency log; is it whole?"
                    )
                if isinstance(record, LogHeader) and record.version != LOG_VERSION:
                    raise UserError(
                        f"Line {number} of {path} says version {record.version} of the latency "
                        f"log, this program reads {LOG_VERSION}."
                    )
                yield record
            if number == 0:
                raise UserError(
                    f"{path} is empty: its run has not loaded the model yet, or was ended before "
                    "it had; wait, or record it again."
                )
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.") from None
