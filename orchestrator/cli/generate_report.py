"""What `headrace generate` shows beside the text: waiting, the closing table, the JSON object."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING

import msgspec
from rich.table import Table

from orchestrator.cli.terminal import console_for
from protocol.sizes import size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from protocol.messages import Finished, RequestStats, Status

#: From its command to its HELLO a worker imports its libraries first, in a second or two.
_PATIENCE_S = 3.0
#: What each stage is, for people; docs/latency-log.md says it at length.
STAGE_TEXTS = {
    "dense": "norm, attention, router",
    "plan": "routing told, split decided",
    "gpu_hits": "resident experts",
    "dma": "fills over the link",
    "gpu_fills": "filled experts",
    "cpu": "misses on the CPU",
    "join": "hand-over and sum",
    "layer": "routed to joined",
    "sample": "head and sampler",
    "step": "whole step",
}


def spinner(text: str, *, is_shown: bool) -> contextlib.AbstractContextManager[object]:
    """A sign of life on a terminal."""
    console = console_for(sys.stderr)
    if not is_shown or not console.is_terminal:
        return contextlib.nullcontext()
    return console.status(text)


def say_waiting(missing_roles: Iterable[str]) -> None:
    """Which workers are not there, and what a person may have to do about it."""
    roles = list(missing_roles)
    commands = " and ".join(f"`headrace {role.replace('_', '-')}`" for role in roles)
    if roles:
        print(
            f"headrace: the pipeline has no {' and no '.join(roles)}, and waits; where no "
            f"supervisor starts workers, start {commands} with the pipeline's --run-dir",
            file=sys.stderr,
            flush=True,
        )


class Waiting:
    """Says who is missing once somebody has been for a while: who was just started is on its way,
    and who is starting needs no other."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._absent: list[str] = []
        self._since_s = clock()
        self._said: list[list[str]] = [[]]

    def hear(self, status: Status) -> None:
        """The latest status of a pipeline that is not ready."""
        starting = {worker.role for worker in status.workers if not worker.is_ready}
        absent = [role for role in status.missing_roles if role not in starting]
        now_s = self._clock()
        if absent != self._absent:
            self._absent, self._since_s = absent, now_s
        if absent not in self._said and now_s - self._since_s >= _PATIENCE_S:
            self._said.append(absent)
            say_waiting(absent)


def show_prompt(prompt: str) -> None:
    """On a terminal the continuation follows its prompt; a file gets the continuation alone."""
    if sys.stdout.isatty() and sys.stderr.isatty():
        console_for(sys.stderr).print(prompt, style="bold", end="")


def as_json(finished: Finished, token_ids: list[int]) -> str:
    """The one object of --json."""
    stats = finished.stats
    result: dict[str, object] = {
        "text": finished.text,
        "token_ids": token_ids,
        "finish_reason": finished.reason,
        "prompt_tokens": stats.prompt_tokens,
        "generated_tokens": stats.generated_tokens,
        "tokens_per_s": stats.tokens_per_s,
        "ttft_s": stats.ttft_s,
        "elapsed_s": stats.elapsed_s,
        "layer_steps": stats.layer_steps,
        "hits": stats.hits,
        "fills": stats.fills,
        "cpu_experts": stats.cpu_experts,
        "fills_behind": stats.fills_behind,
        "evictions": stats.evictions,
        "fill_bytes": stats.fill_bytes,
        "cpu_bytes": stats.cpu_bytes,
        "fill_busy_s": stats.fill_busy_s,
        "cpu_busy_s": stats.cpu_busy_s,
        "worker_restarts": stats.worker_restarts,
        "slots": stats.slots,
        "total_experts": stats.total_experts,
        "stages": stats.stages,
    }
    if stats.logits_digest:  # the pipeline was started with --digest-logits
        result["logits_digest"] = stats.logits_digest
    return msgspec.json.encode(result).decode()


def print_table(finished: Finished, max_tokens: int) -> None:
    """The closing tables, on stderr, of a request for up to `max_tokens` tokens."""
    stats = finished.stats
    console = console_for(sys.stderr)
    console.print()
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="bold")
    table.add_column()
    for name, text in _facts(stats, why_ended(finished, max_tokens)):
        table.add_row(name, text)
    console.print(table)
    if not stats.stages:
        return
    console.print()
    stages = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    stages.add_column("stage")
    for name in ("p50", "p95", "share"):
        stages.add_column(name, justify="right")
    stages.add_column("what it is", style="dim")
    for stage in STAGE_TEXTS:
        times = stats.stages.get(stage)
        if times is not None:
            stages.add_row(
                stage,
                format_us(times.p50_us),
                format_us(times.p95_us),
                f"{100 * times.share:.0f} %",
                STAGE_TEXTS[stage],
            )
    console.print(stages)
    console.print("The branches gpu, dma and cpu run side by side.", style="dim")


def why_ended(finished: Finished, max_tokens: int) -> str:
    """Why a text has no further token."""
    stats = finished.stats
    match finished.reason:
        case "stop":
            return "the model ended the text"
        case "length" if stats.generated_tokens >= max_tokens:
            return f"after the {max_tokens} tokens of --max-tokens"
        case "length":
            return (
                f"the context of {stats.prompt_tokens + stats.generated_tokens} tokens is full, "
                f"prompt and answer together (--max-tokens was {max_tokens})"
            )
        case reason:
            return reason


def _facts(stats: RequestStats, ended: str) -> Iterable[tuple[str, str]]:
    demanded = stats.hits + stats.fills + stats.cpu_experts
    misses = stats.fills + stats.cpu_experts

    def share(part: int) -> str:
        return f"{part} ({100 * part / demanded:.1f} %)" if demanded else str(part)

    yield "tokens/s", f"{stats.tokens_per_s:.1f}"
    yield "tokens", f"{stats.generated_tokens} after a prompt of {stats.prompt_tokens}"
    yield "ended", ended
    yield "first token", f"after {1e3 * stats.ttft_s:.0f} ms"
    yield "slots", f"{stats.slots} of {stats.total_experts} experts"
    yield "hits", share(stats.hits)
    yield "fills", share(stats.fills)
    yield "on the CPU", share(stats.cpu_experts)
    if stats.fills_behind:
        yield "copied ahead", f"{stats.fills_behind} experts, nobody waited"
    if stats.layer_steps:
        yield (
            "q, fills per layer",
            f"{stats.fills / stats.layer_steps:.2f} of {misses / stats.layer_steps:.2f} misses",
        )
    yield "evictions", str(stats.evictions)
    yield "link", _branch(stats.fill_bytes, stats.fill_busy_s)
    yield "CPU", _branch(stats.cpu_bytes, stats.cpu_busy_s)
    if stats.worker_restarts:
        yield "workers restarted", str(stats.worker_restarts)


def _branch(num_bytes: int, busy_s: float) -> str:
    rate = f", {num_bytes / busy_s / 1e9:.2f} GB/s while busy" if busy_s > 0 else ""
    return f"{size(num_bytes)}{rate}"


def format_us(value_us: float) -> str:
    """A duration with about three digits."""
    if value_us >= 1e5:
        return f"{value_us / 1e3:.0f} ms"
    if value_us >= 1e4:
        return f"{value_us / 1e3:.1f} ms"
    return f"{value_us:.0f} us"
