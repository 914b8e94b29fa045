"""A server from its first answer to its last, and the mistakes that are told before it begins."""

from __future__ import annotations

import json
import re
import shutil
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

from tests.http.servers import DEMO, Server
from tests.process.pipelines import REPO_ROOT, Processes, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]

PLAIN = "/v1/completions"
#: Tokens of a text that has begun and not ended when the server is told to end.
NUM_SHORT = 150


def read_stream(server: Server, max_tokens: int) -> list[dict[str, Any]]:
    return server.events(PLAIN, prompt="import os", max_tokens=max_tokens, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("life")


@pytest.fixture(scope="module")
def keyless(folder: Path) -> Iterator[tuple[Processes, Server]]:
    """A server without a key, for this module's tests one after the other; the last ends it."""
    config = folder / "mine.toml"
    config.write_text('slots = "10%"\nlog-format = "json"\ndrain_timeout = 100\n')
    processes = Processes(folder)
    try:
        server = Server(processes, folder / "run", "--config", str(config))
        yield processes, server
        server.client.close()
    finally:
        processes.end()


def test_while_loading_and_then(keyless: tuple[Processes, Server], folder: Path) -> None:
    _, server = keyless
    loading = server.client.get("/health")
    assert loading.status_code == 503
    assert loading.json()["status"] == "loading"
    assert server.client.get("/ready").status_code == 503
    early = server.ask(PLAIN, prompt="x", max_tokens=1)
    # It answers 503 until the model is loaded, and then waits for the workers.
    if early.status_code != 200:
        assert early.status_code == 503
        assert int(early.headers["retry-after"]) >= 1
        assert early.json()["error"]["code"] == "loading"
    server.wait_until_ready()
    settings = server.client.get("/v1/config").json()
    assert settings["slots"] == {"value": "50%", "source": "flag"}
    assert settings["drain-timeout"] == {"value": 100.0, "source": str(folder / "mine.toml")}
    refused = server.ask("/admin/drain")
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "no_key")


def test_chat_and_top(keyless: tuple[Processes, Server], tmp_path: Path) -> None:
    processes, server = keyless
    done = subprocess.run(
        [sys.executable, "-P", "-m", "orchestrator.cli.main", "chat", "--url", server.url,
         "--max-tokens", "5", "--temperature", "0"],
        input="What is a list?", capture_output=True, text=True, timeout=60, cwd=REPO_ROOT,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    whole = server.chat(max_tokens=5, temperature=0)
    assert done.stdout == whole["choices"][0]["message"]["content"] + "\n"
    seen = processes.call("top", "--once", "--url", server.url)
    assert seen.returncode == 0, seen.stderr
    for words in ("demo", "tokens/s", "hit rate", "GB/s", "residency by layer", "gpu_worker"):
        assert words in seen.stdout
    nobody = processes.call("top", "--once", "--url", "http://127.0.0.1:9")
    assert nobody.returncode == 2
    assert "No server answers" in nobody.stderr


def test_the_page_shows_figures_and_asks_nobody_else(
    keyless: tuple[Processes, Server], tmp_path: Path
) -> None:
    _, server = keyless
    page = server.client.get("/")
    assert page.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert not re.search(r"https?://", page.text)
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        pytest.skip("the rest needs chromium, which is not installed")
    done = subprocess.run(
        [chromium, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
         f"--user-data-dir={tmp_path}", "--virtual-time-budget=4000", "--dump-dom",
         f"{server.url}/"],
        capture_output=True, text=True, timeout=100, check=True,
    )  # fmt: skip
    text = re.sub(r"<script>.*?</script>", "", done.stdout, flags=re.DOTALL)
    for words in (">demo<", ">ready<", "hits", "96 of 96 slots", "gpu_worker", "cpu_worker"):
        assert words in text
    assert 'id="cards" hidden' not in text


def test_the_first_signal_drains_and_the_second_ends(keyless: tuple[Processes, Server]) -> None:
    _, server = keyless
    server.wait_until_ready()  # nobody else has waited where this test runs alone
    with ThreadPoolExecutor(2) as pool:
        short = pool.submit(read_stream, server, NUM_SHORT)
        wait_until(lambda: running(server) == 1)
        long = pool.submit(read_stream, server, 2000)
        wait_until(lambda: running(server) == 2 or short.done())
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: server.client.get("/health").json()["status"] == "draining")
        assert server.client.get("/health").status_code == 503
        refused = server.ask(PLAIN, prompt="x", max_tokens=1)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
        assert short.result()[-1]["choices"][0]["finish_reason"] == "length"
        assert server.process.poll() is None
        server.process.send_signal(signal.SIGTERM)
        last = long.result()[-1]
    assert last["error"]["code"] == "engine_error"
    assert server.process.wait(30) == 0
    check_log(server.said())


def running(server: Server) -> int:
    requests = server.stats()["requests"]
    return int(requests["running"] + requests["waiting"])


def check_log(said: str) -> None:
    lines = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    assert {line["process"] for line in lines} >= {"orchestrator", "gpu_worker", "cpu_worker"}
    paths = {line["path"] for line in lines if "path" in line}
    assert PLAIN in paths
    assert not paths & {"/health", "/ready"}  # asked all the time above
    # The long text may have been cut at the same number of tokens: not for its length.
    ends = (NUM_SHORT, "length")
    streams = [
        line for line in lines if (line.get("generated_tokens"), line.get("finish_reason")) == ends
    ]
    assert len(streams) == 1
    assert streams[0]["request_id"].startswith("req-")
    assert streams[0]["path"] == PLAIN
    assert not any("import os" in line["message"] for line in lines)  # no prompts in logs


def test_mistakes_are_one_sentence(tmp_path: Path, processes: Processes) -> None:
    config = tmp_path / "wrong.toml"
    config.write_text("slot = 5\n")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        cases = [
            ((), "No model is named"),
            ((DEMO, "--config", config), "did you mean slots?"),
            ((DEMO, "--port", "99999"), "not a port"),
            ((DEMO, "--host", "no.such.host.invalid"), "no address"),
            ((DEMO, "--host", "a..b"), "no address"),
            ((DEMO, "--port", port), "choose another --port"),
            ((tmp_path / "none", "--port", 0, "--run-dir", tmp_path / "r"), "no directory"),
        ]
        with ThreadPoolExecutor(2) as pool:
            results = list(pool.map(lambda case: processes.call("serve", *case[0]), cases))
    for (arguments, says), done in zip(cases, results, strict=True):
        assert done.returncode == 2, (arguments, done.stderr)
        assert says in done.stderr
        assert "Traceback" not in done.stderr
