"""Grammars of requests that ask for a form: JSON of a schema, or a call of a tool.

llguidance compiles them and says token by token what may come next. Compiling, and taking in the
vocabulary before the first, happens in a thread: it takes up to a second, and the loop also
directs the workers.
"""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from orchestrator.http.errors import bad_request, unsupported
from orchestrator.http.schemas import NamedTool

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

    from orchestrator.http.schemas import ChatRequest, ResponseFormat, Tool
    from orchestrator.text_model import TextModel

_MAX_KEPT = 16
#: Between the parts of JSON: enough to indent, too little to go on for ever.
_JSON_OPTIONS: dict[str, Any] = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{0,24}"}


class Constraints:
    """Compiles grammars for one model and keeps the last few."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._tokenizer: LLTokenizer | None = None
        self._kept: OrderedDict[str, LLMatcher] = OrderedDict()

    async def compile(self, grammar: str, model: TextModel, param: str) -> LLMatcher:
        """A matcher at its beginning.

        Raises:
            ApiError: 400, the grammar cannot be kept to; `param` names the field it is from.
        """
        async with self._lock:
            if grammar not in self._kept:
                matcher = await asyncio.to_thread(self._compile, grammar, model)
                if not matcher.is_error() and not await asyncio.to_thread(_can_begin, matcher):
                    raise bad_request(f"{param} cannot be kept to: no text satisfies it", param)
                if matcher.is_error():
                    reason = " ".join(matcher.get_error().split())[:300]
                    raise bad_request(f"{param} cannot be kept to: {reason}", param)
                self._kept[grammar] = matcher
                if len(self._kept) > _MAX_KEPT:
                    self._kept.popitem(last=False)
            self._kept.move_to_end(grammar)
            return self._kept[grammar].deep_copy()

    def _compile(self, grammar: str, model: TextModel) -> LLMatcher:
        from llguidance import LLMatcher, LLTokenizer

        if self._tokenizer is None:
            self._tokenizer = LLTokenizer(
                model.tokenizer_json,
                n_vocab=model.vocab_size,
                eos_token=sorted(model.eos_tokens) or None,
            )
        return LLMatcher(self._tokenizer, grammar, log_level=0)


def _can_begin(matcher: LLMatcher) -> bool:
    """Whether any token may come first: a schema that is nothing but itself compiles as well."""
    first = matcher.deep_copy()
    first.compute_bitmask()
    return not (first.is_error() or first.is_stopped())


def grammar_of_format(form: ResponseFormat | None) -> str | None:
    """The grammar of `response_format`, None where anything goes.

    Raises:
        ApiError: 400.
    """
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return _grammar({"type": "object"})
    if form.json_schema is None:
        raise bad_request("response_format.json_schema is missing.", "response_format")
    return _grammar(form.json_schema.schema_)


def _grammar(schema: dict[str, Any] | bool) -> str:
    from llguidance import LLMatcher

    if isinstance(schema, bool):
        schema = {} if schema else {"not": {}}
    return LLMatcher.grammar_from_json_schema(schema, overrides=_JSON_OPTIONS)  # type: ignore[arg-type]


def grammar_of_choice(body: ChatRequest, tools: list[Tool], form: str) -> str | None:
    """The grammar of a `tool_choice` that asks for a call, None where none is asked for.

    Raises:
        ApiError: 400, the model writes calls in a form for which there is no grammar.
    """
    from llguidance import LLMatcher

    choice = body.tool_choice
    if isinstance(choice, NamedTool):
        tools = [tool for tool in tools if tool.function.name == choice.function.name]
    elif choice != "required":
        return None
    if form not in ("hermes", "json"):
        raise unsupported("tool_choice", f"a call cannot be made sure of in the form {form}")
    arguments = "arguments" if form == "hermes" else "parameters"
    begin, end = ("<tool_call>\n", "\n</tool_call>") if form == "hermes" else ("", "")
    is_one = isinstance(choice, NamedTool) or body.parallel_tool_calls is False or form == "json"
    lines = [f"start: call{'' if is_one else _more()}"]
    names = [f"call_{number}" for number in range(len(tools))]
    lines.append(f"call: {' | '.join(names)}")
    for name, tool in zip(names, tools, strict=True):
        head = f'{begin}{{"name": {json.dumps(tool.function.name)}, "{arguments}": '
        schema = json.dumps(
            {"x-guidance": _JSON_OPTIONS, **(tool.function.parameters or {"type": "object"})}
        )
        lines.append(f"{name}: {json.dumps(head)} args_{name} {json.dumps('}' + end)}")
        lines.append(f"args_{name}: %json {schema}")
    return LLMatcher.grammar_from_lark("\n".join(lines) + "\n")


def _more() -> str:
    return ' ("\\n" call)*'
