"""What the server refuses, counts and survives: a real one, with the demo model."""

from __future__ import annotations

import json
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

from tests.http.servers import KEY
from tests.process.pipelines import wait_until

if TYPE_CHECKING:
    from tests.http.servers import Server

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]

ASKED = [{"role": "user", "content": "What is a list?"}]
CHAT, PLAIN = "/v1/chat/completions", "/v1/completions"


def test_who_may_ask_what(server: Server) -> None:
    nobody = {"authorization": ""}
    for path in ("/health", "/ready", "/version", "/"):
        assert server.client.get(path, headers=nobody).status_code == 200
    for path in ("/health", "/ready"):
        answer = server.client.head(path, headers=nobody)
        assert (answer.status_code, answer.content) == (200, b"")
    for path in ("/v1/models", "/v1/stats", "/v1/config", "/metrics", "/admin/workers", "/none"):
        for header in ("", "Bearer", "Bearer wrong", f"Basic {KEY}", f"Bearer {KEY}x", "\u00e9"):
            raw = header.encode("latin-1")
            answer = server.client.get(path, headers={b"authorization": raw})
            assert answer.status_code == 401, path
            assert answer.json()["error"]["code"] == "invalid_api_key"
    assert server.client.get("/none").status_code == 404
    assert server.client.get(CHAT).status_code == 405


def test_a_body_without_its_type_is_told_the_header(server: Server) -> None:
    said = b'{"prompt": "a"}'
    answer = server.client.post(PLAIN, content=said, headers={"content-type": "text/plain"})
    assert answer.status_code == 400
    assert "Content-Type" in answer.json()["error"]["message"]


