"""Calls of web pages of other origins (CORS), as the fleet's settings allow them. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

PREFLIGHT_S = 600
"""Time for which a browser may keep the answer to a preflight."""
ANY = "*"
EXPOSED = b"*"
"""Headers of answers that a page may read: all."""


@dataclass(frozen=True)
class CrossOrigin:
    """Which pages may call."""

    origins: tuple[str, ...] = ()
    """Origins as browsers send them, https://chat.example.com; or `*`, for all."""

    def is_preflight(self, method: str, headers: Mapping[str, str]) -> bool:
        """Whether a browser asks if a page may call, which it does without a key."""
        asks = "origin" in headers and "access-control-request-method" in headers
        return method == "OPTIONS" and asks and bool(self.origins)

    def allows(self, headers: Mapping[str, str]) -> bool:
        """Whether the page that calls may."""
        return ANY in self.origins or headers.get("origin") in self.origins

    def answer_headers(self, headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
        """The headers of every answer to this call. headers: the call's, names in lower case."""
        if not self.origins:
            return []
        vary = [] if ANY in self.origins else [(b"vary", b"Origin")]
        if "origin" not in headers or not self.allows(headers):
            return vary
        origin = ANY if ANY in self.origins else headers["origin"]
        allowed = (b"access-control-allow-origin", origin.encode("latin-1"))
        return [allowed, (b"access-control-expose-headers", EXPOSED), *vary]

    def preflight_headers(self, headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
        """More of the answer to a preflight that is allowed: all that the page asks for."""
        asked = headers.get("access-control-request-headers", "").encode("latin-1")
        return [
            (b"access-control-allow-methods", b"GET, POST, HEAD"),
            (b"access-control-allow-headers", asked),
            (b"access-control-max-age", b"%d" % PREFLIGHT_S),
        ]
