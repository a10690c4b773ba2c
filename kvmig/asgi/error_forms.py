"""Errors in each API's own form: as an answer's body, and as the last event of a stream. Pure.

An error has one status, one message and one type for its client, whether our middleware, an
engine's application or the proxy made it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from http import HTTPStatus
from typing import NamedTuple, Self

import msgspec

from kvmig.accounts.keys import QUOTA_CODE, QUOTA_WORDS
from kvmig.asgi.route_table import Api

EDGE_BYTES = 50
"""Longer than an event's number with its name."""

TYPES: dict[int, str] = {
    HTTPStatus.BAD_REQUEST: "BadRequestError",
    HTTPStatus.UNAUTHORIZED: "AuthenticationError",
    HTTPStatus.FORBIDDEN: "PermissionDeniedError",
    HTTPStatus.NOT_FOUND: "NotFoundError",
    HTTPStatus.CONFLICT: "ConflictError",
    HTTPStatus.UNPROCESSABLE_ENTITY: "UnprocessableEntityError",
    HTTPStatus.TOO_MANY_REQUESTS: "RateLimitError",
    HTTPStatus.NOT_IMPLEMENTED: "NotImplementedError",
    HTTPStatus.SERVICE_UNAVAILABLE: "ServiceUnavailableError",
    HTTPStatus.GATEWAY_TIMEOUT: "TimeoutError",
}
"""Types of errors as vLLM names them, by status."""
_FLEET_TYPES: dict[int, str] = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.FORBIDDEN: "permission_error",
    HTTPStatus.NOT_FOUND: "not_found_error",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
}
"""Types of errors as OpenAI and Anthropic name them, by status."""
_ANTHROPIC_TYPES = _FLEET_TYPES | {
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "request_too_large",
    HTTPStatus.SERVICE_UNAVAILABLE: "overloaded_error",
    HTTPStatus.GATEWAY_TIMEOUT: "timeout_error",
}
_CODES: dict[int, str] = {
    HTTPStatus.UNAUTHORIZED: "invalid_api_key",
    HTTPStatus.FORBIDDEN: "permission_denied",
    HTTPStatus.NOT_FOUND: "not_found",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "request_too_large",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_exceeded",
    HTTPStatus.SERVICE_UNAVAILABLE: "unavailable",
}


def type_of(status: int) -> str:
    """vLLM's name for errors with the status."""
    return TYPES.get(status, "BadRequestError" if status < 500 else "InternalServerError")


class ApiError(NamedTuple):
    """What went wrong. code: a word; empty: the status stands for it, as with vLLM."""

    status: int
    message: str
    param: str | None = None
    code: str = ""

    def worded(self) -> Self:
        """The error with a code, as a fleet's clients know it."""
        if self.code:
            return self
        if self.status == HTTPStatus.TOO_MANY_REQUESTS and QUOTA_WORDS in self.message:
            return self._replace(code=QUOTA_CODE)
        if self.status == HTTPStatus.NOT_FOUND and _NO_MODEL.search(self.message):
            return self._replace(code="model_not_found")
        usual = "invalid_request" if self.status < 500 else "internal_error"
        return self._replace(code=_CODES.get(self.status, usual))


_NO_MODEL = re.compile(r"^(The model |there is no model )")


def read_error(status: int, body: bytes) -> ApiError | None:
    """The error in an answer's body, or in the data of an event; None: it holds none that we know.

    status: the answer's; of an event it says less than the error's own code.
    """
    try:
        found = msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    if not isinstance(found, dict):
        return None
    error = found.get("error")
    if isinstance(error, dict) and isinstance(error.get("message"), str):
        param, code = error.get("param"), error.get("code")
        if status < 400:
            status = code if type(code) is int and 400 <= code < 600 else 500
        return ApiError(
            status,
            error["message"],
            param if isinstance(param, str) else None,
            code if isinstance(code, str) else "",
        )
    for name in ("error", "detail", "message"):  # SageMaker's and Starlette's, and Cohere's
        if isinstance(found.get(name), str):
            return ApiError(status, found[name])
    return None


def error_object(error: ApiError) -> dict[str, object]:
    """The error object that OpenAI's clients read."""
    kind, code = type_of(error.status), code_of(error)
    if error.code:
        usual = "invalid_request_error" if error.status < 500 else "api_error"
        kind = _FLEET_TYPES.get(error.status, usual)
    if error.code == QUOTA_CODE:
        kind = QUOTA_CODE
    return {"message": error.message, "type": kind, "param": error.param, "code": code}


def code_of(error: ApiError) -> str | int:
    """The code, a word or the status."""
    return error.code or int(error.status)


def error_body(api: Api, error: ApiError) -> bytes:
    """The body of an answer that is nothing but the error."""
    return msgspec.json.encode(_body(api, error))


def _body(api: Api, error: ApiError) -> Mapping[str, object]:
    if api == "messages":
        usual = "invalid_request_error" if error.status < 500 else "api_error"
        kind = _ANTHROPIC_TYPES.get(error.status, usual)
        return {"type": "error", "error": {"type": kind, "message": error.message}}
    if api == "cohere":
        return {"message": error.message}
    return {"error": error_object(error)}


def error_event(api: Api, error: ApiError, number: int = 0) -> bytes:
    """An error in a stream, after which only `stream_end` may come.

    number: of the event, where the API's have some.
    """
    if api == "messages":
        return b"event: error\ndata: %s\n\n" % error_body(api, error)
    if api == "responses":
        plain = error_object(error)  # OpenAI documents it flat, and sends it nested
        event = {**plain, "type": "error", "sequence_number": number, "error": plain}
        return b"event: error\ndata: %s\n\n" % msgspec.json.encode(event)
    if api == "cohere":
        delta = {"error": error.message, "finish_reason": "ERROR"}
        return b"data: %s\n\n" % msgspec.json.encode({"type": "message-end", "delta": delta})
    return b"data: %s\n\n" % error_body(api, error)


def stream_end(api: Api) -> bytes:
    """What closes a stream of the API, also after an error."""
    return b"data: [DONE]\n\n" if api in ("openai", "cohere") else b""


_ERRORS: dict[Api, bytes] = {
    "openai": b'data: {"error"',
    "responses": b"event: error\n",
    "messages": b"event: error\n",
    "cohere": b'data: {"type": "message-end", "delta": {"error"',
}
_DATA = re.compile(rb"^data: ?(.*)$", re.M)


def is_error_event(api: Api, data: bytes) -> bool:
    """Whether an application's event reports an error."""
    return data.startswith(_ERRORS[api])


def read_event(data: bytes) -> ApiError | None:
    """The error of such an event."""
    found = _DATA.search(data)
    return None if found is None else read_error(0, found[1])


class EventNumbers:
    """Numbers of the events of a response that goes by in parts of any size."""

    _NUMBER = re.compile(rb'"sequence_number": ?(\d+)')

    def __init__(self) -> None:
        self.next = 0
        self._edge = b""

    def feed(self, data: bytes) -> None:
        """What has come."""
        text = self._edge + data
        if numbers := self._NUMBER.findall(text):
            self.next = int(numbers[-1]) + 1
        self._edge = text[-EDGE_BYTES:]


def api_of(path: str) -> Api:
    """How the path's clients are spoken to; one that is no route of theirs has OpenAI's form."""
    if path.startswith("/v1/messages"):
        return "messages"
    if path.startswith("/cohere/"):
        return "cohere"
    return "responses" if path.startswith("/v1/responses") else "openai"
