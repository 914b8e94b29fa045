"""Who may join, who may say what, who is lost."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator import hub as hub_module
from orchestrator.core.events import WorkerJoined, WorkerLost
from orchestrator.hub import Hub, Worker
from protocol.messages import (
    PROTOCOL_VERSION,
    Copied,
    Copy,
    CopyId,
    DetachArena,
    Epoch,
    Execute,
    Executed,
    ExpertId,
    Failed,
    Hello,
    LayerId,
    Message,
    Progress,
    Ran,
    Ready,
    Refused,
    Role,
    Routed,
    Run,
    Sampled,
    SequenceId,
    SlotId,
    StartStep,
    StepDone,
    StepId,
    StepPart,
    Welcome,
    WorkerSetup,
)

STEP, LAYER = StepId(1), LayerId(0)


class FakeLine:
    def __init__(self, token: str, pid: int) -> None:
        self.token = token
        self.pid = pid
        self.is_worker = False
        self.mailbox = None
        self.num_kills = 0

    def kill(self) -> None:
        self.num_kills += 1


class Scene:
    """A hub with everything around it faked, and a clock that stands until told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, is_by_hand: bool = False) -> None:
        self.now_s = 100.0
        monkeypatch.setattr(hub_module.time, "monotonic", lambda: self.now_s)
        self.lines: dict[str, FakeLine] = {}
        self.sent: list[tuple[bytes, Message]] = []
        self.takes_messages = True
        self.drops: list[str] = []
        self.delivered: list[Any] = []
        self.changes: list[tuple[int, str]] = []
        self.hub = Hub(
            self,  # type: ignore[arg-type]
            self.send,
            self.drops.append,
            self.delivered.append,
            lambda role: WorkerSetup("dir", "float32", "cpu", 4, 8, 64),
            lambda worker, change: self.changes.append((worker.epoch, change)),
            is_by_hand=is_by_hand,
        )

    def find(self, token: str) -> FakeLine | None:
        return self.lines.get(token)

    def send(self, identity: bytes, message: Message) -> bool:
        self.sent.append((identity, message))
        return self.takes_messages

    def hello(self, name: str, role: Role, **fields: Any) -> Message:
        """Say HELLO over a fresh life line; returns the answer."""
        pid = 1000 + len(self.lines)
        self.lines[name] = FakeLine(name, pid)
        values = {"protocol_version": PROTOCOL_VERSION, "pid": pid, "token": name, **fields}
        self.hub.handle(name.encode(), Hello(role=role, **values))
        return self.sent[-1][1]

    def join(self, name: str, role: Role) -> Epoch:
        answer = self.hello(name, role)
        assert isinstance(answer, Welcome), answer
        self.hub.handle(name.encode(), Ready(answer.epoch, 1e9))
        return answer.epoch


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Scene:
    return Scene(monkeypatch)


def test_hello_to_ready(scene: Scene) -> None:
    first = scene.hello("a", "cpu_worker")
    second = scene.hello("b", "cpu_worker")
    assert isinstance(first, Welcome)
    assert isinstance(second, Welcome)
    assert first.epoch < second.epoch
    assert scene.delivered == []
    scene.hub.handle(b"a", Progress(first.epoch, 1, 2, "mapping"))
    scene.hub.handle(b"a", Ready(first.epoch, 5e9))
    assert scene.delivered == [WorkerJoined(first.epoch, "cpu_worker", 5e9)]
    assert scene.changes == [(first.epoch, "joined")]
    assert scene.lines["a"].is_worker
    assert (scene.hub.num_ready("cpu_worker"), scene.hub.num_ready("gpu_worker")) == (1, 0)
    assert scene.drops == []


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"protocol_version": 99}, "speaks protocol version 99"),
        ({"token": "made up"}, "no token"),
        ({"pid": 4}, "says it is process 4"),
    ],
)
def test_refusals(scene: Scene, fields: dict[str, Any], says: str) -> None:
    answer = scene.hello("a", "cpu_worker", **fields)
    assert isinstance(answer, Refused)
    assert says in answer.sentence
    assert not scene.hub.is_worker(b"a")
    assert not scene.lines["a"].is_worker


@pytest.mark.parametrize("role", ["gpu_worker", "dma_worker"])
def test_one_of_a_kind(scene: Scene, role: Role) -> None:
    scene.hello("a", role)
    answer = scene.hello("b", role)
    assert isinstance(answer, Refused)
    assert "process 1000" in answer.sentence
    scene.hub.line_ended("a")
    assert isinstance(scene.hello("c", role), Welcome)


