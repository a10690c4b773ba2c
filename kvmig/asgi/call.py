"""One HTTP call: its id, what waits of it, and how its client reads. Pure."""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from http import HTTPStatus
from typing import Any, Protocol

from kvmig.accounts.allowances import TokenAllowance
from kvmig.asgi.answer_room import AnswerRoom, part
from kvmig.asgi.answer_usage import CallUsage
from kvmig.asgi.answer_writers import AnswerWriters
from kvmig.asgi.body_budget import BodyShare
from kvmig.asgi.error_forms import ApiError
from kvmig.tracing.calls import CallTrace


class BackgroundWork(Protocol):
    """What goes on for a call that was answered: an asyncio task."""

    def done(self) -> bool: ...

    def cancel(self) -> bool: ...

    def add_done_callback(self, callback: Callable[[Any], object], /) -> None: ...


class HeldResource(Protocol):
    """Something that a call holds for a while."""

    def give_back(self) -> None:
        """Free the room for now. A second call does nothing."""
        ...

    def close(self) -> None:
        """The call is over."""
        ...


class StreamedRequest(Protocol):
    """What a call must know of each of its requests."""

    request_id: str
    logprobs: int
    whole: bool

    @property
    def position(self) -> int: ...


class HttpCall:
    """One HTTP call: its x-request-id, its live requests, and how its client reads. Pure.

    request_ids: kept by the request table.
    """

    __slots__ = (
        "_coming", "_hold", "_marks", "_submitted", "_unserved", "_waiting", "account", "allowance",
        "answered", "background", "body", "call_id", "failure", "left", "loop_payer", "media",
        "over", "payer", "priority", "quota", "request_ids", "room", "seconds", "sequences",
        "session", "session_name", "status", "tenant", "told", "trace", "writers",
    )  # fmt: skip

    def __init__(
        self, call_id: str = "", account: str = "", tenant: str = "", *, quota: bool = False
    ) -> None:
        """account, tenant: the key that the call counts for, and its user; empty: none is known.

        quota: whether the key has one.
        """
        self.call_id = call_id
        self.account = account
        self.tenant = tenant
        self.quota = quota
        self.allowance: TokenAllowance[Any] | None = None
        """Allowance of a call that has asked for tokens of its key's quota."""
        self.body: BodyShare | None = None
        """What its body takes of the room for bodies, until the engine has the prompt."""
        self.room = AnswerRoom()
        """Room for what is kept of its answer."""
        self.background: BackgroundWork | None = None
        """What goes on for it once its client has an answer; None: nothing does."""
        self.loop_payer = ""
        """Account whose stalls of the event loop its own are; empty: its work isn't timed."""
        self.media: HeldResource | None = None
        """What its images, audio and video take, until they go to the engine with the prompt."""
        self.trace: CallTrace | None = None
        """The call's span; None: there are no traces."""
        self.request_ids: set[str] = set()
        self.priority: int | None = None
        """Number of its class in its header, which goes before all else; None: it has none."""
        self.seconds = 0
        """Seconds of recordings that it has made text of, rounded up for each."""
        self.sequences = 1
        """Sequences that it asks for: answers to each prompt, times its prompts."""
        self.payer = ""
        """The account whose part of what is bounded for all it takes; empty: it is unknown."""
        self.session: int | None = None
        """What stands for the session that it names (`kvmig.asgi.session_id`); None: it names
        none."""
        self.session_name: int | None = None
        """The same for every account that has a session of that id."""
        self.over = False
        """Whether nothing more comes of it: it has its answer, or its client has left."""
        self.answered = False
        """Whether the client was sent all of its answer."""
        self.left = False
        """Whether the client has left before that."""
        self.status = 0
        """Status of the answer; 0: it hasn't begun."""
        self.writers: AnswerWriters | None = None
        """Instances that write its stream; None: its client has not asked."""
        self.told: CallUsage | None = None
        """The usage that the answer names, if it does."""
        self.failure: ApiError | None = None
        """Why its stream could not go on; the application may show it in another way."""
        self._unserved: set[str] = set()
        self._submitted = 0
        self._coming = 0
        self._waiting = 0
        self._hold: Callable[[int], None] | None = None
        self._marks: dict[str, int] | None = None

    @property
    def refused(self) -> bool:
        """Whether the client got an error in place of an answer."""
        return self.status >= HTTPStatus.BAD_REQUEST and not self.left

    @property
    def truncated(self) -> str:
        """Why the answer, which is none that streams, ends before its time; empty: it doesn't."""
        return "" if self.allowance is None else self.allowance.refused

    def end_answer(self) -> None:
        """End the answer, which is sent, or has no client any more."""
        self.answered = not self.left

    def lose_client(self) -> None:
        """The connection is closed."""
        self.left = not (self.answered or self.over)

    def end_background(self) -> None:
        """What goes on for it may go on no more; that it computed is charged."""
        if self.background is not None and not self.background.done():
            self.left, self.answered = True, False
            self.background.cancel()

    # -- requests that wait for their first token

    def enter(self, hold: Callable[[int], None], sequences: int = 1) -> None:
        """Count the call's waiting requests from now on; `hold` gets each change of their number.

        sequences: those that it asks for; they count as waiting until they are there.
        """
        self._hold = hold
        self.sequences = sequences
        self._coming = max(0, sequences - self._submitted)
        self._recount()

    def end_call(self) -> None:
        """The call is over: nothing of it waits."""
        self.over = True
        self._count(0)
        self._hold = None
        self._give_body_back()
        if self.media is not None:
            self.media.close()

    def rendered(self) -> None:
        """Note that one of its prompts goes to the engine, with what was made of its media."""
        if self.media is not None:
            self.media.give_back()

    def submitted(self, request_id: str) -> None:
        """The call has one more request."""
        self._submitted += 1
        self._coming = max(0, self._coming - 1)
        self.request_ids.add(request_id)
        self._unserved.add(request_id)
        self._recount()
        if not self._coming:
            self._give_body_back()

    def began(self, request_id: str) -> None:
        """The request has its first token."""
        self._unserved.discard(request_id)
        self._recount()

    def ended(self, request_id: str) -> None:
        """The request is over."""
        self.request_ids.discard(request_id)
        self.began(request_id)

    def _recount(self) -> None:
        self._count(self._coming + len(self._unserved))

    def _give_body_back(self) -> None:
        if self.body is not None:
            self.body.give_back()

    def _count(self, waiting: int) -> None:
        if self._hold is not None and waiting != self._waiting:
            self._hold(waiting - self._waiting)
            self._waiting = waiting

    # -- a client that doesn't read

    def stopped_reading(self) -> None:
        """Note that the client reads no more: tokens pile up here."""
        self._marks = {}

    def reads_again(self) -> None:
        """The client reads again, or is gone."""
        self._marks = None

    def unread(self, request: StreamedRequest) -> int:
        """The request's tokens since the first such look at which its client didn't read."""
        if self._marks is None:
            return 0
        return request.position - self._marks.setdefault(request.request_id, request.position)

    def has_too_much(self, requests: Iterable[StreamedRequest]) -> bool:
        """Whether more is kept of its answer than may be. requests: of it, that live."""
        unread = ((one.logprobs, self.unread(one)) for one in requests if not one.whole)
        return self.room.full(sum(part(tokens, tokens * each) for each, tokens in unread))


current_call: ContextVar[HttpCall | None] = ContextVar("current_call", default=None)
"""The HTTP call that this task works for."""


def current_call_id() -> str:
    """The x-request-id of that call; empty outside of one."""
    call = current_call.get()
    return "" if call is None else call.call_id


def current_trace_id() -> str:
    """The id of that call's trace, where it is sampled."""
    call = current_call.get()
    return "" if call is None or call.trace is None else call.trace.sampled_id


CALL_ID = "x-request-id"
_GOOD = re.compile(r"[\x21-\x7e]([\x20-\x7e]{0,126}[\x21-\x7e])?")


def accepted(given: str | None) -> str:
    """The client's id if it is printable ASCII of at most 128 characters, else a new one.

    vLLM bases its request ids on it. Two live calls with one id don't confuse anything: sequences
    have ids of their own, and the call's id is ambiguous.
    """
    return given if given is not None and _GOOD.fullmatch(given) else uuid.uuid4().hex
