"""What a person may choose about the server: one frozen value, made at the command line."""

from __future__ import annotations

from pathlib import Path

import msgspec

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 8000
DEFAULT_MAX_BODY_MB = 8.0
DEFAULT_MAX_MESSAGES = 1024
DEFAULT_MAX_QUEUE = 64
DEFAULT_DRAIN_TIMEOUT_S = 30.0
DEFAULT_KEEP_ALIVE_S = 15.0
#: Texts that one request may ask for: prompts times n.
MAX_CHOICES = 16
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 1024


class ServerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How the server answers. Everything about the pipeline is in PipelineSettings."""

    host: str = DEFAULT_HOST
    port: int = DEFAULT_PORT
    #: Empty: no key is asked for, and there are no admin endpoints.
    api_key: str = ""
    #: None: the name of the checkpoint's directory.
    served_model_name: str | None = None
    max_body_bytes: int = int(DEFAULT_MAX_BODY_MB * 1e6)
    max_messages: int = DEFAULT_MAX_MESSAGES
    #: Requests that may be open beyond those that run.
    max_queue: int = DEFAULT_MAX_QUEUE
    drain_timeout_s: float = DEFAULT_DRAIN_TIMEOUT_S
    #: Silence in a stream after which a comment is sent.
    keep_alive_s: float = DEFAULT_KEEP_ALIVE_S
    cors_origins: tuple[str, ...] = ()
    chat_template: Path | None = None
    tool_call_parser: str | None = None
