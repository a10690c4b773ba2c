"""Access rules: which calls are let in, by their headers. Pure.

The OpenAI API asks for a key where there are keys. The admin API moves and ends requests of all
tenants, so without a key it is for programs of this machine only: not for other machines, not for a
proxy that speaks for them, not for a web page in a browser here.
"""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import NamedTuple
from urllib.parse import urlsplit

from kvmig.accounts.page_sessions import PATH as PAGE
from kvmig.asgi.route_table import find_route
from kvmig.core.secret import ADMIN_KEY

PROXIED = (
    "forwarded", "via", "x-real-ip", "x-client-ip", "x-cluster-client-ip", "x-original-host",
    "x-original-forwarded-for", "true-client-ip", "cf-connecting-ip", "fastly-client-ip",
)  # fmt: skip
"""Headers by which a proxy says for whom it speaks, besides those that begin with `FORWARDED`."""
FORWARDED = "x-forwarded-"
PROXYS_HTTP = "1.0"
"""The version of HTTP in which nginx relays calls by default, without a header that names its
client. Programs of the machine speak a newer one."""


class AccessDenied(NamedTuple):
    """The answer to a call that isn't let in."""

    status: HTTPStatus
    message: str


CLOSED = AccessDenied(
    HTTPStatus.FORBIDDEN,
    f"the admin API is for calls from this machine only: set {ADMIN_KEY} at the start, and"
    " send it as a bearer token",
)

Rule = Callable[[Mapping[str, str]], AccessDenied | None]
"""Takes a call's headers, by names in lower case; gives None for a call that is let in."""


def bearer(keys: Sequence[str]) -> Rule:
    """A rule for calls that bear one of the keys; all calls where there are none."""

    def rule(headers: Mapping[str, str]) -> AccessDenied | None:
        scheme, _, given = headers.get("authorization", "").partition(" ")
        matches = [hmac.compare_digest(given.encode(), key.encode()) for key in keys]
        if not keys or (scheme.lower() == "bearer" and any(matches)):
            return None
        return AccessDenied(HTTPStatus.UNAUTHORIZED, "Unauthorized")

    return rule


def local_only(bound: str) -> Rule:
    """A rule for programs of this machine. bound: the address that the server listens on, or the
    path of a socket that only its own user can connect to."""

    def rule(headers: Mapping[str, str]) -> AccessDenied | None:
        # A name that only a browser was told to be this machine's is no name of it (rebinding).
        host = _name_of(headers.get("host", ""))
        proxied = any(name in PROXIED or name.startswith(FORWARDED) for name in headers)
        here = bound.startswith("/") or (is_loopback(bound) and is_loopback(host))
        if proxied or not here:
            return CLOSED
        if "origin" in headers or headers.get("sec-fetch-site", "none") != "none":
            return AccessDenied(
                HTTPStatus.FORBIDDEN, "the admin API without a key is not for web pages"
            )
        return None

    return rule


ADMIN = "/kvmig/"
"""Prefix of the admin API's paths."""
OPENAI = ("/v1", "/v2", "/inference", "/cohere")
"""Prefixes of paths for which vLLM asks for a key with any method."""


@dataclass(frozen=True)
class AccessRules:
    """A front end's rules."""

    openai: Rule
    admin: Rule
    has_admin_key: bool = False
    """Whether the operator has a key that tenants don't have."""
    has_page: bool = False
    """Whether there is a page, which has sessions of its own."""
    by_address: bool = False
    """Whether the admin API is for whom a call's address and headers show to be here."""

    def denied(
        self, method: str, path: str, headers: Mapping[str, str], version: str = ""
    ) -> AccessDenied | None:
        """The answer to a call that isn't let in; None for one that is. version: of HTTP.

        Without a key, clients may read the paths that vLLM shows to all (/health, /metrics, ...);
        calls with a body need one on every path. Browsers send OPTIONS without any. What an engine
        has besides the routes of clients (to load adapters, to sleep, to abort by an id, ...) is
        for the operator, where there is a key for one.
        """
        if self.is_for_page(path):
            return None
        if method == "OPTIONS":
            return self.openai(headers) if _has_body(headers) else None
        if path.startswith(ADMIN) or (self.has_admin_key and is_for_operators(method, path)):
            proxied = self.by_address and version == PROXYS_HTTP
            return CLOSED if proxied else self.admin(headers)
        if method in ("GET", "HEAD") and not path.startswith(OPENAI) and not _has_body(headers):
            return None
        return self.openai(headers)

    def is_for_page(self, path: str) -> bool:
        """Whether a call is for the page, which looks at the session itself."""
        return self.has_page and is_page(path)


def _has_body(headers: Mapping[str, str]) -> bool:
    return "transfer-encoding" in headers or headers.get("content-length", "0") != "0"


def _name_of(host: str) -> str:
    """The name in a `Host` header; empty: there is none in it."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def is_page(path: str) -> bool:
    """Whether a path is the page's."""
    return path == PAGE or path.startswith(f"{PAGE}/")


def is_for_operators(method: str, path: str) -> bool:
    """Whether a call changes something, and is none of a client's."""
    return method not in ("GET", "HEAD") and find_route(method, path) is None


def access(api_keys: Sequence[str], admin_key: str, bound: str) -> AccessRules:
    """The rules of a front end. admin_key: empty: the API's keys open the admin API, too.

    bound: the address that the server listens on.
    """
    keys = [admin_key] if admin_key else list(api_keys)
    admin = bearer(keys) if keys else local_only(bound)
    has_port = not bound.startswith("/")
    return AccessRules(
        bearer(api_keys),
        admin,
        has_admin_key=bool(admin_key),
        has_page=bool(admin_key) and has_port,
        by_address=has_port and not keys,
    )


def is_loopback(host: str) -> bool:
    """Whether the host can only mean this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
