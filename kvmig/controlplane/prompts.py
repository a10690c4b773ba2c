"""Prompts at instances set apart for them, and decoding at the others. Pure.

A new request goes to the instance set apart whose prompts are done first. As soon as it is there it
is paired with an instance that decodes (`hand_over`): the blocks of each chunk travel while the
next one is computed, and the request goes when its prompt is. An instance that decodes so computes
only prompts for which that is sooner. No instance has a role: one that is set apart decodes what
finds no room elsewhere, and one that is gone leaves its part to the others.
"""

from __future__ import annotations

import numpy as np

from kvmig.controlplane.dispatch import DispatchPolicy, NewRequest
from kvmig.controlplane.scheduler import DestinationHeap, RoundPlan
from kvmig.controlplane.view import ClusterView, InstanceView, Mask

SHORT_BLOCKS = 16.0
"""A prompt of which an instance that decodes has no more blocks to compute is computed there: that
takes no longer than a move, and its decoding hardly notices."""
PATIENCE_BLOCKS = 1024.0
"""Blocks of prompts that a new one rather waits for than be computed where others decode."""


class PromptDispatch:
    """`others` dispatches what isn't sooner at an instance set apart."""

    def __init__(self, apart: tuple[str, ...], others: DispatchPolicy) -> None:
        """apart: names of instances."""
        self._apart = apart
        self._others = others

    def pick(self, view: ClusterView, request: NewRequest) -> InstanceView:
        """The instance that computes its prompt. Raises NoInstance if there is none."""
        columns = view.columns
        able: Mask = (columns.open_until >= view.now) & (columns.limit >= request.demand_blocks)
        apart = view.rows_of(self._apart)
        if not (able & ~apart).any():
            return self._others.pick(view, request)
        decoding = self._others.pick(view.only(~apart), request)
        if not (able & apart).any():
            return decoding
        missing, row = self._missing(request, decoding), view.row_of(decoding.instance)
        if missing <= SHORT_BLOCKS or row is None:
            return decoding
        least, best = float(columns.prompts[row]) + missing + PATIENCE_BLOCKS, decoding
        for one in np.flatnonzero(able & apart & (columns.room >= request.demand_blocks)):
            there = view.instances[one]
            wait = float(columns.prompts[one]) + self._missing(request, there)
            if wait < least:
                least, best = wait, there
        return best

    def _missing(self, request: NewRequest, at: InstanceView) -> float:
        """Blocks of its prompt that are to be computed there."""
        return request.demand_blocks - request.held_blocks.get(at.instance, 0.0)


def hand_over(ledger: RoundPlan) -> None:
    """Pair each instance set apart with the roomiest that decode. Its requests go there one by
    one, each as soon as its prompt is computed; one that finds no room there decodes where it is.
    """
    columns = ledger.columns
    sources = ledger.worst(ledger.serving & ledger.apart, -columns.requests)
    if not sources:
        return
    decoding = ledger.serving & ~ledger.apart & (columns.running < columns.seats)
    takers = DestinationHeap(ledger, decoding, ledger.rooms(), ledger.capacity_of)
    for source, roomiest in takers.offer(sources):
        able = [row for row in roomiest if ledger.capacity_of(row) >= 1]
        held = columns.used[source] + columns.head[source] + columns.behind[source]
        for row in able:
            room = ledger.capacity_of(row)
            # As if all that is here now went there, an equal share each: so that those that are
            # set apart don't all choose the same ones. More may come, and go, within the round.
            requests, blocks = columns.requests[source] / len(able), float(held) / len(able)
            ledger.pair(
                source, row, requests, min(blocks, room), budget=room, room=room, why="prompt"
            )
