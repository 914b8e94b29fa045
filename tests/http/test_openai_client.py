"""The official client against a real server with the demo model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import openai
import pytest

from tests.http.servers import KEY

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.http.servers import Server

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]

MODEL = "demo"
ASKED: list[Any] = [{"role": "user", "content": "What is a list?"}]


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0) as made:
        yield made


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).owned_by == "headrace"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_a_chat_whole_and_streamed_says_the_same(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {
        "model": MODEL,
        "messages": ASKED,
        "max_tokens": 12,
        "temperature": 0.8,
        "seed": 5,
    }
    whole = client.chat.completions.create(**asked)
    [choice] = whole.choices
    assert choice.finish_reason == "length"
    assert choice.message.role == "assistant"
    assert choice.message.content
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 12
    assert whole.usage.total_tokens == 12 + whole.usage.prompt_tokens
    chunks = list(
        client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage == whole.usage
    assert chunks[-1].choices == []
    assert all(chunk.usage is None for chunk in chunks[:-1])
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1])
    assert text == choice.message.content
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (
        len(chunks) - 2
    ) + ["length"]
    assert len({chunk.id for chunk in chunks}) == 1


def test_the_same_seed_gives_the_same_text_and_another_another(client: openai.OpenAI) -> None:
    def said(seed: int) -> str:
        made = client.completions.create(
            model=MODEL, prompt="import os", max_tokens=12, temperature=1.0, seed=seed
        )
        return made.choices[0].text

    assert said(1) == said(1)
    assert said(1) != said(2)


def test_several_choices_of_several_prompts(client: openai.OpenAI) -> None:
    made = client.completions.create(
        model=MODEL,
        prompt=["def f", "class A"],
        n=2,
        max_tokens=4,
        echo=True,
        seed=3,
        temperature=1,
    )
    texts = [choice.text for choice in made.choices]
    assert [choice.index for choice in made.choices] == [0, 1, 2, 3]
    assert [text[:5] for text in texts] == ["def f", "def f", "class", "class"]
    assert texts[0] != texts[1]
    assert made.usage is not None
    assert made.usage.completion_tokens == 16


def test_streams_of_several_choices_are_told_apart(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {
        "model": MODEL, "messages": ASKED, "max_tokens": 5, "n": 2, "seed": 9, "temperature": 1.0
    }  # fmt: skip
    whole = client.chat.completions.create(**asked)
    texts = ["", ""]
    for chunk in client.chat.completions.create(**asked, stream=True):
        [choice] = chunk.choices
        texts[choice.index] += choice.delta.content or ""
    assert texts == [choice.message.content for choice in whole.choices]


def test_stop_strings_end_the_text_and_are_not_part_of_it(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {
        "model": MODEL,
        "prompt": "import ",
        "max_tokens": 30,
        "temperature": 0,
    }
    whole = client.completions.create(**asked).choices[0].text
    stop = whole[8:11]
    made = client.completions.create(**asked, stop=["never said", stop])
    assert made.choices[0].finish_reason == "stop"
    assert made.choices[0].text == whole[: whole.find(stop)]
    assert made.usage is not None
    assert made.usage.completion_tokens < 30
    streamed = list(client.completions.create(**asked, stop=stop, stream=True))
    assert "".join(chunk.choices[0].text for chunk in streamed) == whole[: whole.find(stop)]
    assert streamed[-1].choices[0].finish_reason == "stop"


def test_tokens_as_a_prompt(client: openai.OpenAI, server: Server) -> None:
    tokens = server.ask("/tokenize", prompt="import os").json()
    assert tokens["count"] == len(tokens["tokens"])
    asked: dict[str, Any] = {"model": MODEL, "max_tokens": 4, "temperature": 0}
    by_text = client.completions.create(**asked, prompt="import os")
    by_tokens = client.completions.create(**asked, prompt=tokens["tokens"])
    assert by_text.choices[0].text == by_tokens.choices[0].text
    back = server.ask("/detokenize", tokens=tokens["tokens"]).json()
    assert back == {"prompt": "import os"}
    rendered = server.ask("/tokenize", messages=ASKED).json()["tokens"]
    text = server.ask("/detokenize", tokens=rendered).json()["prompt"]
    assert text == "Question: What is a list?\n\nAnswer:"


def test_max_completion_tokens_and_ignore_eos(client: openai.OpenAI) -> None:
    made = client.chat.completions.create(
        model=MODEL, messages=ASKED, max_completion_tokens=3, extra_body={"ignore_eos": True}
    )
    assert made.usage is not None
    assert made.usage.completion_tokens == 3


def test_errors_are_the_clients_own(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=MODEL, prompt="x" * 20_000, max_tokens=4)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=MODEL, prompt="x", max_tokens=5000)
    assert caught.value.code == "context_length_exceeded"
    assert caught.value.param == "max_tokens"
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt="x")
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=client.base_url, api_key="wrong", max_retries=0).models.list()
