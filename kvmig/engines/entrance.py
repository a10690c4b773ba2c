"""The wait of an engine's thread for its grants.

What comes for the engine is served meanwhile: requests, aborts, calls and migrations are never
held up. None that shares a device can stop an engine: without an answer in `StepGate.limit_s` it
steps on, and asks without waiting until an answer comes again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from kvmig.engines.gate import EVERYTHING, NOTHING, StepGate, StepGrant, StepRequest

log = logging.getLogger(__name__)

REST_S = (0.001, 0.05)
"""How long an engine that has requests, but could compute nothing, waits before it looks again:
at first, and at most. A request or call that comes ends it at once."""


class StepAdmission:
    """The wait of one engine's thread for its grants."""

    def __init__(self, gate: StepGate, serve: Callable[[float], None]) -> None:
        """serve: handle one thing that comes for the engine within these seconds, if one does."""
        self.gate = gate
        self.unanswered = 0
        """Steps that were made without a grant."""
        self._serve = serve
        self._silent_at: int | None = None
        """Answers that had come when one didn't: until there is another, none is waited for."""
        self._probe_at = 0.0
        """When it is asked again while it is silent."""
        self._rest_s = REST_S[0]
        self._granted = False
        self._stands = False
        """A grant that stands may be held."""

    def enter(self, look: Callable[[], StepRequest]) -> StepGrant | None:
        """What the next step may compute; None: there is nothing to compute any more.

        look: what it could, now. Waits at most `limit_s`.
        """
        gate = self.gate
        if gate.alone:
            return EVERYTHING
        want = look()
        if want.nothing:
            if self._stands:
                gate.request_step(NOTHING)
                self._stands = False
            return None
        if want.kinds == (False, True) and (grant := gate.reuse_grant()) is not None:
            self._granted = self._stands = True
            return grant
        began = time.monotonic()
        if self._silent_at == gate.answers:
            return self._go_on(want, began)
        self._silent_at = None
        try:
            return self._wait(want, look, began + gate.limit_s)
        finally:
            gate.waited_s += time.monotonic() - began

    def _wait(
        self, want: StepRequest, look: Callable[[], StepRequest], deadline: float
    ) -> StepGrant | None:
        gate, asked = self.gate, want
        gate.request_step(asked)
        while True:
            grant = gate.answer()
            if grant is not None:
                if grant.suits(want):
                    self._granted, self._stands = True, grant.stands
                    return grant
                gate.finish_step()  # what it was for has ended meanwhile
            if grant is not None or want.kinds != asked.kinds:
                asked = want
                gate.request_step(asked)
            if gate.alone:
                gate.request_step(NOTHING)
                return EVERYTHING
            left = deadline - time.monotonic()
            if left <= 0:
                gate.request_step(NOTHING)
                self._silent_at = gate.answers
                self._probe_at = time.monotonic() + gate.limit_s
                log.warning(
                    "no grant in %g s: steps go on without one until an answer comes", gate.limit_s
                )
                self.unanswered += 1
                return EVERYTHING
            self._serve(left)
            want = look()
            if want.nothing:
                gate.request_step(NOTHING)
                return None

    def _go_on(self, want: StepRequest, now: float) -> StepGrant:
        """Step without a grant; ask from time to time, only to learn whether the agent answers."""
        self.unanswered += 1
        if now >= self._probe_at:
            self._probe_at = now + self.gate.limit_s
            self.gate.request_step(want)
            self.gate.request_step(NOTHING)
        return EVERYTHING

    def finish_step(self, computed: bool) -> None:
        """The step is over, and has computed something or not."""
        if self._granted:
            self._granted = False
            self.gate.finish_step()
        if computed:
            self._rest_s = REST_S[0]

    def wait_for_work(self) -> None:
        """Wait until something comes, ever longer while nothing can be computed.

        An engine whose blocks are all lent has requests and can't run them: it would look a
        thousand times a second.
        """
        self._serve(self._rest_s)
        self._rest_s = min(2 * self._rest_s, REST_S[1])
