"""Callers of the server's API, and which users' data each may see.

A call by the server's own socket is its user's, who needs no key. One that the proxy relays needs a
key with the scope `admin`, or to read what belongs to the key's own user, with the scope `read`.
The page's calls come from within this process, with the grant of the key that its person has logged
in with.
"""

from __future__ import annotations

from http import HTTPStatus

from starlette.exceptions import HTTPException
from starlette.requests import Request

from kvmig.accounts.keys import BAD_KEY, KeyGrant, KeyIndex, Scope, allows
from kvmig.fleet.store import OrderActor

FORWARDED = "x-forwarded-for"
"""The proxy says by it for whom it speaks; clients' own are dropped there."""
GRANT = "kvmig.grant"
"""Entry of the ASGI scope of the page's calls: the KeyGrant. No client can set it."""


def who_calls(request: Request, keys: KeyIndex, now: float) -> OrderActor:
    """The caller of a call that may do everything. Raises HTTPException, 401 or 403."""
    grant = _granted(request, keys, now, "admin")
    if grant is None:
        return OrderActor("local", "")
    return OrderActor(f"{grant.user} ({grant.prefix})", request.headers[FORWARDED])


def who_reads(request: Request, keys: KeyIndex, now: float) -> str | None:
    """The user whose usage and keys a call may see; None: those of all.

    Raises HTTPException, 401 or 403.
    """
    grant = _granted(request, keys, now, "read")
    return None if grant is None or "admin" in grant.scopes else grant.user


def who_lists(request: Request, keys: KeyIndex, now: float) -> KeyGrant | None:
    """The grant of the key whose names a call may see; None: it may see all names.

    Raises HTTPException, 401 or 403.
    """
    grant = _granted(request, keys, now, None)
    return None if grant is None or "admin" in grant.scopes else grant


def _granted(request: Request, keys: KeyIndex, now: float, scope: Scope | None) -> KeyGrant | None:
    """The key's; None: the socket's own user calls. `admin` includes `read`. scope: None: any."""
    address = request.headers.get(FORWARDED)
    if address is None:
        if "origin" in request.headers:
            raise HTTPException(HTTPStatus.FORBIDDEN, "the API's socket is not for web pages")
        return None
    grant: KeyGrant | None = request.scope.get(GRANT)
    if grant is None:
        scheme, _, presented = request.headers.get("authorization", "").partition(" ")
        grant = keys.find(presented) if scheme.lower() == "bearer" else None
    if grant is None:
        raise HTTPException(BAD_KEY.status, BAD_KEY.message)
    wanted = "admin" if "admin" in grant.scopes else scope
    if (denied := allows(grant, None, address, now, wanted)) is not None:
        raise HTTPException(denied.status, denied.message)
    return grant
