"""Messages to one prompt, by the template that the checkpoint brings.

A template is a Jinja program of the checkpoint's maker, written for transformers. It runs here in
Jinja's sandbox with what transformers gives it: `raise_exception`, `strftime_now`, `tojson` without
HTML escapes, loop controls, `generation` blocks, the special tokens by name, and any
chat_template_kwargs of the request. It may be long-winded, but it comes from the person who starts
the server, never from a request.
"""

from __future__ import annotations

import json
from datetime import datetime
from typing import TYPE_CHECKING, Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

from orchestrator.http.errors import bad_request, unsupported
from orchestrator.text_model import read_json
from protocol.errors import UserError

if TYPE_CHECKING:
    from pathlib import Path

    from jinja2.parser import Parser

    from orchestrator.http.schemas import ChatMessage, Tool

_SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token")
#: Variables that a request may not set by chat_template_kwargs: they have fields of their own.
_RESERVED = frozenset({"messages", "tools", "add_generation_prompt", *_SPECIAL_TOKENS})


class _GenerationBlocks(Extension):
    """`{% generation %} ... {% endgeneration %}` marks what an assistant says, for training; to us
    it is its content."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class TemplateRefusal(Exception):
    """The template called raise_exception: the messages do not suit it."""


def _refuse(message: str) -> None:
    raise TemplateRefusal(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationBlocks, "jinja2.ext.loopcontrols"],
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


class ChatTemplate:
    """One template, or one for messages and one for messages with tools."""

    def __init__(
        self, source: str, tool_source: str | None, special_tokens: dict[str, str]
    ) -> None:
        environment = _environment()
        try:
            self._plain = environment.from_string(source)
            self._with_tools = (
                self._plain if tool_source is None else environment.from_string(tool_source)
            )
        except jinja2.TemplateError as error:
            raise UserError(
                f"The chat template of the model is not valid Jinja ({error}); give another one "
                "with --chat-template FILE."
            ) from None
        self._special_tokens = special_tokens
        self.source = source if tool_source is None else tool_source

    @classmethod
    def load(cls, model_dir: Path, override: Path | None = None) -> ChatTemplate | None:
        """The template of a checkpoint, or of the file `override`; None where there is none.

        Raises:
            UserError: it cannot be read or is not valid.
        """
        config_path = model_dir / "tokenizer_config.json"
        config = read_json(config_path) if config_path.exists() else {}
        special_tokens = {
            name: text for name in _SPECIAL_TOKENS if (text := _token_text(config.get(name)))
        }
        source, tool_source = _sources(model_dir, config, override)
        return None if source is None else cls(source, tool_source, special_tokens)

    @property
    def knows_tools(self) -> bool:
        return "tools" in self.source

    def knows(self, variable: str) -> bool:
        """Whether the template's text names a variable."""
        return variable in self.source

    def render(
        self,
        messages: list[ChatMessage],
        tools: list[Tool] | None = None,
        *,
        add_generation_prompt: bool = True,
        more: dict[str, Any] | None = None,
    ) -> str:
        """The prompt.

        Raises:
            ApiError: 400, the template does not take these messages, or `more` names a variable
                that is not the request's to set.
        """
        for name in more or ():
            if name in _RESERVED:
                raise unsupported(f"chat_template_kwargs.{name}", "it has a field of its own")
        template = self._with_tools if tools else self._plain
        try:
            return template.render(
                messages=[_as_template_sees(message) for message in messages],
                tools=[tool.model_dump(exclude_none=True) for tool in tools] if tools else None,
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
                **(more or {}),
            )
        except TemplateRefusal as refusal:
            raise bad_request(f"The chat template refuses: {refusal}", "messages") from None
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, ArithmeticError) as error:
            # A program of somebody else's, on values of somebody else's: neither is our fault.
            raise bad_request(
                f"The chat template cannot render these messages: {error}", "messages"
            ) from None
        except RecursionError:
            raise bad_request("The messages are nested too deeply.", "messages") from None


def _sources(
    model_dir: Path, config: dict[str, Any], override: Path | None
) -> tuple[str | None, str | None]:
    """The template, and the one for tools where the checkpoint keeps them apart."""
    beside = model_dir / "chat_template.jinja"
    path = override or (beside if beside.exists() else None)
    if path is not None:
        try:
            return path.read_text(encoding="utf-8"), None
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"The chat template {path} cannot be read: {error}.") from None
    named = config.get("chat_template")
    if isinstance(named, str):
        return named, None
    if isinstance(named, list):
        found = {
            entry["name"]: entry["template"]
            for entry in named
            if isinstance(entry, dict) and isinstance(entry.get("template"), str)
        }
        return found.get("default"), found.get("tool_use")
    return None, None


def _token_text(value: object) -> str | None:
    """A special token is a text, or a map that has it as `content`."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _as_template_sees(message: ChatMessage) -> dict[str, Any]:
    """A message as templates expect it: content a text, arguments of calls a map."""
    seen: dict[str, Any] = message.model_dump(exclude_none=True)
    seen.pop("refusal", None)
    if message.role == "developer":
        seen["role"] = "system"
    if not isinstance(message.content, str):
        seen["content"] = "\n".join(part.text for part in message.content or ())
    for call in seen.get("tool_calls", ()):
        try:
            arguments = json.loads(call["function"]["arguments"] or "{}")
        except ValueError:
            raise bad_request(
                "The arguments of an assistant's tool call are not valid JSON.",
                "messages.tool_calls.function.arguments",
            ) from None
        call["function"]["arguments"] = arguments
    return seen