def test_ids_of_requests(server: Server) -> None:
    answer = server.client.get("/version", headers={"x-request-id": "my-id.7"})
    assert answer.headers["x-request-id"] == "my-id.7"
    answer = server.client.get("/version", headers={"x-request-id": "not sane" * 40})
    assert answer.headers["x-request-id"].startswith("req-")


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {}, "messages"),
        (CHAT, {"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        (CHAT, {"messages": ASKED, "no_such_field": 1}, "no_such_field"),
        (CHAT, {"messages": ASKED, "temperature": -1}, "temperature"),
        (CHAT, {"messages": ASKED, "stop": ["x"] * 17}, "stop"),
        (CHAT, {"messages": ASKED, "stop": ""}, "stop"),
        (CHAT, {"messages": ASKED, "n": 0}, "n"),
        (CHAT, {"messages": ASKED, "n": True}, "n"),
        (CHAT, {"messages": ASKED, "max_tokens": True}, "max_tokens"),
        (CHAT, {"messages": ASKED, "max_tokens": 0}, "max_tokens"),
        (CHAT, {"messages": ASKED, "max_tokens": 10**30}, "max_tokens"),
        (CHAT, {"messages": ASKED * 51}, "messages"),
        (CHAT, {"messages": ASKED, "top_logprobs": 2}, "top_logprobs"),
        (CHAT, {"messages": ASKED, "top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        (CHAT, {"messages": ASKED, "logit_bias": {"x": 1}}, "logit_bias"),
        (CHAT, {"messages": ASKED, "logit_bias": {"4096": 1}}, "logit_bias"),
        (CHAT, {"messages": ASKED, "functions": [{}]}, "functions"),
        (CHAT, {"messages": ASKED, "modalities": ["audio"]}, "modalities"),
        (CHAT, {"messages": ASKED, "reasoning_effort": "high"}, "reasoning_effort"),
        (CHAT, {"messages": ASKED, "tool_choice": "required"}, "tool_choice"),
        (CHAT, {"messages": ASKED, "stream_options": {"include_usage": True}}, "stream_options"),
        (PLAIN, {}, "prompt"),
        (PLAIN, {"prompt": ""}, "prompt"),
        (PLAIN, {"prompt": []}, "prompt"),
        (PLAIN, {"prompt": [5000]}, "prompt"),
        (PLAIN, {"prompt": "x", "suffix": "y"}, "suffix"),
        (PLAIN, {"prompt": "x", "best_of": 2}, "best_of"),
        (PLAIN, {"prompt": "x", "echo": True, "logprobs": 1}, "logprobs"),
        (PLAIN, {"prompt": ["x"] * 9, "n": 2}, "n"),
        ("/tokenize", {}, "prompt"),
        ("/detokenize", {"tokens": [4096]}, "tokens"),
    ],
)
def test_a_bad_request_names_its_field(
    server: Server, path: str, body: dict[str, Any], param: str
) -> None:
    answer = server.ask(path, **body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["message"]
    assert error["param"] == param


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[1]",
        b"null",
        b"\xff\xfe",
        b'{"prompt": "\\ud800", "max_tokens": 1}',
        b'{"prompt": "x", "\\udfff": 1}',
        b'{"prompt": "\xed\xa0\x80", "max_tokens": 1}',  # half of a pair, not escaped
        '{"prompt": "\\ud800", "max_tokens": 1}'.encode("utf-16-le"),
        '{"prompt": "\ud800", "max_tokens": 1}'.encode("utf-32-be", "surrogatepass"),
        b'{"prompt": "x", "temperature": NaN}',
        b'{"prompt": ' + b"[" * 50_000,
        b'{"prompt": "x", "logit_bias": {"1": Infinity}}',
    ],
)
def test_rubbish_is_a_bad_request(server: Server, body: bytes) -> None:
    answer = server.client.post(PLAIN, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["message"].startswith(("The body", "temperature", "logit_bias"))
    assert answer.json()["error"]["message"].endswith(".")


def test_json_of_another_type_is_told_what_it_lacks(server: Server) -> None:
    answer = server.client.post(
        PLAIN, content=b'{"prompt": "x"}', headers={"content-type": "text/plain"}
    )
    assert answer.status_code == 400
    assert "Content-Type: application/json" in answer.json()["error"]["message"]


def test_a_large_body_is_refused_stated_or_not(server: Server) -> None:
    headers = {"content-type": "application/json"}
    large = b'{"prompt": "' + b"x" * 1_000_000 + b'"}'
    assert server.client.post(PLAIN, content=large, headers=headers).status_code == 413
    pieces = (large[place : place + 65536] for place in range(0, len(large), 65536))
    answer = server.client.post(PLAIN, content=pieces, headers=headers)
    assert answer.status_code == 413
    assert answer.json()["error"]["type"] == "invalid_request_error"


def test_a_refused_body_that_is_sent_to_its_end_gets_its_answer(server: Server) -> None:
    """Whoever closes with bytes unread resets the connection, and takes the answer with it."""
    size = 20_000_000
    head = (
        f"POST {PLAIN} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
        f"Authorization: Bearer {KEY}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {size}\r\n\r\n"
    )
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), 30) as connection:
        connection.sendall(head.encode())
        for _ in range(0, size, 1_000_000):
            connection.sendall(bytes(1_000_000))
        answer = b""
        while piece := connection.recv(65536):
            answer += piece
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert answer.endswith(b"}")


def test_pages_elsewhere_may_ask_if_they_were_named(server: Server) -> None:
    wish = {
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization",
    }
    answer = server.client.options(CHAT, headers={"origin": "https://pages.example", **wish})
    assert answer.headers["access-control-allow-origin"] == "https://pages.example"
    answer = server.client.options(CHAT, headers={"origin": "https://other.example", **wish})
    assert "access-control-allow-origin" not in answer.headers


def test_a_full_queue_is_told_with_a_time(server: Server) -> None:
    def ask(number: int) -> tuple[int, Any]:
        answer = server.ask(PLAIN, prompt="x", max_tokens=20, n=8, ignore_eos=True)
        return answer.status_code, answer

    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(ask, range(6)))
    refused = [answer for status, answer in answers if status == 429]
    assert {status for status, _ in answers} == {200, 429}
    assert refused[0].json()["error"]["code"] == "queue_full"
    assert int(refused[0].headers["retry-after"]) >= 1
    server.wait_until_idle()


