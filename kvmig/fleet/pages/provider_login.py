"""Log-in to the pages by the fleet's identity provider (OpenID Connect, with PKCE)."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from kvmig.accounts.login_attempts import LoginAttempt, LoginAttempts
from kvmig.accounts.page_sessions import LoginSession
from kvmig.accounts.people import LoginRefused, person_of
from kvmig.core.errors import KvmigError
from kvmig.fleet.identity_provider import IdentityProvider
from kvmig.fleet.login_api import key_for
from kvmig.fleet.pages.sessions import FleetSessions, address_of
from kvmig.fleet.store import FleetStore
from kvmig.pages.login import own_path, show_login
from kvmig.pages.rendering import PREFIX
from kvmig.pages.site import PageSite

BEGIN = "/login/provider"
BACK = "/login/callback"
SCOPE = "openid profile email"
KEY_NAME = "page"
"""Name of keys of such log-ins, which are shown to no person."""


@dataclass(frozen=True)
class ProviderLogins:
    """Log-ins of people whom the identity provider knows."""

    provider: IdentityProvider
    store: FleetStore
    stored: Callable[..., Awaitable[Any]]
    """Runs a method of the store."""
    changed: Callable[[], Awaitable[None]]
    """Call to be awaited after a change."""
    sessions: FleetSessions
    scheme: str

    @property
    def title(self) -> str:
        """The provider's host."""
        return urlsplit(self.provider.terms.issuer).netloc

    @property
    def attempts(self) -> LoginAttempts:
        """The rules of attempts."""
        return LoginAttempts(self.store.pepper, self.sessions.cookies.cookie)

    def address(self, request: Request) -> str:
        """The address that the provider sends the browser back to; it knows that beforehand."""
        return f"{self.scheme}://{request.headers.get('host', '')}{PREFIX}{BACK}"

    async def page_of(self, request: Request, attempt: LoginAttempt) -> str:
        """The provider's page that the person logs in at. Raises ProviderAway."""
        return await self.provider.login_page(
            {
                "response_type": "code",
                "client_id": self.provider.terms.client_id,
                "redirect_uri": self.address(request),
                "scope": SCOPE,
                "state": attempt.state,
                "nonce": attempt.state,
                "code_challenge": attempt.challenge,
                "code_challenge_method": "S256",
            }
        )

    async def end(self, request: Request) -> tuple[LoginSession, LoginAttempt]:
        """The session of a person who comes back from the provider. Raises KvmigError."""
        query = request.query_params
        attempt = self.attempts.read(request.headers.get("cookie", ""), query.get("state", ""))
        if attempt is None:
            raise LoginRefused("this browser has not begun that log-in, or too long ago")
        if "code" not in query:
            raise LoginRefused(f"the provider refuses: {query.get('error', 'without a reason')}")
        token = await self.provider.token_for(
            query["code"], attempt.verifier, self.address(request)
        )
        claims = await self.provider.claims(token)
        if claims.get("nonce") != attempt.state:
            raise LoginRefused("the token is not of this log-in: Invalid claim: 'nonce'")
        person = person_of(claims, self.provider.terms)
        expires = time.time() + 3600 * self.provider.terms.key_hours
        row, key = await self.stored(
            key_for, self.store, person, expires, address_of(request), KEY_NAME
        )
        await self.changed()
        session = self.sessions.log_in(request, key)
        if not isinstance(session, LoginSession):
            raise LoginRefused(f"{row.prefix}: {session.message}")
        return session, attempt


def provider_routes(site: PageSite, logins: ProviderLogins) -> list[Route]:
    """The routes."""
    tls = logins.scheme == "https"

    async def begin(request: Request) -> Response:
        target = own_path(request.query_params.get("next", ""))
        attempt = logins.attempts.begin(target)
        try:
            page = await logins.page_of(request, attempt)
        except KvmigError as error:
            return refused(request, str(error), target)
        answer = RedirectResponse(page, HTTPStatus.SEE_OTHER)
        answer.headers["set-cookie"] = logins.attempts.set_cookie(attempt, tls=tls)
        return answer

    async def come_back(request: Request) -> Response:
        try:
            session, attempt = await logins.end(request)
        except KvmigError as error:
            return refused(request, str(error), "/")
        # The browser comes from another site. It sends the session's cookie from this page on.
        target = f"{PREFIX}{attempt.target}"
        answer = site.page(request, "logged_in", {"title": "Logged in", "target": target})
        answer.headers["refresh"] = f"0; url={target}"
        answer.headers.append("set-cookie", logins.sessions.set_cookie(session))
        answer.headers.append("set-cookie", logins.attempts.clear_cookie(tls=tls))
        return answer

    def refused(request: Request, sentence: str, target: str) -> Response:
        return show_login(
            site, request, target, "login_fleet", logins.title, sentence, HTTPStatus.FORBIDDEN
        )

    return [Route(BEGIN, begin), Route(BACK, come_back)]
