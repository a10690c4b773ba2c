"""Log-ins by an identity provider that are under way in a browser (OpenID Connect). Pure.

The browser keeps the attempt in a cookie, and nothing else does. The provider sends the browser
back with the attempt's state, which only the fleet can compute from that cookie: so a person ends
no attempt of another browser. The state is also the token's nonce.
"""

from __future__ import annotations

import base64
import hmac
import re
import secrets
from hashlib import blake2b, sha256
from typing import NamedTuple
from urllib.parse import quote, unquote

from kvmig.accounts.page_sessions import cookie_of

ATTEMPT_S = 600
"""Time for a person to log in."""
PATH = "/ui/login"
"""Paths of which browsers send the cookie."""
_FORM = re.compile(r"([A-Za-z0-9_-]{64})\.([A-Za-z0-9_.~%-]{1,2000})")


class LoginAttempt(NamedTuple):
    """One attempt."""

    verifier: str
    """Secret of PKCE (RFC 7636): only who has begun can end it."""
    state: str
    target: str
    """Path to go to then."""

    @property
    def challenge(self) -> str:
        """What the provider gets of the verifier."""
        digest = sha256(self.verifier.encode()).digest()
        return base64.urlsafe_b64encode(digest).rstrip(b"=").decode()


class LoginAttempts:
    """The rules of one fleet."""

    def __init__(self, pepper: bytes, cookie: str) -> None:
        """cookie: name of the fleet's cookie of sessions."""
        self._key = blake2b(b"log-in to the page", key=pepper, digest_size=32).digest()
        self._cookie = f"{cookie}_login"

    def begin(self, target: str) -> LoginAttempt:
        """A new attempt."""
        verifier = secrets.token_urlsafe(48)
        return LoginAttempt(verifier, self._state(verifier), target)

    def read(self, cookies: str, state: str) -> LoginAttempt | None:
        """The attempt of a browser that comes back; None: it has begun none of this state.

        cookies: the call's header.
        """
        parts = _FORM.fullmatch(cookie_of(cookies, self._cookie))
        if parts is None:
            return None
        known = self._state(parts[1])
        if not hmac.compare_digest(known.encode(), state.encode(errors="replace")):
            return None
        return LoginAttempt(parts[1], known, unquote(parts[2]))

    def set_cookie(self, attempt: LoginAttempt, *, tls: bool) -> str:
        """The header that begins it in a browser, which comes back from another site."""
        value = f"{attempt.verifier}.{quote(attempt.target, safe='')}"
        return f"{self._cookie}={value}; Max-Age={ATTEMPT_S}; {_attributes(tls)}"

    def clear_cookie(self, *, tls: bool) -> str:
        """The header that ends it there."""
        return f"{self._cookie}=; Max-Age=0; {_attributes(tls)}"

    def _state(self, verifier: str) -> str:
        return blake2b(verifier.encode(), key=self._key, digest_size=32).hexdigest()


def _attributes(tls: bool) -> str:
    return f"Path={PATH}; HttpOnly; SameSite=Lax{'; Secure' if tls else ''}"
