"""Victims: which request a paired llumlet moves next. Pure; runs where the requests are."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import msgspec

from kvmig.controlplane.messages import Pair
from kvmig.engines.base import RequestState


class VictimRule(msgspec.Struct, frozen=True, kw_only=True):
    """What a request must be to be worth a move."""

    cooldown_s: float = 2.0
    """A request that came here by a migration stays at least so long."""
    min_output_tokens: int = 16
    """Nobody knows how long a request will run, but short answers are common: one that has
    outlived the first tokens probably pays its move back. It also leaves those in prefill
    alone, whose blocks are still being filled."""


DEFAULT_RULE = VictimRule()


def next_victim(
    requests: Iterable[RequestState],
    pair: Pair,
    spent_blocks: float,
    migrating: Collection[str],
    arrived_at: Mapping[str, float],
    now: float,
    rule: VictimRule = DEFAULT_RULE,
) -> RequestState | None:
    """The request to move next under `pair`, or None when there is none this round.

    spent_blocks: blocks of the requests whose move was begun since `pair` came;
    migrating: requests that are moving already; arrived_at: when those that were moved
    here came.

    Lower priority first (vLLM's: the larger number), then the shorter sequence, among
    those that fit what is left of the budget. If none fits though nothing was spent,
    the smallest request that the destination has room for: a budget of average
    requests would otherwise leave the large ones where they are for ever.
    """

    def recent(one: RequestState) -> bool:
        since = arrived_at.get(one.request_id)
        return since is not None and now - since < rule.cooldown_s

    movable = [
        one
        for one in requests
        if one.state == "running"
        and not one.unmovable
        and one.blocks > 0
        and one.output_tokens >= rule.min_output_tokens
        and one.request_id not in migrating
        and not recent(one)
    ]
    left = pair.budget_blocks - spent_blocks
    fitting = [one for one in movable if one.blocks <= left]
    if fitting:
        return min(fitting, key=_order)
    if left <= 0 or spent_blocks > 0:
        return None
    large = [one for one in movable if one.blocks <= pair.room_blocks]
    return min(large, key=lambda one: (one.blocks, *_order(one)), default=None)


def _order(one: RequestState) -> tuple[int, int, str]:
    return -one.priority, one.tokens, one.request_id
