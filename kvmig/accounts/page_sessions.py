"""Sessions of the page in a browser, and the tokens of its forms. Pure.

A session is a signed cookie: it names the key that the person logged in with, and has neither that
key nor its secret in it. It is good as long as the key is, and SESSION_S at most. Proxies and the
server check it alike, and keep nothing of it: it outlives them. All secrets here come from the
pepper.
"""

from __future__ import annotations

import hmac
import re
import secrets
from collections.abc import Callable, Mapping
from hashlib import blake2b
from typing import NamedTuple

from kvmig.accounts.keys import KeyGrant, allows

SESSION_S = 12 * 3600
"""Life of a session, at most."""
AHEAD_S = 60
"""Lead of the clock of another host that has made a session, at most."""
PATH = "/ui"
"""The paths of which browsers send the cookie."""
CSRF_HEADER = "x-csrf-token"
"""Header of a script's call."""
_FORM = re.compile(r"([0-9a-z]{8})\.(\d{1,12})\.([A-Za-z0-9_-]{22})\.([0-9a-f]{64})")
_COOKIE = b"cookie of the page"
_SESSION = b"session of the page"
_TOKEN = b"form of the page"


class LoginSession(NamedTuple):
    """A person who has logged in."""

    grant: KeyGrant
    """What the person's key allows now."""
    value: str
    """The cookie's value."""
    ends: float
    """Unix time."""

    @property
    def is_admin(self) -> bool:
        """Whether the person may see and change everything."""
        return "admin" in self.grant.scopes


class SessionCookies:
    """The rules of one fleet."""

    def __init__(self, pepper: bytes) -> None:
        self._key = _derived(pepper, _SESSION)
        self._token_key = _derived(pepper, _TOKEN)
        # Browsers share cookies between all ports of a host: two fleets have cookies of two names.
        self.cookie = f"kvmig_{_derived(pepper, _COOKIE).hex()[:8]}"
        """The cookie's name."""

    def begin(self, grant: KeyGrant, now: float) -> LoginSession:
        """A session of who has shown this key. now: Unix time."""
        text = f"{grant.prefix}.{int(now)}.{secrets.token_urlsafe(16)}"
        return LoginSession(grant, f"{text}.{self._seal(text, grant)}", int(now) + SESSION_S)

    def read(
        self,
        cookies: str,
        of_prefix: Callable[[str], KeyGrant | None],
        address: str,
        now: float,
    ) -> LoginSession | None:
        """The session of a call; None: it has none that is good now.

        cookies: the call's header. of_prefix: the present grant of a key. address: the client's.
        """
        value = cookie_of(cookies, self.cookie)
        parts = _FORM.fullmatch(value)
        if parts is None:
            return None
        text, ends = value.rpartition(".")[0], int(parts[2]) + SESSION_S
        grant = of_prefix(parts[1])
        sealed = self._seal(text, grant)
        if not hmac.compare_digest(sealed, parts[4]) or grant is None:
            return None
        if not now < ends <= now + SESSION_S + AHEAD_S:
            return None
        if allows(grant, None, address, now, None) is not None:
            return None
        return LoginSession(grant, value, ends)

    def token(self, session: LoginSession) -> str:
        """What a form or a script of this session's pages shows, and no other page can know."""
        return blake2b(session.value.encode(), key=self._token_key, digest_size=32).hexdigest()

    def is_token(self, session: LoginSession, given: str) -> bool:
        """Whether a write comes from the session's own pages."""
        return hmac.compare_digest(self.token(session).encode(), given.encode())

    def set_cookie(self, session: LoginSession, *, tls: bool) -> str:
        """The header that begins a session in a browser. tls: whether the fleet speaks HTTPS."""
        return f"{self.cookie}={session.value}; Max-Age={SESSION_S}; {_attributes(tls)}"

    def clear_cookie(self, *, tls: bool) -> str:
        """The header that ends it there."""
        return f"{self.cookie}=; Max-Age=0; {_attributes(tls)}"

    def _seal(self, text: str, grant: KeyGrant | None) -> str:
        """A seal for one key, and for no later one of the same prefix."""
        whose = bytes(32) if grant is None else grant.hash
        return blake2b(text.encode() + whose, key=self._key, digest_size=32).hexdigest()


def cookie_of(cookies: str, name: str) -> str:
    """The value of one cookie in a call's header; empty: there is none."""
    parts = (one.strip().partition("=") for one in cookies.split(";"))
    return next((value for each, _, value in parts if each == name), "")


def is_own_page(headers: Mapping[str, str]) -> bool:
    """Whether a write comes from a page of this origin, or from no page.

    headers: the call's, names in lower case. Browsers say where a write comes from by one of two
    headers; pages can't change them.
    """
    if (site := headers.get("sec-fetch-site")) is not None:
        return site in ("same-origin", "none")
    if (origin := headers.get("origin")) is not None:
        return origin.partition("://")[2] == headers.get("host", "")
    return True


def _attributes(tls: bool) -> str:
    return f"Path={PATH}; HttpOnly; SameSite=Strict{'; Secure' if tls else ''}"


def _derived(pepper: bytes, purpose: bytes) -> bytes:
    return blake2b(purpose, key=pepper, digest_size=32).digest()
