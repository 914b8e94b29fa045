"""The bodies that clients send, field by field, as pydantic reads them.

A field that is not here is refused by name. Fields that OpenAI's interface has and that mean
nothing to a server of one model (`user`, `metadata`, ...) are accepted and have no effect; those
that would mean something and are not supported are named in `unsupported_fields`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator

from orchestrator.http.settings import MAX_CHOICES, MAX_STOP_CHARACTERS, MAX_STOPS
from orchestrator.requests import MAX_LOGPROBS

#: int32: what no field of ours exceeds, so that numbers never overflow further in.
_MAX_INT = 2**31 - 1


def _no_bool(value: object) -> object:
    """JSON's true is no 1, though Python's is."""
    if isinstance(value, bool):
        raise ValueError("a whole number is expected, not true or false")
    return value


Whole = Annotated[int, BeforeValidator(_no_bool)]
Count = Annotated[Whole, Field(ge=1, le=_MAX_INT)]
TokenId = Annotated[Whole, Field(ge=0, le=_MAX_INT)]
StopText = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid")


class StreamOptions(Body):
    include_usage: bool = False


class TextPart(Body):
    type: Literal["text"]
    text: str


class FunctionCall(Body):
    name: Annotated[str, Field(min_length=1, max_length=256)]
    arguments: str = "{}"


class ToolCall(Body):
    id: str
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None


class ChatMessage(Body):
    """One turn. `tool_calls` only of an assistant, `tool_call_id` only of a tool."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    #: What an assistant thought before; templates that know it show it to the model again.
    reasoning_content: str | None = None
    refusal: None = None


class FunctionDefinition(Body):
    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    type: Literal["function"]
    function: FunctionDefinition


class NamedFunction(Body):
    name: str


class NamedTool(Body):
    type: Literal["function"]
    function: NamedFunction


class JsonSchema(Body):
    name: str = "answer"
    description: str | None = None
    schema_: Annotated[dict[str, Any] | bool, Field(alias="schema")] = {}
    strict: bool | None = None


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class Sampled(Body):
    """What chat and plain completions have in common."""

    model: str | None = None
    max_tokens: Count | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[Whole, Field(ge=-1, le=_MAX_INT)] | None = None
    min_p: Annotated[float, Field(ge=0, lt=1)] | None = None
    stop: StopText | Annotated[list[StopText], Field(max_length=MAX_STOPS)] | None = None
    seed: Annotated[Whole, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    n: Annotated[Whole, Field(ge=1, le=MAX_CHOICES)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=10)] | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool = False
    response_format: ResponseFormat | None = None
    user: str | None = None

    @field_validator("logit_bias")
    @classmethod
    def _tokens_are_numbers(cls, biases: dict[str, float] | None) -> dict[str, float] | None:
        for token in biases or ():
            if not (token.isascii() and token.isdigit() and len(token) <= 9):
                raise ValueError(f"{token!r} is not a token id")
        return biases

    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or ())


class ChatRequest(Sampled):
    """POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[Whole, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    tools: Annotated[list[Tool], Field(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    # Accepted, without effect on a server of one model.
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    # Known, and refused by name unless they ask for what happens anyway.
    functions: Any = None
    function_call: Any = None
    modalities: Any = None
    audio: Any = None
    prediction: Any = None
    web_search_options: Any = None
    verbosity: Any = None
    chat_template: Any = None
    documents: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    structured_outputs: Any = None
    best_of: Any = None
    use_beam_search: Any = None


class CompletionRequest(Sampled):
    """POST /v1/completions."""

    prompt: (
        str
        | Annotated[list[TokenId], Field(min_length=1)]
        | Annotated[list[str], Field(min_length=1)]
        | Annotated[list[Annotated[list[TokenId], Field(min_length=1)]], Field(min_length=1)]
    )
    echo: bool = False
    logprobs: Annotated[Whole, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    # Known, and refused by name unless they ask for what happens anyway.
    suffix: Any = None
    best_of: Any = None
    use_beam_search: Any = None
    prompt_logprobs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    structured_outputs: Any = None


#: Field -> why not, and the values that change nothing.
_UNSUPPORTED: dict[str, tuple[str, tuple[object, ...]]] = {
    "functions": ("say tools instead", ([],)),
    "function_call": ("say tool_choice instead", ("none",)),
    "modalities": ("answers are text", (["text"],)),
    "audio": ("answers are text", ()),
    "prediction": ("there is no speculative decoding", ()),
    "web_search_options": ("this server searches nothing", ()),
    "verbosity": ("say it in a message", ("medium",)),
    "chat_template": ("the server's --chat-template decides", ()),
    "documents": ("put their text into a message", ([],)),
    "suffix": ("text is only continued, not filled in", ("",)),
    "best_of": ("every one of the n choices is returned", (1,)),
    "use_beam_search": ("tokens are sampled", (False,)),
    "prompt_logprobs": ("only generated tokens have log probabilities", ()),
    "guided_json": ("say response_format instead", ()),
    "guided_regex": ("say response_format instead", ()),
    "guided_choice": ("say response_format instead", ()),
    "guided_grammar": ("say response_format instead", ()),
    "structured_outputs": ("say response_format instead", ()),
}


def unsupported_fields(body: Sampled) -> list[tuple[str, str]]:
    """(field, why it is not supported) of every field that the body sets and nothing can do."""
    found = []
    for name, (why, harmless) in _UNSUPPORTED.items():
        value = getattr(body, name, None)
        if value is not None and value not in harmless:
            found.append((name, why))
    return found


class TokenizeRequest(Body):
    """POST /tokenize: a text, or messages as the chat template renders them."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Tool] | None = None


class DetokenizeRequest(Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: Annotated[list[TokenId], Field(max_length=1_000_000)]


class CacheRequest(Body):
    """POST /admin/cache: how many slots are to be used."""

    slots: str | Whole


class TraceRequest(Body):
    """POST /admin/trace."""

    action: Literal["start", "stop"]


class WorkerRequest(Body):
    """POST /admin/workers: restart the worker of this process id."""

    restart: Annotated[Whole, Field(ge=1, le=_MAX_INT)]
