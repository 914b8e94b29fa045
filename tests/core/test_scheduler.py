"""Whose turn it is, where chunks end, when a request ends, and what is rebuilt."""

from __future__ import annotations

import pytest

from orchestrator.core.events import RequestDone, Submit, TokenOut, Withdraw, WorkerFault
from orchestrator.core.scheduler import Scheduler
from protocol.messages import (
    DropSequence,
    Epoch,
    RequestId,
    SamplingParams,
    SequenceId,
    StartStep,
    StepDone,
)

GPU, NEXT_GPU = Epoch(1), Epoch(2)
EOS = 99


def scheduler(
    *, max_rows: int = 4, max_sequence_tokens: int = 64, max_num_seqs: int = 1
) -> Scheduler:
    return Scheduler(max_rows, max_sequence_tokens, max_num_seqs)


def submit(
    into: Scheduler, name: str, prompt: list[int], max_tokens: int = 3, *, ignore_eos: bool = False
) -> list[object]:
    eos_tokens = frozenset[int]() if ignore_eos else frozenset({EOS})
    commands: list[object] = []
    into.submit(
        Submit(RequestId(name), prompt, max_tokens, eos_tokens, SamplingParams(seed=1)),
        commands,  # type: ignore[arg-type]
    )
    return commands


def start(on: Scheduler, gpu: Epoch = GPU) -> StartStep | None:
    commands: list[object] = []
    on.start_next(gpu, commands)  # type: ignore[arg-type]
    on.check(gpu)
    if not commands:
        return None
    (step,) = commands
    assert isinstance(step, StartStep)
    return step


def finish(on: Scheduler, token: int | None = None, gpu: Epoch = GPU) -> list[object]:
    commands: list[object] = []
    assert on.flight is not None
    on.step_done(StepDone(gpu, on.flight.step, token, "", 0, 0), commands)  # type: ignore[arg-type]
    on.check(gpu)
    return commands


def withdraw(on: Scheduler, name: str) -> list[object]:
    commands: list[object] = []
    on.withdraw(Withdraw(RequestId(name)), GPU, commands)  # type: ignore[arg-type]
    on.check(GPU)
    return commands


def ends(commands: list[object]) -> list[str]:
    return [command.reason for command in commands if isinstance(command, RequestDone)]


@pytest.mark.parametrize(
    ("num_prompt", "chunks"),
    [
        (1, [(0, 1)]),
        (4, [(0, 4)]),
        (5, [(0, 4), (4, 1)]),
        (11, [(0, 4), (4, 4), (8, 3)]),
    ],
)
def test_a_prompt_goes_in_chunks_and_only_the_last_samples(
    num_prompt: int, chunks: list[tuple[int, int]]
) -> None:
    on = scheduler()
    submit(on, "a", list(range(num_prompt)))
    seen = []
    for index in range(len(chunks)):
        step = start(on)
        assert step is not None
        is_last = index + 1 == len(chunks)
        assert (step.sampling is not None) == is_last
        assert step.tokens == list(range(num_prompt))[step.start : step.start + len(step.tokens)]
        seen.append((step.start, len(step.tokens)))
        finish(on, 7 if is_last else None)
    assert seen == chunks


@pytest.mark.parametrize("max_tokens", [1, 2, 5])
def test_max_tokens_are_given_and_no_more(max_tokens: int) -> None:
    on = scheduler()
    submit(on, "a", [1, 2], max_tokens)
    commands: list[object] = []
    while start(on) is not None:
        commands += finish(on, 5)
    assert [type(command) for command in commands] == [
        *[TokenOut] * max_tokens,
        DropSequence,
        RequestDone,
    ]
    assert ends(commands) == ["length"]
    assert on.is_idle


def test_an_eos_token_ends_the_request_and_is_not_given() -> None:
    on = scheduler()
    submit(on, "a", [1], 5)
    start(on)
    commands = finish(on, EOS)
    assert commands[0] == DropSequence(GPU, SequenceId(1))
    assert ends(commands) == ["stop"]


def test_an_eos_token_is_one_like_any_other_when_it_is_ignored() -> None:
    on = scheduler()
    submit(on, "a", [1], 2, ignore_eos=True)
    start(on)
    assert finish(on, EOS) == [TokenOut(RequestId("a"), EOS, "")]
    assert start(on) is not None


def test_a_full_context_ends_the_request() -> None:
    on = scheduler(max_sequence_tokens=4)
    submit(on, "a", [1, 2], 100)
    start(on)
    assert ends(finish(on, 5)) == []
    start(on)
    assert ends(finish(on, 5)) == ["length"]


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "reason"),
    [
        ([], 3, "error"),
        ([1] * 5, 3, "error"),
        ([1] * 4, 3, "length"),
        ([1], 0, "length"),
    ],
)
def test_a_request_that_can_yield_nothing_ends_at_once(
    prompt: list[int], max_tokens: int, reason: str
) -> None:
    on = scheduler(max_sequence_tokens=4)
    assert ends(submit(on, "a", prompt, max_tokens)) == [reason]
    assert on.is_idle


