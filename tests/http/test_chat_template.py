"""Templates of checkpoints, as transformers would render them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from orchestrator.http.chat_template import ChatTemplate
from orchestrator.http.errors import ApiError
from orchestrator.http.schemas import ChatMessage, Tool
from protocol.errors import UserError
from tests.http.servers import DEMO

if TYPE_CHECKING:
    from pathlib import Path

CHATML = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
TOOL = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {}}},
}


def messages(*turns: dict[str, Any]) -> list[ChatMessage]:
    return [ChatMessage.model_validate(turn) for turn in turns]


USER = messages({"role": "user", "content": "Hi <b>"})


def template(source: str, **special: str) -> ChatTemplate:
    return ChatTemplate(source, None, special)


def test_chatml() -> None:
    turns = messages(
        {
            "role": "developer",
            "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
        },
        {"role": "user", "content": "Hi"},
    )
    assert template(CHATML).render(turns) == (
        "<|im_start|>system\na\nb<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert template(CHATML).render(USER, add_generation_prompt=False).endswith("<|im_end|>\n")


def test_what_transformers_gives_a_template() -> None:
    source = (
        "{{ bos_token }}{% for m in messages %}{% generation %}{{ m | tojson }}{% endgeneration %}"
        "{% if loop.first %}{% continue %}{% endif %}{% endfor %}{{ strftime_now('%Y') | length }}"
        "{{ thinking }}"
    )
    rendered = template(source, bos_token="<s>").render(USER, more={"thinking": "off"})
    assert rendered == '<s>{"role": "user", "content": "Hi <b>"}4off'


def test_the_demo_template_knows_tools() -> None:
    loaded = ChatTemplate.load(DEMO)
    assert loaded is not None
    assert loaded.knows_tools
    turns = messages(
        {"role": "user", "content": "Add."},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "1", "function": {"name": "add", "arguments": '{"a": 1}'}}],
        },
        {"role": "tool", "tool_call_id": "1", "content": "2"},
    )
    rendered = loaded.render(turns, [Tool.model_validate(TOOL)])
    assert '{"name": "add", "parameters": {"type": "object", "properties": {}}}' in rendered
    assert '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>' in rendered
    assert rendered.endswith("Result: 2\n\nAnswer:")


def test_refusals_and_faults_of_a_template_are_bad_requests() -> None:
    for source in (
        "{{ raise_exception('no system') }}",
        "{{ messages[7].content }}",
        "{{ 1 / 0 }}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    ):
        with pytest.raises(ApiError) as caught:
            template(source).render(USER)
        assert caught.value.status == 400
        assert caught.value.param == "messages"


def test_a_request_does_not_set_what_has_a_field() -> None:
    with pytest.raises(ApiError) as caught:
        template(CHATML).render(USER, more={"messages": []})
    assert caught.value.param == "chat_template_kwargs.messages"


def test_arguments_of_calls_must_be_json() -> None:
    turns = messages(
        {
            "role": "assistant",
            "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{"}}],
        }
    )
    with pytest.raises(ApiError):
        template(CHATML).render(turns)


def write(folder: Path, config: dict[str, Any]) -> Path:
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_where_checkpoints_keep_templates(tmp_path: Path) -> None:
    write(tmp_path, {"chat_template": "{{ eos_token }}!", "eos_token": {"content": "</s>"}})
    loaded = ChatTemplate.load(tmp_path)
    assert loaded is not None
    assert loaded.render(USER) == "</s>!"
    named = [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "{{ tools }}"},
    ]
    loaded = ChatTemplate.load(write(tmp_path, {"chat_template": named}))
    assert loaded is not None
    assert loaded.render(USER) == "plain"
    assert "add" in loaded.render(USER, [Tool.model_validate(TOOL)])
    (tmp_path / "chat_template.jinja").write_text("beside")
    loaded = ChatTemplate.load(tmp_path)
    assert loaded is not None
    assert loaded.render(USER) == "beside"
    other = tmp_path / "mine.jinja"
    other.write_text("mine")
    loaded = ChatTemplate.load(tmp_path, other)
    assert loaded is not None
    assert loaded.render(USER) == "mine"


def test_no_template(tmp_path: Path) -> None:
    assert ChatTemplate.load(tmp_path) is None
    assert ChatTemplate.load(write(tmp_path, {"bos_token": "x"})) is None


def test_a_broken_template_is_told_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not valid Jinja"):
        ChatTemplate.load(write(tmp_path, {"chat_template": "{% for %}"}))
    with pytest.raises(UserError, match="cannot be read"):
        ChatTemplate.load(tmp_path, tmp_path / "none.jinja")
