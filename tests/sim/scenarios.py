"""Scenarios by number: every mix of slots, fill mode and cpu_workers, the rest by chance."""

from __future__ import annotations

import itertools
import random
from typing import Literal

from orchestrator.core.events import CoreConfig
from tests.sim.machine import EXPERT_BYTES
from tests.sim.world import Scenario

Slots = Literal["one", "top_k", "quarter", "all"]
MIXES: list[tuple[Slots, str, int]] = list(
    itertools.product(("one", "top_k", "quarter", "all"), ("auto", "all", "none", "1"), (0, 1, 2))
)
NUM_SCENARIOS = 6 * len(MIXES)
_ROLES = ("gpu_worker", "dma_worker", "cpu_worker")


def scenario(number: int) -> Scenario:
    """The scenario of this number; the same every time."""
    slots, fill_mode, num_cpus = MIXES[number % len(MIXES)]
    rng = random.Random(number)
    num_layers = rng.randint(1, 3)
    top_k = rng.choice((2, 2, 3, 8))
    num_experts = top_k * rng.choice((2, 4))
    total = num_layers * num_experts
    num_slots = {"one": 1, "top_k": top_k, "quarter": max(total // 4, 1), "all": total}[slots]
    max_rows = rng.choice((1, 3, 8))
    num_requests = rng.randint(1, 5)
    prompts = tuple(
        (1000 + index, *(rng.randrange(40) for _ in range(rng.choice((0, 2, 5, 11)))))
        for index in range(num_requests)
    )
    is_tight = rng.random() < 0.2
    max_sequence_tokens = 15 if is_tight else 64
    # Drawn apart, so that a new kind of choice leaves every other one of a number as it was.
    more = random.Random(f"policies of {number}")
    words = random.Random(-1 - number)
    preloads = random.Random(f"preload of {number}").random() < 0.4
    config = CoreConfig(
        num_layers=num_layers,
        top_k=top_k,
        expert_bytes=EXPERT_BYTES,
        num_slots=num_slots,
        max_rows=max_rows,
        max_sequence_tokens=max_sequence_tokens,
        fill_mode=fill_mode,
        host_bytes_per_s=rng.choice((None, None, 40.0)),
        link_bytes_per_s=rng.choice((None, None, 20.0)),
        max_num_seqs=rng.choice((1, 2, 3, 4)),
        report_plans=rng.random() < 0.3,
        policy=more.choice(("lru", "lru", "lru-layer", "lfu", "reuse", "reuse-tables")),
        planner=more.choice(("closed-form", "fluid", "fluid", "fixed-fraction")),
        fill_behind=more.choice(("off", "on", "on", "auto")),
        num_experts=num_experts,
        preload=(num_experts,) * num_layers if preloads and fill_mode != "none" else (),
        prefetch=more.choice((0, 0, 1, 2)) if num_layers > 1 else 0,
    )
    mood = rng.choice(("calm", "one role", "any", "any"))
    return Scenario(
        seed=number,
        config=config,
        num_experts=num_experts,
        arena_kind=rng.choice(("shared", "shared", "cuda_ipc", "in_process")),
        cpu_rates=tuple(rng.choice((0.0, 10.0, 30.0, 90.0)) for _ in range(num_cpus)),
        link_rate=rng.choice((0.0, 5.0, 20.0, 100.0)),
        ran_lag=rng.choice((0, 5, 300)),
        execute_ns=rng.choice((10, 100, 1000)),
        message_ns=rng.choice((10, 10, 200)),
        prompts=prompts,
        max_tokens=tuple(rng.choice((1, 4, 12)) for _ in range(num_requests)),
        withdrawals={
            index: rng.randrange(8000) for index in range(num_requests) if rng.random() < 0.2
        },
        crashes=_crashes(rng, mood),
        repeat_chance=rng.choice((0.0, 0.05, 0.3)),
        num_reports=rng.choice((1, 2, 64)),
        has_barrier=rng.random() < 0.8,
        foreseen_every=rng.choice((0, 0, 40, 200)),
        resizes=tuple(
            (rng.randrange(12_000), rng.randint(1, num_slots))
            for _ in range(rng.choice((0, 0, 1, 4)))
        ),
        is_self_joining=words.random() < 0.75,
        writes_words=words.random() < 0.8,
        late_ns=words.choice((0, 0, 500)),
        starts_hits=words.random() < 0.7,
    )


def _crashes(rng: random.Random, mood: str) -> tuple[tuple[int, tuple[str, ...]], ...]:
    if mood == "calm":
        return ()
    one = rng.choice(_ROLES)
    crashes: list[tuple[int, tuple[str, ...]]] = []
    at = 0
    for _ in range(rng.randint(1, 8)):
        at += rng.randrange(200, 4000)
        several = tuple(role for role in _ROLES if rng.random() < 0.5) or (rng.choice(_ROLES),)
        crashes.append((at, (one,) if mood == "one role" else several))
    return tuple(crashes)
