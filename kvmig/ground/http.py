"""What a front end takes from one call, however it is sent."""

from __future__ import annotations

import msgspec

from kvmig.ground.errors import ConfigError

HEAD_BYTES = 1 << 16
"""Of a call's first line and headers."""
HEAD_S = 20.0
"""For them to arrive, from the connection's first moment on."""
BODIES = 8
"""So many of the largest bodies may be on their way into one front end."""


class HttpConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of a call's body."""

    max_body: int = 64_000_000
    """Bytes."""
    body_timeout_s: float = 60.0
    """For it to arrive."""


def check_http(http: HttpConfig) -> None:
    """Raises ConfigError with the field, its value and what is allowed."""
    rules = (
        (http.max_body >= 1024, "--max-body", http.max_body, "1024 or more"),
        (http.body_timeout_s > 0, "--body-timeout", http.body_timeout_s, "more than 0"),
    )
    for holds, field, value, allowed in rules:
        if not holds:
            raise ConfigError(f"{field} is {value}, must be {allowed}")