def test_one_line_is_one_worker(scene: Scene) -> None:
    scene.hello("a", "cpu_worker")
    hello = Hello(PROTOCOL_VERSION, "cpu_worker", 1000, "a")
    scene.hub.handle(b"other", hello)
    answer = scene.sent[-1][1]
    assert isinstance(answer, Refused)
    assert "already belongs" in answer.sentence
    num_sent = len(scene.sent)
    scene.hub.handle(b"a", hello)
    assert len(scene.sent) == num_sent
    assert "second HELLO" in scene.drops[-1]


def test_only_known_peers_with_their_epoch_and_their_words(scene: Scene) -> None:
    gpu = scene.join("gpu", "gpu_worker")
    cpu = scene.join("cpu", "cpu_worker")
    delivered = list(scene.delivered)
    executed = Executed(cpu, STEP, LAYER, [ExpertId(1)], 1, 2, 3)
    for identity, message, says in (
        (b"nobody", executed, "not welcomed"),
        (b"gpu", executed, "of epoch"),
        (b"gpu", Executed(gpu, STEP, LAYER, [], 1, 2, 3), "may not say"),
        (b"cpu", Routed(cpu, STEP, LAYER, [], [], 1), "may not say"),
        (b"cpu", StepDone(cpu, STEP, [Sampled(1)], 1, 2), "may not say"),
        (b"cpu", Copied(cpu, CopyId(1), 1, 2, 3), "may not say"),
        (b"cpu", Executed(Epoch(99), STEP, LAYER, [], 1, 2, 3), "of epoch 99"),
        (b"cpu", Ready(cpu), "second Ready"),
    ):
        num_drops = len(scene.drops)
        scene.hub.handle(identity, message)
        assert says in scene.drops[-1]
        assert len(scene.drops) == num_drops + 1
    assert scene.delivered == delivered
    scene.hub.handle(b"cpu", executed)
    assert scene.delivered == [*delivered, executed]


def test_nothing_counts_before_ready(scene: Scene) -> None:
    answer = scene.hello("cpu", "cpu_worker")
    assert isinstance(answer, Welcome)
    scene.hub.handle(b"cpu", Executed(answer.epoch, STEP, LAYER, [], 1, 2, 3))
    assert "before it was ready" in scene.drops[-1]
    scene.hub.line_ended("cpu")
    assert scene.delivered == []  # the core never knew it


def test_loss_and_replacement(scene: Scene) -> None:
    epoch = scene.join("cpu", "cpu_worker")
    scene.hub.line_ended("cpu")
    assert scene.delivered[-1] == WorkerLost(epoch)
    assert scene.changes[-1] == (epoch, "lost")
    assert not scene.hub.is_worker(b"cpu")
    scene.hub.line_ended("cpu")  # said again
    assert scene.delivered.count(WorkerLost(epoch)) == 1
    scene.hub.command(Execute(epoch, STEP, LAYER, [ExpertId(1)]))  # nobody to tell
    assert sum(scene.hub.num_replaced.values()) == 0
    assert scene.join("again", "cpu_worker") > epoch
    assert sum(scene.hub.num_replaced.values()) == 1
    scene.join("one more", "cpu_worker")
    assert sum(scene.hub.num_replaced.values()) == 1


