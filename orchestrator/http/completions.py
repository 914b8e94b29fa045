"""POST /v1/completions, /tokenize and /detokenize: text as it is, without a template."""

from __future__ import annotations

import time
import uuid
from typing import TYPE_CHECKING, Any

from orchestrator.http.errors import bad_request, json_response, unsupported
from orchestrator.http.preparing import (
    answer_request,
    check_body,
    check_text,
    off_the_loop,
    usage,
)
from orchestrator.http.settings import MAX_CHOICES
from orchestrator.http.token_text import token_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable

    from starlette.requests import Request
    from starlette.responses import Response

    from orchestrator.http.generation import Generation, Piece
    from orchestrator.http.schemas import (
        CompletionRequest,
        DetokenizeRequest,
        TokenizeRequest,
    )
    from orchestrator.http.server import ServerState
    from orchestrator.text_model import TextModel

#: What OpenAI's interface gives who does not say.
_DEFAULT_MAX_TOKENS = 16


async def completions(state: ServerState, request: Request, body: CompletionRequest) -> Response:
    """Raises ApiError."""
    check_body(state, body)
    await check_text(request)
    model = state.gate.loaded().text_model
    if body.echo and body.logprobs is not None:
        raise unsupported("logprobs", "with echo, since only generated tokens have them")
    prompts = _prompts(body.prompt)
    if len(prompts) > MAX_CHOICES:
        raise bad_request(f"At most {MAX_CHOICES} prompts fit one request.", "prompt")
    tokens = await off_the_loop(
        request,
        lambda: [model.encode(prompt) if isinstance(prompt, str) else prompt for prompt in prompts],
    )
    return await answer_request(
        state,
        request,
        body,
        tokens,
        body.max_tokens or _DEFAULT_MAX_TOKENS,
        body.logprobs,
        lambda generation: CompletionAnswer(model, state.model_name, generation, body, tokens),
        "prompt",
    )


def _prompts(prompt: Any) -> list[str | list[int]]:
    """One or several prompts, each a text or tokens, from the four ways to say it."""
    if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
        return [prompt]
    return list(prompt)


class CompletionAnswer:
    """Chunks of `text_completion`, or one of it."""

    def __init__(
        self,
        model: TextModel,
        model_name: str,
        generation: Generation,
        body: CompletionRequest,
        prompts: list[list[int]],
    ) -> None:
        self._model = model
        self._generation = generation
        self._prompts = prompts
        self._echo = body.echo
        self._head = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model_name,
        }
        options = body.stream_options
        self._wants_usage = options is not None and options.include_usage
        num = len(generation.choices)
        self._texts: list[list[str]] = [[] for _ in range(num)]
        self._reports: list[dict[str, list[Any]]] = [{} for _ in range(num)]
        #: Characters shown so far, for `text_offset`.
        self._num_shown = [0] * num

    def _logprobs(self, piece: Piece) -> dict[str, list[Any]] | None:
        if not piece.logprobs:
            return None
        texts = [token_bytes(self._model, token).decode(errors="replace") for token in piece.tokens]
        return {
            "tokens": texts,
            "token_logprobs": [report.logprob for report in piece.logprobs],
            "top_logprobs": [
                {
                    token_bytes(self._model, token).decode(errors="replace"): logprob
                    for token, logprob in zip(report.top_tokens, report.top_logprobs, strict=True)
                }
                for report in piece.logprobs
            ],
            "text_offset": [self._num_shown[piece.choice.index]] * len(texts),
        }

    def _echoed(self, index: int) -> str:
        num_per_prompt = len(self._generation.choices) // len(self._prompts)
        return self._model.decode(self._prompts[index // num_per_prompt])

    def begin(self) -> Iterable[dict[str, Any]]:
        if self._echo:
            for choice in self._generation.choices:
                yield self._chunk(choice.index, self._echoed(choice.index))

    def chunks(self, piece: Piece) -> Iterable[dict[str, Any]]:
        logprobs = self._logprobs(piece)
        self._num_shown[piece.choice.index] += len(piece.text)
        yield self._chunk(piece.choice.index, piece.text, piece.finish_reason, logprobs)

    def end(self) -> Iterable[dict[str, Any]]:
        if self._wants_usage:
            yield {**self._head, "choices": [], "usage": self._usage()}

    def _usage(self) -> dict[str, Any]:
        return usage(self._prompts, self._generation.num_generated)

    def _chunk(
        self,
        index: int,
        text: str,
        reason: str | None = None,
        logprobs: dict[str, list[Any]] | None = None,
    ) -> dict[str, Any]:
        chunk: dict[str, Any] = {
            **self._head,
            "choices": [
                {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}
            ],
        }
        if self._wants_usage:
            chunk["usage"] = None
        return chunk

    def take(self, piece: Piece) -> None:
        index = piece.choice.index
        for name, values in (self._logprobs(piece) or {}).items():
            self._reports[index].setdefault(name, []).extend(values)
        self._num_shown[index] += len(piece.text)
        self._texts[index].append(piece.text)

    def whole(self) -> dict[str, Any]:
        return {
            **self._head,
            "choices": [
                {
                    "index": choice.index,
                    "text": (self._echoed(choice.index) if self._echo else "")
                    + "".join(self._texts[choice.index]),
                    "logprobs": self._reports[choice.index] or None,
                    "finish_reason": choice.finish_reason,
                }
                for choice in self._generation.choices
            ],
            "usage": self._usage(),
        }


async def tokenize(state: ServerState, request: Request, body: TokenizeRequest) -> Response:
    """Raises ApiError."""
    state.gate.check_model(body.model, state.model_name)
    await check_text(request)
    loaded = state.gate.loaded()
    if (body.prompt is None) == (body.messages is None):
        raise bad_request("Give either prompt or messages.", "prompt")
    text, add_special_tokens = body.prompt, body.add_special_tokens
    if body.messages is not None:
        if state.template is None:
            raise bad_request("This model has no chat template.", "messages")
        text = state.template.render(
            body.messages,
            body.tools,
            add_generation_prompt=body.add_generation_prompt,
            more=body.chat_template_kwargs,
        )
        add_special_tokens = False
    model = loaded.text_model
    tokens = await off_the_loop(
        request, lambda: model.encode(text or "", add_special_tokens=add_special_tokens)
    )
    return json_response({"tokens": tokens, "count": len(tokens), "max_model_len": model.context})


async def detokenize(state: ServerState, request: Request, body: DetokenizeRequest) -> Response:
    """Raises ApiError."""
    state.gate.check_model(body.model, state.model_name)
    model = state.gate.loaded().text_model
    for token in body.tokens:
        if token >= model.vocab_size:
            raise bad_request(
                f"Token {token} is outside the vocabulary of {model.vocab_size}.", "tokens"
            )
    text = await off_the_loop(request, lambda: model.decode(body.tokens))
    return json_response({"prompt": text})
