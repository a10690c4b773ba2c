"""The application of the pages: its routes call those of `kvmig.fleet.api` in this process."""

from __future__ import annotations

from collections.abc import Callable

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from kvmig.accounts.keys import KeyIndex
from kvmig.fleet.pages.backend import FleetPages
from kvmig.pages.api_calls import ApiCaller
from kvmig.pages.session import PageSessions
from kvmig.pages.site import NavigationLink, PageSite

LINKS = (NavigationLink("/", "Fleet"),)
"""The navigation."""


def fleet_pages(
    api: ASGIApp, prefix: str, keys: Callable[[], KeyIndex], sessions: PageSessions
) -> Starlette:
    """The application. api: answers the API's paths, which begin with `prefix`. keys: those that
    let calls in now."""
    pages = FleetPages(PageSite(sessions, LINKS), ApiCaller(api, prefix), keys)
    return pages.site.make_app(overview_routes(pages))


def overview_routes(pages: FleetPages) -> list[Route]:
    """Routes of the first page."""

    async def show_fleet(request: Request) -> Response:
        pages.site.find_person(request, admin=True)
        models = (await pages.call(request, "GET", "/models"))["data"]
        return pages.site.page(request, "fleet", {"title": "Fleet", "models": models})

    return [Route("/", show_fleet)]