@pytest.mark.parametrize("is_by_hand", [True, False])
def test_by_hand_a_person_learns_what_is_missing_and_that_it_is_back(
    is_by_hand: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """At the default level; a supervisor, where there is one, says so itself."""
    caplog.set_level("WARNING")
    scene = Scene(monkeypatch, is_by_hand=is_by_hand)
    scene.join("cpu", "cpu_worker")
    scene.hub.line_ended("cpu")
    scene.hub.line_ended("cpu")
    scene.join("again", "cpu_worker")
    scene.join("one more", "cpu_worker")
    scene.hub.say_goodbye("the end")
    scene.hub.line_ended("again")
    expected = [
        "cpu_worker (process 1000, epoch 1) is gone: misses go to other cpu_workers, or are filled "
        "until you start another `headrace cpu-worker` with this --run-dir",
        "cpu_worker (process 1001, epoch 2) is ready, 1.00 GB/s",
    ]
    assert caplog.messages == (expected if is_by_hand else [])


def test_last_words(scene: Scene) -> None:
    epoch = scene.join("cpu", "cpu_worker")
    scene.hub.handle(b"cpu", Failed(epoch, "out of luck"))
    scene.hub.line_ended("cpu")
    assert scene.hub.last_words(1000) == "out of luck"
    assert scene.hub.last_words(1000) == ""


def test_who_does_not_take_messages_is_killed_once(scene: Scene) -> None:
    epoch = scene.join("cpu", "cpu_worker")
    scene.takes_messages = False
    for _ in range(3):
        scene.hub.command(Execute(epoch, STEP, LAYER, [ExpertId(1)]))
    assert scene.lines["cpu"].num_kills == 1
    assert WorkerLost(epoch) not in scene.delivered  # only its end says so


def _commands(epoch: Epoch) -> list[tuple[Role, Any, Any]]:
    expert = [ExpertId(1)]
    return [
        ("cpu_worker", Execute(epoch, STEP, LAYER, expert),
         Executed(epoch, STEP, LAYER, expert, 1, 2, 3)),
        ("dma_worker", Copy(epoch, CopyId(4), LAYER, ExpertId(1), SlotId(0)),
         Copied(epoch, CopyId(4), 1, 2, 3)),
        ("gpu_worker", StartStep(epoch, STEP, [StepPart(SequenceId(1), 0, [1])]),
         Routed(epoch, STEP, LAYER, expert, [1], 1)),
        ("gpu_worker", Run(epoch, STEP, LAYER, expert, [SlotId(0)], False),
         Ran(epoch, STEP, LAYER, expert, 1, 2)),
        ("gpu_worker", Run(epoch, STEP, LAYER, [], [], True),
         StepDone(epoch, STEP, [Sampled(1)], 1, 2)),
    ]  # fmt: skip


@pytest.mark.parametrize("index", range(5))
def test_hang(scene: Scene, index: int) -> None:
    role, command, answer = _commands(Epoch(1))[index]
    assert scene.join("w", role) == 1
    line = scene.lines["w"]
    scene.now_s += 1000
    scene.hub.condemn_hung(60)
    assert line.num_kills == 0  # owes nothing
    scene.hub.command(command)
    scene.now_s += 59
    scene.hub.condemn_hung(60)
    assert line.num_kills == 0
    scene.hub.handle(b"w", answer)
    scene.now_s += 1000
    scene.hub.condemn_hung(60)
    assert line.num_kills == 0  # answered
    scene.hub.command(command)
    scene.now_s += 61
    scene.hub.condemn_hung(60)
    scene.hub.condemn_hung(60)
    assert line.num_kills == 1


def test_a_busy_worker_is_not_hung(scene: Scene) -> None:
    epoch = scene.join("dma", "dma_worker")
    for copy in range(10):
        scene.hub.command(Copy(epoch, CopyId(copy), LAYER, ExpertId(copy), SlotId(copy)))
    for copy in range(10):  # 500 s in all, but never 60 s of silence
        scene.now_s += 50
        scene.hub.condemn_hung(60)
        scene.hub.handle(b"dma", Copied(epoch, CopyId(copy), 1, 2, 3))
    scene.now_s += 1000
    scene.hub.condemn_hung(60)
    assert scene.lines["dma"].num_kills == 0


def test_void_commands_are_not_owed(scene: Scene) -> None:
    dma = scene.join("dma", "dma_worker")
    cpu = scene.join("cpu", "cpu_worker")
    gpu = scene.join("gpu", "gpu_worker")
    scene.hub.command(Copy(dma, CopyId(1), LAYER, ExpertId(1), SlotId(0)))
    scene.hub.command(DetachArena(dma))
    scene.hub.command(Execute(cpu, STEP, LAYER, [ExpertId(1)]))
    scene.hub.command(StartStep(gpu, StepId(2), [StepPart(SequenceId(1), 0, [1])]))
    scene.hub.handle(b"gpu", StepDone(gpu, StepId(2), [Sampled(1)], 1, 2))
    scene.now_s += 1000
    scene.hub.condemn_hung(60)
    assert [line.num_kills for line in scene.lines.values()] == [0, 0, 0]


def test_statuses(scene: Scene) -> None:
    scene.join("a", "cpu_worker")
    scene.hello("b", "gpu_worker")
    first, second = scene.hub.statuses({"cpu_worker": 2})
    assert (first.role, first.pid, first.is_ready, first.num_restarts) == (
        "cpu_worker", 1000, True, 2,
    )  # fmt: skip
    assert (second.role, second.is_ready, second.num_restarts) == ("gpu_worker", False, 0)


def test_worker_names_itself(scene: Scene) -> None:
    hello = Hello(PROTOCOL_VERSION, "cpu_worker", 7, "t")
    worker = Worker(b"x", FakeLine("t", 7), hello, Epoch(3))  # type: ignore[arg-type]
    assert str(worker) == "cpu_worker (process 7, epoch 3)"