def test_a_chat_is_events_as_openai_writes_them(server: Server) -> None:
    events = server.events(CHAT, messages=ASKED, max_tokens=3, temperature=0)
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert events[-1]["choices"][0]["delta"] == {}
    assert all(event["object"] == "chat.completion.chunk" for event in events)


def test_silence_is_filled_with_comments(server: Server) -> None:
    # A prompt long enough that its first token takes longer than --keep-alive.
    prompt = list(range(1, 1900))
    with server.client.stream(
        "POST", PLAIN, json={"prompt": prompt, "max_tokens": 1, "stream": True}
    ) as answer:
        lines = list(answer.iter_lines())
    assert any(line.startswith(":") for line in lines)
    assert lines[-2] == "data: [DONE]"


@pytest.mark.parametrize("stream", [True, False])
def test_work_stops_with_its_client(server: Server, stream: bool) -> None:
    server.wait_until_idle()
    before = server.stats()["requests"]["ended"].get("abort", 0)
    body = {"prompt": "x", "max_tokens": 2000, "ignore_eos": True, "stream": stream}
    connection = open_request(server, body)
    wait_until(lambda: server.stats()["requests"]["running"] == 1)
    connection.close()
    wait_until(lambda: server.stats()["requests"]["ended"].get("abort", 0) == before + 1, 20)
    server.wait_until_idle()


def test_three_hundred_aborted_requests_leave_nothing(server: Server) -> None:
    server.wait_until_idle()
    before = server.stats()
    ended = before["requests"]["ended"]
    for number in range(300):
        body = {"prompt": "x", "max_tokens": 50, "ignore_eos": True, "stream": number % 2 == 0}
        connection = open_request(server, body)
        if number % 4 == 0:  # a stream that has begun
            connection.recv(64)
        connection.close()

    def num_over() -> int:
        now = server.stats()["requests"]["ended"]
        return sum(now.values()) - sum(ended.values())

    # Some may have been gone before their request was read, and never began.
    wait_until(lambda: server.stats()["requests"]["running"] == 0 and num_over() > 100)
    server.wait_until_idle()
    metrics = server.client.get("/metrics").text
    assert "headrace:num_requests_running 0.0" in metrics
    assert "headrace:num_requests_waiting 0.0" in metrics
    assert len(server.complete(prompt="x", max_tokens=3)["choices"]) == 1


def open_request(server: Server, body: dict[str, Any]) -> socket.socket:
    host, _, port = server.url.removeprefix("http://").partition(":")
    connection = socket.create_connection((host, int(port)), 30)
    content = json.dumps(body).encode()
    connection.sendall(
        f"POST {PLAIN} HTTP/1.1\r\nhost: {host}\r\nauthorization: Bearer {KEY}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n".encode()
        + content
    )
    return connection


def test_figures_seen_from_outside(server: Server) -> None:
    server.complete(prompt="import os", max_tokens=5, ignore_eos=True)
    stats = server.stats()
    assert stats["state"] == "ready"
    assert {worker["role"] for worker in stats["workers"]} == {
        "gpu_worker", "dma_worker", "cpu_worker",
    }  # fmt: skip
    slots = stats["slots"]
    assert slots["total"] == 96
    assert sum(slots["resident_per_layer"]) == slots["resident"]
    assert slots["experts_per_layer"] == [24] * 8
    experts = stats["experts"]
    assert min(experts["hits"], experts["fills"], experts["fill_bytes"]) > 0
    text = server.client.get("/metrics").text
    for series in (
        "headrace:time_to_first_token_seconds_count",
        "headrace:inter_token_latency_seconds_bucket",
        "headrace:e2e_request_latency_seconds_sum",
        'headrace:request_success_total{finished_reason="length"',
        'headrace:expert_lookups_total{result="hit"}',
        'headrace:expert_bytes_total{path="link"}',
        'headrace:branch_seconds_total{branch="cpu"}',
        'headrace:worker_up{worker="gpu_worker"} 1.0',
        'headrace:calibrated_bytes_per_second{path="cpu"}',
        'headrace:cache_slots{state="resident"}',
        "headrace:ipc_wait_seconds_total",
        "headrace:split_q_ratio",
    ):
        assert series in text, series


