"""POST /v1/chat/completions."""

from __future__ import annotations

import time
import uuid
from typing import TYPE_CHECKING, Any

from orchestrator.http.constraints import grammar_of_choice
from orchestrator.http.errors import bad_request, unsupported
from orchestrator.http.preparing import (
    answer_request,
    check_body,
    check_text,
    off_the_loop,
    usage,
)
from orchestrator.http.schemas import ChatRequest, NamedTool
from orchestrator.http.token_text import token_bytes
from orchestrator.http.tools import ToolReader

if TYPE_CHECKING:
    from collections.abc import Iterable

    from starlette.requests import Request
    from starlette.responses import Response

    from orchestrator.http.generation import Generation, Piece
    from orchestrator.http.schemas import Tool
    from orchestrator.http.server import ServerState
    from orchestrator.text_model import TextModel
    from protocol.messages import TokenLogprobs


async def chat_completions(state: ServerState, request: Request, body: ChatRequest) -> Response:
    """Raises ApiError."""
    check_body(state, body)
    await check_text(request)
    loaded = state.gate.loaded()
    if len(body.messages) > state.settings.max_messages:
        raise bad_request(
            f"There are {len(body.messages)} messages; {state.settings.max_messages} is the limit.",
            "messages",
        )
    tools = _tools(state, body)
    if body.top_logprobs is not None and not body.logprobs:
        raise bad_request("top_logprobs needs logprobs to be true.", "top_logprobs")
    tokens = await off_the_loop(
        request,
        lambda: loaded.text_model.encode(_prompt(state, body, tools), add_special_tokens=False),
    )
    return await answer_request(
        state,
        request,
        body,
        [tokens],
        body.max_completion_tokens or body.max_tokens,
        (body.top_logprobs or 0) if body.logprobs else None,
        lambda generation: ChatAnswer(
            loaded.text_model, state.model_name, generation, body, tools, state.tool_form
        ),
        "messages",
        grammar_of_choice(body, tools, state.tool_form) if tools and state.tool_form else None,
    )


def _tools(state: ServerState, body: ChatRequest) -> list[Tool] | None:
    """The tools that the model is told of.

    Raises:
        ApiError: 400, this model's template knows none, or a choice that cannot be kept.
    """
    choice = body.tool_choice
    if isinstance(choice, NamedTool) and choice.function.name not in {
        tool.function.name for tool in body.tools or ()
    }:
        raise bad_request(f"There is no tool {choice.function.name!r}.", "tool_choice")
    if not body.tools:
        if choice not in (None, "none", "auto"):
            raise bad_request("tool_choice needs tools.", "tool_choice")
        return None
    if choice == "none":
        return None
    if state.template is None or not state.template.knows_tools or state.tool_form is None:
        raise unsupported("tools", "the chat template of this model knows none")
    return body.tools


def _prompt(state: ServerState, body: ChatRequest, tools: list[Tool] | None) -> str:
    template = state.template
    if template is None:
        raise bad_request(
            "This model has no chat template; start the server with --chat-template FILE, or use "
            "/v1/completions.",
            "messages",
        )
    more = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        if not template.knows("reasoning_effort"):
            raise unsupported("reasoning_effort", "the chat template of this model knows none")
        more["reasoning_effort"] = body.reasoning_effort
    prompt = template.render(
        body.messages,
        tools,
        add_generation_prompt=body.add_generation_prompt and not body.continue_final_message,
        more=more,
    )
    if not body.continue_final_message:
        return prompt
    # What the template puts after the last message would end it: the prompt stops before that.
    final = body.messages[-1].content
    place = prompt.rfind(final.strip()) if isinstance(final, str) and final.strip() else -1
    if place < 0 or not isinstance(final, str):
        raise bad_request(
            "continue_final_message needs a last message whose text the template shows as it is.",
            "continue_final_message",
        )
    return prompt[: place + len(final.strip())]


