"""Prometheus series: vLLM's shape for requests and tokens, and what only such a pipeline has.

What belongs to HTTP requests is counted where it happens. What belongs to the engine is read from
its sums when somebody scrapes, so it costs the decode path nothing.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, get_args

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from orchestrator.http.stats import num_free_slots
from protocol.messages import Role

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from prometheus_client import Metric

    from orchestrator.engine import Engine

PREFIX = "headrace:"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_FIRST_TOKEN_S = (
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    10,
    20,
    40,
    80,
    160,
)
_NEXT_TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5)
_REQUEST_S = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 15, 20, 30, 60, 120, 240, 480, 960)


class ServerMetrics:
    """All series of one server, in a registry of their own."""

    def __init__(self, model_name: str) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        self.model_name = model_name
        label, value = ["model_name"], model_name

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            made = Histogram(PREFIX + name, text, label, registry=self.registry, buckets=buckets)
            child: Histogram = made.labels(value)
            return child

        def counter(name: str, text: str) -> Counter:
            child: Counter = Counter(PREFIX + name, text, label, registry=self.registry).labels(
                value
            )
            return child

        self._ttft = histogram(
            "time_to_first_token_seconds", "From the request to its first token.", _FIRST_TOKEN_S
        )
        self._inter_token = histogram(
            "inter_token_latency_seconds", "From one token to the next.", _NEXT_TOKEN_S
        )
        self._e2e = histogram(
            "e2e_request_latency_seconds", "From the request to its end.", _REQUEST_S
        )
        self._prompt_tokens = counter("prompt_tokens", "Prompt tokens of requests that ended.")
        self._generation_tokens = counter("generation_tokens", "Tokens that were generated.")
        self._success = Counter(
            PREFIX + "request_success",
            "Texts that ended, by reason (abort: the client was gone).",
            ["model_name", "finished_reason"],
            registry=self.registry,
        )
        self._http = Counter(
            PREFIX + "http_requests",
            "HTTP answers by path and status.",
            ["path", "status"],
            registry=self.registry,
        )
        #: reason -> number, for statistics.
        self.num_ended: dict[str, int] = {}
        self.num_prompt_tokens = 0
        self.num_generated_tokens = 0

    def saw_first_token(self, elapsed_s: float) -> None:
        self._ttft.observe(elapsed_s)

    def saw_token(self, elapsed_s: float) -> None:
        self._inter_token.observe(elapsed_s)

    def saw_end(self, reason: str, num_prompt: int, num_generated: int, elapsed_s: float) -> None:
        self._e2e.observe(elapsed_s)
        self._prompt_tokens.inc(num_prompt)
        self._generation_tokens.inc(num_generated)
        self._success.labels(self.model_name, reason).inc()
        self.num_ended[reason] = self.num_ended.get(reason, 0) + 1
        self.num_prompt_tokens += num_prompt
        self.num_generated_tokens += num_generated

    def saw_answer(self, path: str, status: int) -> None:
        self._http.labels(path, str(status)).inc()

    def watch(self, engine: Engine, achieved: Callable[[], dict[str, float]]) -> None:
        """Add the engine's series. `achieved()` gives bytes/s by path over the last seconds."""
        self.registry.register(_EngineCollector(engine, achieved, self.model_name))

    def text(self) -> bytes:
        return generate_latest(self.registry)


