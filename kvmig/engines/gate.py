"""The step gate: an engine that shares a device asks before each step what it may compute.

Whoever decides for the device (`kvmig.sharing.step_scheduler`) answers with a `Grant`. Here are the
words and the port; how an engine's thread waits: `kvmig.engines.entrance`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import msgspec

PARTS = 10
"""Of a device, which steps take some of."""
LIMIT_S = 1.0
"""How long a step waits for its grant, unless a gate says otherwise."""


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


class UnitShares(NamedTuple):
    """Parts of the device, 1 to `PARTS`, for steps with prompts and for steps of decodes alone."""

    prefill: int
    decode: int
    unit: str = ""
    """Path of the unit, whose other engines should get other SMs."""


class Grant(msgspec.Struct, frozen=True):
    """What the next step may compute."""

    prompts: bool
    decodes: bool
    tokens: int = 0
    """At most so many, but one for each request that decodes; 0: as many as the engine likes."""
    parts: int = 0
    """Parts of the device that the step takes (of `PARTS`); 0: all."""
    stands: bool = False
    """Until it is called back it is good for further steps that compute no prompts."""

    def suits(self, want: Want) -> bool:
        """Whether a step with it computes anything."""
        return (self.prompts and want.prompt_tokens > 0) or (self.decodes and want.decodes > 0)


EVERYTHING = Grant(prompts=True, decodes=True)


class StepGate(Protocol):
    """One engine's way to whoever decides. Called on the engine's thread, but for `on_answer`."""

    limit_s: float
    answers: int
    """How many have come, those to questions that were taken back, too."""
    waited_s: float
    """Seconds that steps have waited for their grants, all in all; whoever waits adds to it."""
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

    def again(self) -> Grant | None:
        """Take a grant that stands for one more step, if nobody has called it back."""
        ...

    def done(self) -> None:
        """The step of the grant that was taken has ended."""
        ...

    def close(self) -> None:
        """Ask no more; what was granted is given back."""
        ...
