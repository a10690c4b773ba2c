"""Extends the engine's HTTP application: admin API, metrics, limits of connections."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from fastapi import FastAPI, Request, Response
from msgspec.structs import replace
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.responses import RedirectResponse
from starlette.routing import Route

from kvmig.accounts.page_sessions import PATH as PAGE
from kvmig.asgi.connection import HttpConnection
from kvmig.core.api_records import InstanceRow
from kvmig.frontend.admin import admin_api, instances_api
from kvmig.frontend.events import events_api
from kvmig.frontend.inventory import cluster_rows
from kvmig.frontend.launcher_link import InstanceMembership, LauncherLink
from kvmig.frontend.metrics import MetricsExposition
from kvmig.frontend.middleware import HttpState
from kvmig.frontend.probes import probe_routes
from kvmig.frontend.router import FrontendRouter
from kvmig.frontend.server_drain import server_drain_api
from kvmig.frontend.struct_answers import add_schemas


def extend(
    app: FastAPI,
    http: HttpState,
    router: FrontendRouter,
    membership: InstanceMembership,
    launcher: LauncherLink,
    model: str,
    *,
    admin_key: str = "",
    tls: bool = False,
) -> None:
    """Add kvmig's routes and state to `app`, before it serves; `HttpMiddleware` is there already.

    Our /metrics, /health and /ping take the place of its own. admin_key: opens the page, where
    there is one. tls: whether browsers come by HTTPS.
    """
    rows_of_router = router.fleet.rows

    def rows() -> list[InstanceRow]:
        return cluster_rows(rows_of_router(), membership.members, model)

    rule, fence = http.access.admin, launcher.raise_fence
    named = http.session_name
    app.include_router(admin_api(router, rows, model, rule, fence, http.reach, name_session=named))
    app.include_router(instances_api(launcher, rows, rule))
    app.include_router(server_drain_api(router, launcher, rows, lambda: router.fleet.unlike, rule))
    app.include_router(events_api(router, rows, rule, lambda: http.closed, fence))
    exposition = MetricsExposition(
        http.registry,
        http.priorities,
        lambda: [replace(row, model=model) for row in router.fleet.rows_here()],
        router.fleet.views_here,
        router.fleet.engine_indexes,
    )

    async def metrics(_: Request) -> Response:
        return Response(await exposition.text(), media_type=CONTENT_TYPE_LATEST)

    engine = getattr(app.state, "engine_client", None)  # vLLM's
    probes = probe_routes(http, lambda: engine is not None and engine.errored)
    app.router.routes[:0] = [Route("/metrics", metrics), *probes]
    app.router.redirect_slashes = False  # behind HTTPS it would lead to HTTP
    if http.access.has_page:
        add_page(app, http, router, launcher, rows, model, AdminKey(admin_key, tls))
    add_schemas(app)
    describe_beside_streams(app)
    app.state.kvmig = http
    app.state.connection = HttpConnection.limited(http.config.send_timeout_s, http.count)


class AdminKey(NamedTuple):
    """The key that opens the page."""

    key: str
    tls: bool
    """Whether browsers come by HTTPS."""


def add_page(
    app: FastAPI,
    http: HttpState,
    router: FrontendRouter,
    launcher: LauncherLink,
    rows: Callable[[], list[InstanceRow]],
    model: str,
    admin: AdminKey,
) -> None:
    """Add the page; its templates are loaded for it alone."""
    from kvmig.frontend.server_pages import AdminSessions, ServerView, server_pages

    def let_in(_: Mapping[str, str]) -> None:
        """Let every call in: the page has looked at its session."""

    routers = (
        admin_api(
            router, rows, model, let_in, launcher.raise_fence, name_session=http.session_name
        ),
        instances_api(launcher, rows, let_in),
    )
    view = ServerView(router, rows, model, time.time)
    sessions = http.page = AdminSessions(admin.key, time.time, tls=admin.tls)

    async def lead_in(_: Request) -> Response:
        return RedirectResponse(f"{PAGE}/")

    app.router.routes.append(Route(PAGE, lead_in))
    app.mount(PAGE, server_pages(view, sessions, model, routers, lambda: http.closed))


def describe_beside_streams(app: FastAPI) -> None:
    """Let a thread make the description of the API, once: that of vLLM's takes a second or two."""
    original = next(
        (one for one in app.routes if isinstance(one, Route) and one.path == app.openapi_url), None
    )
    if original is None:  # the server doesn't describe itself
        return
    content = b""

    async def description(request: Request) -> Response:
        nonlocal content
        if not content:
            await asyncio.to_thread(app.openapi)  # which keeps it
            content = bytes((await original.endpoint(request)).body)
        return Response(content, media_type="application/json")

    app.router.routes.insert(0, Route(original.path, description))
