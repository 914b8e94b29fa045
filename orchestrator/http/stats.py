"""What the pipeline does now, in one JSON object: for `headrace top`, the page and scripts.

Rates are over a window of the last seconds, of which the sums are kept once a second.
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING

import msgspec

from protocol.messages import WorkerStatus

if TYPE_CHECKING:
    from orchestrator.core.events import CoreSnapshot
    from orchestrator.engine import Engine
    from orchestrator.http.metrics import ServerMetrics

WINDOW_S = 10
SAMPLE_EVERY_S = 1.0


class Sample(msgspec.Struct, frozen=True):
    """The engine's sums at one moment."""

    at_s: float
    num_tokens: int
    num_hits: int
    num_fills: int
    num_cpu_experts: int
    fill_bytes: int
    cpu_bytes: int
    link_busy_ns: int
    cpu_busy_ns: int
    gpu_busy_ns: int
    num_layers: int
    ipc_wait_ns: int


class RequestFigures(msgspec.Struct, frozen=True):
    running: int
    waiting: int
    ended: dict[str, int]
    prompt_tokens: int
    generated_tokens: int


class WindowFigures(msgspec.Struct, frozen=True):
    """Over the last `seconds`. Rates in bytes/s are those of a branch while it was busy."""

    seconds: float
    tokens_per_s: float
    hit_rate: float
    #: Share of misses that were filled.
    split_q_ratio: float
    link_bytes_per_s: float
    cpu_bytes_per_s: float
    #: Share of the time in which each branch was busy.
    link_busy: float
    cpu_busy: float
    gpu_busy: float
    ipc_wait_us_per_layer: float


class ExpertFigures(msgspec.Struct, frozen=True):
    """Since the start."""

    hits: int
    fills: int
    cpu: int
    evictions: int
    hit_rate: float
    fill_bytes: int
    cpu_bytes: int
    calibrated_link_bytes_per_s: float
    calibrated_host_bytes_per_s: float


class SlotFigures(msgspec.Struct, frozen=True):
    total: int
    resident: int
    filling: int
    free: int
    #: Experts of each MoE layer, and how many of them are in slots.
    experts_per_layer: list[int]
    resident_per_layer: list[int]


class Stats(msgspec.Struct, frozen=True):
    """GET /v1/stats."""

    model: str
    state: str
    text: str
    uptime_s: float
    requests: RequestFigures
    window: WindowFigures
    experts: ExpertFigures
    slots: SlotFigures
    workers: list[WorkerStatus]
    restarts: dict[str, int]


class StatsWindow:
    """Samples of the last seconds, and what follows from them."""

    def __init__(self, engine: Engine, metrics: ServerMetrics) -> None:
        self._engine = engine
        self._metrics = metrics
        self._samples: deque[Sample] = deque([self._sample()], maxlen=WINDOW_S + 1)
        self._started_s = time.monotonic()

    def tick(self) -> None:
        """To be called every SAMPLE_EVERY_S."""
        self._samples.append(self._sample())

    def achieved(self) -> dict[str, float]:
        """Bytes/s while busy, by path."""
        window = self._window()
        return {"link": window.link_bytes_per_s, "cpu": window.cpu_bytes_per_s}

    def _sample(self) -> Sample:
        totals = self._engine.totals
        return Sample(
            time.monotonic(),
            totals.num_tokens,
            totals.num_hits,
            totals.num_fills,
            totals.num_cpu_experts,
            totals.fill_bytes,
            totals.cpu_bytes,
            totals.link_busy.sum_ns,
            totals.cpu_busy.sum_ns,
            totals.gpu_busy.sum_ns,
            totals.num_passed_layers + totals.num_routed_layers,
            totals.ipc_wait_ns,
        )

    def _window(self) -> WindowFigures:
        old, new = self._samples[0], self._sample()
        seconds = max(new.at_s - old.at_s, 1e-9)
        hits = new.num_hits - old.num_hits
        fills = new.num_fills - old.num_fills
        cpu = new.num_cpu_experts - old.num_cpu_experts
        link_ns = new.link_busy_ns - old.link_busy_ns
        cpu_ns = new.cpu_busy_ns - old.cpu_busy_ns
        return WindowFigures(
            seconds=seconds,
            tokens_per_s=(new.num_tokens - old.num_tokens) / seconds,
            hit_rate=_ratio(hits, hits + fills + cpu),
            split_q_ratio=_ratio(fills, fills + cpu),
            link_bytes_per_s=_ratio(1e9 * (new.fill_bytes - old.fill_bytes), link_ns),
            cpu_bytes_per_s=_ratio(1e9 * (new.cpu_bytes - old.cpu_bytes), cpu_ns),
            link_busy=link_ns / 1e9 / seconds,
            cpu_busy=cpu_ns / 1e9 / seconds,
            gpu_busy=(new.gpu_busy_ns - old.gpu_busy_ns) / 1e9 / seconds,
            ipc_wait_us_per_layer=_ratio(
                (new.ipc_wait_ns - old.ipc_wait_ns) / 1e3, new.num_layers - old.num_layers
            ),
        )

    def stats(self, state: str) -> Stats:
        """Everything at once. `state` is loading, ready, degraded or draining."""
        engine, metrics, totals = self._engine, self._metrics, self._engine.totals
        snapshot, status, loaded = engine.snapshot(), engine.status(), engine.loaded
        per_layer = loaded.layout.num_experts if loaded else []
        num_lookups = totals.num_hits + totals.num_fills + totals.num_cpu_experts
        return Stats(
            model=metrics.model_name,
            state=state,
            text=status.text,
            uptime_s=time.monotonic() - self._started_s,
            requests=RequestFigures(
                running=snapshot.num_active if snapshot else 0,
                waiting=snapshot.num_waiting if snapshot else 0,
                ended=dict(metrics.num_ended),
                prompt_tokens=metrics.num_prompt_tokens,
                generated_tokens=metrics.num_generated_tokens,
            ),
            window=self._window(),
            experts=ExpertFigures(
                hits=totals.num_hits,
                fills=totals.num_fills,
                cpu=totals.num_cpu_experts,
                evictions=totals.num_evictions,
                hit_rate=_ratio(totals.num_hits, num_lookups),
                fill_bytes=totals.fill_bytes,
                cpu_bytes=totals.cpu_bytes,
                calibrated_link_bytes_per_s=snapshot.link_bytes_per_s if snapshot else 0.0,
                calibrated_host_bytes_per_s=snapshot.host_bytes_per_s if snapshot else 0.0,
            ),
            slots=SlotFigures(
                total=snapshot.num_slots if snapshot else 0,
                resident=snapshot.num_resident if snapshot else 0,
                filling=snapshot.num_filling if snapshot else 0,
                free=num_free_slots(snapshot) if snapshot else 0,
                experts_per_layer=list(per_layer),
                resident_per_layer=[totals.residents.get(n, 0) for n in range(len(per_layer))],
            ),
            workers=status.workers,
            restarts={str(role): num for role, num in engine.num_restarts().items()},
        )


def num_free_slots(snapshot: CoreSnapshot) -> int:
    """Slots that may be used and hold nothing; while there are to be fewer, none."""
    return max(0, snapshot.num_slots - snapshot.num_resident - snapshot.num_filling)


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
