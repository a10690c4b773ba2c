"""How many files, and so connections, this process and its children may have open."""

from __future__ import annotations

import resource

SPARE = 500
"""Of a front end, for all but clients."""


def raise_limit() -> int:
    """Take as many as the machine allows; how many that is."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def too_few(allowed: int, max_waiting: int, front_ends: int) -> str:
    """Why they aren't enough for the clients that may wait, as a sentence; empty if they are."""
    needed = -(-max_waiting // front_ends) + SPARE
    if allowed == resource.RLIM_INFINITY or needed <= allowed:
        return ""
    return (
        f"only {allowed} open files are allowed (ulimit -Hn), --max-waiting {max_waiting} may take"
        f" {needed}: connections beyond that wait unanswered; raise the one or lower the other"
    )
