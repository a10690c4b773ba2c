"""The token of an order on the admin API, and of a request that begins a server's contact."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Annotated, Any

from fastapi import Depends, Request

from kvmig.asgi.errors import GatewayError
from kvmig.core.order_fence import NO_TOKEN, TOKEN_HEADER, OrderToken

RaiseOrderFence = Callable[[OrderToken], Awaitable[None]]
"""The launcher refuses a request with an earlier token, and later all that are earlier than it."""


class UnreadableToken(GatewayError):
    """A token that no server of a fleet sends."""

    status = HTTPStatus.BAD_REQUEST
    param = TOKEN_HEADER


def token_of(request: Request) -> OrderToken:
    """The request's token. Raises UnreadableToken."""
    given = request.headers.get(TOKEN_HEADER)
    try:
        return NO_TOKEN if given is None else OrderToken.parse(given)
    except ValueError as error:
        raise UnreadableToken(str(error)) from error


GivenToken = Annotated[OrderToken, Depends(token_of)]
"""The parameter of a route."""


def fenced_by(raise_fence: RaiseOrderFence) -> Any:
    """The dependency of a route that begins a contact, or whose order is fenced here only."""

    async def fenced(token: GivenToken) -> None:
        await raise_fence(token)

    return Depends(fenced)
