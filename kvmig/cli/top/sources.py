"""The servers that `kvmig top` asks: a fleet's, or one `kvmig.serve`.

A fleet is asked once a second, and its server asks each deployment at most once a second for all
who look. A single server sends what changes as events; only its requests are asked for.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from http import HTTPStatus
from typing import Any, Protocol, TypeVar
from urllib.parse import quote

import httpx
import msgspec

from kvmig.cli.client import CallFailure, FleetClient
from kvmig.core.api_records import InstanceRow, ModelBody, RequestRow, RowListing
from kvmig.core.background import cancel_tasks
from kvmig.core.clock import TimeSource
from kvmig.core.live_records import (
    LiveFleet,
    LiveInstance,
    LiveModel,
    LiveMove,
    LiveStream,
    MoveRecord,
)

LOOK_TIMEOUT_S = 5.0
"""Timeout of one look, and of an event: a server sends one every 5 s."""
SILENT_S = 20.0
ORDER_S = 150.0
"""Timeout of an order: a migration may take 120 s."""
STREAMS = 500
"""Most streams that are shown."""
MOVES = 50

Answer = TypeVar("Answer")


class LiveSource(Protocol):
    """What the application needs of a server. Each call raises CallFailure."""

    drain_means: str
    """What becomes of an instance that is drained."""

    @property
    def where(self) -> str: ...

    async def observe(self) -> LiveFleet: ...

    async def drain(self, one: LiveInstance) -> None: ...

    async def undrain(self, one: LiveInstance) -> None: ...

    async def move(self, stream: LiveStream, destination: str | None) -> MoveRecord: ...

    async def close(self) -> None: ...


def open_source(client: FleetClient, wall: TimeSource = time.time) -> LiveSource:
    """A fleet's, or that of a single server where there is no fleet. Raises CallFailure."""
    try:
        client.get("live", streams=0)
    except CallFailure as error:
        if error.status != HTTPStatus.NOT_FOUND:
            raise
        return ServeSource(client, wall)
    return FleetSource(client)


class HttpCalls:
    """Calls of one server."""

    def __init__(self, client: FleetClient) -> None:
        self.where = client.where
        self.http = client.asynchronous(LOOK_TIMEOUT_S)
        self._client = client

    async def close(self) -> None:
        """End its connections, and those of `client`."""
        self._client.close()
        await self.http.aclose()

    async def get(self, path: str, kind: type[Answer], **query: Any) -> Answer:
        """An answer as such a struct. Raises CallFailure."""
        content = await self._ask("GET", path, LOOK_TIMEOUT_S, params=query)
        return self._decoded(content, kind)

    async def order(
        self, method: str, path: str, kind: type[Answer] | None = None, body: Any = None
    ) -> Answer | None:
        """Give an order. kind: of the answer; None: it is not read. Raises CallFailure."""
        more = {} if method == "DELETE" else {"json": {} if body is None else body}
        content = await self._ask(method, path, ORDER_S, **more)
        return None if kind is None else self._decoded(content, kind)

    async def _ask(self, method: str, path: str, timeout_s: float, **more: Any) -> bytes:
        try:
            async with asyncio.timeout(timeout_s):
                answer = await self.http.request(method, path, timeout=timeout_s, **more)
        except (httpx.HTTPError, TimeoutError) as error:
            said = str(error) or type(error).__name__
            raise CallFailure(f"{self.where} does not answer: {said}") from error
        self.check(answer)
        return answer.content

    def check(self, answer: httpx.Response) -> None:
        """Raises CallFailure for a refusal."""
        if answer.is_error:
            raise CallFailure(self._client.refusal(answer), answer.status_code)

    def _decoded(self, content: bytes, kind: type[Answer]) -> Answer:
        try:
            return msgspec.json.decode(content, type=kind)
        except msgspec.DecodeError as error:
            raise CallFailure(f"{self.where} has another kvmig's answer: {error}") from error


class MoveAnswer(msgspec.Struct, frozen=True):
    """A fleet's answer to an order to move."""

    move: MoveRecord


class FleetSource:
    """A fleet's server, or its proxy."""

    drain_means = (
        "Its requests move to other instances; then it ends. The model gets another one if it is to"
        " have more."
    )

    def __init__(self, client: FleetClient) -> None:
        self._calls = HttpCalls(client)
        self.where = client.where

    async def observe(self) -> LiveFleet:
        """What runs now."""
        return await self._calls.get("/kvmig/v2/live", LiveFleet, streams=STREAMS)

    async def drain(self, one: LiveInstance) -> None:
        """Drain an instance, then end it."""
        await self._calls.order("POST", "/kvmig/v2/live/drain", body=_named(one))

    async def undrain(self, one: LiveInstance) -> None:
        """Let an instance serve again."""
        await self._calls.order("POST", "/kvmig/v2/live/undrain", body=_named(one))

    async def move(self, stream: LiveStream, destination: str | None) -> MoveRecord:
        """Move a stream. destination: None: the instance with the most room."""
        body = {
            "model": stream.model,
            "deployment": stream.deployment,
            "request_id": stream.row.id,
            "destination": destination,
        }
        answer = await self._calls.order("POST", "/kvmig/v2/live/move", MoveAnswer, body)
        assert answer is not None
        return answer.move

    async def close(self) -> None:
        """End its connections."""
        await self._calls.close()


