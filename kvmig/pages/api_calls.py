"""Calls of the HTTP API by the page, in the same process: the same routes, checks and errors as
for the API's other clients."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

import httpx
import msgspec
from starlette.types import ASGIApp, Receive, Scope, Send

from kvmig.core.errors import KvmigError

CALL_S = 200.0
"""Timeout of a call: an engine may have to read a model's flags first."""

Query = Mapping[str, str | int | float | bool]


class ApiRefusal(KvmigError):
    """A call that the API has refused; the text is for the caller."""

    def __init__(self, status: HTTPStatus, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status


class ApiCaller:
    """Calls the application of the API."""

    def __init__(self, app: ASGIApp, prefix: str) -> None:
        """prefix: of the API's paths."""
        self._app = app
        self._prefix = prefix

    async def call(
        self,
        method: str,
        path: str,
        *,
        body: object = None,
        query: Query | None = None,
        scope: Mapping[str, object] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Any:
        """What the API answers, decoded. scope: more entries of the call's ASGI scope, by which
        the API knows the caller. Raises ApiRefusal."""

        async def called(own: Scope, receive: Receive, send: Send) -> None:
            await self._app({**own, **(scope or {})}, receive, send)

        request = httpx.Request(
            method,
            f"http://page{self._prefix}{path}",
            json=body,
            params=query,
            headers=headers,
        )
        transport = httpx.ASGITransport(app=called)
        try:
            async with asyncio.timeout(CALL_S):
                answer = await transport.handle_async_request(request)
                await answer.aread()
        except TimeoutError as error:
            sentence = f"the server has not answered within {CALL_S:g} s"
            raise ApiRefusal(HTTPStatus.SERVICE_UNAVAILABLE, sentence) from error
        if answer.is_error:
            raise ApiRefusal(HTTPStatus(answer.status_code), sentence_of(answer))
        return msgspec.json.decode(answer.content)


def sentence_of(answer: httpx.Response) -> str:
    """What an error answer says."""
    try:
        return str(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"status {answer.status_code}"
