"""Sessions of the fleet's pages: cookies, by the keys that let calls in now."""

from __future__ import annotations

from collections.abc import Callable

from starlette.requests import Request

from kvmig.accounts.keys import BAD_KEY, KeyDenied, KeyIndex, allows
from kvmig.accounts.page_sessions import LoginSession, SessionCookies
from kvmig.core.clock import TimeSource
from kvmig.fleet.callers import FORWARDED
from kvmig.pages.session import CookieSessions, PagePerson


class FleetSessions(CookieSessions):
    """Implements `kvmig.pages.session.PageSessions`."""

    def __init__(
        self,
        keys: Callable[[], KeyIndex],
        pepper: Callable[[], bytes],
        wall: TimeSource,
        *,
        tls: bool = False,
    ) -> None:
        """keys: those that let calls in now. pepper: the fleet's, once its database is open. wall:
        Unix time. tls: whether browsers come by HTTPS."""
        super().__init__(tls=tls)
        self._keys = keys
        self._pepper = pepper
        self._wall = wall

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

    def log_in(self, request: Request, key: str) -> LoginSession | KeyDenied:
        """A session of who shows a key; or why there is none."""
        grant, now = self._keys().find(key), self._wall()
        if grant is None:
            return BAD_KEY
        denied = allows(grant, None, address_of(request), now, None)
        return denied or self.cookies.begin(grant, now)


def address_of(request: Request) -> str:
    """The client's, as the proxy says."""
    return request.headers.get(FORWARDED, "")
