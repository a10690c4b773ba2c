"""Errors as HTTP answers, in OpenAI's shape, and the route class that gives them."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from http import HTTPStatus
from itertools import islice
from typing import Any

from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kvmig.asgi.access import AccessDenied, Rule
from kvmig.asgi.error_forms import type_of
from kvmig.asgi.errors import GatewayError
from kvmig.core.errors import KvmigError

MOST = 100
"""Characters of a value in an error message."""

NOT_TAKEN_HEADER = "x-kvmig-not-taken"
"""The header of an answer to a call that a stopping server has not taken: another can serve it."""


class Problem(BaseModel):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: int


class ErrorBody(BaseModel):
    """OpenAI's error shape."""

    error: Problem


Responses = dict[int | str, dict[str, Any]]
"""Answers as FastAPI documents them."""
PROBLEMS: Responses = {status: {"model": ErrorBody} for status in ("4XX", "5XX")}
"""Answers of any route: no key (401, 403), a body too large or too late (413, 408), ..."""


def problem(
    status: HTTPStatus,
    message: str,
    param: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> Response:
    """A response in OpenAI's error shape."""
    kind = type_of(status)
    body = ErrorBody(error=Problem(message=message, type=kind, param=param, code=status))
    return JSONResponse(body.model_dump(), status, headers)


def denial(denied: AccessDenied) -> Response:
    """The answer to a call that isn't let in."""
    asks = denied.status is HTTPStatus.UNAUTHORIZED
    return problem(*denied, headers={"WWW-Authenticate": "Bearer"} if asks else None)


async def as_problem(_: Request, error: Exception) -> Response:
    """An exception handler for calls that no route took: 404, 405."""
    assert isinstance(error, HTTPException)
    return problem(HTTPStatus(error.status_code), error.detail, headers=error.headers)


def invalid(error: RequestValidationError, allowed: Sequence[str]) -> Response:
    """400 that names the field, its value and what is allowed."""
    first: Mapping[str, Any] = error.errors()[0]
    place = [str(part) for part in first["loc"][1:]]
    field = ".".join(place)[:MOST] or None
    match first["type"]:
        case "json_invalid":
            field, message = None, f"the body is not JSON: {first['ctx']['error']}"
        case "extra_forbidden":
            message = f"there is no field {field}, allowed are {', '.join(allowed)}"
        case "missing":
            message = f"{field or 'the body'} is missing, needed are {', '.join(allowed)}"
        case _:
            message = f"{field or 'the body'} is {shorten_value(first['input'])}: {first['msg']}"
    return problem(HTTPStatus.BAD_REQUEST, message, field)


def guarded(rule: Rule, fields: Sequence[str]) -> type[APIRoute]:
    """A route class that lets in whom `rule` does, and answers errors as JSON.

    fields: what a body may hold, for the error that names it.
    """

    class GuardedRoute(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            handle = super().get_route_handler()

            async def answer(request: Request) -> Response:
                if (denied := rule(request.headers)) is not None:
                    return denial(denied)
                try:
                    return await handle(request)
                except RequestValidationError as error:
                    return invalid(error, fields)
                except HTTPException as error:  # the body is no JSON at all
                    return problem(HTTPStatus(error.status_code), "the body is no JSON to be read")
                except GatewayError as error:
                    return problem(error.status, str(error), error.param)
                except KvmigError as error:
                    return problem(HTTPStatus.INTERNAL_SERVER_ERROR, str(error))

            return answer

    return GuardedRoute


def shorten_value(value: Any) -> str:
    """A value as Python writes it, in printable ASCII and cut short. Pure.

    Example: a list of a million numbers is "[0, 1, 2]... (1000000 items)".
    """
    match value:
        case str() | bytes() if len(value) > MOST:
            return f"{value[:MOST]!a}..."
        case list() | dict() if len(value) > MOST:
            few = islice(value.items() if isinstance(value, dict) else value, 3)
            return f"{_cut(ascii(list(few)))}... ({len(value)} items)"
        case int() if value.bit_length() > 3 * MOST:
            return f"a number of {value.bit_length()} bits"
    return _cut(ascii(value))


def _cut(text: str) -> str:
    return text if len(text) <= MOST else f"{text[:MOST]}..."
