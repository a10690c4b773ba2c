"""Routes by which people get a key: where they log in, and what their token is good for here."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from pydantic import Field

from kvmig.accounts.keys import KeyTerms, Scope
from kvmig.accounts.people import LoggedIn, LoginRefused, person_of
from kvmig.accounts.used_tokens import UsedTokens
from kvmig.asgi.strict_body import StrictBody
from kvmig.core.errors import KvmigError
from kvmig.fleet.api_paths import routes_at
from kvmig.fleet.callers import FORWARDED
from kvmig.fleet.identity_provider import SKEW_S, IdentityProvider
from kvmig.fleet.store import FleetStore, KeyRow, NotThere, OrderActor

MOST_TOKEN = 32_768
"""Characters of an ID token: one with many groups is long."""
SCOPES: dict[str, tuple[Scope, ...]] = {
    "admin": ("infer", "read", "admin"),
    "user": ("infer", "read"),
}
"""Scopes of a person's key, by role."""

Body = dict[str, Any]


class LoginBody(StrictBody):
    """An ID token."""

    id_token: str = Field(max_length=MOST_TOKEN)


def login_api(
    provider: IdentityProvider | None,
    store: FleetStore,
    stored: Callable[..., Awaitable[Any]],
    changed: Callable[[], Awaitable[None]],
) -> APIRouter:
    """Routes without a key. provider: None: people get keys from admins only. stored: runs a method
    of the store. changed: to be awaited after a change."""
    api, used = routes_at("/login"), UsedTokens()

    def known() -> IdentityProvider:
        if provider is None:
            raise NotThere("this fleet has no identity provider (kvmig up --oidc-issuer)")
        return provider

    @api.get("")
    async def where() -> Body:
        """The identity provider, and the fleet's client id there."""
        terms = known().terms
        return {"issuer": terms.issuer, "client_id": terms.client_id}

    @api.post("")
    async def log_in(body: LoginBody, request: Request) -> Body:
        """A key for the person that an ID token speaks of."""
        its = known()
        claims = await its.claims(body.id_token)
        person, now = person_of(claims, its.terms), time.time()
        if not used.take_token(body.id_token, claims["exp"] + SKEW_S, now):
            raise LoginRefused("the token has been used: log in again")
        expires = now + 3600 * its.terms.key_hours
        address = request.headers.get(FORWARDED, "")
        try:
            row, shown = await stored(key_for, store, person, expires, address)
        except KvmigError:  # it has given no key
            used.give_back(body.id_token)
            raise
        await changed()
        shown_row: Body = msgspec.to_builtins(row)
        return {"key": shown, "role": person.role, **shown_row}

    return api


def key_for(
    store: FleetStore, person: LoggedIn, expires: float, address: str, name: str = "login"
) -> tuple[KeyRow, str]:
    """A new key of the person's user, who is made at the first time. address: for the audit, as the
    user's name is: a token may have another one each time. name: the key's. Raises LoginRefused,
    ConfigError, StoreError."""
    user = store.user_of(person.subject)
    actor = OrderActor(f"{person.name if user is None else user.name} (login)", address)
    if user is None:
        user = store.add_user(person.name, person.role, actor, subject=person.subject)
    if user.disabled:
        raise LoginRefused(f"user {user.name} is disabled")
    if user.role != person.role:
        store.set_user(user.name, actor, role=person.role)
    terms = KeyTerms(scopes=SCOPES[person.role], expires=expires)
    return store.create_key(user.name, name, terms, actor)
