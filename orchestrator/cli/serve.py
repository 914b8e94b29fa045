"""`headrace serve`: a pipeline of its own, and HTTP in front of it."""

from __future__ import annotations

import argparse
import ipaddress
import logging
import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.cli.options import (
    add_log_format,
    add_log_level,
    add_model,
    add_pipeline_flags,
    add_run_dir,
    settings_from,
)
from orchestrator.cli.sources import add_config, fill_in
from protocol.errors import UserError
from protocol.worker_flags import number

if TYPE_CHECKING:
    from orchestrator.http.settings import ServerSettings
    from orchestrator.settings import PipelineSettings

_DESCRIPTION = """\
Load a model, start the workers, and answer HTTP as OpenAI's interface does: /v1/chat/completions,
/v1/completions, /v1/models; also /tokenize, /detokenize, /health, /metrics, /v1/stats and, with an
API key, /admin. A page at / shows what the pipeline does. SIGTERM or Ctrl-C lets open requests
finish first; the second one does not."""

_EPILOG = """\
example:
  headrace serve models/demo --port 8000
  curl http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' \\
       -d '{"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 40}'

Every flag can be written as HEADRACE_PORT=8000 or, in a file named by --config, port = 8000."""

_SECRET = frozenset({"api-key"})


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register `serve` with the command line."""
    parser = subparsers.add_parser(
        "serve",
        help="answer HTTP as OpenAI's interface does, with a pipeline of its own",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "model_argument", type=Path, nargs="?", metavar="MODEL", help="the same as --model"
    )
    add_model(parser, required=False)
    add_config(parser)
    add_run_dir(parser, "one per user")
    _add_server_flags(parser)
    add_pipeline_flags(parser)
    add_log_level(parser, "info")
    add_log_format(parser)
    parser.set_defaults(func=lambda options: run(parser, options))


def _add_server_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the server")
    group.add_argument("--host", metavar="HOST", help="address to listen on (default: 127.0.0.1)")
    group.add_argument(
        "--port", type=_port, metavar="N", help="port to listen on, 0 for any (default: 8000)"
    )
    group.add_argument(
        "--api-key",
        metavar="KEY",
        help="ask for this key; better said as HEADRACE_API_KEY, which no list of processes shows",
    )
    group.add_argument(
        "--served-model-name",
        metavar="NAME",
        help="what requests call the model (default: the name of its directory)",
    )
    group.add_argument(
        "--chat-template",
        type=Path,
        metavar="FILE",
        help="Jinja template of chats (default: the checkpoint's own)",
    )
    group.add_argument(
        "--tool-call-parser",
        choices=("hermes", "qwen_xml", "glm", "json"),
        help="form in which the model writes calls of tools (default: as its template teaches)",
    )
    group.add_argument(
        "--max-queue",
        type=number(int, 0, "texts"),
        metavar="N",
        help="texts that may wait for their turn; more are answered 429 (default: 64)",
    )
    group.add_argument(
        "--max-body-mb",
        type=number(float, 0.001, "MB"),
        metavar="X",
        help="largest body of a request; larger ones are answered 413 (default: 8)",
    )
    group.add_argument(
        "--max-messages",
        type=number(int, 1, "messages"),
        metavar="N",
        help="messages that one chat may have (default: 1024)",
    )
    group.add_argument(
        "--keep-alive",
        type=number(float, 0.05, "seconds"),
        metavar="S",
        help="silence in a stream after which a comment is sent (default: 15)",
    )
    group.add_argument(
        "--drain-timeout",
        type=number(float, 0, "seconds"),
        metavar="S",
        help="how long open requests may take to finish after a signal (default: 30)",
    )
    group.add_argument(
        "--cors-origins",
        metavar="ORIGINS",
        help="origins whose pages may ask, with commas between them, or * (default: none)",
    )


#: Flag -> field of ServerSettings, where the value is taken as it is.
_FIELDS = {
    "host": "host",
    "port": "port",
    "api_key": "api_key",
    "served_model_name": "served_model_name",
    "chat_template": "chat_template",
    "tool_call_parser": "tool_call_parser",
    "max_queue": "max_queue",
    "max_messages": "max_messages",
    "keep_alive": "keep_alive_s",
    "drain_timeout": "drain_timeout_s",
}


def run(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    """Returns the exit code; raises UserError."""
    if options.model_argument is not None:
        if options.model is not None and options.model != options.model_argument:
            raise UserError(
                f"Two models are named, {options.model_argument} and {options.model}; a server has "
                "one."
            )
        options.model = options.model_argument
    sources = fill_in(parser, options, os.environ)
    if options.model is None:
        raise UserError(
            "No model is named; say `headrace serve DIR` with a Hugging Face checkpoint directory."
        )
    _check_model(options)
    from orchestrator.calibrate.profile import cache_dir
    from orchestrator.http.server import HttpFront, listen
    from orchestrator.process import run_orchestrator
    from protocol.logs import set_up_logging
    from protocol.run_dir import default_run_dir

    log_level, log_format = options.log_level or "info", options.log_format or "text"
    set_up_logging("orchestrator", log_level, log_format)
    pipeline = settings_from(
        options,
        options.run_dir or default_run_dir(os.environ),
        calibration_dir=cache_dir(os.environ),
        is_supervising=True,
        log_level=log_level,
        log_format=log_format,
    )
    server = _server_settings(options)
    listener = listen(server.host, server.port)
    config = _resolved(pipeline, server, sources)
    log = logging.getLogger("headrace")
    log.info("%s", _config_line(config), extra={"facts": {"config": config}})
    if not server.api_key and not _is_loopback(listener.getsockname()[0]):
        log.warning(
            "listening on %s without a key: whoever reaches this port may use the model; say "
            "HEADRACE_API_KEY",
            server.host,
        )
    return run_orchestrator(pipeline, HttpFront(server, listener, config))


def _check_model(options: argparse.Namespace) -> None:
    """What files and headers tell of a model that cannot be served is told before anybody is let
    in to wait for it. Raises UserError."""
    from expert_store.checkpoint import open_checkpoint, refuse_dense
    from orchestrator.text_model import TextModel

    TextModel.load(options.model, options.max_context, lambda note: None)
    refuse_dense(open_checkpoint(options.model))


def _server_settings(options: argparse.Namespace) -> ServerSettings:
    from orchestrator.http.settings import ServerSettings

    given: dict[str, Any] = {
        field: value
        for name, field in _FIELDS.items()
        if (value := getattr(options, name)) is not None
    }
    if options.max_body_mb is not None:
        given["max_body_bytes"] = int(options.max_body_mb * 1e6)
    if options.cors_origins is not None:
        origins = (origin.strip() for origin in options.cors_origins.split(","))
        given["cors_origins"] = tuple(origin for origin in origins if origin)
    if not given.get("api_key", "x").strip().isprintable() or given.get("api_key", "x") == "":
        raise UserError("The API key is empty or holds unprintable characters; choose another.")
    return ServerSettings(**given)


def _resolved(
    pipeline: PipelineSettings, server: ServerSettings, sources: dict[str, str]
) -> dict[str, dict[str, Any]]:
    """Every setting: its value and where it comes from. Secrets only as far as they are set."""
    import msgspec

    values = {**msgspec.structs.asdict(pipeline), **msgspec.structs.asdict(server)}
    names = {field: flag.replace("_", "-") for flag, field in _FIELDS.items()}
    names |= {
        "model_dir": "model",
        "num_cpu_workers": "cpu-workers",
        "max_body_bytes": "max-body-mb",
    }
    names |= {"worker_timeout_s": "worker-timeout"}
    config = {}
    for field, value in values.items():
        if field in ("is_supervising", "parent_fd", "max_rows"):
            continue
        name = names.get(field, field.replace("_", "-"))
        if name == "max-body-mb":
            value /= 1e6
        shown = ("(set)" if value else None) if name in _SECRET else value
        if isinstance(shown, Path):
            shown = str(shown)
        elif isinstance(shown, tuple):
            shown = list(shown)
        config[name] = {"value": shown, "source": sources.get(name, "default")}
    return config


def _config_line(config: dict[str, dict[str, Any]]) -> str:
    """All of it in one line; what is no default says where it comes from."""
    parts = []
    for name, entry in config.items():
        where = "" if entry["source"] == "default" else f" ({entry['source']})"
        parts.append(f"{name}={shlex.quote(str(entry['value']))}{where}")
    return "settings: " + " ".join(parts)


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False


def _port(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) <= 65535):
        raise argparse.ArgumentTypeError(f"{text!r} is not a port; say a number up to 65535")
    return int(text)
