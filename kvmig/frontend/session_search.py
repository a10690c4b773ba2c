"""Which front end served a session's last call, from what all of them remember. Pure.

Turns of one session may come to several front ends of a server. Each remembers the last one that it
served itself; only the latest of all shows where the session is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from kvmig.asgi.errors import AmbiguousSession, SessionBusy, UnknownSession
from kvmig.controlplane.front_messages import SessionsFound
from kvmig.controlplane.session_carriage import latest_fronts
from kvmig.frontend.session_memory import UNKNOWN


class SessionPlaceOfCall(NamedTuple):
    """A session, and the front end that served its last call."""

    owner: int
    front: str


def find_latest(found: Mapping[str, SessionsFound]) -> SessionPlaceOfCall:
    """The one session of an id. found: what each front end has of that id, by front end.

    Raises UnknownSession, AmbiguousSession if several accounts have one of that id, and SessionBusy
    if a request of it runs.
    """
    latest = latest_fronts(found)
    if len(latest) > 1:
        raise AmbiguousSession(f"{len(latest)} accounts have a session of that id, name one")
    if not latest:
        raise UnknownSession(UNKNOWN)
    ((owner, front),) = latest.items()
    if any(owner in told.running for told in found.values()):
        raise SessionBusy("a request of the session runs: move it (POST /kvmig/v1/migrations)")
    return SessionPlaceOfCall(owner, front)