class _EngineCollector:
    """Reads the engine when scraped."""

    def __init__(
        self, engine: Engine, achieved: Callable[[], dict[str, float]], model_name: str
    ) -> None:
        self._engine = engine
        self._achieved = achieved
        self._model_name = model_name
        self._started_s = time.time()

    def describe(self) -> list[Metric]:
        return []  # asked for at registration, when there is nothing to tell yet

    def collect(self) -> Iterator[Metric]:
        yield from self._requests()
        yield from self._experts()
        yield from self._rates()
        yield from self._workers()

    def _requests(self) -> Iterator[Metric]:
        snapshot = self._engine.snapshot()
        running = snapshot.num_active if snapshot else 0
        waiting = snapshot.num_waiting if snapshot else 0
        yield _gauge("num_requests_running", "Sequences that take turns now.", running)
        yield _gauge("num_requests_waiting", "Sequences that wait for their turn.", waiting)
        yield _gauge("start_time_seconds", "When this server started.", self._started_s)

    def _experts(self) -> Iterator[Metric]:
        totals = self._engine.totals
        num_misses = totals.num_fills + totals.num_cpu_experts
        yield _counters(
            "expert_lookups",
            "Experts that layer-steps asked for, by where they ran.",
            "result",
            {"hit": totals.num_hits, "fill": totals.num_fills, "cpu": totals.num_cpu_experts},
        )
        yield _counters(
            "expert_evictions", "Experts that left their slot.", "", totals.num_evictions
        )
        yield _counters(
            "expert_bytes",
            "Expert weights copied over the link, or read in place by the CPU.",
            "path",
            {"link": totals.fill_bytes, "cpu": totals.cpu_bytes},
        )
        yield _counters(
            "branch_seconds",
            "Time in which each branch was busy; branches run side by side.",
            "branch",
            {
                "gpu": totals.gpu_busy.sum_ns / 1e9,
                "link": totals.link_busy.sum_ns / 1e9,
                "cpu": totals.cpu_busy.sum_ns / 1e9,
            },
        )
        yield _counters(
            "layer_steps",
            "MoE layers that were run: passed by the gpu_worker alone, or routed to the planner.",
            "how",
            {"passed": totals.num_passed_layers, "routed": totals.num_routed_layers},
        )
        yield _counters("steps", "Steps of the model.", "", totals.num_steps)
        yield _counters(
            "ipc_wait_seconds",
            "Time from a router's choice until the orchestrator took it up.",
            "",
            totals.ipc_wait_ns / 1e9,
        )
        yield _gauge(
            "split_q_ratio",
            "Share of all misses that were filled.",
            totals.num_fills / num_misses if num_misses else 0.0,
        )

    def _rates(self) -> Iterator[Metric]:
        snapshot = self._engine.snapshot()
        calibrated = GaugeMetricFamily(
            PREFIX + "calibrated_bytes_per_second",
            "Rates that the planner splits misses by.",
            labels=["path"],
        )
        achieved = GaugeMetricFamily(
            PREFIX + "achieved_bytes_per_second",
            "Rates while busy, over the last seconds.",
            labels=["path"],
        )
        slots = GaugeMetricFamily(
            PREFIX + "cache_slots", "Expert slots by state.", labels=["state"]
        )
        if snapshot is not None:
            calibrated.add_metric(["link"], snapshot.link_bytes_per_s)
            calibrated.add_metric(["cpu"], snapshot.host_bytes_per_s)
            slots.add_metric(["resident"], snapshot.num_resident)
            slots.add_metric(["filling"], snapshot.num_filling)
            slots.add_metric(["free"], num_free_slots(snapshot))
        for path, rate in self._achieved().items():
            achieved.add_metric([path], rate)
        yield calibrated
        yield achieved
        yield slots

    def _workers(self) -> Iterator[Metric]:
        status = self._engine.status()
        up = GaugeMetricFamily(
            PREFIX + "worker_up", "Workers of a role that are ready.", labels=["worker"]
        )
        restarts = CounterMetricFamily(
            PREFIX + "worker_restarts", "Workers that took a lost one's place.", labels=["worker"]
        )
        num_restarts = self._engine.num_restarts()
        for role in get_args(Role):
            num_ready = sum(worker.role == role and worker.is_ready for worker in status.workers)
            up.add_metric([role], num_ready)
            restarts.add_metric([role], num_restarts.get(role, 0))
        yield up
        yield restarts
        yield _counters(
            "dropped_messages", "Messages that made no sense.", "", status.num_dropped_messages
        )


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(PREFIX + name, text, value)


def _counters(
    name: str, text: str, label: str, values: dict[str, float] | dict[str, int] | float
) -> CounterMetricFamily:
    if not isinstance(values, dict):
        return CounterMetricFamily(PREFIX + name, text, values)
    family = CounterMetricFamily(PREFIX + name, text, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family
