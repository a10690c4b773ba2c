"""The step gate: an engine that shares a device asks before each step what it may compute.

Whoever decides for the device (`kvmig.controlplane.turns`) answers with a `Grant`. The engine's
thread waits for it in `Entrance`, and serves what comes for the engine meanwhile: requests, aborts,
calls and migrations are never held up. Nobody who shares a device can stop an engine: without an
answer in `StepGate.limit_s` it steps on, and asks without waiting until it hears something again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Protocol

import msgspec

log = logging.getLogger(__name__)

LIMIT_S = 1.0
"""How long a step waits for its grant, unless a gate says otherwise."""
REST_S = (0.001, 0.05)
"""How long an engine that has requests, but could compute nothing, waits before it looks again:
at first, and at most. A request or call that comes ends it at once."""


class Want(msgspec.Struct, frozen=True):
    """What an engine's next step could compute."""

    prompt_tokens: int
    """Of prompts, at most; 0: nobody waits, or there is no room for who does."""
    decodes: int
    """Requests that could get a token."""
    oldest_prompt: float = 0.0
    """Arrival of the first request that waits, seconds of its front end's clock; 0: none does."""
    oldest_decode: float = 0.0
    """Arrival of the oldest request that decodes; 0: none does."""

    @property
    def nothing(self) -> bool:
        """Whether there is nothing to compute."""
        return not (self.prompt_tokens or self.decodes)

    @property
    def kinds(self) -> tuple[bool, bool]:
        """Whether it wants (prompts, decodes)."""
        return self.prompt_tokens > 0, self.decodes > 0


NOTHING = Want(0, 0)


class Grant(msgspec.Struct, frozen=True):
    """What the next step may compute."""

    prompts: bool
    decodes: bool
    tokens: int = 0
    """At most so many, but one for each request that decodes; 0: as many as the engine likes."""
    parts: int = 0
    """Parts of the device that the step takes (of `kvmig.controlplane.adbs.PARTS`); 0: all."""

    def suits(self, want: Want) -> bool:
        """Whether a step with it computes anything."""
        return (self.prompts and want.prompt_tokens > 0) or (self.decodes and want.decodes > 0)


EVERYTHING = Grant(prompts=True, decodes=True)


class StepGate(Protocol):
    """One engine's way to whoever decides. Called on the engine's thread, but for `on_answer`."""

    limit_s: float
    on_answer: Callable[[], None]
    """Called, from any thread, when there is an answer to take, or `alone` has changed."""

    @property
    def alone(self) -> bool:
        """Nobody else computes on the device now: no step asks."""
        ...

    def ask(self, want: Want) -> None:
        """Want this for the next step, instead of what was asked last. Never blocks."""
        ...

    def answer(self) -> Grant | None:
        """Take the grant for what was asked last, if it came."""
        ...

    def done(self) -> None:
        """The step of the grant that was taken has ended."""
        ...

    def close(self) -> None:
        """Ask no more; what was granted is given back."""
        ...


class Entrance:
    """Where one engine's thread waits for its grants."""

    def __init__(self, gate: StepGate, serve: Callable[[float], None]) -> None:
        """serve: handle one thing that comes for the engine within so many seconds, if one does."""
        self.gate = gate
        self.unanswered = 0
        """Steps that were made without a grant."""
        self.waited_s = 0.0
        """For grants, all in all."""
        self._serve = serve
        self._silent = False
        """The last question had no answer: the next isn't waited for."""
        self._rest_s = REST_S[0]
        self._granted = False

    def enter(self, look: Callable[[], Want]) -> Grant | None:
        """What the next step may compute; None: there is nothing to compute any more.

        look: what it could, now. Waits at most `limit_s`.
        """
        gate = self.gate
        if gate.alone:
            return EVERYTHING
        want = look()
        if want.nothing:
            return None
        began = time.monotonic()
        try:
            return self._wait(want, look, began + (0.0 if self._silent else gate.limit_s))
        finally:
            self.waited_s += time.monotonic() - began

    def _wait(self, want: Want, look: Callable[[], Want], deadline: float) -> Grant | None:
        gate, asked = self.gate, want
        gate.ask(asked)
        while True:
            grant = gate.answer()
            if grant is not None:
                self._silent = False
                if grant.suits(want):
                    self._granted = True
                    return grant
                gate.done()  # what it was for has ended meanwhile
            if grant is not None or want.kinds != asked.kinds:
                asked = want
                gate.ask(asked)
            if gate.alone:
                gate.ask(NOTHING)
                return EVERYTHING
            left = deadline - time.monotonic()
            if left <= 0:
                gate.ask(NOTHING)
                self._go_on()
                return EVERYTHING
            self._serve(left)
            want = look()
            if want.nothing:
                gate.ask(NOTHING)
                return None

    def _go_on(self) -> None:
        self.unanswered += 1
        if not self._silent:
            self._silent = True
            log.warning(
                "no grant in %g s: steps go on without one until somebody answers",
                self.gate.limit_s,
            )

    def leave(self, computed: bool) -> None:
        """The step is over, and has computed something or not."""
        if self._granted:
            self._granted = False
            self.gate.done()
        if computed:
            self._rest_s = REST_S[0]

    def rest(self) -> None:
        """Wait until something comes, ever longer while nothing can be computed.

        An engine whose blocks are all lent has requests and can't run them: it would look a
        thousand times a second.
        """
        self._serve(self._rest_s)
        self._rest_s = min(2 * self._rest_s, REST_S[1])
