"""The application of the pages: its routes call those of `kvmig.fleet.api` in this process."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from kvmig.accounts.keys import KeyIndex
from kvmig.core.live_records import LiveFleet
from kvmig.fleet.live_api import MOST_STREAMS
from kvmig.fleet.pages.accounts import key_routes, user_routes
from kvmig.fleet.pages.backend import FleetPages
from kvmig.fleet.pages.models import model_routes
from kvmig.fleet.pages.playground import playground_routes
from kvmig.fleet.pages.provider_login import ProviderLogins, provider_routes
from kvmig.fleet.pages.sessions import FleetSessions
from kvmig.fleet.pages.usage import usage_routes
from kvmig.fleet.pages.workers import worker_routes
from kvmig.pages.api_calls import ApiCaller
from kvmig.pages.live_feed import LiveFeed
from kvmig.pages.login import login_routes
from kvmig.pages.picture import picture_of
from kvmig.pages.session import PageSessions
from kvmig.pages.site import NavigationLink, PageSite, go_to

LINKS = (
    NavigationLink("/", "Fleet", admin=True),
    NavigationLink("/models", "Models"),
    NavigationLink("/playground", "Playground"),
    NavigationLink("/workers", "Workers", admin=True),
    NavigationLink("/usage", "Usage"),
    NavigationLink("/keys", "Keys"),
    NavigationLink("/users", "Users", admin=True),
    NavigationLink("/audit", "Audit", admin=True),
)
"""The navigation."""


def fleet_pages(
    api: ASGIApp,
    prefix: str,
    keys: Callable[[], KeyIndex],
    feed: LiveFeed,
    own: FleetSessions,
    sessions: PageSessions | None = None,
    logins: ProviderLogins | None = None,
) -> Starlette:
    """The application. api: answers the API's paths, which begin with `prefix`. keys: those that
    let calls in now. feed: the live picture. own: the sessions that people log in to. sessions:
    those that pages look for; None: the same. logins: by an identity provider; None: there is
    none."""
    pages = FleetPages(PageSite(sessions or own, LINKS), ApiCaller(api, prefix), keys)
    title = "" if logins is None else logins.title
    return pages.site.make_app(
        [
            *login_routes(pages.site, own, "login_fleet", title),
            *([] if logins is None else provider_routes(pages.site, logins)),
            *overview_routes(pages, feed),
            *model_routes(pages),
            *playground_routes(pages),
            *worker_routes(pages),
            *usage_routes(pages),
            *key_routes(pages),
            *user_routes(pages),
        ]
    )


def overview_routes(pages: FleetPages, feed: LiveFeed) -> list[Route]:
    """Routes of the first page, which is live."""

    async def show_fleet(request: Request) -> Response:
        if not pages.site.find_person(request).admin:
            return go_to("/models")
        found = await pages.call(request, "GET", "/live", query={"streams": MOST_STREAMS})
        picture = picture_of(msgspec.convert(found, LiveFleet))
        return pages.site.page(request, "fleet", {"title": "Fleet", "picture": picture})

    async def follow(request: Request) -> Response:
        pages.check_admin(request)
        events = feed.events(lambda: pages.is_admin(request))
        return StreamingResponse(events, media_type="text/event-stream")

    return [Route("/", show_fleet), Route("/live", follow)]
