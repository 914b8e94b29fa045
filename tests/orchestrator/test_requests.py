"""What is accepted, what a client hears, what it cost."""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec
import pytest

from orchestrator.core.events import RequestCounters, RequestDone, Submit, TokenOut
from orchestrator.requests import RequestBook, why_not_sampled
from orchestrator.stage_times import StageTimes
from orchestrator.text_model import TextModel
from protocol.messages import (
    Accepted,
    Finished,
    Generate,
    Generated,
    Rejected,
    RequestId,
    SamplingParams,
    TokenLogprobs,
)
from tests.orchestrator.byte_model import byte_tokenizer

MODEL = TextModel(byte_tokenizer(), frozenset({10}), 64, 256)
CLIENT = b"client"


def make_book() -> RequestBook:
    return RequestBook(MODEL, 6, 24)


def ask(name: str = "mine", **fields: object) -> Generate:
    return Generate(RequestId(name), **{"prompt": "Hello", "max_tokens": 5, **fields})


def accept(book: RequestBook, generate: Generate, num_restarts: int = 0) -> tuple[Accepted, Submit]:
    answer = book.accept(CLIENT, generate, num_restarts)
    assert not isinstance(answer, Rejected), answer.sentence
    return answer


def test_a_request_from_prompt_to_stats() -> None:
    book = make_book()
    accepted, submit = accept(book, ask(), num_restarts=3)
    assert accepted == Accepted(RequestId("mine"), 5)
    assert submit.prompt_tokens == MODEL.encode("Hello")
    assert (submit.max_tokens, submit.eos_tokens) == (5, frozenset({10}))
    tokens = MODEL.encode("é!")
    heard = [book.token(TokenOut(submit.request, token, f"d{token}")) for token in tokens]
    assert heard == [
        (CLIENT, Generated(RequestId("mine"), [tokens[0]], "")),
        (CLIENT, Generated(RequestId("mine"), [tokens[1]], "é")),
        (CLIENT, Generated(RequestId("mine"), [tokens[2]], "!")),
    ]
    times = StageTimes()
    times.add("step", 7000)
    counters = RequestCounters(layer_steps=9, hits=5, fills=3, cpu_experts=1, fill_bytes=300)
    [(client, finished)] = book.done(
        RequestDone(submit.request, "length", counters), times, num_restarts=4
    )
    assert client == CLIENT
    assert isinstance(finished, Finished)
    assert (finished.reason, finished.text) == ("length", "é!")
    stats = finished.stats
    assert (stats.prompt_tokens, stats.generated_tokens) == (5, 3)
    assert (stats.layer_steps, stats.hits, stats.fills, stats.cpu_experts) == (9, 5, 3, 1)
    assert (stats.worker_restarts, stats.slots, stats.total_experts) == (1, 6, 24)
    assert stats.stages["step"].p50_us == 7.0
    assert stats.tokens_per_s > 0
    assert 0 < stats.ttft_s <= stats.elapsed_s
    digest = ""
    for token in tokens:
        digest = hashlib.sha256(f"{digest}d{token}".encode()).hexdigest()
    assert stats.logits_digest == digest
    assert book.clients() == []


def test_held_back_text_comes_with_the_end() -> None:
    book = make_book()
    _, submit = accept(book, ask())
    first = MODEL.encode("é")[0]
    book.token(TokenOut(submit.request, first, ""))
    rest, finished = (
        message
        for _, message in book.done(
            RequestDone(submit.request, "length", RequestCounters()), StageTimes(), 0
        )
    )
    assert isinstance(rest, Generated)
    assert (rest.tokens, rest.text) == ([], "\ufffd")
    assert isinstance(finished, Finished)
    assert finished.text == "\ufffd"


def test_same_name_of_two_clients_is_two_requests() -> None:
    book = make_book()
    _, first = accept(book, ask())
    answer = book.accept(b"other", ask(), 0)
    assert not isinstance(answer, Rejected)
    assert answer[1].request != first.request
    assert book.find(CLIENT, RequestId("mine")) == first.request
    assert set(book.clients()) == {CLIENT, b"other"}
    again = book.accept(CLIENT, ask(), 0)
    assert isinstance(again, Rejected)
    assert "open already" in again.sentence


def test_room_in_the_context_bounds_the_answer() -> None:
    _, submit = accept(make_book(), ask(max_tokens=1000))
    assert submit.max_tokens == 64 - 5


def test_ignore_eos() -> None:
    _, submit = accept(make_book(), ask(ignore_eos=True))
    assert submit.eos_tokens == frozenset()


def test_the_end_of_the_pipeline_reaches_every_client() -> None:
    book = make_book()
    accept(book, ask())
    accept(book, ask("second"))
    messages = [message for _, message in book.abandon("It is over.", 0)]
    assert [message.request for message in messages] == ["mine", "second"]
    assert all(message.reason == "error" for message in messages)
    assert all(message.sentence == "It is over." for message in messages)
    assert book.abandon("It is over.", 0) == []


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"prompt": ""}, "empty"),
        ({"prompt": "x" * 64}, "64 tokens and the context holds 64"),
        ({"prompt": "x" * 5_000_000}, "5000000 characters"),
        ({"prompt_tokens": [1, 256]}, "Token 256"),
        ({"prompt_tokens": [-1]}, "Token -1"),
        ({"prompt_tokens": []}, "empty"),
        ({"max_tokens": 0}, "at least one"),
        ({"max_tokens": -3}, "at least one"),
        ({"sampling": SamplingParams(temperature=-1)}, "temperature"),
        ({"sampling": SamplingParams(logit_bias={256: 1.0})}, "vocabulary of 256"),
    ],
)
def test_rejects_with_a_sentence(fields: dict[str, object], says: str) -> None:
    book = make_book()
    answer = book.accept(CLIENT, ask(**fields), 0)
    assert isinstance(answer, Rejected)
    assert says in answer.sentence
    assert book.clients() == []


def test_logprobs_travel_with_their_token() -> None:
    book = make_book()
    _, submit = accept(book, ask())
    logprobs = TokenLogprobs(-0.5, [72, 73], [-0.5, -1.5])
    heard = book.token(TokenOut(submit.request, 72, "", logprobs))
    assert heard is not None
    assert heard[1].logprobs == [logprobs]


def test_prompt_tokens_win_over_text() -> None:
    _, submit = accept(make_book(), ask(prompt_tokens=[7, 8]))
    assert submit.prompt_tokens == [7, 8]


@pytest.mark.parametrize(
    "change",
    [
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"temperature": -0.1},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_p": float("nan")},
        {"min_p": -0.1},
        {"min_p": 1.0},
        {"min_p": float("nan")},
        {"seed": -1},
        {"seed": 2**63},
        {"presence_penalty": 2.5},
        {"frequency_penalty": float("nan")},
        {"repetition_penalty": 0.0},
        {"repetition_penalty": 1e-300},
        {"logit_bias": {1: 101.0}},
        {"logit_bias": dict.fromkeys(range(1025), 1.0)},
        {"num_logprobs": 21},
    ],
)
def test_sampling_out_of_range(change: dict[str, Any]) -> None:
    assert why_not_sampled(SamplingParams()) is None
    sentence = why_not_sampled(msgspec.structs.replace(SamplingParams(), **change))
    assert sentence is not None
    assert next(iter(change)) in sentence
