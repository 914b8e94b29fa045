"""Whose turn it is: requests, their tokens, and the next step.

Requests wait in the order of their coming. Up to `max_num_seqs` of them are active, and one step is
in flight at a time, because the layers of a step share the slots, the link and the host's memory,
and two steps at once would only halve each other. A step is one of two kinds:

    a chunk    the next prompt tokens of one sequence, up to the next multiple of max_rows
    a decode   the one token after the cached ones, of every sequence whose prompt is through:
               weights are then read once for all of them

While there is work of both kinds they alternate. So a running stream never waits longer for its
next token than one chunk takes, and a prompt never longer for its next chunk than one decode step;
prompts take turns, and one that comes in later has no more turns than the others.

A sequence knows all its tokens (the prompt, then what was sampled) and how many of them the
gpu_worker's KV cache holds. What is next for it follows from these two alone, and a token is
sampled only if the step ends at the last known token. So a lost gpu_worker needs no special path:
its caches are empty again, the same chunks follow, the known tokens are replayed one by one with
nothing sampled (the same shapes give the same numbers, whoever else is in the step), and sampling
goes on at the first unknown token. What was emitted is among the known tokens and is never emitted
again.

Unless it is the sequence that ends the worker. Whoever was in the step when a gpu_worker was lost,
twice since its last new token, is a suspect and decodes alone from then on, so that the others get
on without it; one that has lost `MAX_LOSSES` workers without a new token ends in an error.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from orchestrator.core.directory import InvariantBroken
from orchestrator.core.events import (
    PromptRead,
    RequestCounters,
    RequestDone,
    TokenOut,
    WorkerFault,
)
from protocol.messages import DropSequence, SequenceId, StartStep, StepId, StepPart

if TYPE_CHECKING:
    from orchestrator.core.events import CoreCommand, Submit, Withdraw
    from protocol.messages import Epoch, FinishReason, RequestId, StepDone

#: Gpu_workers lost in steps of a request since its last new token: from here on it decodes alone,
#: and here it ends.
SUSPECT_LOSSES, MAX_LOSSES = 2, 5
_LOST_SENTENCE = (
    f"{MAX_LOSSES} gpu_workers in a row ended while they worked on this request; their last words "
    "are in the log."
)


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
    #: Gpu_workers lost in its steps since its last new token.
    num_losses: int = 0
    counters: RequestCounters = field(default_factory=RequestCounters)

    @property
    def num_prompt(self) -> int:
        return len(self.submit.prompt_tokens)

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def is_suspect(self) -> bool:
        """Whether its steps may be what ends gpu_workers."""
        return self.num_losses >= SUSPECT_LOSSES

    @property
    def is_decoding(self) -> bool:
        """Whether the prompt is through."""
        return self.num_cached >= self.num_prompt


@dataclass(slots=True, eq=False)
class Part:
    """One sequence's share of the step in flight."""

    live: Live
    #: What `num_cached` will be when the step is done.
    end: int
    wants_token: bool

    @property
    def num_rows(self) -> int:
        return self.end - self.live.num_cached


@dataclass(slots=True, eq=False)
class Flight:
    """The step that the gpu_worker works on."""

    step: StepId
    parts: list[Part]
    #: A chunk of a prompt while other sequences decode: it must not cost them their experts.
    is_guest: bool

    @property
    def num_rows(self) -> int:
        return sum(part.num_rows for part in self.parts)

    @property
    def requests(self) -> list[RequestId]:
        return [part.live.submit.request for part in self.parts]

    def holds(self, live: Live) -> bool:
        return any(part.live is live for part in self.parts)


