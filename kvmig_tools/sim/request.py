"""A request in the simulator: what its client would see, and where it stands."""

from __future__ import annotations

import math


class SimRequest:
    """One request. Times in virtual seconds; NaN: not yet.

    Only the engine that runs it reads `final_tokens`: a policy sees what has been
    generated so far (a test poisons the rest).
    """

    __slots__ = (
        "arrival",
        "end_step",
        "final_tokens",
        "finished_at",
        "first_token_at",
        "generated",
        "grows",
        "index",
        "input_tokens",
        "joined",
        "lost_s",
        "migrations",
        "offset",
        "paused_s",
        "preempted_at",
        "preemptions",
        "prefix",
        "prefix_tokens",
        "priority",
        "queued_at",
        "request_id",
        "session",
    )

    def __init__(
        self,
        index: int,
        arrival: float,
        input_tokens: int,
        output_tokens: int,
        priority: int = 0,
        prefix: str = "",
        prefix_tokens: int = 0,
        *,
        grows: bool = False,
        session: int | None = None,
    ) -> None:
        """prefix: names what the first `prefix_tokens` tokens share with other requests.

        session: stands for the one that its client names; None: it names none.
        grows: the rest, and the answer, belong to it from then on, as in a conversation.
        """
        self.index = index
        self.request_id = f"r{index:07d}"
        self.arrival = arrival
        self.input_tokens = input_tokens
        self.final_tokens = input_tokens + output_tokens
        self.priority = priority
        self.prefix = prefix
        self.prefix_tokens = min(prefix_tokens, input_tokens) if prefix else 0
        self.session = session
        self.grows = grows and bool(prefix)
        self.generated = 0
        """Output tokens; while it decodes, those before it joined the batch."""
        self.queued_at = arrival
        self.first_token_at = math.nan
        self.finished_at = math.nan
        self.preempted_at = math.nan
        self.preemptions = 0
        self.lost_s = 0.0
        """From each preemption until the cache was computed again: queueing and recompute."""
        self.migrations = 0
        self.paused_s = 0.0
        """Between suspension and the destination's commit."""
        # Kept by `DecodeBatch`:
        self.offset = 0
        self.end_step = 0
        self.joined = 0

    @property
    def tokens(self) -> int:
        """Input and output tokens while it isn't in a batch."""
        return self.input_tokens + self.generated

    @property
    def was_preempted(self) -> bool:
        """Whether its cache, taken by a preemption, isn't computed again yet."""
        return self.preempted_at == self.preempted_at  # not NaN

    @property
    def rank(self) -> tuple[int, float, int]:
        """Its place in a queue: priority, then first come, first served."""
        return self.priority, self.arrival, self.index
