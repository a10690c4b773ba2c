"""Moves that a destination has refused: which of them are worth another try. Pure.

A destination that is full stays so until something ends there, and one that can't run a request
hardly ever can later. The same request asked again, round after round, costs both engines a
handshake each time and moves nothing, nor does any request that would go after it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import msgspec

from kvmig.controlplane.messages import PairedDestination

FULL = ("no_blocks", "no_batch_slot")
"""Reasons of a refusal for want of room (`kvmig.kvtransfer.report.Reason`)."""
UNFIT = ("incompatible", "unsupported", "corrupt", "error")
"""Reasons that concern this request there, not the room: the next one may go."""
FIRST_S = 1.0
"""Time until a refused request is tried there again, though no more room was reported."""
LAST_S = 16.0
"""The longest such time; each refusal doubles it."""


class RefusedMove(msgspec.Struct):
    """A request that one destination has refused."""

    room_blocks: float
    """The least room that was reported since: more than that, and something has ended there.
    Infinite where room isn't what it lacks."""
    wait_s: float
    until: float
    """The time of another try in any case: reports are old, and count no places in a batch."""


class RefusedMoves:
    """Refusals for want of room, or for good, by request and destination."""

    def __init__(self) -> None:
        self._moves: dict[tuple[str, str], RefusedMove] = {}

    def __len__(self) -> int:
        return len(self._moves)

    def set_pairs(self, pairs: Sequence[PairedDestination]) -> None:
        """The scheduler has renewed the pairs, with what room it sees now."""
        rooms = {pair.destination: pair.room_blocks for pair in pairs}
        for (_, destination), move in self._moves.items():
            if destination in rooms and move.room_blocks < math.inf:
                move.room_blocks = min(move.room_blocks, rooms[destination])

    def refuse(self, request_id: str, pair: PairedDestination, reason: str, now: float) -> None:
        """The destination has refused the request; other reasons than FULL and UNFIT are ignored:
        they say nothing of a next try."""
        if reason not in (*FULL, *UNFIT):
            return
        room_blocks = pair.room_blocks if reason in FULL else math.inf
        before = self._moves.get((request_id, pair.destination))
        wait_s = FIRST_S if before is None else min(2 * before.wait_s, LAST_S)
        self._moves[request_id, pair.destination] = RefusedMove(room_blocks, wait_s, now + wait_s)

    def waiting(self, pair: PairedDestination, now: float) -> set[str]:
        """Requests that aren't worth a try there now."""
        return {
            request_id
            for (request_id, destination), move in self._moves.items()
            if destination == pair.destination
            and now < move.until
            and pair.room_blocks <= move.room_blocks
        }

    def forget(self, here: Collection[str]) -> None:
        """Forget requests that are not here any more."""
        self._moves = {key: move for key, move in self._moves.items() if key[0] in here}