def _logprobs(model: TextModel, tokens: list[int], logprobs: list[TokenLogprobs]) -> dict[str, Any]:
    """OpenAI's `logprobs` of a chat choice."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        content = token_bytes(model, token)
        return {
            "token": content.decode(errors="replace"),
            "logprob": logprob,
            "bytes": list(content),
        }

    return {
        "content": [
            {
                **entry(token, report.logprob),
                "top_logprobs": [
                    entry(*likely)
                    for likely in zip(report.top_tokens, report.top_logprobs, strict=True)
                ],
            }
            for token, report in zip(tokens, logprobs, strict=True)
        ]
    }


class ChatAnswer:
    """Chunks of `chat.completion.chunk`, or one `chat.completion`."""

    def __init__(
        self,
        model: TextModel,
        model_name: str,
        generation: Generation,
        body: ChatRequest,
        tools: list[Tool] | None,
        tool_form: str | None,
    ) -> None:
        self._model = model
        self._generation = generation
        self._head = {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model_name,
        }
        options = body.stream_options
        self._wants_usage = options is not None and options.include_usage
        self._wants_logprobs = bool(body.logprobs)
        num = len(generation.choices)
        self._readers = (
            [ToolReader(tool_form, tools) for _ in range(num)] if tools and tool_form else None
        )
        self._num_calls = [0] * num
        self._texts: list[list[str]] = [[] for _ in range(num)]
        self._calls: list[list[dict[str, Any]]] = [[] for _ in range(num)]
        self._reports: list[list[dict[str, Any]]] = [[] for _ in range(num)]

    # ---- the parts that both ways share ----

    def _read(self, piece: Piece) -> tuple[str, list[dict[str, Any]], str | None]:
        """Text, calls and finish reason of a piece, calls taken out of the text."""
        index, reason = piece.choice.index, piece.finish_reason
        if self._readers is None:
            return piece.text, [], reason
        reader = self._readers[index]
        text, calls = reader.push(piece.text)
        if reason is not None:
            rest, more = reader.finish()
            text, calls = text + rest, calls + more
        self._num_calls[index] += len(calls)
        if reason == "stop" and self._num_calls[index]:
            reason = "tool_calls"
        return text, calls, reason

    def _usage(self) -> dict[str, Any]:
        prompts = [self._generation.choices[0].prompt_tokens]
        return usage(prompts, self._generation.num_generated)

    # ---- a stream ----

    def begin(self) -> Iterable[dict[str, Any]]:
        for choice in self._generation.choices:
            yield self._chunk(choice.index, {"role": "assistant", "content": ""})

    def chunks(self, piece: Piece) -> Iterable[dict[str, Any]]:
        index = piece.choice.index
        before = self._num_calls[index]
        text, calls, reason = self._read(piece)
        logprobs = _logprobs(self._model, piece.tokens, piece.logprobs) if piece.logprobs else None
        if text or logprobs is not None:
            yield self._chunk(index, {"content": text}, logprobs=logprobs)
        for place, call in enumerate(calls, before):
            yield self._chunk(index, {"tool_calls": [{"index": place, **call}]})
        if reason is not None:
            yield self._chunk(index, {}, reason)

    def end(self) -> Iterable[dict[str, Any]]:
        if self._wants_usage:
            yield {
                "id": self._head["id"],
                "object": "chat.completion.chunk",
                "created": self._head["created"],
                "model": self._head["model"],
                "choices": [],
                "usage": self._usage(),
            }

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        reason: str | None = None,
        logprobs: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        chunk: dict[str, Any] = {
            "id": self._head["id"],
            "object": "chat.completion.chunk",
            "created": self._head["created"],
            "model": self._head["model"],
            "choices": [
                {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
            ],
        }
        if self._wants_usage:
            chunk["usage"] = None
        return chunk

    # ---- all at once ----

    def take(self, piece: Piece) -> None:
        index = piece.choice.index
        text, calls, reason = self._read(piece)
        self._texts[index].append(text)
        self._calls[index] += calls
        if piece.logprobs:
            self._reports[index] += _logprobs(self._model, piece.tokens, piece.logprobs)["content"]
        piece.choice.finish_reason = reason or piece.choice.finish_reason

    def whole(self) -> dict[str, Any]:
        choices = []
        for choice in self._generation.choices:
            text, calls = "".join(self._texts[choice.index]), self._calls[choice.index]
            message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
            if calls:
                message["content"] = text.strip() or None
                message["tool_calls"] = calls
            logprobs = {"content": self._reports[choice.index]} if self._wants_logprobs else None
            choices.append(
                {
                    "index": choice.index,
                    "message": message,
                    "logprobs": logprobs,
                    "finish_reason": choice.finish_reason,
                }
            )
        return {
            **self._head,
            "object": "chat.completion",
            "choices": choices,
            "usage": self._usage(),
        }
