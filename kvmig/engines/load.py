"""What an engine tells of the requests that it holds."""

from __future__ import annotations

import msgspec


class ClassLoad(msgspec.Struct, frozen=True):
    """What the requests of one priority hold. Sizes in KV blocks, counts in requests."""

    priority: int
    running: int
    waiting: int
    used_blocks: int
    """Of those that run."""


class GroupLoad(msgspec.Struct, frozen=True):
    """A pool of KV blocks beside the first, in an engine that has several. In its own blocks."""

    total_blocks: int
    used_blocks: int
    head_blocks: int
    waiting_blocks: int


class Preempted(msgspec.Struct, frozen=True):
    """How often requests of one priority were preempted since the start."""

    priority: int
    times: int
    below: int
    """Those of `times` at which a request of a smaller number was in the batch."""


class EngineLoad(msgspec.Struct, frozen=True):
    """What an instance holds now: of one size however many requests it has.

    Sizes in KV blocks, counts in requests.
    """

    total_blocks: int
    used_blocks: int
    running: int
    waiting: int
    head_blocks: int
    """Demand of the request at the head of the queue (0 when none waits)."""
    waiting_blocks: int
    """Demand of all waiting requests."""
    classes: tuple[ClassLoad, ...] = ()
    """One a priority that has requests here; empty: all are of priority 0."""
    groups: tuple[GroupLoad, ...] = ()
    """Further pools of blocks."""
    preempted: tuple[Preempted, ...] = ()
    """One a priority of which a request was ever preempted."""
    seats: int = 0
    """Requests that can run at once; 0: as many as there are blocks for."""
    preempted_waiting: int = 0
    """Of those that wait: ran here already and were preempted; 0 where the engine can't tell."""
    prefill_blocks: int = 0
    """Of running requests: what is still to be computed of their prompts before they decode."""


class RequestState(msgspec.Struct, frozen=True):
    """One request as its engine sees it, for the admin API and for choosing victims."""

    request_id: str
    state: str
    """running, waiting or suspended."""
    tokens: int
    """Prompt and output tokens."""
    output_tokens: int
    blocks: int
    priority: int
    unmovable: str = ""
    """Why it can't be moved now, in a few words; empty when it can."""
    wanted_blocks: int = 0
    """Blocks that starting it takes; 0 when it runs."""
    age_ms: float = 0.0
    """How long ago all that was so: an engine in the middle of a step can't be asked."""
    arrived_s: float = 0.0
    """When it came to its front end, seconds of that one's clock; 0: not known."""

    @property
    def weight_blocks(self) -> int:
        """Blocks that it takes where it goes."""
        return self.blocks or self.wanted_blocks


class StepTime(msgspec.Struct, frozen=True):
    """A decode step of a batch with so many tokens of KV cache took so long."""

    tokens: int
    ms: float
