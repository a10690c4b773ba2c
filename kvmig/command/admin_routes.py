"""The admin API of a deployment that runs a command: what a fleet's server asks and orders.

It has the paths and answers of a front end's (`kvmig.frontend.admin`), as far as they make sense.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from http import HTTPStatus
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from kvmig.asgi.access import Rule
from kvmig.asgi.errors import GatewayError
from kvmig.asgi.problems import denial, problem
from kvmig.command.server_pool import UNMOVABLE, ServerInstance, ServerPool
from kvmig.core.api_records import InstanceRow, ModelBody, RowListing
from kvmig.core.clock import monotonic
from kvmig.core.order_fence import TOKEN_HEADER, OrderFence, OrderToken

PREFIX = "/kvmig/v1"
LOOK_S = 0.2
"""Pause between two looks at what has changed."""
HEARTBEAT_S = 5.0
"""Longest time between two events of a listener."""

Endpoint = Callable[[Request], Awaitable[Response]]


class AddedServers(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The order to start more servers."""

    count: int = 1
    gpus: tuple[str, ...] = ()
    unit: str = ""


class AdminRoutes:
    """Makes the routes."""

    def __init__(
        self,
        pool: ServerPool,
        model: str,
        created: int,
        rule: Rule,
        live: Callable[[], int],
        closed: Callable[[], bool],
        registry: CollectorRegistry,
    ) -> None:
        """model: its name. created: Unix time. rule: who may call. live: calls that are relayed.
        closed: whether the deployment stops."""
        self._pool = pool
        self._model = model
        self._created = created
        self._rule = rule
        self._live = live
        self._closed = closed
        self._registry = registry
        self._fence = OrderFence()

    def routes(self) -> list[Route]:
        """Return every route."""
        return [
            self._route("GET", "/events", self._events),
            self._route("GET", "/model", self._served),
            self._route("GET", "/instances", self._instances),
            self._route("POST", "/instances", self._add),
            self._route("DELETE", "/instances/{name}", self._remove),
            self._route("POST", "/instances/{name}/drain", self._drain),
            self._route("DELETE", "/instances/{name}/drain", self._stop_drain),
            self._route("GET", "/migrations", self._no_migrations),
            self._route("POST", "/migrations", self._refuse(UNMOVABLE)),
            self._route("POST", "/sessions/move", self._refuse(UNMOVABLE)),
            self._route("POST", "/park", self._refuse("another engine can't be parked")),
            self._route("POST", "/unpark", self._refuse("another engine can't be parked")),
            Route("/v1/models", self._models),
            Route("/metrics", self._metrics),
        ]

    def _route(self, method: str, path: str, endpoint: Endpoint) -> Route:
        async def guarded(request: Request) -> Response:
            if (denied := self._rule(request.headers)) is not None:
                return denial(denied)
            if (given := request.headers.get(TOKEN_HEADER)) is not None:
                await request.body()  # nothing is waited for between the fence and the order
                try:
                    why = self._fence.refuse(OrderToken.parse(given))
                except ValueError as error:
                    return problem(HTTPStatus.BAD_REQUEST, str(error), TOKEN_HEADER)
                if why:
                    return problem(HTTPStatus.CONFLICT, why)
            try:
                return await endpoint(request)
            except GatewayError as error:
                return problem(error.status, str(error), error.param)

        return Route(PREFIX + path, guarded, methods=[method])

    def _refuse(self, sentence: str) -> Endpoint:
        async def refuse(_: Request) -> Response:
            return problem(HTTPStatus.NOT_IMPLEMENTED, sentence)

        return refuse

    # -- what there is

    async def _models(self, _: Request) -> Response:
        row = {
            "id": self._model, "object": "model", "created": self._created, "owned_by": "kvmig",
        }  # fmt: skip
        return _answer({"object": "list", "data": [row]})

    async def _served(self, _: Request) -> Response:
        return _answer(ModelBody(id=self._model))

    async def _instances(self, _: Request) -> Response:
        return _answer(RowListing(data=self._pool.rows()))

    async def _no_migrations(self, _: Request) -> Response:
        return _answer(RowListing[dict[str, Any]](data=[]))

    async def _metrics(self, _: Request) -> Response:
        return Response(generate_latest(self._registry), media_type=CONTENT_TYPE_LATEST)

    async def _events(self, _: Request) -> Response:
        return StreamingResponse(self._stream(), media_type="text/event-stream")

    async def _stream(self) -> AsyncIterator[bytes]:
        """`instances` now and whenever one changes, at least every HEARTBEAT_S; then `closed`."""
        told: list[InstanceRow] | None = None
        said = 0.0
        while not self._closed():
            rows = self._pool.rows()
            if rows != told or monotonic() - said >= HEARTBEAT_S:
                yield _event("instances", {"live": self._live(), "parked": False, "data": rows})
                told, said = rows, monotonic()
            await asyncio.sleep(LOOK_S)
        yield _event("closed", {})

    # -- orders

    async def _add(self, request: Request) -> Response:
        body = await request.body()
        try:
            wanted = msgspec.json.decode(body or b"{}", type=AddedServers)
        except msgspec.MsgspecError as error:
            return problem(HTTPStatus.BAD_REQUEST, f"the body is no order: {error}")
        if wanted.count < 1:
            sentence = f"count is {wanted.count}, must be 1 or more"
            return problem(HTTPStatus.BAD_REQUEST, sentence, "count")
        names = self._pool.add(wanted.count, wanted.gpus, wanted.unit)
        return self._listed(names, HTTPStatus.CREATED)

    async def _remove(self, request: Request) -> Response:
        query, deadline_s = request.query_params, None
        if (given := query.get("deadline_s")) is not None:
            with contextlib.suppress(ValueError):
                deadline_s = float(given)
            if deadline_s is None or not 0 <= deadline_s < 1e9:
                sentence = f"deadline_s is {given[:100]}, must be seconds, 0 or more"
                return problem(HTTPStatus.BAD_REQUEST, sentence, "deadline_s")
        removed = self._pool.remove(
            request.path_params["name"],
            now=query.get("now") == "true",
            last=query.get("last") == "true",
            deadline_s=deadline_s,
        )
        return self._one(removed, HTTPStatus.ACCEPTED)

    async def _drain(self, request: Request) -> Response:
        drained = self._pool.drain(request.path_params["name"])
        return self._one(drained, HTTPStatus.ACCEPTED)

    async def _stop_drain(self, request: Request) -> Response:
        return self._one(self._pool.stop_drain(request.path_params["name"]), HTTPStatus.OK)

    def _one(self, instance: ServerInstance, status: HTTPStatus) -> Response:
        return self._listed([instance.name], status)

    def _listed(self, names: Sequence[str], status: HTTPStatus) -> Response:
        return _answer(
            RowListing(data=[one for one in self._pool.rows() if one.id in names]), status
        )


def _answer(value: object, status: HTTPStatus = HTTPStatus.OK) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


def _event(name: str, data: dict[str, Any]) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + msgspec.json.encode(data) + b"\n\n"