def test_requests_are_served_in_the_order_of_their_coming() -> None:
    on = scheduler()
    submit(on, "a", [1], 1)
    submit(on, "b", [2], 1)
    submit(on, "c", [3], 1)
    seen = []
    while (step := start(on)) is not None:
        seen.append(step.tokens)
        finish(on, 5)
    assert seen == [[1], [2], [3]]


def test_active_sequences_take_turns_and_the_rest_waits() -> None:
    on = scheduler(max_num_seqs=2)
    for name, token in (("a", 10), ("b", 20), ("c", 30)):
        submit(on, name, [token], 2)
    seen = []
    while (step := start(on)) is not None:
        seen.append((step.sequence, step.start))
        finish(on, 5)
    assert seen == [(1, 0), (2, 0), (1, 1), (2, 1), (3, 0), (3, 1)]


def test_who_comes_in_during_a_step_goes_before_the_one_that_has_it() -> None:
    on = scheduler(max_num_seqs=2)
    submit(on, "a", [10])
    start(on)
    submit(on, "b", [20])
    finish(on, 5)
    step = start(on)
    assert step is not None
    assert step.tokens == [20]


def test_one_step_is_in_flight_at_a_time() -> None:
    on = scheduler(max_num_seqs=2)
    submit(on, "a", [1])
    submit(on, "b", [2])
    assert start(on) is not None
    assert start(on) is None


def test_a_waiting_request_is_withdrawn_at_once() -> None:
    on = scheduler()
    submit(on, "a", [1])
    start(on)
    submit(on, "b", [2])
    assert ends(withdraw(on, "b")) == ["cancelled"]
    assert withdraw(on, "b") == []


def test_a_running_request_is_withdrawn_with_its_step_and_gives_no_token_more() -> None:
    on = scheduler()
    submit(on, "a", [1])
    start(on)
    assert withdraw(on, "a") == []
    commands = finish(on, 5)
    assert commands[0] == DropSequence(GPU, SequenceId(1))
    assert ends(commands) == ["cancelled"]
    assert len(commands) == 2


def test_an_active_request_whose_turn_it_is_not_is_withdrawn_at_once() -> None:
    on = scheduler(max_num_seqs=2)
    submit(on, "a", [1])
    submit(on, "b", [2])
    start(on)
    finish(on, 5)
    start(on)
    commands = withdraw(on, "a")
    assert commands[0] == DropSequence(GPU, SequenceId(1))
    assert ends(commands) == ["cancelled"]


def test_a_lost_gpu_worker_costs_a_replay_and_no_token() -> None:
    on = scheduler()
    submit(on, "a", [1, 2, 3, 4, 5], 4)
    start(on)
    finish(on)
    for early in (50, 51):
        start(on)
        finish(on, early)
    start(on)
    on.gpu_lost([])
    on.check(None)
    replayed = []
    tokens: tuple[int | None, ...] = (None, None, None, 52, 53)
    for token in tokens:
        step = start(on, NEXT_GPU)
        assert step is not None
        replayed.append((step.start, step.tokens, step.sampling is not None))
        commands = finish(on, token, NEXT_GPU)
        assert [c.token for c in commands if isinstance(c, TokenOut)] == (
            [] if token is None else [token]
        )
    assert replayed == [
        (0, [1, 2, 3, 4], False),
        (4, [5], False),
        (5, [50], False),
        (6, [51], True),
        (7, [52], True),
    ]
    assert on.is_idle


def test_a_request_withdrawn_in_its_step_ends_with_the_gpu_worker() -> None:
    on = scheduler()
    submit(on, "a", [1])
    start(on)
    withdraw(on, "a")
    commands: list[object] = []
    on.gpu_lost(commands)  # type: ignore[arg-type]
    assert ends(commands) == ["cancelled"]
    assert len(commands) == 1


def test_a_name_is_free_again_when_its_request_is_over() -> None:
    on = scheduler()
    submit(on, "a", [1], 1)
    assert submit(on, "a", [2], 1) == []
    start(on)
    finish(on, 5)
    submit(on, "a", [2], 1)
    step = start(on)
    assert step is not None
    assert step.tokens == [2]


def test_a_missing_token_is_the_workers_fault_and_changes_nothing() -> None:
    on = scheduler()
    submit(on, "a", [1])
    start(on)
    with pytest.raises(WorkerFault, match="without the token"):
        finish(on, None)
    assert finish(on, 5) == [TokenOut(RequestId("a"), 5, "")]


@pytest.mark.parametrize("limit", ["max_rows", "max_sequence_tokens", "max_num_seqs"])
def test_limits_below_one_are_refused(limit: str) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        scheduler(**{limit: 0})
