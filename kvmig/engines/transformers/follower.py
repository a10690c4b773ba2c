"""A request that is computed here behind its source, and never sampled from.

transformers computes tokens of a request until none is left, and samples when it has computed the
last one. A follower holds its last known token back: each step computes the KV of what the source
has put out since, as a chunk of a prefill that doesn't end, so there is no output, no stop, no
noise and no log-probability to think of.
"""

from __future__ import annotations

from collections.abc import Sequence

from transformers.generation.continuous_batching.requests import RequestState as State
from transformers.generation.continuous_batching.requests import RequestStatus

ENOUGH = 2
"""Tokens for which an engine that has nothing else to do makes a step. With a step for each, as
many as the source makes, one would always be under way when the request is switched."""


class Follower(State):
    """Counts as decoding: scheduled before prefills, and however little of the cache is free."""

    def __init__(self, request_id: str, tokens: Sequence[int], computed: int) -> None:
        """tokens: prompt and outputs as far as they are known; `computed` of them have their KV."""
        super().__init__(request_id=request_id, initial_tokens=list(tokens))
        self.position_offset = computed
        self.remaining_prefill_tokens = list(tokens[computed:])
        self.status = RequestStatus.DECODING
        self.lost = False
        """Others needed its blocks: it can't go on."""

    @property
    def behind(self) -> int:
        """Tokens that steps have to compute."""
        return len(self.remaining_prefill_tokens) - 1

    def learn(self, token_ids: Sequence[int]) -> None:
        """More outputs of the source."""
        self.initial_tokens += token_ids
        self.remaining_prefill_tokens += token_ids

    def take(self, most: int) -> None:
        """Let the step that is scheduled now compute `most` tokens, but never the last one."""
        count, left = min(most, self.behind), self.remaining_prefill_tokens
        self.tokens_to_process, self.remaining_prefill_tokens = left[:count], left[count:]