class Scheduler:
    """Requests in, steps and tokens out; see the module for the order."""

    __slots__ = (
        "_active",
        "_had_turn",
        "_is_chunk_next",
        "_last_sequence",
        "_last_step",
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
        self._active: list[Live] = []  # next turn first
        self._had_turn: list[Live] = []  # those of the last step that are not over
        self._is_chunk_next = True
        self._last_sequence = 0
        self._last_step = 0
        self.flight: Flight | None = None

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_active(self) -> int:
        return len(self._active)

    def request_of(self, sequence: SequenceId) -> RequestId | None:
        """Whose sequence this is; None if it is over."""
        for request, live in self._live.items():
            if live.sequence == sequence:
                return request
        return None

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
        if self.flight is None or not self.flight.holds(live):
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
        for live in self._had_turn:  # only now: who came in meanwhile goes before them
            self._active.remove(live)
            self._active.append(live)
        decoding = [live for live in self._active if live.is_decoding]
        in_prompt = [live for live in self._active if not live.is_decoding]
        is_chunk = bool(in_prompt) and (self._is_chunk_next or not decoding)
        if is_chunk:
            self._had_turn = in_prompt[:1]
        elif decoding[0].is_suspect:
            self._had_turn = decoding[:1]
        else:
            together = [live for live in decoding if not live.is_suspect]
            self._had_turn = together[: self._max_rows]
        self._is_chunk_next = not is_chunk
        self._last_step += 1
        parts = []
        for live in self._had_turn:
            end = min(live.num_cached + self._max_rows, live.num_prompt)
            end = end if is_chunk else live.num_cached + 1
            parts.append(Part(live, end, end == len(live.tokens)))
        self.flight = Flight(StepId(self._last_step), parts, is_chunk and bool(decoding))
        commands.append(
            StartStep(gpu_epoch, self.flight.step, [_wire_part(part) for part in parts])
        )
        return self.flight

    def check_done(self, event: StepDone) -> None:
        """Raises WorkerFault unless there is a token for each part that was to sample."""
        parts = [] if self.flight is None else self.flight.parts
        if len(event.sampled) != len(parts):
            raise WorkerFault(
                event.epoch, f"ended step {event.step} with {len(event.sampled)} answers"
            )
        for part, sampled in zip(parts, event.sampled, strict=True):
            if part.wants_token and sampled is None:
                sentence = f"ended step {event.step} without the token it was for"
                raise WorkerFault(event.epoch, sentence)

    def step_done(self, event: StepDone, commands: list[CoreCommand]) -> None:
        """The step in flight is through, and `check_done` passed it: emit its tokens, and end the
        requests whose last those were."""
        flight = self.flight
        if flight is None or flight.step != event.step:
            raise InvariantBroken(f"step {event.step} is done, but it is not the one in flight")
        self.flight = None
        for part, sampled in zip(flight.parts, event.sampled, strict=True):
            live = part.live
            live.num_cached = part.end
            if live.is_withdrawn:
                self._finish(live, "cancelled", event.epoch, commands)
            elif not part.wants_token or sampled is None:
                if not live.num_generated:
                    commands.append(PromptRead(live.submit.request, live.num_cached))
            elif sampled.token in live.submit.eos_tokens:
                self._finish(live, "stop", event.epoch, commands)
            else:
                live.tokens.append(sampled.token)
                live.num_losses = 0
                request, logprobs = live.submit.request, sampled.logprobs
                commands.append(TokenOut(request, sampled.token, sampled.logits_digest, logprobs))
                if live.num_generated == live.num_wanted:
                    self._finish(live, "length", event.epoch, commands)

    def gpu_lost(self, commands: list[CoreCommand]) -> None:
        """No cache is left and no step runs; active sequences will be rebuilt from their tokens,
        but for one that has lost too many workers."""
        flight, self.flight = self.flight, None
        for part in flight.parts if flight is not None else ():
            part.live.num_losses += 1
        for live in list(self._active):
            live.num_cached = 0
            if live.is_withdrawn:
                self._finish(live, "cancelled", None, commands)
            elif live.num_losses >= MAX_LOSSES:
                self._finish(live, "error", None, commands, _LOST_SENTENCE)

    def _finish(
        self,
        live: Live,
        reason: FinishReason,
        gpu_epoch: Epoch | None,
        commands: list[CoreCommand],
        sentence: str = "",
    ) -> None:
        del self._live[live.submit.request]
        if live in self._active:
            self._active.remove(live)
            if live in self._had_turn:
                self._had_turn.remove(live)
        else:
            self._waiting.remove(live)
        if live.num_cached and gpu_epoch is not None:
            commands.append(DropSequence(gpu_epoch, live.sequence))
        commands.append(RequestDone(live.submit.request, reason, live.counters, sentence))

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
            if live.is_withdrawn and not (self.flight is not None and self.flight.holds(live)):
                raise InvariantBroken(f"request {name} is withdrawn, but still here")
        if any(live.num_cached for live in self._waiting):
            raise InvariantBroken("a waiting request has a cache")
        if self.flight is not None:
            self._check_flight(self.flight, gpu_epoch)

        if any(live not in self._active for live in self._had_turn):
            raise InvariantBroken("somebody who is over is to go behind the others")

    def _check_flight(self, flight: Flight, gpu_epoch: Epoch | None) -> None:
        if gpu_epoch is None:
            raise InvariantBroken("a step is in flight, but there is no gpu_worker")
        sequences = {part.live.sequence for part in flight.parts}
        if not sequences or len(sequences) != len(flight.parts):
            raise InvariantBroken("the step in flight is for nobody, or twice for somebody")
        if any(part.live not in self._active for part in flight.parts):
            raise InvariantBroken("the step in flight belongs to no active request")
        if not 1 <= flight.num_rows <= self._max_rows:
            raise InvariantBroken(f"the step in flight has {flight.num_rows} rows")
        if len(flight.parts) > 1 and flight.num_rows != len(flight.parts):
            raise InvariantBroken("a step in flight decodes more than a token of a sequence")


def _wire_part(part: Part) -> StepPart:
    live = part.live
    tokens = live.tokens[live.num_cached : part.end]
    if not part.wants_token:
        return StepPart(live.sequence, live.num_cached, tokens)
    return StepPart(live.sequence, live.num_cached, tokens, live.submit.sampling, live.num_prompt)
