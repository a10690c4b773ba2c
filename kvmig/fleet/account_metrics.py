"""The metrics of users and their quotas, bounded in number however many users and keys there are.

Pure. A user who has once been shown stays so: counters of the others would fall otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from kvmig.accounts.keys import KeyGrant, quotas_of
from kvmig.proxy.messages import QuotaLeft

MOST_USERS = 200
"""Users who have counters of their own."""
MOST_QUOTAS = 200
"""Quotas that are shown, those with the smallest part left."""
OTHERS = "(others)"
"""Stands for all other users."""
NEAR_END = 0.1
"""Part of a quota; with less left it is near its end."""


class QuotaUse(NamedTuple):
    """A quota of a key or a user."""

    kind: str
    """key or user."""
    name: str
    """Prefix of the key, or name of the user."""
    model: str
    """Model whose tokens count; empty: all models."""
    period: str
    part_left: float
    """0 to 1."""


def quota_uses(
    grants: Iterable[KeyGrant], left: Mapping[str, QuotaLeft], now: float
) -> list[QuotaUse]:
    """Every quota, once. left: by `AppliedQuota.id`; one that isn't there is whole.

    now: Unix time.
    """
    found: dict[str, QuotaUse] = {}
    for grant in grants:
        for quota in quotas_of(grant):
            if quota.id in found:
                continue
            tokens, known = quota.tokens, left.get(quota.id)
            spare = tokens if known is None else known.now(tokens, now).left
            is_key = quota.whose.id == grant.origin
            found[quota.id] = QuotaUse(
                "key" if is_key else "user",
                grant.prefix if is_key else grant.user,
                quota.model,
                quota.period,
                spare / tokens if tokens > 0 else 0.0,
            )
    return list(found.values())


def of_quotas(uses: Sequence[QuotaUse]) -> list[Metric]:
    """How much of quotas is left."""
    part = GaugeMetricFamily(
        "kvmig_quota_left_ratio",
        f"Part of a quota that is left, 0 to 1, of the {MOST_QUOTAS} with the smallest part.",
        labels=["kind", "name", "model", "period"],
    )
    count = GaugeMetricFamily(
        "kvmig_quotas",
        "Number of quotas: used_up, near_end (less than a tenth is left), or fine.",
        labels=["state"],
    )
    for one in sorted(uses, key=lambda use: (use.part_left, use))[:MOST_QUOTAS]:
        part.add_metric([one.kind, one.name, one.model, one.period], one.part_left)
    used_up = sum(one.part_left <= 0 for one in uses)
    near_end = sum(0 < one.part_left < NEAR_END for one in uses)
    states = {"used_up": used_up, "near_end": near_end, "fine": len(uses) - used_up - near_end}
    for state, number in states.items():
        count.add_metric([state], number)
    return [part, count]


class UserCounters:
    """The users' use of tokens and calls."""

    def __init__(self) -> None:
        self._shown: set[str] = set()

    def metrics(self, sums: Sequence[Mapping[str, Any]]) -> list[Metric]:
        """The counters. sums: of all time by user, the largest first."""
        tokens = CounterMetricFamily(
            "kvmig_user_tokens",
            f"Tokens that were counted, by user; {OTHERS}: those beyond the first {MOST_USERS}.",
            labels=["user", "kind"],
        )
        calls = CounterMetricFamily(
            "kvmig_user_calls", "Calls that were counted, by user.", labels=["user"]
        )
        counted: dict[str, list[int]] = {}
        for one in sums:
            name = self._label(one["user"])
            count = counted.setdefault(name, [0, 0, 0])
            for at, field in enumerate(("calls", "prompt", "output")):
                count[at] += one[field]
        for name, (number, prompt, output) in counted.items():
            calls.add_metric([name], number)
            tokens.add_metric([name, "prompt"], prompt)
            tokens.add_metric([name, "output"], output)
        return [tokens, calls]

    def _label(self, user: str) -> str:
        if user not in self._shown and len(self._shown) >= MOST_USERS:
            return OTHERS
        self._shown.add(user)
        return user
