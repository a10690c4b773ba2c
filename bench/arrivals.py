"""When tokens reach a client, and the times between them. Pure.

An arrival is one read of the socket that brought tokens: a front end that lags puts several
tokens into one chunk, and the kernel several chunks into one read; a client sees both alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple


class Arrival(NamedTuple):
    """`tokens` tokens, the response's `first` and on, came at `at` (seconds)."""

    at: float
    first: int
    tokens: int

    @property
    def end(self) -> int:
        """Tokens that have come by now."""
        return self.first + self.tokens


def intervals_ms(arrivals: Sequence[Arrival]) -> list[float]:
    """Times between arrivals, each divided by the tokens that came at its end.

    Example: one token at 0.00 s, one at 0.01 s, two at 0.03 s: 10 ms and 10 ms.
    """
    return [(b.at - a.at) * 1e3 / b.tokens for a, b in pairwise(arrivals)]


def wait_for_ms(arrivals: Sequence[Arrival], token: int) -> float:
    """How long the client had waited when `token` came: since the arrival before.

    Where `token` came alone, this is the time since the token before it. Where it came in
    one read with tokens before it, they had to wait too, and that wait counts.
    Raises ValueError if it never came, or was in the first arrival.
    """
    for before, after in pairwise(arrivals):
        if after.first <= token < after.end:
            return (after.at - before.at) * 1e3
    raise ValueError(f"token {token} never came, or nothing before it")


def longest_ms(arrivals: Sequence[Arrival], begin: float, end: float) -> float:
    """The longest time between two arrivals of those that touch the window [begin, end] (s)."""
    touching = [(b.at - a.at) * 1e3 for a, b in pairwise(arrivals) if b.at > begin and a.at < end]
    return max(touching, default=0.0)


def longest_before(arrivals: Sequence[Arrival], begin: float, end: float) -> Arrival | None:
    """The arrival that ended that time; None if no two touch the window."""
    touching = [(b.at - a.at, b) for a, b in pairwise(arrivals) if b.at > begin and a.at < end]
    return max(touching, key=lambda one: one[0])[1] if touching else None


def tokens_from(arrival: Arrival, token: int) -> int:
    """How many tokens after `token` an arrival begins: 0 if it has that one, less if it is over
    before."""
    return 0 if arrival.first <= token < arrival.end else arrival.first - token


def tokens_by(arrivals: Sequence[Arrival], at: float) -> float:
    """Tokens that have come by `at`, with the fraction of the one on its way.

    Between two arrivals the count grows evenly; before the first and after the last it
    stands still.
    """
    if not arrivals or at <= arrivals[0].at:
        return 0.0
    for before, after in pairwise(arrivals):
        if at <= after.at:
            share = (at - before.at) / (after.at - before.at)
            return before.end + share * after.tokens
    return float(arrivals[-1].end)


def step_ms(streams: Sequence[Sequence[Arrival]], begin: float, end: float) -> float:
    """Time a token of one stream takes in the window [begin, end] (s), all streams together.

    Intervals count by the part that lies in the window, so that windows of equal length
    compare, however few intervals fall into one. Infinite if nothing moved.
    """
    tokens = sum(tokens_by(one, end) - tokens_by(one, begin) for one in streams)
    return len(streams) * (end - begin) * 1e3 / tokens if tokens > 0 else float("inf")