def _named(one: LiveInstance) -> dict[str, str]:
    return {"model": one.model, "deployment": one.deployment, "instance": one.row.id}


class InstancesEvent(msgspec.Struct, frozen=True):
    """Event `instances` of a single server."""

    live: int = 0
    parked: bool = False
    data: tuple[InstanceRow, ...] = ()


class ServeSource:
    """One `kvmig.serve`, which is followed from the first look on."""

    drain_means = (
        "Its requests move to other instances, and it gets new ones only if no other serves."
        " It stays until it is to serve again (u)."
    )

    def __init__(self, client: FleetClient, wall: TimeSource) -> None:
        """wall: Unix time."""
        self._calls = HttpCalls(client)
        self.where = client.where
        self._wall = wall
        self._model = ""
        self._seen: InstancesEvent | None = None
        self._moves: deque[MoveRecord] = deque(maxlen=MOVES)
        self._following: asyncio.Task[None] | None = None
        self._heard = asyncio.Event()

    async def observe(self) -> LiveFleet:
        """What runs now."""
        await self._follow_on()
        answer = await self._calls.get("/kvmig/v1/requests", RowListing[RequestRow])
        seen = self._seen or InstancesEvent()
        rows = sorted(answer.data, key=lambda one: one.tokens, reverse=True)
        name = self._model
        return LiveFleet(
            at=self._wall(),
            models=(
                LiveModel(
                    name=name,
                    state="parked" if seen.parked else "serving",
                    serving=sum(one.state == "serving" for one in seen.data),
                    desired=len(seen.data),
                    running=seen.live,
                    streams=len(rows),
                ),
            ),
            instances=tuple(LiveInstance(model=name, gpus=one.gpus, row=one) for one in seen.data),
            streams=tuple(LiveStream(model=name, row=one) for one in rows[:STREAMS]),
            moves=tuple(LiveMove(model=name, move=one) for one in reversed(self._moves)),
        )

    async def _follow_on(self) -> None:
        """Follow its events; raises CallFailure where they have ended, and begins again next."""
        if self._following is not None and self._following.done():
            ended, self._following, self._seen = self._following, None, None
            ended.result()
        if self._following is None:
            self._model = (await self._calls.get("/kvmig/v1/model", ModelBody)).id
            found = await self._calls.get(
                "/kvmig/v1/migrations", RowListing[MoveRecord], limit=MOVES
            )
            self._moves.clear()
            self._moves.extend(reversed(found.data))
            self._heard.clear()
            self._following = asyncio.create_task(self._follow(), name=f"events of {self.where}")
            try:
                async with asyncio.timeout(LOOK_TIMEOUT_S):
                    await self._heard.wait()
            except TimeoutError as error:
                raise CallFailure(f"{self.where} sends no events") from error
            if self._following.done():
                self._following.result()

    async def _follow(self) -> None:
        """Take its events until it stops. Raises CallFailure."""
        wait = httpx.Timeout(LOOK_TIMEOUT_S, read=SILENT_S)
        try:
            async with self._calls.http.stream("GET", "/kvmig/v1/events", timeout=wait) as answer:
                if answer.is_error:
                    await answer.aread()
                self._calls.check(answer)
                event = ""
                async for line in answer.aiter_lines():
                    field, _, value = line.partition(": ")
                    if field == "event":
                        event = value
                    elif field == "data":
                        self._take(event, value)
        except (httpx.HTTPError, msgspec.DecodeError) as error:
            raise CallFailure(f"{self.where} sends no events any more: {error!r}") from error
        finally:
            self._heard.set()  # who waits for the first event waits no more
        raise CallFailure(f"{self.where} has stopped")

    def _take(self, event: str, value: str) -> None:
        if event == "instances":
            self._seen = msgspec.json.decode(value, type=InstancesEvent)
            self._heard.set()
        elif event == "migration":
            self._moves.append(msgspec.json.decode(value, type=MoveRecord))

    async def drain(self, one: LiveInstance) -> None:
        """Drain an instance, which stays."""
        await self._calls.order("POST", f"{_path(one)}/drain")

    async def undrain(self, one: LiveInstance) -> None:
        """Let an instance serve again."""
        await self._calls.order("DELETE", f"{_path(one)}/drain")

    async def move(self, stream: LiveStream, destination: str | None) -> MoveRecord:
        """Move a stream. destination: None: the instance with the most room."""
        body = {"request_id": stream.row.id, "destination": destination}
        answer = await self._calls.order("POST", "/kvmig/v1/migrations", MoveRecord, body)
        assert answer is not None
        return answer

    async def close(self) -> None:
        """Follow no more, and end its connections."""
        if self._following is not None:
            await cancel_tasks(self._following)
        await self._calls.close()


def _path(one: LiveInstance) -> str:
    return f"/kvmig/v1/instances/{quote(one.row.id, safe='')}"
