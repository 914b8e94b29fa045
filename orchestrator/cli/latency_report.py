"""Folds a latency log into percentiles, and shows them."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import msgspec
from rich.table import Table

from orchestrator.cli.generate_report import STAGE_TEXTS, format_us
from orchestrator.cli.terminal import console_for
from orchestrator.latency_log import (
    LayerRecord,
    LogHeader,
    StepRecord,
    layer_stages,
    step_stages,
)
from orchestrator.stage_times import StageTimes
from protocol.messages import StageStats
from protocol.sizes import size

if TYPE_CHECKING:
    from collections.abc import Iterable

    from orchestrator.latency_log import LogRecord

_NUM_SLOWEST = 10


class LayerSummary(msgspec.Struct, frozen=True):
    """One MoE layer over all steps."""

    layer: int
    hits: int
    fills: int
    cpu: int
    stages: dict[str, StageStats]


class SlowStep(msgspec.Struct, frozen=True):
    """One of the steps that took longest."""

    step: int
    num_tokens: int
    duration_us: float
    slowest_layer: int
    slowest_layer_us: float
    reason: str


class LatencyReport(msgspec.Struct, frozen=True):
    """Everything `headrace latency` says."""

    model: str
    num_slots: int
    total_experts: int
    num_steps: int
    num_incomplete: int
    num_layer_steps: int
    hits: int
    fills: int
    cpu: int
    fill_bytes: int
    cpu_bytes: int
    stages: dict[str, StageStats]
    layers: list[LayerSummary]
    slowest: list[SlowStep]


class _Layer:
    def __init__(self) -> None:
        self.hits = self.fills = self.cpu = 0
        self.times = StageTimes()


def summarise(records: Iterable[LogRecord]) -> LatencyReport:
    """Statistics over the complete records; shares are of the sum of all steps."""
    header = LogHeader(0, "", "", 0, 0, 0, 0, 0)
    times = StageTimes()
    layers: dict[int, _Layer] = {}
    steps: list[StepRecord] = []
    slowest_layers: dict[int, LayerRecord] = {}
    num_incomplete = num_layer_steps = fill_bytes = cpu_bytes = 0
    for record in records:
        match record:
            case LogHeader():
                header = record
            case LayerRecord(is_complete=True):
                num_layer_steps += 1
                fill_bytes += record.fill_bytes
                cpu_bytes += record.cpu_bytes
                layer = layers.setdefault(record.layer, _Layer())
                layer.hits += len(record.hits)
                layer.fills += len(record.fills)
                layer.cpu += len(record.cpu)
                for stage, duration_ns in layer_stages(record):
                    times.add(stage, duration_ns)
                    layer.times.add(stage, duration_ns)
                worst = slowest_layers.get(record.step)
                if worst is None or _duration_ns(record) > _duration_ns(worst):
                    slowest_layers[record.step] = record
            case StepRecord(is_complete=True):
                steps.append(record)
                for stage, duration_ns in step_stages(record):
                    times.add(stage, duration_ns)
            case StepRecord() | LayerRecord():
                num_incomplete += 1
            case _:
                pass
    steps.sort(key=lambda step: step.started_ns - step.done_ns)
    return LatencyReport(
        model=header.model,
        num_slots=header.num_slots,
        total_experts=header.total_experts,
        num_steps=len(steps),
        num_incomplete=num_incomplete,
        num_layer_steps=num_layer_steps,
        hits=sum(layer.hits for layer in layers.values()),
        fills=sum(layer.fills for layer in layers.values()),
        cpu=sum(layer.cpu for layer in layers.values()),
        fill_bytes=fill_bytes,
        cpu_bytes=cpu_bytes,
        stages=times.stats("step"),
        layers=[
            LayerSummary(number, layer.hits, layer.fills, layer.cpu, layer.times.stats("layer"))
            for number, layer in sorted(layers.items())
        ],
        slowest=[_slow_step(step, slowest_layers.get(step.step)) for step in steps[:_NUM_SLOWEST]],
    )


def _duration_ns(record: LayerRecord) -> int:
    return record.joined_ns - record.routed_ns


def _slow_step(step: StepRecord, layer: LayerRecord | None) -> SlowStep:
    return SlowStep(
        step.step,
        step.num_tokens,
        (step.done_ns - step.started_ns) / 1e3,
        -1 if layer is None else layer.layer,
        0.0 if layer is None else _duration_ns(layer) / 1e3,
        "" if layer is None else layer.reason,
    )


def as_json(report: LatencyReport) -> str:
    return msgspec.json.encode(report).decode()


def show(report: LatencyReport) -> None:
    """Tables on stdout."""
    console = console_for(sys.stdout)
    demanded = report.hits + report.fills + report.cpu
    hit_rate = 100 * report.hits / demanded if demanded else 0.0
    console.print(
        f"{report.model}: {report.num_steps} steps, {report.num_layer_steps} layer-steps, "
        f"{report.num_slots} slots of {report.total_experts} experts; {hit_rate:.1f} % hits, "
        f"{report.fills} fills ({size(report.fill_bytes)}), {report.cpu} on the CPU "
        f"({size(report.cpu_bytes)})"
    )
    if report.num_incomplete:
        console.print(f"{report.num_incomplete} records of interrupted steps are left out")
    console.print()
    console.print(_stage_table(report.stages))
    console.print("shares of all steps; the branches gpu, dma and cpu run side by side")
    console.print()
    console.print(_layer_table(report))
    console.print()
    console.print(_slowest_table(report))


def _stage_table(stages: dict[str, StageStats]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("stage")
    for name in ("p50", "p95", "p99", "max", "share", "times"):
        table.add_column(name, justify="right")
    table.add_column("what it is", style="dim")
    for stage, text in STAGE_TEXTS.items():
        times = stages.get(stage)
        if times is not None:
            table.add_row(
                stage,
                *_percentiles(times),
                format_us(times.max_us),
                f"{100 * times.share:.1f} %",
                str(times.num_samples),
                text,
            )
    return table


def _layer_table(report: LatencyReport) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for name in ("layer", "p50", "p95", "p99", "max", "plan", "dma", "cpu", "join"):
        table.add_column(name, justify="right")
    for name in ("hits", "fills", "on CPU"):
        table.add_column(name, justify="right")
    for layer in report.layers:
        whole = layer.stages["layer"]
        table.add_row(
            str(layer.layer),
            *_percentiles(whole),
            format_us(whole.max_us),
            *(
                format_us(layer.stages[stage].p50_us) if stage in layer.stages else ""
                for stage in ("plan", "dma", "cpu", "join")
            ),
            str(layer.hits),
            str(layer.fills),
            str(layer.cpu),
        )
    return table


def _slowest_table(report: LatencyReport) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for name in ("slowest step", "tokens", "took", "its slowest layer", "took"):
        table.add_column(name, justify="right")
    table.add_column("decided there", style="dim")
    for slow in report.slowest:
        table.add_row(
            str(slow.step),
            str(slow.num_tokens),
            format_us(slow.duration_us),
            "" if slow.slowest_layer < 0 else str(slow.slowest_layer),
            format_us(slow.slowest_layer_us),
            slow.reason,
        )
    return table


def _percentiles(times: StageStats) -> tuple[str, str, str]:
    return format_us(times.p50_us), format_us(times.p95_us), format_us(times.p99_us)
