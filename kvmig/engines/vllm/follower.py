"""A request that is computed here behind its source, and never sampled from.

vLLM computes tokens of a request until none is left, and samples when it has computed the
last one. A follower hides its last known token from the scheduler: each step computes the
KV of what the source has put out since, as a chunk of a prefill that doesn't end, so there
is no output, no stop, no grammar and no generator to think of.
"""

from __future__ import annotations

from vllm.v1.request import Request

ENOUGH = 2
"""Tokens for which an engine that has nothing else to do makes a step. With a step for each, as
many as the source makes, one would always be under way when the request is switched."""


class Follower(Request):
    """A Request whose last token isn't scheduled."""

    @property
    def num_tokens_with_spec(self) -> int:
        """What the scheduler computes up to."""
        return len(self._all_token_ids) - 1


def hold_back(request: Request) -> None:
    """Make it a follower, in place: the scheduler knows requests by identity."""
    request.__class__ = Follower


def let_go(request: Request) -> None:
    """Make it an ordinary request again: its next step samples."""
    request.__class__ = Request


def behind(request: Request) -> int:
    """Tokens of a follower that the next step would compute."""
    return request.num_tokens_with_spec - request.num_computed_tokens