def test_the_configuration_can_be_read_and_keeps_its_secret(server: Server) -> None:
    config = server.client.get("/v1/config").json()
    assert config["slots"] == {"value": "50%", "source": "flag"}
    assert config["api-key"] == {"value": "(set)", "source": "flag"}
    assert config["drain-timeout"] == {"value": 30.0, "source": "default"}
    assert KEY not in json.dumps(config)
    assert KEY not in server.said()


def test_slots_can_be_fewer_and_more_again(server: Server) -> None:
    asked = {"prompt": "import os", "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    text = server.complete(**asked)["choices"][0]["text"]
    assert server.ask("/admin/cache", slots="5%").json() == {"slots": 9, "most": 96}
    slots = server.stats()["slots"]
    assert (slots["total"], slots["resident"] + slots["filling"] + slots["free"]) == (9, 9)
    assert sum(slots["resident_per_layer"]) == slots["resident"]
    assert server.complete(**asked)["choices"][0]["text"] == text
    assert server.stats()["slots"]["resident"] <= 9
    assert server.ask("/admin/cache", slots=96).status_code == 200
    assert server.complete(**asked)["choices"][0]["text"] == text
    assert server.stats()["slots"]["resident"] > 9
    for wrong in (97, "200%", 0, "many"):
        answer = server.ask("/admin/cache", slots=wrong)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "slots")


def test_a_trace_of_what_happens_meanwhile(server: Server) -> None:
    assert server.ask("/admin/trace", action="stop").status_code == 409
    assert server.ask("/admin/trace", action="start").status_code == 200
    assert server.ask("/admin/trace", action="start").status_code == 409
    server.complete(prompt="import os", max_tokens=4, ignore_eos=True)
    trace = server.ask("/admin/trace", action="stop").json()
    slices = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert sum(event["name"].startswith("step ") for event in slices) == 4
    names = {event["args"]["name"] for event in trace["traceEvents"] if event["ph"] == "M"}
    assert any(name.startswith("cpu_worker (pid") for name in names)


def test_a_worker_is_replaced_and_no_request_is_lost(server: Server) -> None:
    listed = server.client.get("/admin/workers").json()
    assert listed["missing"] == []
    [pid] = [worker["pid"] for worker in listed["workers"] if worker["role"] == "cpu_worker"]
    assert server.ask("/admin/workers", restart=1).status_code == 404
    with ThreadPoolExecutor(1) as pool:
        text = pool.submit(
            server.complete, prompt="import ", max_tokens=60, ignore_eos=True, temperature=0
        )
        wait_until(lambda: server.stats()["requests"]["running"] == 1 or text.done())
        assert server.ask("/admin/workers", restart=pid).status_code == 200
        wait_until(lambda: server.client.get("/health").status_code == 503)
        degraded = server.client.get("/health").json()
        assert text.result()["usage"]["completion_tokens"] == 60
    assert degraded["status"] in ("degraded", "ready")
    if degraded["status"] == "degraded":
        assert degraded["missing_workers"] == ["cpu_worker"]
    wait_until(lambda: server.client.get("/health").status_code == 200)
    assert server.stats()["restarts"] == {"cpu_worker": 1}
    again = server.complete(prompt="import ", max_tokens=60, ignore_eos=True, temperature=0)
    assert again["choices"][0]["text"] == text.result()["choices"][0]["text"]
