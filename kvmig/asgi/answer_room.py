"""How much of one call's answer a front end keeps until its client has it. Pure.

A token of an answer that is given whole is kept until the last one is there, one of a stream while
its client doesn't read. A log-probability is an object first, then a part of the answer, then text:
it takes many times what a token takes, also of the event loop.
"""

from __future__ import annotations

MOST_TOKENS = 524_288
"""Most tokens of one answer, all its sequences together, that are kept at once."""
MOST_LOGPROBS = 65_536
"""The same of log-probabilities."""
MOST_NUMBERS = 1_048_576
"""The same of embeddings' numbers."""


class AnswerRoom:
    """What is kept of one call's answer. Tokens, log-probabilities and numbers take parts of it."""

    __slots__ = ("_taken",)

    def __init__(self) -> None:
        self._taken = 0.0

    def count_kept(self, tokens: int, logprobs: int, numbers: int = 0) -> None:
        """Count more as kept, until the call is over."""
        self._taken += part(tokens, logprobs) + numbers / MOST_NUMBERS

    def full(self, unread: float = 0.0) -> bool:
        """Whether there is more than may be kept. unread: see `part`, of what is not for long."""
        return self._taken + unread > 1


def part(tokens: int, logprobs: int) -> float:
    """Share of one call's answer room that tokens with these log-probabilities take."""
    return tokens / MOST_TOKENS + logprobs / MOST_LOGPROBS


def sentence() -> str:
    """Why a call's answer is not gone on with."""
    return (
        f"the answer is too large to be kept until its client has it: allowed are {MOST_TOKENS}"
        f" tokens, {MOST_LOGPROBS} log-probabilities, or {MOST_NUMBERS} numbers of embeddings, of"
        " all its sequences and prompts together. Ask for fewer (max_tokens, n, logprobs,"
        " prompt_logprobs, input), or for a stream, and read it"
    )
