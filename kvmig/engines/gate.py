"""The step gate: an engine that shares a device asks before each step what it may compute.

The device's scheduler (`kvmig.sharing.step_scheduler`) answers a `StepRequest` with a
`StepGrant`. Both travel to and from the unit's agent as they are (`kvmig.sharing.messages`), under
the tags that they have there. How an engine's thread waits: `kvmig.engines.entrance`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Protocol

import msgspec

PARTS = 10
"""Parts of a device; a step takes some of them."""
LIMIT_S = 1.0
"""How long a step waits for its grant, unless a gate says otherwise."""

StepKind = Literal["prefill", "decode"]


class StepRequest(
    msgspec.Struct, frozen=True, kw_only=True, tag="Want", forbid_unknown_fields=True
):
    """What an engine's next step could compute; it replaces the engine's last request."""

    number: int = 0
    """The gate counts an engine's requests from 1 on; the engine itself leaves this at 0."""
    prompt_tokens: int
    """Most tokens of prompts; 0: no request waits, or none has room."""
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

    def oldest(self, kind: StepKind) -> float | None:
        """Arrival of the oldest request that such a step would serve; None: it wants none."""
        if kind == "prefill":
            return self.oldest_prompt if self.prompt_tokens else None
        return self.oldest_decode if self.decodes else None


NOTHING = StepRequest(prompt_tokens=0, decodes=0)


class ComputeShares(msgspec.Struct, frozen=True, tag="Gated", forbid_unknown_fields=True):
    """Parts of the device, 1 to `PARTS`, that an engine's steps take.

    Sent to the unit's agent, it announces that the engine asks before each step.
    """

    prefill: int
    """Parts for steps with prompts."""
    decode: int
    """Parts for steps of decodes alone."""


class StepGrant(
    msgspec.Struct, frozen=True, kw_only=True, tag="Granted", forbid_unknown_fields=True
):
    """What the next step may compute."""

    number: int = 0
    """Number of the request that this answers."""
    prompts: bool
    decodes: bool
    tokens: int = 0
    """Most tokens of the step, at least one for each request that decodes; 0: no limit."""
    parts: int = 0
    """Parts of the device that the step takes (of `PARTS`); 0: all."""
    stands: bool = False
    """Whether the grant covers further steps without prompts until it is called back."""

    def suits(self, want: StepRequest) -> bool:
        """Whether a step with it computes anything."""
        return (self.prompts and want.prompt_tokens > 0) or (self.decodes and want.decodes > 0)


EVERYTHING = StepGrant(prompts=True, decodes=True)


class StepGate(Protocol):
    """One engine's way to its device's scheduler. All but `on_answer` runs on the engine's
    thread."""

    limit_s: float
    answers: int
    """How many have come, those to questions that were taken back, too."""
    waited_s: float
    """Seconds that steps have waited for their grants, all in all; each wait adds to it."""
    on_answer: Callable[[], None]
    """Called, from any thread, when there is an answer to take, or `alone` has changed."""

    @property
    def alone(self) -> bool:
        """Whether no other engine computes on the device now: then no step asks."""
        ...

    def request_step(self, want: StepRequest) -> None:
        """Want this for the next step, instead of what was asked last. Never blocks."""
        ...

    def answer(self) -> StepGrant | None:
        """Take the grant for what was asked last, if it came."""
        ...

    def reuse_grant(self) -> StepGrant | None:
        """Take a grant that stands for one more step, if it wasn't called back."""
        ...

    def finish_step(self) -> None:
        """The step of the grant that was taken has ended."""
        ...

    def close(self) -> None:
        """Ask no more; what was granted is given back."""
        ...
