"""What is wrong with a body, in one sentence that says what would be right."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from orchestrator.http.errors import from_validation
from orchestrator.http.schemas import Body, CacheRequest, ChatRequest, CompletionRequest

ASKED = [{"role": "user", "content": "x"}]


def refusal(kind: type[Body], **fields: Any) -> tuple[str | None, str]:
    """Field and sentence."""
    with pytest.raises(ValidationError) as caught:
        kind.model_validate(fields)
    error = from_validation(list(caught.value.errors()))
    return error.param, error.message


@pytest.mark.parametrize("stop", [5, {}, True, ["a", 5], "", [""], ["a"] * 17, [["a"]]])
def test_stops(stop: Any) -> None:
    param, message = refusal(ChatRequest, messages=ASKED, stop=stop)
    assert param == "stop"
    assert message.startswith("stop must be a text, or a list of at most 16 texts;")


@pytest.mark.parametrize("prompt", [5, None, {}, [], [[]], [1, "a"], ["a", 1], [-1], [[1], ["a"]]])
def test_prompts(prompt: Any) -> None:
    param, message = refusal(CompletionRequest, prompt=prompt)
    assert param == "prompt"
    assert message.startswith("prompt must be a text, a list of texts, a list of token ids,")


@pytest.mark.parametrize(
    "content",
    [
        5,
        ["x"],
        [{"type": "text"}],
        [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}],
    ],
)
def test_parts_of_a_message(content: Any) -> None:
    messages = [*ASKED, {"role": "user", "content": content}]
    param, message = refusal(ChatRequest, messages=messages)
    assert param == "messages[1].content"
    assert message.startswith("messages[1].content must be a text, or a list of parts like")
    assert "images" in message


@pytest.mark.parametrize(
    ("kind", "fields", "param", "says"),
    [
        (ChatRequest, {"tool_choice": {"type": "x"}}, "tool_choice", 'must be "none", "auto",'),
        (
            ChatRequest,
            {"response_format": {"type": "json_schema", "json_schema": {"schema": 5}}},
            "response_format.json_schema.schema",
            "must be a JSON Schema",
        ),
        (ChatRequest, {"response_format": 5}, "response_format", "must be a JSON object."),
        (ChatRequest, {"temperature": "hot"}, "temperature", "must be a valid number"),
        (ChatRequest, {"top_k": True}, "top_k", ": a whole number is expected"),
        (ChatRequest, {"seed": 2**63}, "seed", f"must be less than or equal to {2**63 - 1}"),
        (ChatRequest, {"stop_": "x"}, "stop_", "is not a field that this server knows"),
        (CacheRequest, {"slots": []}, "slots", "must be a number of experts like 64"),
    ],
)
def test_other_fields(kind: type[Body], fields: dict[str, Any], param: str, says: str) -> None:
    more = {"messages": ASKED} if kind is ChatRequest else {}
    assert refusal(kind, **more, **fields)[0] == param
    message = refusal(kind, **more, **fields)[1]
    assert message.startswith(param)
    assert says in message
    assert message.endswith(".")
