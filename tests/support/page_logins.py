"""People who log in to the pages of a fleet that is only its API."""

from __future__ import annotations

import re

from tests.support.fleet_api import Api


async def key_of(api: Api, name: str, *scopes: str, **more: object) -> tuple[str, str]:
    """A new user's key, and its prefix."""
    role = "admin" if "admin" in scopes else "user"
    assert (await api.ask("POST", "users", {"name": name, "role": role}))[0] == 201
    body = {"user": name, "scopes": list(scopes), **more}
    status, made = await api.ask("POST", "keys", body)
    assert status == 201
    return str(made["key"]), str(made["prefix"])


async def log_in(api: Api, key: str, target: str = "/ui/") -> str:
    """The way that the log-in leads to; the client has the cookie then."""
    answer = await api.browse("login", {"key": key, "next": target})
    assert answer.status_code == 303, answer.text
    return str(answer.headers["location"])


def token_on(page: str) -> str:
    found = re.search(r'name="csrf" value="([0-9a-f]{64})"', page)
    assert found is not None
    return found[1]
