"""Answers of a given form, log probabilities and penalties: a real server with the demo model."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.http.servers import Server

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"enum": ["list", "tuple"]},
        "size": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "size"],
    "additionalProperties": False,
}
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {"a": {"enum": [1, 2]}, "b": {"enum": [3, 4]}},
            "required": ["a", "b"],
            "additionalProperties": False,
        },
    },
}
ASKED = [{"role": "user", "content": "Add one and three."}]
CHAT = "/v1/chat/completions"


def json_schema(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


@pytest.mark.parametrize("temperature", [0, 1.5])
def test_json_of_a_schema(server: Server, temperature: float) -> None:
    made = server.chat(
        n=3, max_tokens=250, temperature=temperature, seed=4, response_format=json_schema(SCHEMA)
    )
    for choice in made["choices"]:
        assert choice["finish_reason"] == "stop"
        value = json.loads(choice["message"]["content"])
        assert value.keys() == {"name", "size"}
        assert value["name"] in ("list", "tuple")
        assert 0 <= value["size"] <= 99


def test_constrained_beside_unconstrained(server: Server) -> None:
    free = server.complete(prompt="import os", max_tokens=12, temperature=0)["choices"][0]["text"]
    made = server.complete(
        prompt=["import os", "x = "], max_tokens=40, temperature=0,
        response_format=json_schema({"enum": [[1, 2], [3]]}),
    )  # fmt: skip
    assert all(json.loads(choice["text"]) in ([1, 2], [3]) for choice in made["choices"])
    again = server.complete(prompt="import os", max_tokens=12, temperature=0)
    assert again["choices"][0]["text"] == free


def test_any_object_begins_like_one(server: Server) -> None:
    made = server.chat(max_tokens=8, temperature=0, response_format={"type": "json_object"})
    assert made["choices"][0]["message"]["content"].lstrip().startswith("{")


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"response_format": json_schema({"type": "frob"})}, "response_format"),
        ({"response_format": json_schema({"$ref": "http://127.0.0.1:9/x"})}, "response_format"),
        ({"response_format": json_schema({"$ref": "#"})}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_object"}, "ignore_eos": True}, "ignore_eos"),
        ({"tools": [ADD], "tool_choice": {"type": "function", "function": {"name": "sub"}}},
         "tool_choice"),
    ],
)  # fmt: skip
def test_forms_that_cannot_be_kept_to(server: Server, more: dict[str, Any], param: str) -> None:
    answer = server.ask(CHAT, messages=ASKED, **more)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "add"}}], ids=["any", "named"]
)
def test_a_tool_that_must_be_called_is_called(server: Server, choice: Any) -> None:
    asked: dict[str, Any] = {
        "messages": ASKED, "tools": [ADD], "tool_choice": choice, "parallel_tool_calls": False,
        "max_tokens": 80, "temperature": 0,
    }  # fmt: skip
    [whole] = server.ask(CHAT, **asked).json()["choices"]
    assert whole["finish_reason"] == "tool_calls"
    assert whole["message"]["content"] is None
    [call] = whole["message"]["tool_calls"]
    assert call["function"]["name"] == "add"
    arguments = json.loads(call["function"]["arguments"])
    assert arguments["a"] in (1, 2)
    assert arguments["b"] in (3, 4)
    deltas = [event["choices"][0] for event in server.events(CHAT, **asked)]
    assert deltas[-1]["finish_reason"] == "tool_calls"
    [streamed] = [
        delta["delta"]["tool_calls"] for delta in deltas if "tool_calls" in delta["delta"]
    ]
    assert streamed[0]["index"] == 0
    assert streamed[0]["function"] == call["function"]
    assert not any(delta["delta"].get("content") for delta in deltas)


def test_tools_that_may_be_called(server: Server) -> None:
    """The demo model calls nothing by itself, and says what it says."""
    made = server.chat(tools=[ADD], max_tokens=5, temperature=0)
    assert made["choices"][0]["message"]["content"]
    assert "tool_calls" not in made["choices"][0]["message"]
    without = server.ask("/tokenize", messages=ASKED).json()["count"]
    prompt = server.ask(CHAT, messages=ASKED, tools=[ADD], max_tokens=1).json()["usage"]
    assert prompt["prompt_tokens"] > without
    silent = server.ask(CHAT, messages=ASKED, tools=[ADD], tool_choice="none", max_tokens=1).json()
    assert silent["usage"]["prompt_tokens"] == without


def test_log_probabilities_of_a_chat(server: Server) -> None:
    made = server.chat(max_tokens=4, temperature=0, logprobs=True, top_logprobs=3, ignore_eos=True)
    [choice] = made["choices"]
    content = choice["logprobs"]["content"]
    assert len(content) == 4
    told = b"".join(bytes(entry["bytes"]) for entry in content).decode(errors="replace")
    assert told == choice["message"]["content"]
    for entry in content:
        likely = [top["logprob"] for top in entry["top_logprobs"]]
        assert likely == sorted(likely, reverse=True)
        assert len(likely) == 3
        assert entry["logprob"] == likely[0]  # greedy
        assert sum(math.exp(logprob) for logprob in likely) <= 1 + 1e-6
    events = server.events(
        CHAT, messages=[{"role": "user", "content": "What is a list?"}], max_tokens=4,
        temperature=0, logprobs=True, top_logprobs=3, ignore_eos=True,
    )  # fmt: skip
    streamed = [
        entry
        for event in events
        if event["choices"][0]["logprobs"]
        for entry in event["choices"][0]["logprobs"]["content"]
    ]
    assert streamed == content
    assert server.chat(max_tokens=1)["choices"][0]["logprobs"] is None


def test_log_probabilities_of_a_completion(server: Server) -> None:
    made = server.complete(prompt="import os", max_tokens=3, temperature=0, logprobs=2)
    [choice] = made["choices"]
    report = choice["logprobs"]
    assert "".join(report["tokens"]) == choice["text"]
    assert [len(top) for top in report["top_logprobs"]] == [2, 2, 2]
    assert report["text_offset"][0] == 0
    assert report["text_offset"] == sorted(report["text_offset"])


def test_biases_and_penalties_change_what_is_said(server: Server) -> None:
    asked: dict[str, Any] = {
        "prompt": "import os", "max_tokens": 16, "temperature": 0, "ignore_eos": True,
        "repetition_penalty": 1.0,
    }  # fmt: skip
    plain = server.complete(**asked)["choices"][0]["text"]
    [token] = server.ask("/tokenize", prompt="Q").json()["tokens"]
    biased = server.complete(**asked, logit_bias={str(token): 100})["choices"][0]["text"]
    assert biased == "Q" * 16
    both = server.complete(
        **asked, logit_bias={str(token): 100}, frequency_penalty=2, presence_penalty=2
    )
    assert both["choices"][0]["text"].startswith("Q")
    varied = server.complete(**asked, frequency_penalty=2, presence_penalty=2)
    assert len(set(varied["choices"][0]["text"])) >= len(set(plain))
