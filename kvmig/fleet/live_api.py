"""Routes of what runs now, and of orders about single instances and requests."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Query
from pydantic import Field
from starlette.responses import Response

from kvmig.asgi.strict_body import StrictBody
from kvmig.core.errors import KvmigError
from kvmig.fleet.api_paths import routes_at
from kvmig.fleet.audit import AuditedOrder, add_to_audit
from kvmig.fleet.live_view import LiveView
from kvmig.fleet.store import OrderActor
from kvmig.fleet.tables import FleetDatabase

MOST_STREAMS = 1000
Body = dict[str, Any]
StreamsQuery = Annotated[
    int, Query(ge=0, le=MOST_STREAMS, description="Streams to list; 0: no deployment is asked.")
]


class InstanceBody(StrictBody):
    """An instance of a model."""

    model: str = Field(min_length=1, max_length=200)
    instance: str = Field(min_length=1, max_length=100)
    deployment: str = Field(
        default="",
        max_length=200,
        description="Which of a model's two deployments, while it rolls out; empty: the one that"
        " has such an instance.",
    )


class MoveBody(StrictBody):
    """Move a request."""

    model: str = Field(min_length=1, max_length=200)
    request_id: str = Field(
        min_length=1, max_length=500, description="The id of a stream, or the call's x-request-id."
    )
    destination: str | None = Field(
        default=None,
        min_length=1,
        max_length=100,
        description="Id of an instance; null: the one with the most room.",
    )
    deployment: str = Field(default="", max_length=200, description="As for an instance.")


def live_api(
    view: LiveView,
    database: FleetDatabase,
    stored: Callable[..., Awaitable[None]],
    caller: Any,
) -> APIRouter:
    """The routes. stored: runs a call of the database on the store's thread. caller: who calls."""
    api = routes_at("/live")

    async def carry_out(
        action: str,
        body: InstanceBody,
        actor: OrderActor,
        order: Callable[[str, str, str], Awaitable[None]],
    ) -> None:
        """Keep in the audit what was ordered, then what came of it: an order that is cut short
        between the two stands there as one of which no end is known."""

        async def keep(state: str, why: str = "") -> None:
            after = {"state": state, **({"why": why} if why else {})}
            shown = AuditedOrder(action, f"{body.model}/{body.instance}", after=after)
            await stored(keep_order, database, shown, actor, view.wall())

        await keep("ordered")
        try:
            await order(body.model, body.instance, body.deployment)
        except KvmigError as error:
            await keep("refused", str(error))
            raise
        await keep("begun")

    @api.get("")
    async def live(streams: StreamsQuery = 200, _: OrderActor = caller) -> Response:
        """What runs now: models, instances, streams, GPUs, and the migrations that ended last."""
        found = await view.observe(streams)
        return Response(msgspec.json.encode(found), media_type="application/json")

    @api.post("/drain")
    async def drain(body: InstanceBody, actor: OrderActor = caller) -> Body:
        """Let an instance's requests go to the model's other instances; then it ends. The model
        gets another one if it is to have more. 409 where the deployment refuses."""
        view.check(body.model, body.instance, body.deployment)
        await carry_out("instance.drain", body, actor, view.drain)
        return {}

    @api.post("/undrain")
    async def undrain(body: InstanceBody, actor: OrderActor = caller) -> Body:
        """Let an instance that is drained serve again."""
        view.check(body.model, body.instance, body.deployment)
        await carry_out("instance.undrain", body, actor, view.undrain)
        return {}

    @api.post("/move")
    async def move(body: MoveBody, _: OrderActor = caller) -> Body:
        """Move a request to another instance, and wait for the end: the answer is the migration's
        report, also where it was aborted. The stream goes on in either case."""
        found = await view.move(body.model, body.request_id, body.destination, body.deployment)
        return {"move": msgspec.to_builtins(found)}

    return api


def keep_order(database: FleetDatabase, order: AuditedOrder, actor: OrderActor, now: float) -> None:
    """Keep a row of the audit of an order about an instance: how far it has come. Raises
    StoreError."""
    with database.transaction() as connection:
        add_to_audit(connection, order, actor, now)
