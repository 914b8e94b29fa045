"""What the server says of its own interface, asked in every way that it allows and many it does
not: no answer is a fault of the server's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import hypothesis
import pytest
import schemathesis

from tests.http.servers import KEY

if TYPE_CHECKING:
    from tests.http.servers import Server

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]

#: A generated body may well ask for a long text: this many tokens is all that it gets.
MAX_TOKENS = 3
OPERATIONS = [
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/v1/models/{model}"),
    ("GET", "/health"),
    ("GET", "/metrics"),
]


@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_no_answer_is_a_fault(server: Server, method: str, path: str) -> None:
    schema = schemathesis.openapi.from_dict(server.client.get("/openapi.json").json())
    operation = schema[path][method]
    statuses = set()

    @hypothesis.settings(
        max_examples=40 if method == "POST" else 10,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(case=operation.as_strategy())
    def ask(case: Any) -> None:
        if isinstance(case.body, dict) and "completions" in path:
            case.body["max_tokens"] = MAX_TOKENS
            case.body.pop("max_completion_tokens", None)
            case.body.pop("n", None)
        answer = case.call(base_url=server.url, headers={"authorization": f"Bearer {KEY}"})
        statuses.add(answer.status_code)
        assert answer.status_code < 500, answer.text
        if answer.status_code >= 400:
            assert answer.json()["error"]["message"]

    restarts = server.stats()["restarts"]
    ask()
    assert statuses
    assert server.stats()["restarts"] == restarts  # nothing that was asked killed a worker
