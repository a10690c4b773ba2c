"""Quotas: of what was granted and what was used never more than the quota, whatever comes when."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvmig.accounts.allowances import Ask, Granted
from kvmig.accounts.keys import KeyGrant, Period
from kvmig.accounts.usage import Spool, UsageRecord
from kvmig.fleet.ledger import merge
from kvmig.fleet.quotas import begins_anew, grant, left, period_of
from kvmig.fleet.store import Store
from tests.fleet_stores import Place

NOON = datetime(2026, 12, 31, 12, tzinfo=UTC).timestamp()
DAY_S = 86400.0


@pytest.fixture
def store(place: Place) -> Iterator[Store]:
    made = place.store()
    made.open()
    yield made
    made.close()


def key(quota: int = 1000, period: Period = "day") -> KeyGrant:
    return KeyGrant(
        key_id="k1", user_id="u1", user="bea", prefix="p", hash=b"", quota=quota, period=period
    )


def asking(seq: int = 1, least: int = 1, want: int = 256, began: float = NOON) -> Ask:
    return Ask(7, "front-1", seq, "k1", began, least, want)


def record(seq: int = 1, **more: Any) -> UsageRecord:
    given: dict[str, Any] = {"seq": seq, "call_id": f"c{seq}", "account": "k1", "model": "a"}
    return UsageRecord(**{**given, "began": NOON, "sequences": 1, **more})


def tokens_left(store: Store, of: KeyGrant, now: float = NOON) -> int:
    return left(store.database, [of], now)["k1"].tokens


def test_calls_get_what_is_left_and_the_last_one_less_than_it_wants(store: Store) -> None:
    given = [grant(store.database, key(600), asking(seq)).tokens for seq in range(3)]
    assert given == [256, 256, 44]
    # Two others may want of the rest, too.
    assert [grant(store.database, key(600), asking(2)).tokens for _ in range(3)] == [32, 12, 0]


def test_a_call_that_needs_more_than_is_left_gets_nothing_and_hears_why(store: Store) -> None:
    granted = grant(store.database, key(100), asking(least=101))

    assert granted == Granted(
        7,
        0,
        "the API key's quota of 100 tokens a day is used up; it begins anew at"
        " 2027-01-01T00:00:00Z",
    )
    assert tokens_left(store, key(100)) == 100


def test_what_an_ended_call_did_not_use_is_left_again(store: Store, tmp_path: Path) -> None:
    grant(store.database, key(), asking())
    spool = tmp_path / "front-1.sqlite"
    Spool(spool).write([record(prompt=10, output=20)])
    merge(store.database, spool)
    assert tokens_left(store, key()) == 1000 - 256

    Spool(spool).write([record(prompt=10, output=25, ended=NOON + 1)])
    merge(store.database, spool)

    assert tokens_left(store, key()) == 1000 - 35


def test_a_call_whose_front_end_was_killed_keeps_its_grant_until_the_period_ends(
    store: Store, tmp_path: Path
) -> None:
    grant(store.database, key(), asking())
    spool = tmp_path / "front-1.sqlite"
    Spool(spool).write([record(prompt=10, output=20)])
    merge(store.database, spool)

    assert tokens_left(store, key()) == 744
    assert tokens_left(store, key(), NOON + DAY_S) == 1000


def test_a_call_counts_for_the_period_in_which_it_began(store: Store) -> None:
    midnight = NOON + DAY_S / 2
    assert grant(store.database, key(), asking(1, began=midnight - 1)).tokens == 256
    assert grant(store.database, key(), asking(2, want=1000, began=midnight)).tokens == 1000
    assert grant(store.database, key(), asking(1, want=1000, began=midnight - 1)).tokens == 744


@pytest.mark.parametrize(
    ("period", "name", "anew"),
    [
        ("day", "2026-12-31", datetime(2027, 1, 1, tzinfo=UTC)),
        ("month", "2026-12", datetime(2027, 1, 1, tzinfo=UTC)),
        ("total", "", None),
    ],
)
def test_periods_are_the_calendars(period: Period, name: str, anew: datetime | None) -> None:
    assert period_of(period, NOON) == name
    assert begins_anew(period, NOON) == (None if anew is None else anew.timestamp())


STEPS = st.lists(
    st.tuples(
        st.sampled_from(("ask", "use", "write", "end", "merge", "die")),
        st.integers(1, 5),
        st.integers(1, 80),
    ),
    max_size=60,
)


@given(steps=STEPS, quota=st.integers(1, 300))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
def test_however_calls_ask_use_end_and_die_they_never_get_more_than_the_quota(
    sqlite_place: Place, tmp_path_factory: pytest.TempPathFactory,
    steps: list[tuple[str, int, int]], quota: int,
) -> None:  # fmt: skip
    folder = tmp_path_factory.mktemp("quota")
    store = Store(f"sqlite:///{folder}/db.sqlite", folder / "pepper")
    store.open()
    spool = folder / "front-1.sqlite"
    granted, used, over = dict.fromkeys(range(1, 6), 0), dict.fromkeys(range(1, 6), 0), set()
    try:
        for step, seq, tokens in steps:
            if step == "merge":
                merge(store.database, spool)
            elif seq in over:
                continue
            elif step == "ask":
                granted[seq] += grant(store.database, key(quota), asking(seq, want=tokens)).tokens
            elif step == "use":
                used[seq] = min(used[seq] + tokens, granted[seq])
            elif step == "die":  # what it used since its last record is written nowhere
                over.add(seq)
            else:
                ended = NOON if step == "end" else None
                Spool(spool).write([record(seq, output=used[seq], ended=ended)])
                over.update([seq] if step == "end" else [])
            assert sum(used.values()) <= quota
    finally:
        store.close()
