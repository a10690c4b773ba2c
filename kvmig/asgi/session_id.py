"""The session that a call names: a conversation, an agent's run, a user. Pure.

Clients of other routers send it in a header, or in OpenAI's fields `prompt_cache_key` and `user`.
Dispatch takes it as a hint (`kvmig.controlplane.session_hints`). What is kept of it is a keyed
hash with its owner, so two owners who use the same id have two sessions.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b

SESSION_HEADERS = ("x-session-id", "x-smg-routing-key")
"""The first one counts: Ray Serve's by default, and that of SGLang's gateway."""
LONGEST_SESSION = 256
"""Characters of an id."""
KEY_BYTES = 8


class SessionTooLong(ValueError):
    """`param`: the header that is to blame."""

    def __init__(self, param: str, length: int) -> None:
        super().__init__(f"{param} has {length} characters, allowed are {LONGEST_SESSION}")
        self.param = param


def session_in(headers: Mapping[str, str]) -> str:
    """The id that a header names; empty: none does. Raises SessionTooLong."""
    for name in SESSION_HEADERS:
        given = headers.get(name, "").strip()
        if len(given) > LONGEST_SESSION:
            raise SessionTooLong(name, len(given))
        if given:
            return given
    return ""


def session_key(secret: bytes, owner: str, session: str) -> int | None:
    """What stands for an owner's session; None: there is none. secret: the front end's own."""
    if not session:
        return None
    words = f"{len(owner)} {owner} {session}".encode(errors="surrogatepass")
    return int.from_bytes(blake2b(words, digest_size=KEY_BYTES, key=secret).digest())
