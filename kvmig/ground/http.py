"""What a front end takes from one call, however it is sent, and how much of it waits."""

from __future__ import annotations

import msgspec

from kvmig.ground.errors import ConfigError

HEAD_BYTES = 1 << 16
"""Of a call's first line and headers."""
HEAD_S = 20.0
"""For them to arrive, from the connection's first moment on."""
KEEP_ALIVE_S = 75
"""For the next call on a connection. Longer than clients and proxies keep idle ones (httpx, and so
openai, 5 s; aiohttp 15 s; nginx and most load balancers 60 s): the client must close first, or a
call may meet the closing of its connection, which HTTP/1.1 can't tell from a failure."""
BODIES = 8
"""So many of the largest bodies may be on their way into one front end."""


SEND_BYTES = 1 << 17
"""Of an answer, that the kernel holds for a client that doesn't read (it doubles that)."""


class HttpConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of calls."""

    max_body: int = 64_000_000
    """Bytes."""
    body_timeout_s: float = 60.0
    """For it to arrive."""
    max_waiting: int = 10_000
    """Requests of all front ends that wait for their first token; 0: no limit."""
    max_unread: int = 8192
    """Tokens of a request that its client hasn't read; 0: no limit."""
    read_timeout_s: float = 300.0
    """For a client to go on reading."""


def check_http(http: HttpConfig) -> None:
    """Raises ConfigError with the field, its value and what is allowed."""
    rules = (
        (http.max_body >= 1024, "--max-body", http.max_body, "1024 or more"),
        (http.body_timeout_s > 0, "--body-timeout", http.body_timeout_s, "more than 0"),
        (http.max_waiting >= 0, "--max-waiting", http.max_waiting, "0 or more"),
        (http.max_unread >= 0, "--max-unread", http.max_unread, "0 or more"),
        (http.read_timeout_s > 0, "--read-timeout", http.read_timeout_s, "more than 0"),
    )
    for holds, field, value, allowed in rules:
        if not holds:
            raise ConfigError(f"{field} is {value}, must be {allowed}")
