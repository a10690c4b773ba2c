"""Log-in and log-out."""

from __future__ import annotations

import re
from http import HTTPStatus
from typing import Protocol

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from kvmig.accounts.keys import KeyDenied
from kvmig.accounts.page_sessions import LoginSession
from kvmig.pages.rendering import PREFIX
from kvmig.pages.site import FormOutcome, PageSite, go_to

MOST_KEY = 4096
"""Characters that are taken for a key."""
MOST_FIELDS = 4
OWN_PATH = re.compile(rf"{PREFIX}(/[\w.~%:@+,/-]*(\?[\w.~%:@+,/?&=-]*)?)", re.ASCII)
"""A path of the page, which cannot be taken for another site's address."""


class LoginSessions(Protocol):
    """Begins and ends sessions of a browser."""

    def log_in(self, request: Request, key: str) -> LoginSession | KeyDenied:
        """A session of who shows a key; or why there is none."""
        ...

    def set_cookie(self, session: LoginSession) -> str:
        """The header that begins a session in a browser."""
        ...

    def clear_cookie(self) -> str:
        """The header that ends it there."""
        ...


def show_login(
    site: PageSite,
    request: Request,
    target: str,
    hint: str,
    provider: str = "",
    refused: str = "",
    status: HTTPStatus = HTTPStatus.OK,
) -> Response:
    """The page with the log-in's form. target: where it leads. hint: template of where a key comes
    from. provider: name of an identity provider; empty: there is none. refused: what was wrong."""
    values = {
        "title": "Log in", "target": target, "hint": hint, "provider": provider, "refused": refused,
    }  # fmt: skip
    return site.page(request, "login", values, FormOutcome(status=status))


def login_routes(
    site: PageSite, sessions: LoginSessions, hint: str, provider: str = ""
) -> list[Route]:
    """The routes. hint, provider: see `show_login`."""

    async def show(request: Request) -> Response:
        target = own_path(request.query_params.get("next", ""))
        return show_login(site, request, target, hint, provider)

    async def log_in(request: Request) -> Response:
        fields = await request.form(max_files=0, max_fields=MOST_FIELDS)
        target = own_path(str(fields.get("next", "")))
        key = str(fields.get("key", "")).strip()[:MOST_KEY]
        session = sessions.log_in(request, key)
        if isinstance(session, KeyDenied):
            return show_login(
                site, request, target, hint, provider, session.message, session.status
            )
        answer = go_to(target)
        answer.headers["set-cookie"] = sessions.set_cookie(session)
        return answer

    async def log_out(request: Request) -> Response:
        await site.read_form(request)
        answer = go_to("/login")
        answer.headers["set-cookie"] = sessions.clear_cookie()
        return answer

    return [
        Route("/login", show),
        Route("/login", log_in, methods=["POST"]),
        Route("/logout", log_out, methods=["POST"]),
    ]


def own_path(given: str) -> str:
    """The path to go to after the log-in, below the prefix: the given one if it is a page's."""
    found = OWN_PATH.fullmatch(given)
    return "/" if found is None else found[1]
