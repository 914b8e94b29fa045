"""Who is here: HELLO, epochs, who may say what, and who has stopped answering.

    HELLO -> checked (version, life line, process, role free) -> Welcome with a new epoch
    Progress ... Ready -> the core hears WorkerJoined
    life line over     -> the core hears WorkerLost

A peer is known by its ZeroMQ identity, or by the mailbox of its life line once it is welcomed.
Every message must come from a welcomed worker, carry its epoch and be one that its role may say;
anything else is dropped and counted. A worker that owes an answer and says nothing for too long is
killed: its life line then ends like any other.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from orchestrator.core.events import AllIn, CoreEvent, WorkerJoined, WorkerLost
from protocol.messages import (
    PROTOCOL_VERSION,
    AttachArena,
    Capabilities,
    Copied,
    Copy,
    DetachArena,
    DropSequence,
    Epoch,
    Execute,
    Executed,
    Failed,
    Hello,
    Message,
    Progress,
    Ran,
    Ready,
    Refused,
    Role,
    Routed,
    Run,
    Shutdown,
    StartStep,
    StepDone,
    Welcome,
    WorkerEvent,
    WorkerSetup,
    WorkerStatus,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from orchestrator.lifelines import Lifelines, Line
    from orchestrator.mailroom import Mailbox

log = logging.getLogger("headrace")

AddressedCommand = StartStep | Run | DropSequence | Copy | AttachArena | DetachArena | Execute
#: The same as a tuple: `isinstance` with a union type costs several times as much.
ADDRESSED = (StartStep, Run, DropSequence, Copy, AttachArena, DetachArena, Execute)

_LIFE = (Progress, Ready, Failed)
_MAY_SAY: dict[Role, tuple[type, ...]] = {
    # Where the device's memory cannot be shared, the gpu_worker carries out copies itself.
    "gpu_worker": (Routed, Ran, StepDone, Copied, *_LIFE),
    "dma_worker": (Copied, *_LIFE),
    "cpu_worker": (Executed, *_LIFE),
}
_MAX_LAST_WORDS = 16
#: What becomes of its work while a worker is away.
_WITHOUT: dict[Role, str] = {
    "gpu_worker": "requests wait",
    "dma_worker": "misses run on the CPU",
    "cpu_worker": "misses go to other cpu_workers, or are filled",
}
#: Roles of which one is all that a pipeline can use.
_SINGLE: tuple[Role, ...] = ("gpu_worker", "dma_worker")


class Worker:
    """A welcomed worker. `owed` names answers that are due; hung is who owes and is silent."""

    __slots__ = (
        "bytes_per_s",
        "capabilities",
        "epoch",
        "identity",
        "is_condemned",
        "is_ready",
        "is_replacement",
        "is_self_joining",
        "line",
        "mailbox",
        "owed",
        "quiet_since_s",
        "role",
        "said",
    )

    def __init__(self, identity: bytes, line: Line, hello: Hello, epoch: Epoch) -> None:
        self.identity = identity
        self.line = line
        #: In place of the socket, if the worker uses it.
        self.mailbox: Mailbox | None = None
        self.role: Role = hello.role
        self.epoch = epoch
        self.capabilities: Capabilities = hello.capabilities
        self.is_ready = False
        self.is_condemned = False
        self.is_replacement = False
        self.bytes_per_s = 0.0
        self.owed: set[tuple[object, ...]] = set()
        self.quiet_since_s = 0.0
        #: Of a gpu_worker: the (step, layer) it asked about last, and whether it joins by itself.
        self.said = (0, 0)
        self.is_self_joining = False

    def __str__(self) -> str:
        return f"{self.role} (process {self.line.pid}, epoch {self.epoch})"


class Hub:
    """All workers of one pipeline. `deliver` takes events for the core; `send(identity, message)`
    says whether the message left."""

    def __init__(
        self,
        lifelines: Lifelines,
        send: Callable[[bytes, Message], bool],
        count_drop: Callable[[str], None],
        deliver: Callable[[CoreEvent], None],
        setup_for: Callable[[Role], WorkerSetup],
        on_change: Callable[[Worker, str], None],
        *,
        is_by_hand: bool = False,
    ) -> None:
        self._lifelines = lifelines
        self._send = send
        self._count_drop = count_drop
        self._deliver = deliver
        self._setup_for = setup_for
        self._on_change = on_change
        #: Nobody starts workers again by itself, so a person must learn what is missing.
        self._is_by_hand = is_by_hand
        self._is_ending = False
        self._by_identity: dict[bytes, Worker] = {}
        self._by_epoch: dict[Epoch, Worker] = {}
        self._by_token: dict[str, Worker] = {}
        self._next_epoch = 1
        self._num_to_replace: dict[Role, int] = {}
        #: Workers that took the place of a lost one, by role.
        self.num_replaced: dict[Role, int] = {}
        self.progress_text = ""
        #: Why workers failed, by pid, the latest last.
        self._last_words: dict[int, str] = {}

    # ---------------------------------------------------------------- what workers say

    def is_worker(self, identity: bytes) -> bool:
        return identity in self._by_identity

    def handle(self, identity: bytes, event: WorkerEvent) -> None:
        """One event from the wire."""
        if isinstance(event, Hello):
            self._hello(identity, event)
            return
        worker = self._by_identity.get(identity)
        if worker is None:
            self._count_drop(f"{type(event).__name__} from a peer that was not welcomed")
            return
        self._heard(worker, event)

    def _heard(self, worker: Worker, event: WorkerEvent) -> None:
        kind = type(event)
        if isinstance(event, Hello):
            self._count_drop(f"a second HELLO from {worker}")
            return
        if event.epoch != worker.epoch:
            self._count_drop(f"{kind.__name__} of epoch {event.epoch} from {worker}")
            return
        if kind not in _MAY_SAY[worker.role]:
            self._count_drop(f"{kind.__name__} from {worker}, which may not say it")
            return
        worker.quiet_since_s = time.monotonic()
        match event:
            case Progress():
                self.progress_text = f"{worker.role}: {event.text}"
                log.info("%s: %s (%d of %d)", worker.role, event.text, event.done, event.total)
            case Ready():
                self._ready(worker, event)
            case Failed():
                self._last_words[worker.line.pid] = event.sentence
                if len(self._last_words) > _MAX_LAST_WORDS:
                    del self._last_words[next(iter(self._last_words))]
                log.error("%s fails: %s", worker, event.sentence)
            case _ if not worker.is_ready:
                self._count_drop(f"{kind.__name__} from {worker} before it was ready")
            case Routed():
                worker.owed.clear()
                worker.said = (event.step, event.layer)
                worker.is_self_joining = event.is_self_joining
                self._deliver(event)
            case StepDone():
                worker.owed.clear()
                worker.said = (event.step + 1, 0)
                self._deliver(event)
            case Ran():
                worker.owed.discard((Ran, event.step, event.layer, *event.experts))
                self._deliver(event)
            case Copied():
                worker.owed.discard((Copied, event.copy))
                self._deliver(event)
            case Executed():
                worker.owed.discard((Executed, event.step, event.layer, *event.experts))
                self._deliver(event)

    def _hello(self, identity: bytes, hello: Hello) -> None:
        if identity in self._by_identity:
            self._count_drop(f"a second HELLO from {self._by_identity[identity]}")
            return
        line = self._lifelines.find(hello.token)
        sentence = self._why_refused(hello, line)
        if sentence is not None or line is None:
            log.warning("refused a %s: %s", hello.role, sentence)
            self._send(identity, Refused(sentence or ""))
            return
        epoch = Epoch(self._next_epoch)
        self._next_epoch += 1
        worker = Worker(identity, line, hello, epoch)
        line.is_worker = True
        self._by_identity[identity] = self._by_epoch[epoch] = self._by_token[line.token] = worker
        if self._num_to_replace.get(worker.role):
            self._num_to_replace[worker.role] -= 1
            worker.is_replacement = True
            self.num_replaced[worker.role] = self.num_replaced.get(worker.role, 0) + 1
        log.info("%s joins: %s", worker, hello.capabilities)
        self._send(identity, Welcome(epoch, self._setup_for(worker.role)))
        mailbox = line.mailbox
        if mailbox is not None and mailbox.is_used:
            worker.mailbox = mailbox
            mailbox.hear_through(
                lambda event: self._heard(worker, event),
                lambda why: self.condemn(epoch, f"broke the protocol: it {why}"),
                is_first=worker.role == "gpu_worker",
            )

    def _tell(self, worker: Worker, message: Message) -> bool:
        """False when the worker is gone or does not read."""
        if worker.mailbox is not None:
            return worker.mailbox.send(message)
        return self._send(worker.identity, message)

    def _why_refused(self, hello: Hello, line: Line | None) -> str | None:
        if hello.protocol_version != PROTOCOL_VERSION:
            return (
                f"This {hello.role} speaks protocol version {hello.protocol_version}, the "
                f"orchestrator speaks {PROTOCOL_VERSION}; run all processes from the same release."
            )
        if line is None:
            return (
                f"This {hello.role} shows no token of a living life line; join through "
                "lifeline.sock first."
            )
        if line.token in self._by_token:
            return f"This life line already belongs to {self._by_token[line.token]}."
        if hello.pid != line.pid:
            return (
                f"This {hello.role} says it is process {hello.pid}, but its life line belongs to "
                f"process {line.pid}."
            )
        if hello.role in _SINGLE:
            for worker in self._by_epoch.values():
                if worker.role == hello.role:
                    return (
                        f"There is a {hello.role} already, process {worker.line.pid}, and a "
                        "pipeline has one; stop that one first."
                    )
        return None

    def _ready(self, worker: Worker, ready: Ready) -> None:
        if worker.is_ready:
            self._count_drop(f"a second Ready from {worker}")
            return
        worker.is_ready = True
        worker.bytes_per_s = ready.bytes_per_s
        rate = f", {ready.bytes_per_s / 1e9:.2f} GB/s" if ready.bytes_per_s else ""
        is_news = self._is_by_hand and worker.is_replacement
        log.log(logging.WARNING if is_news else logging.INFO, "%s is ready%s", worker, rate)
        self._on_change(worker, "joined")
        self._deliver(
            WorkerJoined(
                worker.epoch,
                worker.role,
                ready.bytes_per_s,
                ready.arena,
                worker.capabilities.numa_node,
                ready.far_bytes_per_s,
            )
        )

    # ---------------------------------------------------------------- what workers are told

    def command(self, command: AddressedCommand) -> None:
        """Send one command of the core to the worker of its epoch."""
        worker = self._by_epoch.get(command.epoch)
        if worker is None:  # lost; the core hears of it next
            return
        self._note_owed(worker, command)
        if not self._tell(worker, command):
            self.condemn(worker.epoch, "cannot be reached any more (it hangs or is gone)")

    def _note_owed(self, worker: Worker, command: AddressedCommand) -> None:
        owed: tuple[object, ...]
        match command:
            case Run(experts=experts) if not command.join:
                if worker.is_self_joining and not command.is_ran_wanted:
                    return  # it says so in the residency segment
                owed = (Ran, command.step, command.layer, *experts)
            case Run(join=True):
                owed = (Routed, command.step)
            case StartStep():
                owed = (Routed, command.step)
                # What belonged to an earlier step may have been dropped as stale, unanswered.
                for other in self._by_epoch.values():
                    if other.role == "cpu_worker":
                        other.owed.clear()
            case Copy():
                owed = (Copied, command.copy)
            case Execute():
                owed = (Executed, command.step, command.layer, *command.experts)
            case AttachArena() | DetachArena():
                worker.owed.clear()  # copies under way are void
                return
            case _:
                return
        self._owe(worker, owed)

    def _owe(self, worker: Worker, owed: tuple[object, ...]) -> None:
        if not worker.owed:
            worker.quiet_since_s = time.monotonic()
        worker.owed.add(owed)

    def expect(self, all_in: AllIn) -> None:
        """The gpu_worker waits for nothing in this layer-step: it owes its next word, unless it is
        beyond that already."""
        worker = self._by_epoch.get(all_in.epoch)
        if worker is not None and worker.said <= (all_in.step, all_in.layer):
            self._owe(worker, (Routed, all_in.step))

    def condemn(self, epoch: Epoch, why: str) -> None:
        """Kill a worker that cannot go on; it is lost when its process is over."""
        worker = self._by_epoch.get(epoch)
        if worker is None or worker.is_condemned:
            return
        worker.is_condemned = True
        log.error("%s %s; it is killed", worker, why)
        worker.line.kill()

    def condemn_hung(self, timeout_s: float) -> None:
        """Kill every worker that owes an answer and was silent for longer than `timeout_s`."""
        now_s = time.monotonic()
        for worker in list(self._by_epoch.values()):
            if worker.owed and now_s - worker.quiet_since_s > timeout_s:
                self.condemn(worker.epoch, f"has not answered for {timeout_s:.0f} s")

    def heard_of(self, role: Role) -> None:
        """A worker of this role was seen to make progress, though it sent nothing."""
        for worker in self._by_epoch.values():
            if worker.role == role:
                worker.quiet_since_s = time.monotonic()

    def say_goodbye(self, reason: str) -> None:
        """Ask every worker to leave."""
        self._is_ending = True
        for worker in self._by_epoch.values():
            self._tell(worker, Shutdown(worker.epoch, reason))

    # ---------------------------------------------------------------- ends

    def line_ended(self, token: str) -> None:
        """The process behind a life line is over."""
        worker = self._by_token.pop(token, None)
        if worker is None:
            return
        del self._by_identity[worker.identity]
        del self._by_epoch[worker.epoch]
        self._num_to_replace[worker.role] = self._num_to_replace.get(worker.role, 0) + 1
        if self._is_by_hand and not self._is_ending:
            log.warning(
                "%s is gone: %s until you start another `headrace %s` with this --run-dir",
                worker, _WITHOUT[worker.role], worker.role.replace("_", "-"),
            )  # fmt: skip
        else:
            log.info("%s is gone", worker)
        if worker.is_ready:
            self._on_change(worker, "lost")
            self._deliver(WorkerLost(worker.epoch))

    # ---------------------------------------------------------------- asked by others

    def num_ready(self, role: Role) -> int:
        return sum(worker.role == role and worker.is_ready for worker in self._by_epoch.values())

    def kill(self, pid: int) -> bool:
        """End a worker's process because somebody wishes it; False when there is none of that
        number. It is lost, and replaced, like any other that dies."""
        for worker in self._by_epoch.values():
            if worker.line.pid == pid:
                self.condemn(worker.epoch, "is to be replaced")
                return True
        return False

    def last_words(self, pid: int) -> str:
        """What the worker of process `pid` said before it failed; "" when it said nothing."""
        return self._last_words.pop(pid, "")

    def statuses(self, num_restarts: Mapping[Role, int]) -> list[WorkerStatus]:
        return [
            WorkerStatus(
                worker.role,
                worker.line.pid,
                worker.epoch,
                worker.is_ready,
                worker.bytes_per_s,
                worker.capabilities,
                num_restarts.get(worker.role, 0),
            )
            for worker in self._by_epoch.values()
        ]
