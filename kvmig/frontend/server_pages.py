"""The page of a single server at /ui/, for those who have its admin key: instances, streams, moves.

It calls the routes of the admin API in this process.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from http import HTTPStatus
from itertools import islice
from typing import Any
from urllib.parse import quote

import msgspec
from fastapi import APIRouter, FastAPI
from starlette.applications import Starlette
from starlette.datastructures import FormData
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from kvmig.accounts.keys import BAD_KEY, KeyDenied, KeyGrant
from kvmig.accounts.page_sessions import CSRF_HEADER, LoginSession, SessionCookies, is_own_page
from kvmig.accounts.page_sessions import PATH as PAGE
from kvmig.asgi.access import AccessDenied
from kvmig.core.api_records import InstanceRow, RequestRow
from kvmig.core.clock import TimeSource, monotonic
from kvmig.core.live_records import (
    LiveFleet,
    LiveInstance,
    LiveModel,
    LiveMove,
    LiveStream,
    MoveRecord,
)
from kvmig.frontend.router import FrontendRouter
from kvmig.frontend.struct_answers import shown_report
from kvmig.pages.api_calls import ApiCaller, ApiRefusal
from kvmig.pages.live_feed import LiveFeed
from kvmig.pages.login import login_routes
from kvmig.pages.picture import picture_of
from kvmig.pages.session import CookieSessions, PagePerson
from kvmig.pages.site import NO_FORM, FormOutcome, NavigationLink, PageSite, go_to
from kvmig.pages.words import move_text

LOOK_S = 0.9
"""Time for which a list of requests counts, however many pages are open."""
MOST_MOVES = 50
MOST_STREAMS = 200
"""Streams of the table."""
INSTANCES = "/instances"
"""Path of the table of instances."""
READS = ("GET", "HEAD")
PREFIX = "adminkey"
"""Name of the admin key in sessions."""
PERSON = PagePerson("admin", admin=True)


class AdminSessions(CookieSessions):
    """Sessions of those who have shown the admin key; they end when another key is set."""

    def __init__(self, admin_key: str, wall: TimeSource, *, tls: bool) -> None:
        """wall: Unix time. tls: whether browsers come by HTTPS."""
        super().__init__(tls=tls)
        secret = admin_key.encode()
        self._key = secret
        self._wall = wall
        self._cookies = SessionCookies(blake2b(secret, person=b"kvmig page").digest()[:32])
        self._grant = KeyGrant(
            key_id=PREFIX, origin=PREFIX, user_id=PREFIX, user=PERSON.name, prefix=PREFIX,
            hash=blake2b(secret, digest_size=32).digest(), scopes=("admin",),
        )  # fmt: skip

    def find_person(self, request: Request) -> PagePerson | None:
        """See `PageSessions`."""
        return None if self.find_session(request) is None else PERSON

    @property
    def cookies(self) -> SessionCookies:
        """See `CookieSessions`."""
        return self._cookies

    def find_session(self, request: Request) -> LoginSession | None:
        """See `CookieSessions`."""
        return self._read(request.headers.get("cookie", ""))

    @property
    def authorization(self) -> str:
        """See `PageKey`."""
        return f"Bearer {self._key.decode()}"

    def judge_call(self, method: str, headers: Mapping[str, str]) -> AccessDenied | None:
        """See `PageKey`: the session is as good as the admin key."""
        session = self._read(headers.get("cookie", ""))
        if session is None:
            sentence = f"the session is over, or there was none: log in at {PAGE}/login"
            return AccessDenied(HTTPStatus.UNAUTHORIZED, sentence)
        if method in READS:
            return None
        given = headers.get(CSRF_HEADER, "")
        if is_own_page(headers) and self._cookies.is_token(session, given):
            return None
        sentence = f"the header {CSRF_HEADER} is missing, or not of this session"
        return AccessDenied(HTTPStatus.FORBIDDEN, sentence)

    def log_in(self, request: Request, key: str) -> LoginSession | KeyDenied:
        """See `LoginSessions`."""
        if hmac.compare_digest(key.encode(), self._key):
            return self._cookies.begin(self._grant, self._wall())
        return BAD_KEY

    def _read(self, cookies: str) -> LoginSession | None:
        grants = {PREFIX: self._grant}
        return self._cookies.read(cookies, grants.get, "", self._wall())


class ServerView:
    """What runs in one server, as its page shows it. Make it inside a running event loop."""

    def __init__(
        self,
        router: FrontendRouter,
        rows: Callable[[], list[InstanceRow]],
        model: str,
        wall: TimeSource,
        clock: TimeSource = monotonic,
    ) -> None:
        """rows: of all instances, now. wall: Unix time."""
        self._router = router
        self._rows = rows
        self._model = model
        self._wall = wall
        self._clock = clock
        self._lock = asyncio.Lock()
        self._requests: list[RequestRow] = []
        self._looked_at = -LOOK_S

    async def requests(self) -> Sequence[RequestRow]:
        """The live requests, as they were at most LOOK_S ago."""
        async with self._lock:
            if self._clock() - self._looked_at >= LOOK_S:
                self._requests = await self._router.requests()
                self._looked_at = self._clock()
            return self._requests

    async def observe(self) -> LiveFleet:
        """What runs now."""
        name, rows, requests = self._model, self._rows(), await self.requests()
        serving = sum(one.state == "serving" for one in rows)
        reports = islice(reversed(self._router.reports), MOST_MOVES)
        moves = [msgspec.convert(shown_report(one), MoveRecord) for one in reports]
        return LiveFleet(
            at=self._wall(),
            models=(
                LiveModel(
                    name=name,
                    state="serving" if serving else "waiting",
                    why="" if serving else "no instance serves",
                    serving=serving,
                    desired=len(rows),
                    running=len(requests),
                    held=self._router.held,
                ),
            ),
            instances=tuple(instance_of(name, one) for one in rows),
            streams=tuple(LiveStream(model=name, row=one) for one in requests),
            moves=tuple(LiveMove(model=name, move=one) for one in moves),
        )


def instance_of(model: str, row: InstanceRow) -> LiveInstance:
    """An instance at its place."""
    gpus = tuple(f"GPU {one}" for one in row.gpus)
    return LiveInstance(model=model, worker=row.host or "this host", gpus=gpus, row=row)


def server_pages(
    view: ServerView,
    sessions: AdminSessions,
    model: str,
    routers: Sequence[APIRouter],
    closed: Callable[[], bool],
) -> Starlette:
    """The application. routers: of the admin API, without its rules of access. closed: whether the
    server stops."""
    api = FastAPI(openapi_url=None, redirect_slashes=False)
    for one in routers:
        api.include_router(one)
    links = (
        NavigationLink("/", "Server"),
        NavigationLink("/playground", "Playground"),
        NavigationLink(INSTANCES, "Instances"),
    )
    site, feed = PageSite(sessions, links), LiveFeed(view.observe)
    calls = ApiCaller(api, "/kvmig/v1")

    async def show_live(request: Request) -> Response:
        site.find_person(request)
        values = {"title": model, "picture": picture_of(await view.observe())}
        return site.page(request, "fleet", values)

    async def follow(request: Request) -> Response:
        site.find_person(request)
        events = feed.events(lambda: not closed() and sessions.find_person(request) is not None)
        return StreamingResponse(events, media_type="text/event-stream")

    async def show_instances(request: Request, outcome: FormOutcome = NO_FORM) -> Response:
        site.find_person(request)
        requests = sorted(await view.requests(), key=lambda one: one.tokens, reverse=True)
        values: dict[str, Any] = {
            "title": model,
            "instances": (await calls.call("GET", "/instances"))["data"],
            "requests": requests[:MOST_STREAMS],
            "count": len(requests),
        }
        return site.page(request, "server", values, outcome)

    async def order(request: Request, form: FormData) -> str:
        path = f"/instances/{quote(request.path_params['instance'], safe='')}/drain"
        await calls.call("DELETE" if form.get("stop") == "yes" else "POST", path)
        return INSTANCES

    async def move(request: Request, form: FormData) -> str:
        body = {"request_id": form.get("request_id", ""), "destination": form.get("to") or None}
        await calls.call("POST", "/migrations", body=body)
        return INSTANCES

    async def show_playground(request: Request) -> Response:
        site.find_person(request)
        return site.page(request, "playground", {"title": "Playground"})

    async def move_shown(request: Request) -> Response:
        """Move the stream that the playground shows; the answer is for its script."""
        form = await site.read_form(request)
        body = {"request_id": form.get("request_id", ""), "destination": None}
        try:
            found = await calls.call("POST", "/migrations", body=body)
        except ApiRefusal as error:
            return JSONResponse({"sentence": str(error)}, error.status)
        return JSONResponse({"sentence": move_text(found)})

    async def show_model(request: Request) -> Response:
        return go_to(INSTANCES)

    return site.make_app(
        [
            *login_routes(site, sessions, "login_server"),
            Route("/", show_live),
            Route("/live", follow),
            Route(INSTANCES, show_instances),
            Route("/playground", show_playground),
            Route("/playground/move", move_shown, methods=["POST"]),
            Route("/models/{name:path}", show_model),
            site.form_route("/instances/{instance}/drain", order, show_instances),
            site.form_route("/move", move, show_instances),
        ]
    )
