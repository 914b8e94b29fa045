"""What chat and plain completions do alike: from a checked body to a running generation."""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from orchestrator.http.answering import EventStream, whole_answer
from orchestrator.http.constraints import grammar_of_format
from orchestrator.http.errors import bad_request, unsupported
from orchestrator.http.generation import Choice, Generation
from orchestrator.http.sampling import for_choice, sampling_of
from orchestrator.http.schemas import unsupported_fields
from orchestrator.http.settings import MAX_CHOICES
from orchestrator.http.stop_strings import StopFinder

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.requests import Request
    from starlette.responses import Response

    from orchestrator.http.answering import Answer
    from orchestrator.http.schemas import Sampled
    from orchestrator.http.server import ServerState

T = TypeVar("T")

#: Bodies beyond this are rendered and tokenised in a thread: the loop also directs the workers.
_LARGE_BYTES = 16_000
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


async def check_text(request: Request) -> None:
    """Refuse half of a surrogate pair, escaped or not: it is in no text, and nothing further in
    could encode it. JSON in UTF-16 or UTF-32, which the framework would read, hides such halves
    from a look at the bytes; both have zeros in them, and JSON in UTF-8 never has.

    Raises:
        ApiError: 400.
    """
    raw = await request.body()
    try:
        raw.decode()
        is_utf8 = b"\0" not in raw
    except UnicodeDecodeError:
        is_utf8 = False
    if not is_utf8:
        raise bad_request("The body is not valid UTF-8; send JSON in UTF-8.")
    if _SURROGATE.search(raw):
        try:
            msgspec.json.decode(raw)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            raise bad_request(
                "The body holds an escape that is half of a surrogate pair; send valid Unicode."
            ) from None


async def off_the_loop(request: Request, work: Callable[[], T]) -> T:
    """`work()`, in a thread if the request is large."""
    if len(await request.body()) > _LARGE_BYTES:
        return await asyncio.to_thread(work)
    return work()


def check_body(state: ServerState, body: Sampled) -> None:
    """Raises ApiError for another model and for fields that nothing here can do."""
    state.gate.check_model(body.model, state.model_name)
    for name, why in unsupported_fields(body):
        raise unsupported(name, why)
    if body.stream_options is not None and not body.stream:
        raise bad_request("stream_options is only for requests with stream.", "stream_options")


def num_tokens_for(state: ServerState, num_prompt: int, wanted: int | None, param: str) -> int:
    """Tokens that an answer may have.

    Raises:
        ApiError: 400 context_length_exceeded.
    """
    context = state.gate.loaded().text_model.context
    room = context - num_prompt
    if room < 1 or (wanted is not None and wanted > room):
        asked = "" if wanted is None else f" and {wanted} more are asked for"
        raise bad_request(
            f"This model's context holds {context} tokens; the prompt has {num_prompt}{asked}. "
            "Shorten the prompt or the answer.",
            param if room < 1 or wanted is None else "max_tokens",
            "context_length_exceeded",
        )
    return room if wanted is None else wanted


async def answer_request(
    state: ServerState,
    request: Request,
    body: Sampled,
    prompts: list[list[int]],
    max_tokens: int | None,
    num_logprobs: int | None,
    answer: Callable[[Generation], Answer],
    prompt_param: str,
    tool_grammar: str | None = None,
) -> Response:
    """Make n choices of each prompt and answer as the body wishes.

    Raises:
        ApiError: the request cannot be served.
    """
    loaded = state.gate.loaded()
    n = body.n or 1
    if n * len(prompts) > MAX_CHOICES:
        raise bad_request(
            f"{len(prompts)} prompts times n = {n} are {n * len(prompts)} texts; {MAX_CHOICES} is "
            "the limit of a request.",
            "n",
        )
    model = loaded.text_model
    sampling = sampling_of(body, state.sampling_defaults, num_logprobs, model.vocab_size)
    grammar, grammar_param = grammar_of_format(body.response_format), "response_format"
    if tool_grammar is not None:
        if grammar is not None:
            raise unsupported("response_format", "with a tool_choice that asks for a call")
        grammar, grammar_param = tool_grammar, "tools"
    if grammar is not None and body.ignore_eos:
        raise unsupported("ignore_eos", "a text of a given form ends where the form does")
    choices: list[Choice] = []
    for tokens in prompts:
        num_tokens = num_tokens_for(state, len(tokens), max_tokens, prompt_param)
        sentence = model.why_wrong_length(tokens)
        if sentence is not None:
            raise bad_request(sentence, prompt_param)
        for index in range(n):
            choices.append(
                Choice(
                    len(choices),
                    tokens,
                    num_tokens,
                    for_choice(sampling, index),
                    body.ignore_eos,
                    StopFinder(body.stops()),
                    None
                    if grammar is None
                    else await state.constraints.compile(grammar, model, grammar_param),
                )
            )
    state.gate.enter(len(choices))
    generation = Generation(
        state.engine,
        state.metrics,
        choices,
        state.settings.keep_alive_s,
        lambda: state.gate.leave(len(choices)),
    )
    try:
        await generation.start()
    except BaseException:
        generation.end()
        raise
    note = request.scope.get("headrace.note")
    if note is not None:
        note.generation = generation
    if body.stream:
        return EventStream(generation, answer(generation))
    return await whole_answer(request.receive, generation, answer(generation))


def usage(prompts: list[list[int]], num_generated: int) -> dict[str, Any]:
    """OpenAI's count of a request; a prompt counts once however many choices it has."""
    num_prompt = sum(len(tokens) for tokens in prompts)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_generated,
        "total_tokens": num_prompt + num_generated,
    }
