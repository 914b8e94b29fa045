"""`headrace generate`: continue a prompt, stream the text, then say where the time went."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from typing import TYPE_CHECKING

from orchestrator.cli.options import (
    add_log_level,
    add_model,
    add_pipeline_flags,
    add_run_dir,
    given_pipeline_flags,
    pipeline_arguments,
)
from orchestrator.cli.prompt import add_prompt_flags, prompt_of
from protocol.errors import EXIT_FAULT, EXIT_OK, UserError
from protocol.worker_flags import number

if TYPE_CHECKING:
    from orchestrator.cli.interrupts import Interrupts
    from orchestrator.cli.own_pipeline import OwnPipeline
    from orchestrator.client import PipelineClient
    from protocol.messages import Finished, SamplingParams, Status

_DESCRIPTION = """\
Continue a prompt. With --model a whole pipeline is started, supervised and ended with this command;
without it the pipeline that waits in --run-dir is used (start one with `headrace orchestrator`).
The text goes to stdout, everything else to stderr. Ctrl-C ends it all within seconds."""

_EPILOG = """\
examples:
  headrace generate --model models/demo --slots 25% --prompt "The function returns"
  headrace generate --model DIR --prompt "Hello" --device cuda --slots 2000 --max-tokens 500
  headrace generate --model DIR --prompt-file question.txt --max-tokens 500
  headrace generate --run-dir /run/user/1000/headrace --prompt "Hello" --json"""

#: Until the workers are ready: a large model loads its dense part for minutes from a cold disk.
_READY_TIMEOUT_S = 1800.0
_CONNECT_TIMEOUT_S = 2.0
_OWN_CONNECT_TIMEOUT_S = 60.0
_LAST_WORDS_S = 12.0


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register `generate` with the command line."""
    parser = subparsers.add_parser(
        "generate",
        help="continue a prompt",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_flags(parser)
    parser.set_defaults(func=run_generate)


def add_flags(parser: argparse.ArgumentParser, *, is_prompt_required: bool = True) -> None:
    """Everything that says what is to be generated, and by which pipeline."""
    add_model(parser, required=False)
    add_run_dir(parser, "with --model a fresh private one, else one per user")
    group = parser.add_argument_group("the text")
    add_prompt_flags(group, is_required=is_prompt_required)
    group.add_argument(
        "--max-tokens",
        type=number(int, 1, "tokens"),
        default=128,
        metavar="N",
        help="stop after so many new tokens (default: %(default)s)",
    )
    group.add_argument(
        "--temperature",
        type=number(float, 0, "temperature"),
        default=0.0,
        metavar="T",
        help="0 takes the likeliest token, higher is more random (default: %(default)g)",
    )
    group.add_argument(
        "--top-k",
        type=number(int, 0, "tokens"),
        default=0,
        metavar="K",
        help="sample from the K likeliest tokens only (default: 0, all)",
    )
    group.add_argument(
        "--top-p",
        type=float,
        default=1.0,
        metavar="P",
        help="sample from the likeliest tokens that make up this probability (default: 1, all)",
    )
    group.add_argument(
        "--min-p",
        type=float,
        default=0.0,
        metavar="P",
        help="leave out tokens below this share of the likeliest one (default: 0, none)",
    )
    group.add_argument(
        "--seed",
        type=number(int, 0, "seed"),
        default=0,
        metavar="S",
        help="same seed, same text (default: %(default)s)",
    )
    group.add_argument(
        "--ignore-eos", action="store_true", help="go on after the model's end-of-text token"
    )
    group.add_argument(
        "--json", action="store_true", help="print one JSON object on stdout instead of the text"
    )
    add_pipeline_flags(parser)
    add_log_level(parser)


def run_generate(options: argparse.Namespace) -> int:
    """Returns the exit code. Raises UserError and KeyboardInterrupt for the caller to show."""
    from orchestrator.cli.interrupts import Interrupts

    sampling = _sampling(options)
    options.prompt = prompt_of(options)
    if options.model is not None:
        from orchestrator.cli.own_pipeline import OwnPipeline

        _check_prompt(options)
        arguments = ["--model", str(options.model), *pipeline_arguments(options)]
        if options.log_level is not None:
            arguments += ["--log-level", options.log_level]
        with Interrupts() as interrupts, OwnPipeline(arguments, options.run_dir) as pipeline:
            try:
                return _on_own(options, sampling, pipeline, interrupts)
            except KeyboardInterrupt:
                # A second Ctrl-C must not cut the clean end short; it is bounded.
                signal.signal(signal.SIGINT, signal.SIG_IGN)
                raise
    given = given_pipeline_flags(options)
    if given:
        raise UserError(
            f"--{next(iter(given))} belongs to a pipeline's start and this command was to use one "
            "that runs; name --model DIR to start one, or leave the flag out."
        )
    with Interrupts() as interrupts:
        return _on_running(options, sampling, interrupts)


def _on_own(
    options: argparse.Namespace,
    sampling: SamplingParams,
    pipeline: OwnPipeline,
    interrupts: Interrupts,
) -> int:
    from orchestrator.client import PipelineClient
    from protocol.errors import OrchestratorGone

    try:
        client = PipelineClient.connect(pipeline.run_dir, _OWN_CONNECT_TIMEOUT_S, pipeline.is_alive)
        try:
            finished = _continue(options, sampling, client, interrupts, is_own=True)
        finally:
            client.close()
    except OrchestratorGone:
        finished = None
    if finished is not None and finished.reason != "error":
        # The text is whole; what was to be kept beside it may not be, and stderr says so then.
        return max(pipeline.end(), EXIT_OK)
    if finished is not None and finished.sentence:
        ended = pipeline.end()
        if ended == EXIT_OK:  # it was this request alone that could not be served
            print(f"headrace: {finished.sentence}", file=sys.stderr)
        return ended if ended > 0 else EXIT_FAULT
    # The orchestrator is ending by itself and has told on stderr what is wrong.
    code = pipeline.wait(_LAST_WORDS_S)
    if code is not None and code > 0:
        return code
    how = "" if code is None else f" (it ended with {f'signal {-code}' if code else 'code 0'})"
    print(
        f"headrace: the orchestrator went away before the text was complete{how}.", file=sys.stderr
    )
    return EXIT_FAULT


def _on_running(
    options: argparse.Namespace, sampling: SamplingParams, interrupts: Interrupts
) -> int:
    from orchestrator.client import PipelineClient
    from protocol.errors import OrchestratorGone
    from protocol.run_dir import RunDir, default_run_dir

    run_dir = RunDir(options.run_dir or default_run_dir(os.environ))
    try:
        client = PipelineClient.connect(run_dir, _CONNECT_TIMEOUT_S)
        try:
            finished = _continue(options, sampling, client, interrupts, is_own=False)
        finally:
            client.close()
    except OrchestratorGone:
        print(
            "headrace: the orchestrator went away before the text was complete; look at its "
            "output, start it again, then repeat this command.",
            file=sys.stderr,
        )
        return EXIT_FAULT
    if finished.reason == "error":
        print(f"headrace: {finished.sentence}", file=sys.stderr)
        return EXIT_FAULT
    return EXIT_OK


def _continue(
    options: argparse.Namespace,
    sampling: SamplingParams,
    client: PipelineClient,
    interrupts: Interrupts,
    *,
    is_own: bool,
) -> Finished:
    """Stream one request and print its result."""
    from orchestrator.cli import generate_report as report
    from protocol.messages import Finished, Generated, Status

    waiting = report.Waiting(time.monotonic)

    def on_wait(status: Status) -> None:
        interrupts.check()
        if not is_own:
            waiting.hear(status)

    with report.spinner("starting workers", is_shown=is_own):
        client.wait_until_ready(_READY_TIMEOUT_S, on_wait)
    token_ids: list[int] = []
    is_streaming = not options.json
    if is_streaming:
        report.show_prompt(options.prompt)
    finished: Finished | None = None
    for reply in client.generate(
        options.prompt,
        max_tokens=options.max_tokens,
        sampling=sampling,
        ignore_eos=options.ignore_eos,
    ):
        interrupts.check()
        match reply:
            case Generated():
                token_ids += reply.tokens
                if is_streaming:
                    sys.stdout.write(reply.text)
                    sys.stdout.flush()
            case Status() if not is_own:  # else the supervisor says that it starts another
                report.say_waiting(reply.missing_roles)
            case Finished():
                finished = reply
            case _:
                pass
    assert finished is not None  # generate() ends with it or raises
    if is_streaming:
        sys.stdout.write("\n")
        sys.stdout.flush()
    if finished.reason != "error":
        if options.json:
            print(report.as_json(finished, token_ids))
        else:
            report.print_table(finished, options.max_tokens)
    return finished


def _check_prompt(options: argparse.Namespace) -> None:
    """A prompt that cannot be continued is told before a model is loaded for it."""
    from orchestrator.text_model import TextModel

    # What it has to tell, its orchestrator tells.
    model = TextModel.load(options.model, options.max_context, lambda note: None)
    sentence = model.why_wrong_length(model.encode(options.prompt))
    if sentence is not None:
        raise UserError(sentence)


def _sampling(options: argparse.Namespace) -> SamplingParams:
    from orchestrator.requests import why_not_sampled
    from protocol.messages import SamplingParams

    sampling = SamplingParams(
        options.temperature, options.top_k, options.top_p, options.min_p, options.seed
    )
    sentence = why_not_sampled(sampling)
    if sentence is not None:
        field, _, what = sentence.partition(" ")
        raise UserError(f"--{field.replace('_', '-')} {what}")
    return sampling
