"""A `headrace serve` process and what a test asks it."""

from __future__ import annotations

import json
import re
import time
from typing import TYPE_CHECKING, Any

import httpx

from tests.process.pipelines import PATIENCE_S, REPO_ROOT

if TYPE_CHECKING:
    from pathlib import Path

    from tests.process.pipelines import Processes

KEY = "a-key-for-tests"
DEMO = REPO_ROOT / "models/demo"


class Server:
    """Starts at once; `client` is an httpx client with the key."""

    def __init__(
        self, processes: Processes, run_dir: Path, *flags: str, model: Path = DEMO
    ) -> None:
        self._processes = processes
        self.process = processes.headrace(
            "serve", model, "--port", "0", "--run-dir", run_dir, "--slots", "50%", *flags
        )
        self.url = self._wait_for_url()
        self.client = httpx.Client(
            base_url=self.url, headers={"authorization": f"Bearer {KEY}"}, timeout=PATIENCE_S
        )

    def said(self) -> str:
        return self._processes.said(self.process)

    def _wait_for_url(self) -> str:
        deadline = time.monotonic() + PATIENCE_S
        while not (found := re.search(r"on (http://[\w.:\[\]]+)", self.said())):
            assert self.process.poll() is None, self.said()
            assert time.monotonic() < deadline, "it does not listen"
            time.sleep(0.05)
        return found[1]

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while self.client.get("/health").status_code != 200:
            assert self.process.poll() is None, self.said()
            assert time.monotonic() < deadline, "it does not get ready"
            time.sleep(0.1)

    def ask(self, path: str, **body: Any) -> httpx.Response:
        return self.client.post(path, json=body)

    def complete(self, **body: Any) -> dict[str, Any]:
        answer = self.ask("/v1/completions", **body)
        assert answer.status_code == 200, answer.text
        value: dict[str, Any] = answer.json()
        return value

    def chat(self, text: str = "What is a list?", **body: Any) -> dict[str, Any]:
        answer = self.ask(
            "/v1/chat/completions", messages=[{"role": "user", "content": text}], **body
        )
        assert answer.status_code == 200, answer.text
        value: dict[str, Any] = answer.json()
        return value

    def events(self, path: str, **body: Any) -> list[dict[str, Any]]:
        """All chunks of a stream; it must end with [DONE]."""
        with self.client.stream("POST", path, json={**body, "stream": True}) as answer:
            assert answer.status_code == 200
            assert answer.headers["content-type"].startswith("text/event-stream")
            lines = [line for line in answer.iter_lines() if line.startswith("data: ")]
        assert lines[-1] == "data: [DONE]"
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]

    def stats(self) -> dict[str, Any]:
        value: dict[str, Any] = self.client.get("/v1/stats").json()
        return value

    def wait_until_idle(self) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while any(self.stats()["requests"][name] for name in ("running", "waiting")):
            assert time.monotonic() < deadline, "requests are left"
            time.sleep(0.02)
