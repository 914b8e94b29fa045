"""A `headrace serve` process for benchmarks, and a client that costs little.

The client shares two processors with what it measures, so it is one thread that reads sockets: no
HTTP library, no parsing beyond what a figure needs.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parent.parent
KEY = "benchmark"
_START_TIMEOUT_S = 300.0


@dataclass
class Server:
    process: subprocess.Popen[bytes]
    port: int
    run_dir: Path
    log: Path


@contextlib.contextmanager
def server(model: Path, folder: Path, *flags: object) -> Iterator[Server]:
    """A server that is ready, until the end of the context."""
    log, run_dir = folder / "server.log", folder / "run"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "orchestrator.cli.main", "serve", str(model),
             "--port", "0", "--run-dir", str(run_dir), "--api-key", KEY,
             "--log-level", "warning", *map(str, flags)],
            cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.DEVNULL, stdout=out, stderr=out,
        )  # fmt: skip
    try:
        deadline = time.monotonic() + _START_TIMEOUT_S
        port = 0
        while True:
            found = re.search(r"on http://127\.0\.0\.1:(\d+)", log.read_text(errors="replace"))
            port = int(found[1]) if found else 0
            if port and asyncio.run(call(port, "GET", "/health")).status == 200:
                break
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"The server did not start:\n{log.read_text(errors='replace')}")
            time.sleep(0.2)
        yield Server(process, port, run_dir, log)
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@dataclass
class Answer:
    """One answer. `stamps_s` are when the parts of a stream came that held text."""

    status: int
    body: bytes = b""
    stamps_s: list[float] = field(default_factory=list)
    started_s: float = 0.0
    ended_s: float = 0.0
    is_complete: bool = False

    def json(self) -> Any:
        return json.loads(self.body)

    def text(self) -> str:
        """The text of a completion, whole or streamed."""
        if b"data: [DONE]" not in self.body:
            return str(self.json()["choices"][0]["text"])
        chunks = [
            json.loads(line[6:]) for line in self.body.split(b"\n") if line.startswith(b"data: {")
        ]
        return "".join(c["choices"][0]["text"] for c in chunks if c.get("choices"))


async def call(
    port: int,
    method: str,
    path: str,
    body: object = None,
    *,
    raw: bytes | None = None,
    abort_after: int | None = None,
) -> Answer:
    """One request on a connection of its own. `abort_after`: leave after so many parts, 0 at once.

    Raises:
        OSError: nobody listens, or the connection broke.
    """
    content = raw if raw is not None else b"" if body is None else json.dumps(body).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        started_s = time.monotonic()
        writer.write(
            f"{method} {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\n"
            "connection: close\r\ncontent-type: application/json\r\n"
            f"content-length: {len(content)}\r\n\r\n".encode()
            + content
        )
        await writer.drain()
        if abort_after == 0:
            return Answer(0, started_s=started_s)
        head = await reader.readuntil(b"\r\n\r\n")
        answer = Answer(int(head.split(b" ", 2)[1]), started_s=started_s)
        is_chunked = b"transfer-encoding: chunked" in head.lower()
        while True:
            if is_chunked:
                num_bytes = int(await reader.readline() or b"0", 16)
                part = await reader.readexactly(num_bytes + 2) if num_bytes else b""
                part = part[:-2]
            else:
                part = await reader.read(65536)
            if not part:
                break
            answer.body += part
            if b'"text":"' in part:
                answer.stamps_s += [time.monotonic()] * part.count(b"data: {")
            if abort_after is not None and len(answer.stamps_s) >= abort_after:
                return answer
        answer.ended_s = time.monotonic()
        answer.is_complete = not is_chunked or answer.body.endswith(b"data: [DONE]\n\n")
        return answer
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
