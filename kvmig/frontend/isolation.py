"""What keeps users of one model apart: salts of their prompts, and entries that are each one's own.

An engine finds what it keeps of a prompt (KV blocks, encoded images, compiled grammars) by a salt,
too. Here a user's salt is made, to which the call's own `cache_salt` is added: so a call can share
less than its user, and never more. A salt is a keyed hash, from which the user can't be learnt.
Pure.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterator, MutableMapping
from hashlib import sha256
from typing import TypeVar

from kvmig.asgi.call import current_call

Value = TypeVar("Value")
SALT_LENGTH = 32
"""Number of hexadecimal digits of a salt."""


def make_salt(secret: bytes, tenant: str, given: str | None) -> str:
    """The salt of a prompt. secret: the cluster's, so that all front ends make the same.

    tenant: id of the user; empty: it is unknown. given: the call's own salt.
    """
    words = f"prompt {len(tenant)} {tenant} {'' if given is None else '=' + given}"
    return hmac.new(secret, words.encode(errors="surrogatepass"), sha256).hexdigest()[:SALT_LENGTH]


def session_secret(secret: bytes) -> bytes:
    """The key of hashes of sessions (`kvmig.asgi.session_id`). secret: the cluster's: a session has
    the same hash at all front ends."""
    return hmac.new(secret, b"sessions", sha256).digest()


def current_tenant() -> str:
    """The user whose call this task works for; empty: it is unknown."""
    call = current_call.get()
    return "" if call is None else call.tenant


class PromptSalts:
    """Salts of the prompts of the calls of one cluster."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def salt_of(self, given: str | None) -> str:
        """The salt of a prompt of the current call."""
        return make_salt(self._secret, current_tenant(), given)


class OwnEntries(MutableMapping[str, Value]):
    """A dictionary in which the calls of a user find that user's entries only."""

    def __init__(self) -> None:
        self._entries: dict[tuple[str, str], Value] = {}
        """The entries by user and key."""

    def name_of(self, key: str) -> tuple[str, str]:
        """The name by which the present call's user has an entry."""
        return current_tenant(), key

    def __getitem__(self, key: str) -> Value:
        return self._entries[self.name_of(key)]

    def __setitem__(self, key: str, value: Value) -> None:
        self._entries[self.name_of(key)] = value

    def __delitem__(self, key: str) -> None:
        del self._entries[self.name_of(key)]

    def __iter__(self) -> Iterator[str]:
        tenant = current_tenant()
        return iter([key for owner, key in self._entries if owner == tenant])

    def __len__(self) -> int:
        return sum(1 for _ in self)
