"""Whose turn it is: requests, their tokens, and the next step.

Requests wait in the order of their coming. Up to `max_num_seqs` of them are active and take turns,
one step each; one step is in flight at a time, because the layers of a step share the slots, the
link and the host's memory, and two steps at once would only halve each other.

A sequence knows all its tokens (the prompt, then what was sampled) and how many of them the
gpu_worker's KV cache holds. The next step follows from these two alone:

    the cache lacks prompt tokens  ->  the next chunk, up to the next multiple of max_rows
    else                           ->  the one token after the cached ones
    wanted is a new token          ->  only if that step ends at the last known token

So a lost gpu_worker needs no special path: its caches are empty again, the same chunks follow, the
known tokens are replayed one by one with nothing sampled (the same shapes give the same numbers),
and sampling goes on at the first unknown token. What was emitted is among the known tokens and is
never emitted again.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from orchestrator.core.directory import InvariantBroken
from orchestrator.core.events import RequestCounters, RequestDone, TokenOut, WorkerFault
from protocol.messages import DropSequence, SequenceId, StartStep, StepId

if TYPE_CHECKING:
    from orchestrator.core.events import CoreCommand, Submit, Withdraw
    from protocol.messages import Epoch, FinishReason, RequestId, StepDone


@dataclass(slots=True, eq=False)
class Live:
    """A request that is not over: waiting or active."""

    submit: Submit
    sequence: SequenceId
    #: The prompt, then every sampled token.
    tokens: list[int]
    #: How many tokens end the request: max_tokens, or what the context has room for.
    num_wanted: int
    #: Leading tokens that the gpu_worker's KV cache holds.
    num_cached: int = 0
    is_withdrawn: bool = False
    counters: RequestCounters = field(default_factory=RequestCounters)

    @property
    def num_prompt(self) -> int:
        return len(self.submit.prompt_tokens)

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.num_prompt


@dataclass(slots=True, eq=False)
class Flight:
    """The step that the gpu_worker works on."""

    step: StepId
    live: Live
    #: What `num_cached` will be when it is done.
    end: int
    wants_token: bool

    @property
    def num_rows(self) -> int:
        return self.end - self.live.num_cached


class Scheduler:
    """Requests in, steps and tokens out; see the module for the order."""

    __slots__ = (
        "_active",
        "_last_sequence",
        "_last_step",
        "_last_turn",
        "_live",
        "_max_num_seqs",
        "_max_rows",
        "_max_sequence_tokens",
        "_waiting",
        "flight",
    )

    def __init__(self, max_rows: int, max_sequence_tokens: int, max_num_seqs: int) -> None:
        """ValueError if a limit is below 1."""
        if min(max_rows, max_sequence_tokens, max_num_seqs) < 1:
            raise ValueError(
                "max_rows, max_sequence_tokens and max_num_seqs must be at least 1, not "
                f"{max_rows}, {max_sequence_tokens} and {max_num_seqs}"
            )
        self._max_rows = max_rows
        self._max_sequence_tokens = max_sequence_tokens
        self._max_num_seqs = max_num_seqs
        self._live: dict[RequestId, Live] = {}
        self._waiting: deque[Live] = deque()
        self._active: deque[Live] = deque()  # next turn first
        self._last_sequence = 0
        self._last_step = 0
        self._last_turn: Live | None = None
        self.flight: Flight | None = None

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_active(self) -> int:
        return len(self._active)

    @property
    def is_idle(self) -> bool:
        return not self._live

    # ---- requests ----

    def submit(self, event: Submit, commands: list[CoreCommand]) -> bool:
        """Queue a request; False if one of this name is not over yet.

        A request that cannot yield a token ends here: an empty prompt or one beyond the context is
        an error (the shell refuses both with a sentence), no room or no wish for a token is its
        length.
        """
        if event.request in self._live:
            return False
        num_prompt = len(event.prompt_tokens)
        room = self._max_sequence_tokens - num_prompt
        num_wanted = min(event.max_tokens, room)
        if num_prompt == 0 or num_wanted < 1:
            reason: FinishReason = "error" if num_prompt == 0 or room < 0 else "length"
            commands.append(RequestDone(event.request, reason, RequestCounters()))
            return True
        self._last_sequence += 1
        live = Live(event, SequenceId(self._last_sequence), list(event.prompt_tokens), num_wanted)
        self._live[event.request] = live
        self._waiting.append(live)
        return True

    def withdraw(
        self, event: Withdraw, gpu_epoch: Epoch | None, commands: list[CoreCommand]
    ) -> bool:
        """End a request now, or with its step in flight; False if it is over already."""
        live = self._live.get(event.request)
        if live is None or live.is_withdrawn:
            return False
        live.is_withdrawn = True
        if self.flight is None or self.flight.live is not live:
            self._finish(live, "cancelled", gpu_epoch, commands)
        return True

    # ---- steps ----

    def start_next(self, gpu_epoch: Epoch, commands: list[CoreCommand]) -> Flight | None:
        """Start the step whose turn it is, unless one is in flight or nobody wants one."""
        if self.flight is not None:
            return None
        while self._waiting and len(self._active) < self._max_num_seqs:
            self._active.append(self._waiting.popleft())
        if not self._active:
            return None
        if self._active[0] is self._last_turn:
            self._active.rotate(-1)  # only now: who came in meanwhile goes before it
        live = self._last_turn = self._active[0]
        start, num_prompt = live.num_cached, live.num_prompt
        end = min(start + self._max_rows, num_prompt) if start < num_prompt else start + 1
        wants_token = end == len(live.tokens)
        self._last_step += 1
        self.flight = Flight(StepId(self._last_step), live, end, wants_token)
        commands.append(
            StartStep(
                gpu_epoch,
                self.flight.step,
                live.sequence,
                start,
                live.tokens[start:end],
                live.submit.sampling if wants_token else None,
            )
        )
        return self.flight

    def step_done(self, event: StepDone, commands: list[CoreCommand]) -> None:
        """The step in flight is through: emit its token, and end the request if that was the last.

        Raises:
            WorkerFault: the step was to sample and there is no token.
        """
        flight = self.flight
        if flight is None or flight.step != event.step:
            raise InvariantBroken(f"step {event.step} is done, but it is not the one in flight")
        if flight.wants_token and event.token is None:
            raise WorkerFault(event.epoch, f"ended step {event.step} without the token it was for")
        live = flight.live
        live.num_cached = flight.end
        self.flight = None
        if live.is_withdrawn:
            self._finish(live, "cancelled", event.epoch, commands)
            return
        if not flight.wants_token or event.token is None:
            return
        if event.token in live.submit.eos_tokens:
            self._finish(live, "stop", event.epoch, commands)
            return
        live.tokens.append(event.token)
        commands.append(TokenOut(live.submit.request, event.token, event.logits_digest))
        if live.num_generated == live.num_wanted:
            self._finish(live, "length", event.epoch, commands)

    def gpu_lost(self, commands: list[CoreCommand]) -> None:
        """No cache is left and no step runs; active sequences will be rebuilt from their tokens."""
        self.flight = None
        for live in list(self._active):
            live.num_cached = 0
            if live.is_withdrawn:
                self._finish(live, "cancelled", None, commands)

    def _finish(
        self,
        live: Live,
        reason: FinishReason,
        gpu_epoch: Epoch | None,
        commands: list[CoreCommand],
    ) -> None:
        del self._live[live.submit.request]
        (self._active if live in self._active else self._waiting).remove(live)
        if live.num_cached and gpu_epoch is not None:
            commands.append(DropSequence(gpu_epoch, live.sequence))
        commands.append(RequestDone(live.submit.request, reason, live.counters))

    # ---- the recount ----

    def check(self, gpu_epoch: Epoch | None) -> None:
        """Recount; InvariantBroken says what disagrees."""
        everyone = [*self._waiting, *self._active]
        by_name = {live.submit.request: live for live in everyone}
        if len(by_name) != len(everyone) or by_name != self._live:
            raise InvariantBroken("the queues do not hold each live request once")
        if len(self._active) > self._max_num_seqs:
            raise InvariantBroken(f"{len(self._active)} sequences are active at once")
        for live in everyone:
            name = live.submit.request
            if live.tokens[: live.num_prompt] != live.submit.prompt_tokens:
                raise InvariantBroken(f"request {name} has lost its prompt")
            if not 0 <= live.num_generated < live.num_wanted:
                raise InvariantBroken(f"request {name} goes on after its last token")
            if not 0 <= live.num_cached < len(live.tokens):
                raise InvariantBroken(f"request {name} has cached tokens that it does not know")
            if live.num_cached and gpu_epoch is None:
                raise InvariantBroken(f"request {name} has a cache, but there is no gpu_worker")
            in_flight = self.flight is not None and self.flight.live is live
            if live.is_withdrawn and not in_flight:
                raise InvariantBroken(f"request {name} is withdrawn, but still here")
        if any(live.num_cached for live in self._waiting):
            raise InvariantBroken("a waiting request has a cache")
        if self.flight is not None:
            if gpu_epoch is None:
                raise InvariantBroken("a step is in flight, but there is no gpu_worker")
            if self.flight.live not in self._active:
                raise InvariantBroken("the step in flight belongs to no active request")
