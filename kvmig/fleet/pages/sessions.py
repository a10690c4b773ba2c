"""Sessions of the fleet's pages: cookies, by the keys that let calls in now."""

from __future__ import annotations

from collections.abc import Callable
from http import HTTPStatus

from starlette.exceptions import HTTPException
from starlette.requests import Request

from kvmig.accounts.keys import BAD_KEY, KeyDenied, KeyIndex, allows
from kvmig.accounts.page_sessions import CSRF_HEADER, LoginSession, SessionCookies
from kvmig.core.clock import Clock
from kvmig.fleet.callers import FORWARDED
from kvmig.pages.session import PagePerson


class FleetSessions:
    """Implements `kvmig.pages.session.PageSessions`."""

    def __init__(
        self,
        keys: Callable[[], KeyIndex],
        pepper: Callable[[], bytes],
        wall: Clock,
        *,
        tls: bool = False,
    ) -> None:
        """keys: those that let calls in now. pepper: the fleet's, once its database is open. wall:
        Unix time. tls: whether browsers come by HTTPS."""
        self._keys = keys
        self._pepper = pepper
        self._wall = wall
        self._tls = tls

    @property
    def cookies(self) -> SessionCookies:
        """The rules of the fleet's cookies."""
        return SessionCookies(self._pepper())

    def find_session(self, request: Request) -> LoginSession | None:
        """The session of a request; None: it has none that is good now."""
        presented, address = request.headers.get("cookie", ""), address_of(request)
        return self.cookies.read(presented, self._keys().of_prefix, address, self._wall())

    def find_person(self, request: Request) -> PagePerson | None:
        """See the protocol."""
        session = self.find_session(request)
        if session is None:
            return None
        return PagePerson(session.grant.user, session.is_admin, session.grant.prefix)

    def csrf_token(self, request: Request) -> str:
        """See the protocol."""
        session = self.find_session(request)
        return "" if session is None else self.cookies.token(session)

    def check_csrf(self, request: Request, presented: str) -> None:
        """See the protocol. A script presents the token in a header."""
        session = self.find_session(request)
        given = presented or request.headers.get(CSRF_HEADER, "")
        if session is None or not self.cookies.is_token(session, given):
            sentence = "the form is of an earlier session: load the page again"
            raise HTTPException(HTTPStatus.FORBIDDEN, sentence)

    def log_in(self, request: Request, key: str) -> LoginSession | KeyDenied:
        """A session of who shows a key; or why there is none."""
        grant, now = self._keys().find(key), self._wall()
        if grant is None:
            return BAD_KEY
        denied = allows(grant, None, address_of(request), now, None)
        return denied or self.cookies.begin(grant, now)

    def set_cookie(self, session: LoginSession) -> str:
        """The header that begins a session in a browser."""
        return self.cookies.set_cookie(session, tls=self._tls)

    def clear_cookie(self) -> str:
        """The header that ends it there."""
        return self.cookies.clear_cookie(tls=self._tls)


def address_of(request: Request) -> str:
    """The client's, as the proxy says."""
    return request.headers.get(FORWARDED, "")
