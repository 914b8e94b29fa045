"""What goes wrong, in the shape in which OpenAI's clients expect it."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.responses import Response

from orchestrator.http.settings import MAX_STOP_CHARACTERS, MAX_STOPS

_NO_OBJECT = (
    "The body is not a JSON object; send one, with the header `Content-Type: application/json`."
)


class ApiError(Exception):
    """An answer that is no success. `param` is the field it is about, `code` a word for programs,
    `retry_after_s` when it may be worth asking again."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        kind: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.kind = kind or ("invalid_request_error" if status < 500 else "server_error")
        self.retry_after_s = retry_after_s

    def body(self) -> dict[str, Any]:
        return error_body(self.message, self.kind, self.param, self.code)

    def response(self) -> Response:
        headers = {}
        if self.retry_after_s is not None:
            headers["retry-after"] = str(self.retry_after_s)
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        return json_response(self.body(), self.status, headers)


def error_body(
    message: str, kind: str, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def json_response(
    value: object, status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    """A body of JSON from anything that msgspec can encode."""
    return Response(msgspec.json.encode(value), status, headers, "application/json")


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def unsupported(param: str, why: str) -> ApiError:
    """A field that means something and that this server cannot do: never dropped in silence."""
    return ApiError(400, f"{param} is not supported: {why}", param=param, code="unsupported_field")


#: How pydantic begins most of its sentences.
_SHOULD = "Input should "
#: Fields that may be one of several things -> what may be there. pydantic says for each of these
#: things why it is not that one.
_ONE_OF = {
    "stop": f"a text, or a list of at most {MAX_STOPS} texts; none of them empty, nor of more than "
    f"{MAX_STOP_CHARACTERS} characters",
    "prompt": "a text, a list of texts, a list of token ids, or a list of such lists; no list may "
    "be empty",
    "content": 'a text, or a list of parts like {"type": "text", "text": "..."}; images, audio and '
    "files are not taken",
    "tool_choice": '"none", "auto", "required", or {"type": "function", "function": {"name": '
    '"..."}}',
    "schema": "a JSON Schema: an object, true or false",
    "slots": 'a number of experts like 64, or a share of them like "25%"',
}


def from_validation(errors: list[Any]) -> ApiError:
    """One sentence and the field's path, from pydantic's list of what is wrong."""
    first = errors[0] if errors else {}
    place = [part for part in first.get("loc", ()) if part != "body"]
    path = ""
    for index, part in enumerate(place):
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else str(part)
        if part in _ONE_OF and index + 1 < len(place):  # what follows names one of the things
            return bad_request(f"{path} must be {_ONE_OF[part]}.", path)
    kind, said = first.get("type", ""), first.get("msg", "The request is not valid")
    if kind == "extra_forbidden":
        message = f"{path} is not a field that this server knows; leave it out."
    elif kind == "missing":
        message = f"{path or 'The body'} is missing."
    elif kind == "json_invalid":
        message = f"The body is not valid JSON: {first.get('ctx', {}).get('error', said)}."
        path = ""
    elif kind in ("model_attributes_type", "model_type", "dict_type"):
        message = f"{path} must be a JSON object." if path else _NO_OBJECT
    elif said.startswith(_SHOULD):
        message = f"{path or 'The body'} must {said.removeprefix(_SHOULD)}."
    else:
        message = f"{path or 'The body'}: {said.removeprefix('Value error, ')}."
    return bad_request(message, path or None)
