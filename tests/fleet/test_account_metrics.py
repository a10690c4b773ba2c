"""Metrics of users and quotas, however many there are."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.core import Metric

from kvmig.accounts.keys import AccountLimits, KeyGrant, ModelQuota
from kvmig.fleet.account_metrics import (
    MOST_QUOTAS,
    MOST_USERS,
    OTHERS,
    QuotaUse,
    UserCounters,
    of_quotas,
    quota_uses,
)
from kvmig.proxy.messages import QuotaLeft

NOW = 1000.0


def grant(name: str, user: str = "bea", **terms: Any) -> KeyGrant:
    return KeyGrant(
        key_id=name, origin=name, user_id=f"u-{user}", user=user, prefix=name, hash=b"", **terms
    )


def used(user: str, output: int) -> dict[str, Any]:
    return {"user": user, "calls": 1, "prompt": 2 * output, "output": output}


def values(metrics: Iterable[Metric], name: str, *labels: str) -> dict[tuple[str, ...], float]:
    (found,) = [one for one in metrics if one.name == name]
    return {tuple(one.labels[each] for each in labels): one.value for one in found.samples}


def test_a_user_has_tokens_and_calls() -> None:
    found = UserCounters().metrics([used("bea", 5), used("al", 3)])
    assert values(found, "kvmig_user_tokens", "user", "kind") == {
        ("bea", "prompt"): 10, ("bea", "output"): 5, ("al", "prompt"): 6, ("al", "output"): 3,
    }  # fmt: skip
    assert values(found, "kvmig_user_calls", "user") == {("bea",): 1, ("al",): 1}


def test_users_beyond_the_most_are_counted_together() -> None:
    users = [used(f"u{at}", 1) for at in range(MOST_USERS + 5)]
    found = values(UserCounters().metrics(users), "kvmig_user_calls", "user")
    assert len(found) == MOST_USERS + 1
    assert found[OTHERS,] == 5


@given(
    st.lists(st.lists(st.tuples(st.integers(0, 300), st.integers(1, 9)), max_size=40), max_size=8)
)
def test_no_counter_of_a_user_ever_falls(steps: list[list[tuple[int, int]]]) -> None:
    counters, totals = UserCounters(), dict.fromkeys(range(230), 1)
    before: dict[tuple[str, ...], float] = {}
    for step in steps:
        for user, more in step:
            totals[user] = totals.get(user, 0) + more
        largest = sorted(totals.items(), key=lambda one: -one[1])
        sums = [used(f"u{user}", output) for user, output in largest]
        now = values(counters.metrics(sums), "kvmig_user_tokens", "user", "kind")
        assert all(now[one] >= value for one, value in before.items())
        assert sum(now.values()) == 3 * sum(totals.values())
        before = now


def test_quotas_of_keys_users_and_models_have_the_part_that_is_left() -> None:
    key = grant("key1", quota=100, quotas={"m": ModelQuota(50, "day")})
    whole = grant("key2", user_limits=AccountLimits(quota=1000, period="total"))
    left = {"key1": QuotaLeft(25, None), "key1 m": QuotaLeft(-5, None)}
    assert quota_uses([key, whole], left, NOW) == [
        QuotaUse("key", "key1", "", "month", 0.25),
        QuotaUse("key", "key1", "m", "day", 0.0),
        QuotaUse("user", "bea", "", "total", 1.0),
    ]


def test_a_users_quota_is_one_however_many_keys_the_user_has() -> None:
    limits = AccountLimits(quota=10)
    keys = [grant(f"key{at}", user_limits=limits) for at in range(3)]
    assert len(quota_uses(keys, {}, NOW)) == 1


def test_a_quota_whose_period_is_over_is_whole_again() -> None:
    key = grant("key1", quota=100)
    (use,) = quota_uses([key], {"key1": QuotaLeft(0, NOW - 1)}, NOW)
    assert use.part_left == 1.0


def test_of_many_quotas_those_nearest_to_their_end_are_shown_and_all_are_counted() -> None:
    uses = [QuotaUse("key", f"k{at}", "", "month", at / 1000) for at in range(1001)]
    found = of_quotas(uses)
    shown = values(found, "kvmig_quota_left_ratio", "name")
    assert len(shown) == MOST_QUOTAS
    assert max(shown.values()) < 0.2
    states = values(found, "kvmig_quotas", "state")
    assert states == {("used_up",): 1, ("near_end",): 99, ("fine",): 901}
