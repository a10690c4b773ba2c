"""What the demo asks of the server: its instances, one stream, migrations."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import httpx

from kvmig.core.errors import KvmigError

TIMEOUT_S = 60.0


class DemoFailed(KvmigError):
    """The server can't be reached, or refused; the message is one sentence."""


class Chunk(NamedTuple):
    """A part of the stream; at: when it came, seconds."""

    text: str
    tokens: int
    at: float


class Api:
    """One server, at `url`."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self._http = http

    @classmethod
    @asynccontextmanager
    async def at(cls, url: str) -> AsyncIterator[Api]:
        """Connected to until the end of the block. Raises DemoFailed, there and then."""
        try:
            async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S) as http:
                yield cls(http)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            why = str(error) or type(error).__name__
            raise DemoFailed(f"the server at {url} does not answer: {why}") from error

    async def model(self) -> str:
        """The served model's name."""
        name: str = (await self._get("/v1/models"))[0]["id"]
        return name

    async def instances(self) -> list[str]:
        """Ids of those that serve."""
        rows = await self._get("/kvmig/v1/instances")
        return [row["id"] for row in rows if row["state"] == "serving"]

    async def instance_of(self, call_id: str) -> str | None:
        """Where the call runs; None when it has ended."""
        rows = await self._get("/kvmig/v1/requests")
        return next((row["instance"] for row in rows if row["call_id"] == call_id), None)

    async def migrate(self, call_id: str, destination: str) -> dict[str, Any] | None:
        """Move the call, and wait; the report, or None when there is nothing to move any more."""
        body = {"request_id": call_id, "destination": destination}
        answer = await self._http.post("/kvmig/v1/migrations", json=body)
        if answer.status_code in (404, 409):
            return None
        report: dict[str, Any] = checked(answer)
        return report

    async def migrations_of(self, call_id: str) -> list[dict[str, Any]]:
        """The reports of all that moved it, whoever asked."""
        rows = await self._get("/kvmig/v1/migrations")
        return [row for row in rows if row["request_id"].startswith(f"cmpl-{call_id}-")]

    async def stream(self, call_id: str, body: dict[str, Any]) -> AsyncIterator[Chunk]:
        """The completion's chunks as they come."""
        options = {"stream": True, "return_token_ids": True}
        headers = {"x-request-id": call_id}
        async with self._http.stream(
            "POST", "/v1/completions", json={**body, **options}, headers=headers
        ) as answer:
            if answer.status_code != 200:
                await answer.aread()
                checked(answer)
            async for line in answer.aiter_lines():
                at = time.monotonic()
                if not line.startswith("data: {"):
                    continue
                chunk = json.loads(line.removeprefix("data: "))
                if "error" in chunk:
                    raise DemoFailed(f"the stream broke off: {chunk['error']['message']}")
                for choice in chunk["choices"]:
                    yield Chunk(choice["text"], len(choice["token_ids"] or ()), at)

    async def _get(self, path: str) -> Any:
        return checked(await self._http.get(path))["data"]


def checked(answer: httpx.Response) -> Any:
    """The JSON of an answer. Raises DemoFailed with the server's own words."""
    if answer.status_code == 200:
        return answer.json()
    try:
        why = answer.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        why = answer.reason_phrase
    raise DemoFailed(f"{answer.request.url.path} was refused ({answer.status_code}): {why}")
