"""Calls of tools in what models say, whole and in pieces."""

from __future__ import annotations

import json
from typing import Any

import pytest

from orchestrator.http.schemas import Tool
from orchestrator.http.tools import ToolReader, parser_for

TOOLS = [
    Tool.model_validate(
        {
            "type": "function",
            "function": {
                "name": "add",
                "parameters": {
                    "type": "object",
                    "properties": {"a": {"type": "integer"}, "note": {"type": "string"}},
                },
            },
        }
    )
]


def read(form: str, pieces: list[str]) -> tuple[str, list[tuple[str, Any]]]:
    reader = ToolReader(form, TOOLS)
    text, calls = "", []
    for piece in pieces:
        more, found = reader.push(piece)
        text, calls = text + more, calls + found
    more, found = reader.finish()
    calls += found
    assert len({call["id"] for call in calls}) == len(calls)
    return text + more, [
        (call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls
    ]


HERMES = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "note": "x</b>"}}\n</tool_call>'
XML = (
    "<tool_call>\n<function=add>\n<parameter=a>\n2\n</parameter>\n<parameter=note>\n7\n"
    "</parameter>\n</function>\n</tool_call>"
)
GLM = "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>2</arg_value>\n</tool_call>"
CASES = [
    ("hermes", HERMES, {"a": 2, "note": "x</b>"}),
    ("qwen_xml", XML, {"a": 2, "note": "7"}),
    ("glm", GLM, {"a": 2}),
]


@pytest.mark.parametrize("step", [1, 3, 1000])
@pytest.mark.parametrize(("form", "said", "arguments"), CASES)
def test_calls_between_text(form: str, said: str, arguments: dict[str, Any], step: int) -> None:
    whole = f"Let me see.{said}{said}"
    pieces = [whole[place : place + step] for place in range(0, len(whole), step)]
    assert read(form, pieces) == ("Let me see.", [("add", arguments)] * 2)


def test_a_call_that_nobody_closed_counts_when_it_is_complete() -> None:
    assert read("hermes", [HERMES.removesuffix("</tool_call>")])[1][0][0] == "add"


@pytest.mark.parametrize(
    "said",
    [
        "<tool_call>not json</tool_call>",
        '<tool_call>{"name": "other", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "add", "arguments": 7}</tool_call>',
        '<tool_call>[{"name": {}}]</tool_call>',
        "<tool_call>" + "[" * 100_000,
        "a <tool_ca",
        "1 < 2",
    ],
)
def test_what_is_no_call_stays_text(said: str) -> None:
    assert read("hermes", list(said) if len(said) < 1000 else [said]) == (said, [])


@pytest.mark.parametrize(
    ("said", "calls"),
    [
        ('{"name": "add", "parameters": {"a": 1}}', [("add", {"a": 1})]),
        (
            ' [{"name": "add", "arguments": {"a": 1}}, {"name": "add", "arguments": {"a": 2}}]',
            [("add", {"a": 1}), ("add", {"a": 2})],
        ),
    ],
)
def test_bare_json(said: str, calls: list[tuple[str, Any]]) -> None:
    assert read("json", list(said)) == ("", calls)


@pytest.mark.parametrize(
    "said", ["plain words", '{"no": "call"}', "[1, 2]", '{"name": "add"', "  ", "[[]]", '"add"']
)
def test_json_that_is_no_call_stays_text(said: str) -> None:
    assert read("json", list(said)) == (said, [])


@pytest.mark.parametrize(
    ("template", "form"),
    [
        ("{% if tools %}<tool_call>{{ x }}", "hermes"),
        ("{{ tools }}<tool_call>\n<function=name>", "qwen_xml"),
        ("{{ tools }}<tool_call>{{ n }}<arg_key>", "glm"),
        ('{{ tools }}{"name": f, "parameters": p}', "json"),
        ("{{ messages }}", None),
    ],
)
def test_a_template_says_its_form(template: str, form: str | None) -> None:
    assert parser_for(template) == form
