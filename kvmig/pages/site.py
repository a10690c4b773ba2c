"""The page's application: static files, answers in HTML, errors, and who may see what."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from starlette.applications import Starlette
from starlette.datastructures import FormData
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles

from kvmig.pages.api_calls import ApiRefusal
from kvmig.pages.headers import PageHeaders
from kvmig.pages.rendering import PREFIX, render
from kvmig.pages.sent_forms import ONCE, SentForms
from kvmig.pages.session import PagePerson, PageSessions

STATIC = Path(__file__).parent / "static"
MOST_FIELDS = 200
"""Fields of a form."""
CSRF = "csrf"
"""Name of the form field with the session's token."""


class NavigationLink(NamedTuple):
    """An entry of the navigation."""

    path: str
    """Below the prefix."""
    title: str
    admin: bool = False
    """Whether only admins see it."""


class FormOutcome(NamedTuple):
    """What a page says of the form that was sent: it was refused, or its answer is shown once."""

    error: str = ""
    """Why it was refused; empty: it was not."""
    status: HTTPStatus = HTTPStatus.OK
    form: Mapping[str, Any] = {}
    """The form's fields, to be shown again."""
    found: Any = None
    """What came of it; None: nothing to be shown."""


NO_FORM = FormOutcome()
Act = Callable[[Request, FormData], Awaitable[str | FormOutcome]]
"""Carries a form out: the path to go to, below the prefix, or what is shown. Raises ApiRefusal."""
Show = Callable[[Request, FormOutcome], Awaitable[Response]]
"""Shows the form's page."""


class NotLoggedIn(Exception):
    """A page was asked for without a session."""


class PageSite:
    """What the routes of all pages share."""

    def __init__(self, sessions: PageSessions, links: Sequence[NavigationLink]) -> None:
        self.sessions = sessions
        self._links = links
        self._sent: SentForms[str | FormOutcome] = SentForms()

    def find_person(self, request: Request, *, admin: bool = False) -> PagePerson:
        """The person who is logged in. admin: the page is for admins only. Raises NotLoggedIn, or
        HTTPException, 403."""
        person = self.sessions.find_person(request)
        if person is None:
            raise NotLoggedIn
        if admin and not person.admin:
            raise HTTPException(HTTPStatus.FORBIDDEN, "this page is for admins")
        return person

    def page(
        self,
        request: Request,
        template: str,
        values: Mapping[str, object],
        outcome: FormOutcome = NO_FORM,
    ) -> HTMLResponse:
        """A whole page, for the person of the request. outcome: of a form that was sent there."""
        person = self.sessions.find_person(request)
        links = [
            one for one in self._links if person is not None and (person.admin or not one.admin)
        ]
        shared = {
            "form": outcome.form,
            "outcome": outcome,
            "person": person,
            "csrf": "" if person is None else self.sessions.csrf_token(request),
            "links": links,
            "here": request.url.path,
            "once": self._sent.new_token(),
        }
        return HTMLResponse(render(template, **(shared | dict(values))), outcome.status)

    async def read_form(self, request: Request) -> FormData:
        """A form's fields, once its token is checked. Raises NotLoggedIn, HTTPException."""
        self.find_person(request)
        form = await request.form(max_files=0, max_fields=MOST_FIELDS)
        self.sessions.check_csrf(request, str(form.get(CSRF, "")))
        return form

    def form_route(self, path: str, act: Act, show: Show) -> Route:
        """A route that takes a form. show: of its page, where the form is refused. A form with the
        field ONCE is carried out once."""

        async def take(request: Request) -> Response:
            form = await self.read_form(request)
            person, token = self.find_person(request), str(form.get(ONCE, ""))
            fields = [(name, str(value)) for name, value in form.multi_items()]
            try:
                done = await self._sent.carry_out(
                    f"{person.name}/{person.key}",
                    request.url.path,
                    token,
                    fields,
                    lambda: act(request, form),
                )
            except ApiRefusal as error:
                done = FormOutcome(str(error), error.status, form)
            return go_to(done) if isinstance(done, str) else await show(request, done)

        return Route(path, take, methods=["POST"])

    def make_app(self, routes: Sequence[BaseRoute]) -> Starlette:
        """The application, to be mounted at the prefix."""
        app = Starlette(
            routes=[Mount("/static", StaticFiles(directory=STATIC)), *routes],
            middleware=[Middleware(PageHeaders)],
            exception_handlers={
                NotLoggedIn: self._ask_for_login,
                HTTPException: self._show_error,
                ApiRefusal: self._show_refusal,
            },
        )
        app.router.redirect_slashes = False  # it would lead from HTTPS to HTTP
        return app

    async def _ask_for_login(self, request: Request, _: Exception) -> Response:
        """Lead to the log-in and back; refuse a script."""
        if request.method != "GET" or "text/html" not in request.headers.get("accept", ""):
            return Response("log in first", HTTPStatus.UNAUTHORIZED, media_type="text/plain")
        return go_to(f"/login?next={quote(request.url.path, safe='/')}")

    async def _show_error(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return self._error(request, HTTPStatus(error.status_code), error.detail)

    async def _show_refusal(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiRefusal)
        return self._error(request, error.status, str(error))

    def _error(self, request: Request, status: HTTPStatus, sentence: str) -> Response:
        values = {"title": status.phrase, "sentence": sentence}
        return self.page(request, "error", values, FormOutcome(status=status))


def go_to(path: str) -> RedirectResponse:
    """Lead to a page after a form. path: below the prefix."""
    return RedirectResponse(f"{PREFIX}{path}", HTTPStatus.SEE_OTHER)
