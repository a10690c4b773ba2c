"""An engine's step gate in a unit: questions go out by number, answers come back by it.

How they travel isn't known here: `send` may write a packet to the unit's agent, or call a `Turns`
of this process.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from msgspec.structs import replace

from kvmig.engines.gate import LIMIT_S, NOTHING, StepGrant, StepRequest

SendRequest = Callable[[StepRequest], None]
SendDone = Callable[[int], None]


class UnitGate:
    """Implements `kvmig.engines.gate.StepGate`. `receive_grant`, `recall_grant`, `crowd` and
    `close` are for any thread."""

    def __init__(self, want: SendRequest, done: SendDone, limit_s: float = LIMIT_S) -> None:
        """want, done: send it to the process that decides, and never block; called on the engine's
        thread, and `finish_step` on any."""
        self.limit_s = limit_s
        self.answers = 0
        self.waited_s = 0.0
        self.on_answer: Callable[[], None] = lambda: None
        self._want, self._done = want, done
        self._alone = True
        self._lock = threading.Lock()
        self._number = 0
        """Number of the last request."""
        self._open = False
        """Whether a request is unanswered."""
        self._came: StepGrant | None = None
        """The answer, if the engine has not taken it yet."""
        self._standing: StepGrant | None = None
        """The standing grant that the engine took; a call back ends it."""
        self._stepping = False
        """A step is made with it now."""

    @property
    def alone(self) -> bool:
        return self._alone

    def request_step(self, want: StepRequest) -> None:
        with self._lock:
            held = self._came is not None or self._standing is not None
            back = self._number if held else None
            withdraws = want is NOTHING
            if withdraws and not self._open and back is None:
                return  # there is nothing to take back
            self._number += 1
            self._open, self._came, self._standing = not withdraws, None, None
            number = self._number
        if back is not None:
            self._done(back)
        self._want(replace(want, number=number))

    def answer(self) -> StepGrant | None:
        with self._lock:
            grant, self._came = self._came, None
            if grant is not None and grant.stands:
                self._standing, self._stepping = grant, True
        return grant

    def reuse_grant(self) -> StepGrant | None:
        with self._lock:
            self._stepping = self._standing is not None
            return self._standing

    def finish_step(self) -> None:
        with self._lock:
            self._stepping = False
            stands = self._standing is not None
        if not stands:
            self._done(self._number)

    def close(self) -> None:
        with self._lock:
            self._standing = None
        self.crowd(alone=True)

    def receive_grant(self, grant: StepGrant) -> None:
        """An answer came. To a question that was taken back: nothing is computed for it."""
        with self._lock:
            self.answers += 1
            stale = grant.number != self._number or not self._open
            if not stale:
                self._open, self._came = False, grant
        if stale:
            self._done(grant.number)
        else:
            self.on_answer()

    def recall_grant(self, number: int) -> None:
        """The answer to that question stands no more. An engine that makes no step gives it back at
        once."""
        with self._lock:
            if number != self._number:
                return
            if self._came is not None:
                self._came = replace(self._came, stands=False)
            ends = self._standing is not None and not self._stepping
            self._standing = None
        if ends:
            self._done(number)

    def crowd(self, *, alone: bool) -> None:
        """Take whether no other member is in the unit now, or no agent can be asked."""
        if alone != self._alone:
            self._alone = alone
            self.on_answer()
