"""Errors of the admin API in OpenAI's shape, and the key that guards it."""

from __future__ import annotations

import hmac
from collections.abc import Callable, Coroutine, Mapping, Sequence
from http import HTTPStatus
from typing import Any

from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kvmig.gateway.admin_models import ErrorBody, Problem
from kvmig.gateway.errors import GatewayError
from kvmig.ground.errors import KvmigError

_TYPES = {
    HTTPStatus.BAD_REQUEST: "BadRequestError",
    HTTPStatus.UNAUTHORIZED: "AuthenticationError",
    HTTPStatus.NOT_FOUND: "NotFoundError",
    HTTPStatus.CONFLICT: "ConflictError",
    HTTPStatus.SERVICE_UNAVAILABLE: "ServiceUnavailableError",
    HTTPStatus.GATEWAY_TIMEOUT: "TimeoutError",
}


def problem(
    status: HTTPStatus,
    message: str,
    param: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> Response:
    """A response in OpenAI's error shape."""
    kind = _TYPES.get(status, "InternalServerError")
    body = ErrorBody(error=Problem(message=message, type=kind, param=param, code=status))
    return JSONResponse(body.model_dump(), status, headers)


def invalid(error: RequestValidationError, allowed: Sequence[str]) -> Response:
    """400 that names the field, its value and what is allowed."""
    first: Mapping[str, Any] = error.errors()[0]
    place = [str(part) for part in first["loc"][1:]]
    field = ".".join(place) or None
    match first["type"]:
        case "json_invalid":
            field, message = None, f"the body is not JSON: {first['ctx']['error']}"
        case "extra_forbidden":
            message = f"there is no field {field}, allowed are {', '.join(allowed)}"
        case "missing":
            message = f"{field or 'the body'} is missing, needed are {', '.join(allowed)}"
        case _:
            message = f"{field or 'the body'} is {first['input']!r}: {first['msg']}"
    return problem(HTTPStatus.BAD_REQUEST, message, field)


def guarded(api_keys: Sequence[str], fields: Sequence[str]) -> type[APIRoute]:
    """A route class that asks for a key if there are any, and answers errors as JSON.

    fields: what a body may hold, for the error that names it.
    """

    def authorized(request: Request) -> bool:
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        matches = [hmac.compare_digest(given.encode(), key.encode()) for key in api_keys]
        return not api_keys or (scheme.lower() == "bearer" and any(matches))

    class Route(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            handle = super().get_route_handler()

            async def answer(request: Request) -> Response:
                if not authorized(request):
                    ask = {"WWW-Authenticate": "Bearer"}
                    return problem(HTTPStatus.UNAUTHORIZED, "Unauthorized", headers=ask)
                try:
                    return await handle(request)
                except RequestValidationError as error:
                    return invalid(error, fields)
                except GatewayError as error:
                    return problem(error.status, str(error), error.param)
                except KvmigError as error:
                    return problem(HTTPStatus.INTERNAL_SERVER_ERROR, str(error))

            return answer

    return Route
