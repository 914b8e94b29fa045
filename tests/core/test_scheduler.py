"""Whose turn it is, where chunks end, when a request ends, and what is rebuilt."""

from __future__ import annotations

import pytest

from orchestrator.core.events import RequestDone, Submit, TokenOut, Withdraw, WorkerFault
from orchestrator.core.scheduler import Scheduler
from protocol.messages import (
    DropSequence,
    Epoch,
    RequestId,
    Sampled,
    SamplingParams,
    SequenceId,
    StartStep,
    StepDone,
    StepPart,
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


def start_parts(on: Scheduler, gpu: Epoch = GPU) -> list[StepPart]:
    """The parts of the next step; none if there is none."""
    commands: list[object] = []
    on.start_next(gpu, commands)  # type: ignore[arg-type]
    on.check(gpu)
    if not commands:
        return []
    (step,) = commands
    assert isinstance(step, StartStep)
    return step.parts


def start(on: Scheduler, gpu: Epoch = GPU) -> StepPart | None:
    """The one part of the next step."""
    parts = start_parts(on, gpu)
    assert len(parts) < 2
    return parts[0] if parts else None


def finish(on: Scheduler, *tokens: int | None, gpu: Epoch = GPU) -> list[object]:
    """End the step with a token for each part; with none for any by default."""
    commands: list[object] = []
    assert on.flight is not None
    answers = [None if token is None else Sampled(token) for token in tokens]
    done = StepDone(gpu, on.flight.step, answers or [None] * len(on.flight.parts), 0, 0)
    on.check_done(done)
    on.step_done(done, commands)  # type: ignore[arg-type]
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


def test_sequences_whose_prompts_are_through_decode_together_and_the_rest_waits() -> None:
    on = scheduler(max_num_seqs=2)
    for name, token in (("a", 10), ("b", 20), ("c", 30)):
        submit(on, name, [token], 3)
    seen = []
    while parts := start_parts(on):
        seen.append([(part.sequence, part.start) for part in parts])
        finish(on, *[5] * len(parts))
    assert seen == [
        [(1, 0)],
        [(1, 1)],  # between two chunks, whoever can decode does
        [(2, 0)],
        [(1, 2), (2, 1)],  # and with this a is over
        [(3, 0)],
        [(2, 2), (3, 1)],
        [(3, 2)],
    ]


def test_a_long_prompt_and_running_streams_alternate() -> None:
    on = scheduler(max_num_seqs=3)
    for name in ("a", "b"):
        submit(on, name, [1], 9)
    for tokens in ([5], [5], [5], [5, 5]):
        start_parts(on)
        finish(on, *tokens)
    submit(on, "long", list(range(13)), 9)
    seen = []
    for _ in range(8):
        parts = start_parts(on)
        seen.append([(part.sequence, len(part.tokens)) for part in parts])
        assert on.flight is not None
        assert on.flight.is_guest == (len(parts) == 1)
        finish(on, *[None if part.sampling is None else 5 for part in parts])
    decode = [(1, 1), (2, 1)]
    assert seen == [
        [(3, 4)],
        decode,
        [(3, 4)],
        decode,
        [(3, 4)],
        decode,
        [(3, 1)],
        [*decode, (3, 1)],
    ]


def test_a_prompt_alone_is_no_guest() -> None:
    on = scheduler(max_num_seqs=2)
    submit(on, "a", list(range(9)))
    submit(on, "b", list(range(9)))
    for _ in range(4):
        start(on)
        assert on.flight is not None
        assert not on.flight.is_guest
        finish(on)


def test_prompts_take_turns_and_who_comes_in_during_a_step_goes_first() -> None:
    on = scheduler(max_num_seqs=4)
    submit(on, "a", list(range(12)))
    start(on)
    submit(on, "b", list(range(8)))
    finish(on)
    seen = []
    for _ in range(4):
        part = start(on)
        assert part is not None
        seen.append((part.sequence, part.start))
        finish(on, None if part.sampling is None else 5)
    assert seen == [(2, 0), (1, 4), (2, 4), (2, 8)]


def test_newcomers_without_end_do_not_starve_a_long_prompt() -> None:
    on = scheduler(max_num_seqs=2)
    submit(on, "long", list(range(40)))
    since = 0
    for number in range(30):
        submit(on, f"short {number}", [1], 1)
        part = start(on)
        assert part is not None
        since = 0 if part.sequence == 1 else since + 1
        assert since < 3
        if len(finish(on, None if part.sampling is None else 5)) and part.sequence == 1:
            return
    assert part.start == 36


def test_more_sequences_than_rows_decode_in_turns() -> None:
    on = scheduler(max_rows=2, max_num_seqs=3)
    for name in ("a", "b", "c"):
        submit(on, name, [1], 9)
    for tokens in ([5], [5], [5], [5, 5], [5]):
        start_parts(on)
        finish(on, *tokens)
    seen = []
    for _ in range(3):
        seen.append([part.sequence for part in start_parts(on)])
        finish(on, 5, 5)
    assert seen == [[1, 2], [3, 1], [2, 3]]


def test_a_stream_that_ends_or_is_withdrawn_leaves_the_others_in_the_step() -> None:
    on = scheduler(max_num_seqs=3)
    for name in ("a", "b", "c"):
        submit(on, name, [1], 9)
    for tokens in ([5], [5], [5], [5, 5], [5]):
        start_parts(on)
        finish(on, *tokens)
    assert [part.sequence for part in start_parts(on)] == [1, 2, 3]
    assert withdraw(on, "b") == []
    commands = finish(on, EOS, 7, 8)
    assert [type(command) for command in commands] == [
        *[DropSequence, RequestDone] * 2,
        TokenOut,
    ]
    assert ends(commands) == ["stop", "cancelled"]
    assert [part.sequence for part in start_parts(on)] == [3]


def test_lost_caches_are_rebuilt_together_and_nothing_known_is_sampled() -> None:
    on = scheduler(max_num_seqs=2)
    submit(on, "a", [1], 9)
    submit(on, "b", [2], 9)
    for tokens in ([50], [51], [60], [52, 61]):
        start_parts(on)
        finish(on, *tokens)
    start_parts(on)
    on.gpu_lost([])
    seen = []
    for _ in range(5):
        parts = start_parts(on, NEXT_GPU)
        seen.append([(part.sequence, part.tokens, part.sampling is not None) for part in parts])
        answers = [None if part.sampling is None else 9 for part in parts]
        commands = finish(on, *answers, gpu=NEXT_GPU)
        assert len(commands) == sum(answer is not None for answer in answers)
    assert seen == [
        [(1, [1], False)],
        [(1, [50], False)],
        [(2, [2], False)],
        [(1, [51], False), (2, [60], False)],
        [(1, [52], True), (2, [61], True)],
    ]


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
    for _ in range(2):
        start(on)
        finish(on, 5)
    part = start(on)
    assert part is not None
    assert part.sequence == 2
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
        commands = finish(on, token, gpu=NEXT_GPU)
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


def test_answers_for_another_number_of_parts_are_the_workers_fault() -> None:
    on = scheduler()
    submit(on, "a", [1])
    start(on)
    with pytest.raises(WorkerFault, match="with 2 answers"):
        finish(on, 5, 5)


@pytest.mark.parametrize("limit", ["max_rows", "max_sequence_tokens", "max_num_seqs"])
def test_limits_below_one_are_refused(limit: str) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        scheduler(**{limit: 0})
