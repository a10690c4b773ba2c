"""What front ends of one server ask each other, by way of their launcher, and what it asks them.

They share a port, so a call may come to any of them, and none has a connection to another one. A
question travels to the launcher (`AskFronts`), from there to each (`FrontQuestion`), and the
answers come back together (`FrontAnswers`).
"""

from __future__ import annotations

import msgspec

from kvmig.kvtransfer.report import MigrationReport
from kvmig.rpc.messages import RpcMessage


class KnownSession(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A session that a front end remembers."""

    owner: int
    """Stands for the session of one account (`kvmig.asgi.session_id.session_key`)."""
    ended_at: float
    """When its last request there ended, by the monotonic clock of the host, which all front ends
    of a server share."""


class FindSession(msgspec.Struct, frozen=True, tag=True):
    """Which sessions do you remember?"""

    name: int | None = None
    """Only those of this id; None: all."""
    owner: int | None = None
    """Only this account's; None: of all accounts."""


class SessionsFound(msgspec.Struct, frozen=True, tag=True):
    """Answer to FindSession."""

    sessions: tuple[KnownSession, ...] = ()
    running: tuple[int, ...] = ()
    """Sessions that have a request now, by owner, whether or not they are remembered."""


class MoveFoundSession(msgspec.Struct, frozen=True, tag=True):
    """Move this session, whose last call you have served."""

    owner: int
    destination: str | None = None
    """An instance; None: the one with the most room."""
    inexact: bool = False


class FoundSessionMoved(msgspec.Struct, frozen=True, tag=True):
    """Answer to MoveFoundSession: the report, or why the move did not begin."""

    report: MigrationReport | None = None
    error: str = ""
    """Name of an error in `kvmig.asgi.errors`."""
    sentence: str = ""


class CarrySessions(msgspec.Struct, frozen=True, tag=True):
    """Move the idle sessions of an instance that drains to others, as far as time and room go."""

    instance: str
    within_s: float
    owners: tuple[int, ...] | None = None
    """The sessions whose last call you have served; None: all that you remember."""


class SessionsCarried(msgspec.Struct, frozen=True, tag=True):
    """Answer to CarrySessions: the drain's report of sessions."""

    moved: int = 0
    bytes: int = 0
    """Bytes that travelled."""
    stayed: dict[str, int] = {}
    """Sessions that could not move, by reason: deadline, no_room, no_destination, or that of a
    migration."""


class AbortCalls(msgspec.Struct, frozen=True, tag=True):
    """End these calls of your clients."""

    request_ids: tuple[str, ...] | None = None
    """The ids that clients know; None: all that run."""


class CallsAborted(msgspec.Struct, frozen=True, tag=True):
    """Answer to AbortCalls."""

    count: int = 0
    """Requests that it has ended, or of calls that were named: those that it was to end."""


SessionsAsked = FindSession | MoveFoundSession | CarrySessions
FrontAsked = SessionsAsked | AbortCalls
FrontReply = SessionsFound | FoundSessionMoved | SessionsCarried | CallsAborted


class FrontQuestion(RpcMessage, frozen=True, tag=True):
    """Launcher to a front end: answer this (`FrontAnswer`)."""

    call_id: int
    asked: FrontAsked


class FrontAnswer(RpcMessage, frozen=True, tag=True):
    """Front end to the launcher."""

    call_id: int
    reply: FrontReply


class AskFronts(RpcMessage, frozen=True, tag=True):
    """Front end to the launcher: ask the other front ends this."""

    call_id: int
    asked: FrontAsked
    front: str = ""
    """Only the one of this name; empty: all others."""
    timeout_s: float = 2.0


class FrontAnswers(RpcMessage, frozen=True, tag=True):
    """Launcher to the front end that asked: the replies, by the names of those that gave them. Who
    is gone, or too slow, is left out."""

    call_id: int
    replies: dict[str, FrontReply]


FrontMessage = FrontQuestion | FrontAnswer | AskFronts | FrontAnswers
