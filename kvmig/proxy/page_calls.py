"""Calls of the page in a browser, which have a session in place of a key. Pure.

The proxy checks the session as it checks a key, so that the server gets few calls of those who have
none. Paths under /ui/v1/ are a model's: such a call has the rights of the session's key, and is
counted and limited as any other of that key.
"""

from __future__ import annotations

import ipaddress
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from math import ceil
from typing import NamedTuple
from urllib.parse import quote

from kvmig.accounts.page_sessions import CSRF_HEADER, LoginSession, SessionCookies, is_own_page
from kvmig.proxy.directory import ModelDirectory
from kvmig.proxy.refusals import ProxyRefusal

PAGES = "/ui/"
"""Prefix of the page's paths."""
MODEL_CALLS = "/ui/v1/"
"""Prefix of paths of models; what follows /ui is a path of the API."""
LOGIN = "/ui/login"
STATIC = "/ui/static/"
OPEN = (LOGIN, STATIC)
"""Beginnings of paths without a session."""
READS = ("GET", "HEAD")
MOST_ADDRESSES = 4096
"""Addresses of which it is known how much they have asked without a session."""
BURST = 100.0
"""Calls without a session that one address has at once."""
EACH_S = 10.0
"""Calls more that it has each second."""
MOST_PAGES = 64
"""Calls of one user's pages that the server answers at once."""
FORM_BYTES = 256_000
"""Bytes of a form of the page, at most: the server takes it apart on its event loop."""
LOGINS = 16
"""Log-ins that the server gets at once; one more is refused."""
FILES = 64
"""Calls of the page's files that the server answers at once."""
VISIT_S = 60.0
"""Longest time of a call without a key, until its answer is read; then it is cut."""
TRY = 10.0
"""How many calls count for one try to log in, for which the server may ask a provider."""


class VisitorCall(NamedTuple):
    """A call without a session that the server answers."""


class LoginRedirect(NamedTuple):
    """The call is answered with the way to the log-in, or to the first page."""

    location: str


class SessionCall(NamedTuple):
    """A call of a person who has logged in."""

    prefix: str
    """Prefix of the session's key."""
    user: str
    """Id of the key's user."""
    path: str
    """Path that is asked for with the rights of that key."""
    for_model: bool
    """Whether a model is asked, and not the server."""


PageWay = VisitorCall | LoginRedirect | SessionCall


@dataclass
class VisitorRates:
    """How much each address may ask without a session. Few addresses are kept."""

    _levels: OrderedDict[str, tuple[float, float]] = field(default_factory=OrderedDict, init=False)
    """What each address has used, and when that was so."""

    def __len__(self) -> int:
        return len(self._levels)

    def wait_s(self, address: str, calls: float, now: float) -> float:
        """Seconds until the address may ask; 0: it may now, and it is counted. now: steady."""
        whose = network_of(address)
        used, at = self._levels.pop(whose, (0.0, now))
        used = max(0.0, used - EACH_S * max(0.0, now - at))
        wait_s = max(0.0, used + calls - BURST) / EACH_S
        self._levels[whose] = (used if wait_s else used + calls, now)
        while len(self._levels) > MOST_ADDRESSES:
            self._levels.popitem(last=False)
        return wait_s


class OpenPages:
    """Calls of each user's pages that the server answers now: every page that is open is one."""

    def __init__(self) -> None:
        self._open: Counter[str] = Counter()

    @contextmanager
    def entered(self, way: SessionCall) -> Iterator[None]:
        """Count a call until its end. Raises ProxyRefusal."""
        if way.for_model:  # counted by the limits of its key
            yield
            return
        if self._open[way.user] >= MOST_PAGES:
            sentence = f"{MOST_PAGES} pages of this user are open, close one or try again"
            raise ProxyRefusal(HTTPStatus.TOO_MANY_REQUESTS, sentence, "pages_full", 1.0)
        self._open[way.user] += 1
        try:
            yield
        finally:
            self._open[way.user] -= 1
            if not self._open[way.user]:
                del self._open[way.user]


