"""Victims: which request a paired llumlet moves next. Pure; runs where the requests are."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Literal

import msgspec

from kvmig.controlplane.messages import AT_ONCE, PairedDestination
from kvmig.engines.base import RequestState


class VictimRule(msgspec.Struct, frozen=True, kw_only=True):
    """The rule by which requests are worth a move."""

    cooldown_s: float = 2.0
    """Least stay of a request that came here by a migration, except where all that can be
    must go at once (`kvmig.controlplane.messages.AT_ONCE`)."""
    min_output_tokens: int = 1
    """Fewest output tokens of a victim: requests in prefill stay, except in a drain."""
    prefers: Literal["shortest", "latest"] = "shortest"
    """Within a priority class, of those that fit the budget: the shortest sequence (the paper),
    or the one that arrived last (its artifact)."""


DEFAULT_RULE = VictimRule()


def next_victim(
    requests: Iterable[RequestState],
    pair: PairedDestination,
    spent_blocks: float,
    migrating: Collection[str],
    arrived_at: Mapping[str, float],
    now: float,
    rule: VictimRule = DEFAULT_RULE,
) -> RequestState | None:
    """The request to move next under `pair`, or None when there is none this round.

    requests: those that wait in the order of their queue; spent_blocks: blocks of the
    requests whose move was begun since `pair` came; migrating: requests that are moving
    already; arrived_at: when those that were moved here came.
    """

    def may_go(one: RequestState) -> bool:
        if one.unmovable or one.request_id in migrating:
            return False
        since = arrived_at.get(one.request_id)
        return pair.why in AT_ONCE or since is None or now - since >= rule.cooldown_s

    able = [one for one in requests if may_go(one)]
    return _CHOICES[pair.why](able, pair, spent_blocks, rule)


def _balance(
    able: list[RequestState], pair: PairedDestination, spent: float, rule: VictimRule
) -> RequestState | None:
    """Lower priority first (vLLM's: the larger number), then as the rule prefers.

    Among those that fit what is left of the budget. If none fits though nothing was
    spent, the smallest request that the destination has room for: a budget of average
    requests would otherwise never move the large ones.
    """
    running = [
        one
        for one in able
        if one.state == "running"
        and one.blocks > 0
        and one.output_tokens >= rule.min_output_tokens
        and (pair.priority is None or one.priority > pair.priority)
    ]
    return _within_budget(running, pair, spent, rule)


def _within_budget(
    running: list[RequestState], pair: PairedDestination, spent: float, rule: VictimRule
) -> RequestState | None:
    left = pair.budget_blocks - spent
    fitting = [one for one in running if one.blocks <= left]
    if fitting and rule.prefers == "latest":
        # Of equals, or where no arrival is known, the last that its engine names.
        return max(reversed(fitting), key=lambda one: (one.priority, one.arrived_s))
    if fitting:
        return min(fitting, key=_order)
    if left <= 0 or spent > 0:
        return None
    large = [one for one in running if one.blocks <= pair.room_blocks]
    return min(large, key=lambda one: (one.blocks, *_order(one)), default=None)


def _order(one: RequestState) -> tuple[int, int, str]:
    return -one.priority, one.tokens, one.request_id


def _queue(
    able: list[RequestState], pair: PairedDestination, spent: float, rule: VictimRule
) -> RequestState | None:
    """The first in the queue that still fits where it goes."""
    left = pair.budget_blocks - spent
    return next((one for one in able if one.state == "waiting" and one.wanted_blocks <= left), None)


def _defragment(
    able: list[RequestState], pair: PairedDestination, spent: float, rule: VictimRule
) -> RequestState | None:
    """The smallest request that frees enough alone, else the largest that fits."""
    left, room = pair.budget_blocks - spent, pair.room_blocks - spent
    fitting = [one for one in able if one.state == "running" and 0 < one.blocks <= room]
    if left <= 0 or not fitting:
        return None
    enough = [one for one in fitting if one.blocks >= left]
    if enough:
        return min(enough, key=lambda one: (one.blocks, *_order(one)))
    return max(fitting, key=lambda one: (one.blocks, one.priority, one.request_id))


def _drain(
    able: list[RequestState], pair: PairedDestination, spent: float, rule: VictimRule
) -> RequestState | None:
    """A waiting request, which costs nothing; then any that runs, in prefill or not."""
    waiting = next((one for one in able if one.state == "waiting"), None)
    if waiting is not None:
        return waiting
    return _within_budget([one for one in able if one.state == "running"], pair, spent, rule)


def _prompt(
    able: list[RequestState], pair: PairedDestination, spent: float, rule: VictimRule
) -> RequestState | None:
    """The prompt that is computed first: running ones, then the queue, in the engine's order. Then
    a request that decodes here, the shortest first: there was no room for it before."""
    left = pair.budget_blocks - spent
    fitting = [one for one in able if one.weight_blocks <= left]
    prompts = [one for one in fitting if one.output_tokens == 0 and one.state == "running"]
    prompts += [one for one in fitting if one.state == "waiting"]
    if prompts:
        return prompts[0]
    return min((one for one in fitting if one.state == "running"), key=_order, default=None)


_CHOICES: dict[
    str, Callable[[list[RequestState], PairedDestination, float, VictimRule], RequestState | None]
] = {
    "balance": _balance,
    "priority": _balance,
    "queue": _queue,
    "defragment": _defragment,
    "relieve": _defragment,
    "drain": _drain,
    "prompt": _prompt,
}
