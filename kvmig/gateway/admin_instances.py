"""The admin API's orders: more instances, fewer, and which ones shall be emptied."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from http import HTTPStatus
from typing import Annotated

from fastapi import APIRouter, Query

from kvmig.controlplane.orders import AddInstances, DrainInstance, RestartInstances, StopDrain
from kvmig.gateway.access import Rule
from kvmig.gateway.admin import PREFIX
from kvmig.gateway.admin_errors import PROBLEMS, Responses, guarded
from kvmig.gateway.admin_models import (
    AddBody,
    DrainBody,
    ErrorBody,
    Instance,
    Listing,
    RestartBody,
)
from kvmig.gateway.inventory import InstanceRow
from kvmig.gateway.launcher_link import LauncherLink


def instances_api(
    launcher: LauncherLink,
    rows: Callable[[], Sequence[InstanceRow]],
    model: str,
    rule: Rule,
) -> APIRouter:
    """The routes, for `app.include_router`.

    rows: of all instances, now. rule: who may call them.
    """
    errors: Responses = {status: {"model": ErrorBody} for status in (400, 404, 409, 503)}
    adding = APIRouter(route_class=guarded(rule, tuple(AddBody.model_fields)))
    restarting = APIRouter(route_class=guarded(rule, tuple(RestartBody.model_fields)))
    draining = APIRouter(route_class=guarded(rule, tuple(DrainBody.model_fields)))

    def told(names: Sequence[str]) -> list[Instance]:
        return [Instance.of(row, model) for row in rows() if row.id in names]

    @adding.post("/instances", status_code=HTTPStatus.CREATED, responses=errors)
    async def add(body: AddBody | None = None) -> Listing[Instance]:
        """Start instances; they are `starting` until they serve."""
        wanted = body or AddBody()
        names = await launcher.order(
            lambda call_id: AddInstances(call_id, wanted.count, wanted.flags)
        )
        return Listing(data=told(names))

    @restarting.post("/instances/restart", status_code=HTTPStatus.ACCEPTED, responses=errors)
    async def restart(body: RestartBody | None = None) -> Listing[Instance]:
        """Start them again, one after the other, each once its requests have gone elsewhere."""
        wanted = body or RestartBody()
        names = await launcher.order(
            lambda call_id: RestartInstances(call_id, tuple(wanted.instances), wanted.deadline_s)
        )
        return Listing(data=told(names))

    @draining.delete("/instances/{name}", status_code=HTTPStatus.ACCEPTED, responses=errors)
    async def remove(
        name: str,
        now: bool = False,
        deadline_s: Annotated[float | None, Query(ge=0, allow_inf_nan=False)] = None,
    ) -> Listing[Instance]:
        """Drain it, then end it; `now`: end it at once, its requests run again elsewhere."""
        names = await launcher.order(
            lambda call_id: DrainInstance(call_id, name, deadline_s, leave=True, now=now)
        )
        return Listing(data=told(names))

    @draining.post("/instances/{name}/drain", status_code=HTTPStatus.ACCEPTED, responses=errors)
    async def drain(name: str, body: DrainBody | None = None) -> Listing[Instance]:
        """Let its requests go elsewhere; it stays, and takes no new ones."""
        deadline_s = (body or DrainBody()).deadline_s
        names = await launcher.order(lambda call_id: DrainInstance(call_id, name, deadline_s))
        return Listing(data=told(names))

    @draining.delete("/instances/{name}/drain", responses=errors)
    async def stop_drain(name: str) -> Listing[Instance]:
        """Let a draining instance serve again."""
        names = await launcher.order(lambda call_id: StopDrain(call_id, name))
        return Listing(data=told(names))

    api = APIRouter(prefix=PREFIX, tags=["kvmig"], responses=PROBLEMS)
    api.include_router(adding)
    api.include_router(restarting)
    api.include_router(draining)
    return api
