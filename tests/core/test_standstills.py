"""A worker that may run for a moment and then stands still, as under a quota of CPU time.

Four layer-steps in a row find it running and the fifth waits for all of its pause. The median of
what it takes says that nothing has happened; the time that is lost says otherwise.
"""

from __future__ import annotations

from orchestrator.core.adaptive_split import AdaptiveSplit, Decision
from orchestrator.core.directory import ExpertDirectory
from orchestrator.core.events import ArmTaken, CoreConfig, Drifted
from orchestrator.core.fluid_split import BranchCosts
from orchestrator.core.policies import make_policy
from protocol.messages import ExpertId, LayerId

LAYERS = 3
EXPERT_BYTES = 24_576
#: A fill takes 1.2 ms, an expert on the CPU 0.02 ms, and each branch begins after 0.3 ms.
COSTS = BranchCosts(EXPERT_BYTES, 0.02e9, 0.02e9, 1.2e9, 1.2e9)
BEGIN_S, RUN_S, STAND_S = 0.3e-3, 2e-3, 60e-3


class Machine:
    """Runs decisions one after the other; the CPU stands still where its time is up."""

    def __init__(self) -> None:
        config = CoreConfig(
            num_layers=LAYERS, top_k=2, num_experts=8, expert_bytes=EXPERT_BYTES, num_slots=6,
            max_rows=8, max_sequence_tokens=64, planner="fluid", costs=COSTS,
        )  # fmt: skip
        self.directory = ExpertDirectory(config.num_slots, make_policy("lru"))
        self.split = AdaptiveSplit(config, make_policy("lru"), lambda key: 0.0, 1.2e9, 0.02e9)
        self.is_braked = False
        self.now_s = 1.0
        self.news: list[Drifted | ArmTaken] = []

    def running(self, at_s: float) -> float:
        """When the CPU next runs, from `at_s` on."""
        past_s = at_s % (RUN_S + STAND_S)
        return at_s if not self.is_braked or past_s < RUN_S else at_s - past_s + RUN_S + STAND_S

    def token(self) -> tuple[int, int]:
        """(fills, experts on the CPU)"""
        decisions = [self.layer_step(layer) for layer in range(LAYERS)]
        return sum(len(d.fills) for d in decisions), sum(len(d.cpu) for d in decisions)

    def layer_step(self, layer: int) -> Decision:
        misses = [(LayerId(layer), ExpertId(1)), (LayerId(layer), ExpertId(2))]
        decision = self.split.decide(
            self.directory, misses, [], None, has_cpu=True, has_link=True
        )  # fmt: skip
        ends_s = [self.now_s]
        at_s = self.now_s + BEGIN_S
        for number, _ in enumerate(decision.fills):
            end_s = at_s + EXPERT_BYTES / COSTS.link_bytes_per_s
            self.split.filled(EXPERT_BYTES, ns(at_s), ns(end_s))
            if not number:
                self.split.took("link_fixed_s", ns(BEGIN_S))
            at_s = end_s
            ends_s.append(end_s)
        if decision.cpu:
            count = len(decision.cpu)
            begin_s = self.running(self.now_s + BEGIN_S)
            end_s = begin_s + count * EXPERT_BYTES / COSTS.cpu_bytes_per_s
            self.split.executed(count, [1] * count, ns(begin_s), ns(end_s))
            self.split.took("cpu_fixed_s", ns(begin_s - self.now_s))
            ends_s.append(end_s)
        self.split.joined(2, ns(max(ends_s) - self.now_s))
        self.now_s = max(ends_s) + 0.1e-3
        self.news += self.split.settle()
        return decision


def ns(seconds: float) -> int:
    return round(seconds * 1e9)


def test_a_cpu_that_stands_still_now_and_then_loses_its_work_within_twenty_tokens() -> None:
    machine = Machine()
    for _ in range(40):
        fills, runs = machine.token()
    assert (fills, runs) == (0, 2 * LAYERS)
    machine.is_braked = True
    for _ in range(20):
        machine.token()
    after = [machine.token() for _ in range(60)]
    num_fills, num_runs = (sum(counts) for counts in zip(*after, strict=True))
    assert num_runs < 0.1 * (num_fills + num_runs)  # probes aside
    assert any(isinstance(news, Drifted) for news in machine.news)


def test_it_gets_its_work_back_when_it_runs_again() -> None:
    machine = Machine()
    machine.is_braked = True
    for _ in range(100):
        machine.token()
    assert machine.token()[1] == 0
    machine.is_braked = False
    for _ in range(2000):
        if machine.token()[1] == 2 * LAYERS:
            break
    counts = [machine.token() for _ in range(300)]
    num_fills, num_runs = (sum(column) for column in zip(*counts, strict=True))
    assert num_runs > 0.9 * (num_fills + num_runs)
