"""Which idle sessions leave an instance that drains, where to, and in what order. Pure.

A session has no request now; all that it is are blocks in a prefix cache, which save its next turn
their prefill. A drain has a deadline, so those go first that save most prefill for each byte that
travels: what other instances hold of a session needn't be computed there anyway, and what the
destination holds needn't travel. Of those that save the same, the one that was used last goes
first: it is the likeliest to come back.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from kvmig.controlplane.front_messages import SessionsCarried, SessionsFound


class CachedSession(NamedTuple):
    """An idle session of the instance that drains."""

    owner: int
    tokens: int
    """Tokens that the instance holds of it."""
    used_at: float
    """When its last request ended."""
    held: Mapping[str, int]
    """Tokens of its beginning that other instances hold, by instance."""


class SessionCarriage(NamedTuple):
    """A session that goes, and where to."""

    owner: int
    destination: str
    blocks: int
    """Blocks that travel."""
    saved_tokens: int
    """Tokens of prefill that the next turn is spared."""

    def saved_per_byte(self, block_bytes: int) -> float:
        """Tokens of prefill saved by each byte that travels."""
        return self.saved_tokens / (self.blocks * block_bytes)


def plan_carriages(
    sessions: Iterable[CachedSession],
    rooms: Mapping[str, int],
    block_tokens: int,
    block_bytes: int = 1,
) -> list[SessionCarriage]:
    """The sessions that go, the largest saving for each byte first.

    rooms: free KV blocks of the instances that can take sessions. One that fits nowhere any more is
    left out, and so is one of which another instance holds as much.
    """
    left = dict(rooms)
    by_owner = {one.owner: one for one in sessions}

    def entry(carriage: SessionCarriage) -> tuple[float, float, int, SessionCarriage]:
        used_at = by_owner[carriage.owner].used_at
        return -carriage.saved_per_byte(block_bytes), -used_at, carriage.owner, carriage

    first = (_best_carriage(one, left, block_tokens) for one in by_owner.values())
    heap = [entry(one) for one in first if one is not None]
    heapq.heapify(heap)
    plan: list[SessionCarriage] = []
    while heap:
        *_, carriage = heapq.heappop(heap)
        # Room only gets less, so what a session saves for each byte does, too.
        now = _best_carriage(by_owner[carriage.owner], left, block_tokens)
        if now is None:
            continue
        if now.blocks > carriage.blocks:
            heapq.heappush(heap, entry(now))
            continue
        left[now.destination] -= now.blocks
        plan.append(now)
    return plan


def _best_carriage(
    session: CachedSession, rooms: Mapping[str, int], block_tokens: int
) -> SessionCarriage | None:
    """Choose the instance to which the fewest blocks must travel; of equal ones, the roomiest."""
    saved = session.tokens - max(session.held.values(), default=0)
    if saved <= 0:
        return None
    needs = (
        (-(-(session.tokens - session.held.get(name, 0)) // block_tokens), -room, name)
        for name, room in rooms.items()
    )
    fitting = [(blocks, rank, name) for blocks, rank, name in needs if blocks <= -rank]
    if not fitting:
        return None
    blocks, _, name = min(fitting)
    return SessionCarriage(session.owner, name, blocks, saved)


def latest_fronts(found: Mapping[str, SessionsFound]) -> dict[int, str]:
    """The front end that served the last call of each session. found: what each remembers."""
    latest: dict[int, tuple[float, str]] = {}
    for front, told in found.items():
        for one in told.sessions:
            before = latest.get(one.owner)
            if before is None or (one.ended_at, front) > before:
                latest[one.owner] = one.ended_at, front
    return {owner: front for owner, (_, front) in latest.items()}


def add_reports(reports: Iterable[SessionsCarried]) -> SessionsCarried:
    """What several front ends carried, together."""
    moved = nbytes = 0
    stayed: dict[str, int] = {}
    for one in reports:
        moved += one.moved
        nbytes += one.bytes
        for reason, count in one.stayed.items():
            stayed[reason] = stayed.get(reason, 0) + count
    return SessionsCarried(moved, nbytes, stayed)


def sentence_of(carried: SessionsCarried) -> str:
    """The report of a drain's sessions, for people; empty: there were none."""
    left = sum(carried.stayed.values())
    if not carried.moved and not left:
        return ""
    why = ", ".join(f"{count} {reason}" for reason, count in sorted(carried.stayed.items()))
    return (
        f"{carried.moved} idle sessions moved ({carried.bytes / 1e6:.1f} MB), {left} did not"
        f"{f' ({why})' if why else ''}"
    )