class OpenVisits:
    """Calls without a key that the server answers now: those of files leave log-ins their room."""

    def __init__(self) -> None:
        self._open: Counter[bool] = Counter()
        """Counts of calls of files (true), and of others."""

    @contextmanager
    def entered(self, path: str) -> Iterator[None]:
        """Count a call until its end. Raises ProxyRefusal."""
        of_files = path.startswith(STATIC)
        most, what = (FILES, "files of the page") if of_files else (LOGINS, "log-ins")
        if self._open[of_files] >= most:
            sentence = f"{most} {what} are asked for at once, try again"
            code = "files_full" if of_files else "logins_full"
            raise ProxyRefusal(HTTPStatus.SERVICE_UNAVAILABLE, sentence, code, 1.0)
        self._open[of_files] += 1
        try:
            yield
        finally:
            self._open[of_files] -= 1


def too_slow() -> ProxyRefusal:
    """Why a call without a key is cut."""
    sentence = f"the call has taken {VISIT_S:g} s, more than one without a key may"
    return ProxyRefusal(HTTPStatus.REQUEST_TIMEOUT, sentence, "visit_too_slow")


def network_of(address: str) -> str:
    """What one person has of addresses: of IPv6, a whole network."""
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return address
    if found.version == 6 and found.ipv4_mapped is None:
        return str(ipaddress.ip_network((found, 64), strict=False))
    return address


def is_page(path: str) -> bool:
    """Whether a path is the page's."""
    return path == PAGES.rstrip("/") or path.startswith(PAGES)


def judge(
    method: str,
    path: str,
    query: bytes,
    headers: Mapping[str, str],
    session: LoginSession | None,
    cookies: SessionCookies,
) -> PageWay:
    """What becomes of a call of the page. headers: names in lower case. session: the call's; None:
    it has none. cookies: the fleet's rules.

    Raises ProxyRefusal.
    """
    writes = method not in READS
    if writes and not is_own_page(headers):
        sentence = "the call comes from a page of another origin"
        raise ProxyRefusal(HTTPStatus.FORBIDDEN, sentence, "cross_origin")
    if path == PAGES.rstrip("/") and not writes:
        # The server does not know whether the browser came by HTTPS, and would lead it astray.
        return LoginRedirect(PAGES)
    for_model = path.startswith(MODEL_CALLS)
    if session is not None:
        if for_model and writes and not cookies.is_token(session, headers.get(CSRF_HEADER, "")):
            sentence = f"the header {CSRF_HEADER} is missing, or not of this session"
            raise ProxyRefusal(HTTPStatus.FORBIDDEN, sentence, "csrf")
        own = path.removeprefix(PAGES.rstrip("/")) if for_model else path
        return SessionCall(session.grant.prefix, session.grant.user_id, own, for_model)
    if path.startswith(OPEN):
        return VisitorCall()
    if method == "GET" and "text/html" in headers.get("accept", ""):
        here = path + (f"?{query.decode('ascii', 'replace')}" if query else "")
        return LoginRedirect(f"{LOGIN}?next={quote(here, safe='')}")
    sentence = f"the session is over, or there was none: log in at {LOGIN}"
    raise ProxyRefusal(HTTPStatus.UNAUTHORIZED, sentence, "no_session")


class PageEntry:
    """The calls of the page at one proxy."""

    def __init__(
        self, directory: ModelDirectory, clock: Callable[[], float], wall: Callable[[], float]
    ) -> None:
        """clock: steady. wall: Unix time."""
        self._directory = directory
        self._clock = clock
        self._wall = wall
        self._visitors = VisitorRates()
        self.open = OpenPages()
        self.visits = OpenVisits()

    def judge(
        self, method: str, path: str, query: bytes, headers: Mapping[str, str], address: str
    ) -> PageWay:
        """See `judge`. Also raises ProxyRefusal for an address that asks too much without a
        session."""
        known, presented = self._directory, headers.get("cookie", "")
        session = known.cookies.read(presented, known.current, address, self._wall())
        way = judge(method, path, query, headers, session, known.cookies)
        if isinstance(way, VisitorCall):
            calls = 1.0 if method in READS and not path.startswith(f"{LOGIN}/") else TRY
            self.charge_visitor(address, calls)
        return way

    def charge_visitor(self, address: str, calls: float = TRY) -> None:
        """Count calls without a session; a log-in is `TRY` of them. Raises ProxyRefusal."""
        if wait_s := self._visitors.wait_s(address, calls, self._clock()):
            sentence = (
                f"too many calls of this address without a log-in, try again in {ceil(wait_s)} s"
            )
            raise ProxyRefusal(HTTPStatus.TOO_MANY_REQUESTS, sentence, "too_many_logins", wait_s)
