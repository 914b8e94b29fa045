"""What goes wrong, in the shape in which OpenAI's clients expect it."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.responses import Response


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


def from_validation(errors: list[Any]) -> ApiError:
    """One sentence and the field's path, from pydantic's list of what is wrong."""
    first = errors[0] if errors else {}
    place = [part for part in first.get("loc", ()) if part != "body"]
    path = ""
    for part in place:
        if isinstance(part, int):
            path += f"[{part}]"
        elif isinstance(part, str) and not part.startswith(("function-", "list[", "constrained")):
            path += f".{part}" if path else part
    kind, said = first.get("type", ""), first.get("msg", "The request is not valid")
    if kind == "extra_forbidden":
        message = f"{path} is not a field that this server knows; leave it out."
    elif kind == "missing":
        message = f"{path or 'The body'} is missing."
    elif kind == "model_attributes_type" and not path:
        message = "The body is not a JSON object; send one, with Content-Type: application/json."
    elif kind == "json_invalid":
        message = f"The body is not valid JSON: {first.get('ctx', {}).get('error', said)}."
        path = ""
    elif not path and kind in ("model_attributes_type", "dict_type"):
        message = (
            "The body is not a JSON object; send one, with the header `Content-Type: "
            "application/json`."
        )
    else:
        message = f"{path or 'The body'}: {said.removeprefix('Value error, ')}."
    return bad_request(message, path or None)
