"""Extends the engine's HTTP application: admin API, metrics, limits of connections."""

from __future__ import annotations

from fastapi import FastAPI, Request, Response
from prometheus_client import generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.routing import Route

from kvmig.gateway.admin import admin_api, instances_api
from kvmig.gateway.events import events_api
from kvmig.gateway.http import Connection, HttpState
from kvmig.gateway.inventory import InstanceRow, cluster_rows
from kvmig.gateway.launcher import LauncherLink, Membership
from kvmig.gateway.metrics import (
    ClassCollector,
    InstanceCollector,
    UnitCollector,
    of_all_front_ends,
    with_instances,
)
from kvmig.gateway.router import Router


def extend(
    app: FastAPI,
    http: HttpState,
    router: Router,
    membership: Membership,
    launcher: LauncherLink,
    model: str,
) -> None:
    """Add kvmig's routes and state to `app`, before it serves; `HttpMiddleware` is there already.

    Our /metrics takes the place of its own.
    """
    rows_of_router = router.fleet.rows

    def rows() -> list[InstanceRow]:
        return cluster_rows(rows_of_router(), membership.members)

    app.include_router(admin_api(router, rows, model, http.access.admin))
    app.include_router(instances_api(launcher, rows, model, http.access.admin))
    app.include_router(
        events_api(router, rows, model, http.access.admin, closed=lambda: http.closed)
    )
    source = of_all_front_ends(http.registry)
    source.register(InstanceCollector(rows_of_router))
    source.register(UnitCollector(rows_of_router))
    source.register(ClassCollector(rows_of_router, http.priorities))
    exposed = with_instances(source, router.fleet.engine_indexes)

    async def metrics(_: Request) -> Response:
        return Response(generate_latest(exposed), media_type=CONTENT_TYPE_LATEST)

    app.router.routes.insert(0, Route("/metrics", metrics))
    app.state.kvmig = http
    app.state.connection = Connection.limited(http.config.send_timeout_s, http.count)
