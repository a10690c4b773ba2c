"""Policies by name: each says who gets a new request, what moves, and which of its requests.

The front end makes the dispatcher, the scheduler runs the rounds, llumlets choose victims;
the simulator runs the same objects.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from kvmig.controlplane.dispatch import (
    DispatchPolicy,
    FewestWithRoom,
    FreestInstance,
    LeastLoaded,
    RoomiestAfter,
    RoundRobin,
)
from kvmig.controlplane.prompts import PromptDispatch, hand_over
from kvmig.controlplane.rules import (
    balance,
    drain,
    gather,
    make_room,
    move_queues,
    pair_extremes,
    protect,
    relieve,
)
from kvmig.controlplane.scheduler import RoundConfig
from kvmig.controlplane.victims import VictimRule
from kvmig.core.config import PolicyName, SchedulerConfig


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """One way to run a cluster."""

    name: PolicyName
    dispatcher: Callable[[], DispatchPolicy]
    rounds: RoundConfig | None = None
    """The policy's rounds; None: requests move only in a drain, or by hand."""
    victims: VictimRule = VictimRule()
    headroom: bool = True
    """Whether the headroom of priorities counts as usage."""


_PAPER = RoundConfig(rules=(pair_extremes,), queued="head", min_gain=0.0)
_PAPER_VICTIMS = VictimRule(cooldown_s=0.0)

_POLICIES = (
    Policy(name="round-robin", dispatcher=RoundRobin),
    Policy(name="least-loaded", dispatcher=LeastLoaded),
    Policy(name="freeness", dispatcher=RoomiestAfter),
    Policy(
        name="llumnix",
        dispatcher=lambda: FreestInstance("head"),
        rounds=_PAPER,
        victims=_PAPER_VICTIMS,
    ),
    Policy(
        name="llumnix-base",
        dispatcher=lambda: FreestInstance("head"),
        rounds=_PAPER,
        victims=_PAPER_VICTIMS,
        headroom=False,
    ),
    Policy(
        name="llumnix-artifact",
        dispatcher=lambda: FreestInstance("all"),
        rounds=msgspec.structs.replace(_PAPER, queued="all", preempted_give=True),
        victims=msgspec.structs.replace(_PAPER_VICTIMS, prefers="latest"),
    ),
    Policy(
        name="kvmig",
        dispatcher=lambda: FewestWithRoom(enough=15.0, prompt_weight=0.3),
        rounds=RoundConfig(
            rules=(drain, relieve, protect, move_queues, make_room, gather, balance)
        ),
    ),
)
POLICIES = {one.name: one for one in _POLICIES}


def policy_of(config: SchedulerConfig) -> Policy:
    """The policy by its name, with the thresholds that the config gives, and with prompts at the
    instances that it sets apart."""
    policy = _named(config)
    apart, others, rounds = config.prompt_instances, policy.dispatcher, policy.rounds
    if not apart or rounds is None:
        return policy
    return msgspec.structs.replace(
        policy,
        dispatcher=lambda: PromptDispatch(apart, others()),
        rounds=msgspec.structs.replace(rounds, rules=(*rounds.rules, hand_over), apart=apart),
    )


def _named(config: SchedulerConfig) -> Policy:
    policy = POLICIES[config.policy]
    if not config.migration:
        return msgspec.structs.replace(policy, rounds=None)
    if policy.rounds is None:  # what an operator wants moved is moved, whatever the policy
        drains = RoundConfig(rules=(drain,), inexact=config.inexact_moves)
        return msgspec.structs.replace(policy, rounds=drains)
    given: dict[str, object] = {
        field: value
        for field in ("source_below", "destination_above", "min_gain")
        if (value := getattr(config, field)) is not None
    }
    rounds = msgspec.structs.replace(policy.rounds, inexact=config.inexact_moves, **given)
    return msgspec.structs.replace(policy, rounds=rounds)
