"""Calls of tools in what a model says, for the forms that chat templates teach.

    hermes      <tool_call>{"name": ..., "arguments": {...}}</tool_call>   Qwen2.5, Qwen3, Hermes
    qwen_xml    <tool_call><function=name><parameter=key>value</parameter></function></tool_call>
    glm         <tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>
    json        the whole answer is {"name": ..., "parameters": {...}}, or a list of such

Which one a checkpoint was taught is read off its template. Text outside of calls stays text. What
begins like a call and is none is text too: nothing that a model said is lost.
"""

from __future__ import annotations

import json
import re
import uuid
from typing import TYPE_CHECKING, Any

from orchestrator.http.stop_strings import StopFinder

if TYPE_CHECKING:
    from collections.abc import Callable

    from orchestrator.http.schemas import Tool

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
PARSERS = ("hermes", "qwen_xml", "glm", "json")

Call = dict[str, Any]


def parser_for(template: str) -> str | None:
    """The form that a template teaches, None if it is none of ours."""
    if "<function=" in template:
        return "qwen_xml"
    if "<arg_key>" in template:
        return "glm"
    if _OPEN in template:
        return "hermes"
    if '"parameters"' in template and "tools" in template and '"name"' in template:
        return "json"
    return None


def make_call(name: str, arguments: object) -> Call:
    """A call as OpenAI's interface shows it."""
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {
        "id": f"call_{uuid.uuid4().hex[:24]}",
        "type": "function",
        "function": {"name": name, "arguments": text},
    }


class ToolReader:
    """Takes an answer apart as it comes: `push` and `finish` return (text, complete calls)."""

    def __init__(self, form: str, tools: list[Tool]) -> None:
        self._form = form
        self._parse = _BLOCKS.get(form)
        self._types = {tool.function.name: _types_of(tool) for tool in tools}
        self._finder = StopFinder([_OPEN])
        #: What came after the opening mark, as far as it is not closed.
        self._block: str | None = None
        #: The whole answer, of the form that has no marks.
        self._whole: list[str] = []

    def push(self, piece: str) -> tuple[str, list[Call]]:
        if self._parse is None:
            self._whole.append(piece)
            return self._begins_as_text(), []
        text, calls = "", list[Call]()
        while True:
            if self._block is None:
                finder = self._finder
                text += finder.push(piece)
                if not finder.is_stopped:
                    return text, calls
                piece = finder.rest
                self._finder = StopFinder([_OPEN])
                self._block = ""
            self._block += piece
            block, mark, piece = self._block.partition(_CLOSE)
            if not mark:
                return text, calls
            self._block = None
            call = self._read(block)
            if call is None:
                text += _OPEN + block + _CLOSE
            else:
                calls.append(call)
                piece = piece.removeprefix("\n")

    def finish(self) -> tuple[str, list[Call]]:
        """The answer is over. A call that was not closed counts if it is complete."""
        if self._parse is None:
            text = "".join(self._whole)
            self._whole.clear()
            calls = _bare_calls(text, self._types)
            return ("", calls) if calls else (text, [])
        if self._block is None:
            return self._finder.finish(), []
        call = self._read(self._block)
        text = "" if call else _OPEN + self._block
        self._block = None
        return text, [call] if call else []

    def _begins_as_text(self) -> str:
        """An answer that does not begin like JSON has no calls: it need not be held back."""
        begin = "".join(self._whole).lstrip()
        if not begin or begin[0] in "{[":
            return ""
        text = "".join(self._whole)
        self._whole.clear()
        self._parse = _never
        return text

    def _read(self, block: str) -> Call | None:
        assert self._parse is not None
        return self._parse(block, self._types)


def _never(block: str, types: dict[str, dict[str, str]]) -> Call | None:
    return None


def _types_of(tool: Tool) -> dict[str, str]:
    """Parameter -> its JSON type, as far as the tool says."""
    properties = (tool.function.parameters or {}).get("properties")
    if not isinstance(properties, dict):
        return {}
    return {
        name: schema["type"]
        for name, schema in properties.items()
        if isinstance(schema, dict) and isinstance(schema.get("type"), str)
    }


def _json_call(value: object, types: dict[str, dict[str, str]]) -> Call | None:
    if not isinstance(value, dict) or value.get("name") not in types:
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    return make_call(value["name"], arguments) if isinstance(arguments, (dict, str)) else None


def _hermes(block: str, types: dict[str, dict[str, str]]) -> Call | None:
    try:
        return _json_call(json.loads(block), types)
    except (ValueError, RecursionError, TypeError):
        return None


def _bare_calls(text: str, types: dict[str, dict[str, str]]) -> list[Call]:
    """All of the text is calls, or none of it is."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return []
    try:
        calls = (
            [_json_call(entry, types) for entry in value if value]
            if isinstance(value, list)
            else [_json_call(value, types)]
        )
    except TypeError:
        return []
    return [call for call in calls if call] if all(calls) else []


def _typed(value: str, kind: str | None) -> object:
    """A parameter's text as a value of its type; text it stays where it is none."""
    if kind in (None, "string"):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
_GLM_NAME = re.compile(r"\s*([^\s<]+)(.*)", re.DOTALL)
_GLM_PAIR = re.compile(
    r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL
)  # fmt: skip


def _qwen_xml(block: str, types: dict[str, dict[str, str]]) -> Call | None:
    return _tagged(_FUNCTION.fullmatch(block), _PARAMETER, types)


def _glm(block: str, types: dict[str, dict[str, str]]) -> Call | None:
    return _tagged(_GLM_NAME.fullmatch(block), _GLM_PAIR, types)


def _tagged(
    found: re.Match[str] | None, pair: re.Pattern[str], types: dict[str, dict[str, str]]
) -> Call | None:
    if found is None or found[1] not in types:
        return None
    kinds = types[found[1]]
    arguments = {key: _typed(value, kinds.get(key)) for key, value in pair.findall(found[2])}
    return make_call(found[1], arguments)


_BLOCKS: dict[str, Callable[[str, dict[str, dict[str, str]]], Call | None]] = {
    "hermes": _hermes,
    "qwen_xml": _qwen_xml,
    "glm": _glm,
}
