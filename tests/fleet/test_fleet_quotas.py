"""Quotas: of what was granted and what was used never more than the quota, whatever comes when."""

from __future__ import annotations

from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from sqlalchemy import insert

from kvmig.accounts.allowances import TokenGrant, TokenRequest
from kvmig.accounts.keys import KeyGrant, KeyTerms, ModelQuota, Period, quotas_of
from kvmig.accounts.usage import UsageRecord, UsageSpool
from kvmig.core.errors import ConfigError
from kvmig.fleet import quotas
from kvmig.fleet.ledger import merge
from kvmig.fleet.quotas import (
    begins_anew,
    give_back,
    grant,
    idle_sources,
    left,
    left_of,
    period_of,
    sweep,
)
from kvmig.fleet.store import FleetStore
from kvmig.fleet.tables import grants
from tests.support.examples import examples
from tests.support.fleet_stores import ANNA, Place, database_reads

NOON = datetime(2026, 12, 31, 12, tzinfo=UTC).timestamp()
DAY_S = 86400.0


@pytest.fixture
def store(store: FleetStore) -> FleetStore:
    store.add_user("bea", "user", ANNA)
    return store


def key(store: FleetStore, quota: int | None = 1000, period: Period = "day") -> KeyGrant:
    """A new one of bea's."""
    row, _ = store.create_key("bea", "laptop", KeyTerms(quota=quota, period=period), ANNA)
    return grant_of(store, row.prefix)


def grant_of(store: FleetStore, prefix: str) -> KeyGrant:
    return next(one for one in store.key_changes().granted if one.prefix == prefix)


def asking(
    seq: int = 1, least: int = 1, want: int = 256, began: float = NOON, model: str = "a"
) -> TokenRequest:
    return TokenRequest(7, "front-1", seq, "", began, least, want, model)


def given_to(store: FleetStore, of: KeyGrant, *asked: TokenRequest) -> list[int]:
    """Tokens, of each question."""
    return [grant(store.database, of, one).tokens for one in asked]


def count(
    store: FleetStore, folder: Path, of: KeyGrant, seq: int = 1, *, over: bool = False, **more: Any
) -> None:
    """Bring a call's record into the ledger. over: its front end was killed."""
    spool = folder / "front-1.sqlite"
    UsageSpool(spool).write([record(of, seq, **more)])
    merge(store.database, spool, over=over)


def record(of: KeyGrant, seq: int = 1, **more: Any) -> UsageRecord:
    told: dict[str, Any] = {"seq": seq, "call_id": f"c{seq}", "account": of.key_id, "model": "a"}
    return UsageRecord(**{**told, "began": NOON, "sequences": 1, **more})


def tokens_left(store: FleetStore, of: KeyGrant, now: float = NOON, at: int = 0) -> int:
    """Neither used nor granted, of a key's first quota or another."""
    quota = quotas_of(of)[at]
    with store.database.transaction(reading=True) as connection:
        return left_of(connection, quota, period_of(quota.period, now))


def test_calls_get_what_is_left_and_the_last_one_less_than_it_wants(store: FleetStore) -> None:
    bea = key(store, 600)
    assert given_to(store, bea, *map(asking, range(3))) == [256, 256, 44]
    # Two others may want of the rest, too.
    assert given_to(store, bea, *map(asking, (2, 2, 2))) == [32, 12, 0]


def test_a_call_that_needs_more_than_is_left_gets_nothing_and_hears_why(store: FleetStore) -> None:
    bea = key(store, 100)

    granted = grant(store.database, bea, asking(least=101))

    assert granted == TokenGrant(
        7,
        0,
        "the API key's quota of 100 tokens a day has 100 left, the request needs 101 to begin; it"
        " starts again at 2027-01-01T00:00:00Z",
    )
    assert tokens_left(store, bea) == 100


def test_what_others_have_reserved_is_not_used_up(store: FleetStore, tmp_path: Path) -> None:
    bea = key(store, 300)
    grant(store.database, bea, asking(1))
    count(store, tmp_path, bea, 1, prompt=10, output=20)

    granted = grant(store.database, bea, asking(2, least=100))

    assert granted == TokenGrant(
        7,
        0,
        "270 tokens are left of the API key's quota of 300 tokens a day, reserved by calls that"
        " run: try again",
        again=True,
    )


def test_what_a_killed_front_end_has_left_behind_is_not_said_to_come_back(
    store: FleetStore, tmp_path: Path
) -> None:
    bea = key(store, 256)
    grant(store.database, bea, asking(1))
    count(store, tmp_path, bea, 1, output=20, over=True)
    refused = grant(store.database, bea, asking(2))
    assert not refused.again
    assert "is used up" in refused.why


def test_a_call_that_has_used_its_grant_is_not_told_that_it_has_reserved_it(
    store: FleetStore,
) -> None:
    bea = key(store, 256)
    grant(store.database, bea, asking(1))
    refused = grant(store.database, bea, asking(1))
    assert not refused.again
    assert "is used up" in refused.why


def test_a_call_is_granted_nothing_once_it_is_over(store: FleetStore, tmp_path: Path) -> None:
    """Its question may lie in a socket while its last record is merged."""
    bea = key(store)
    count(store, tmp_path, bea, prompt=10, output=20, ended=NOON)
    assert grant(store.database, bea, asking()) == TokenGrant(7, 0, "the call is over")
    assert tokens_left(store, bea) == 1000 - 30


def test_a_call_of_a_killed_front_end_is_over(store: FleetStore, tmp_path: Path) -> None:
    bea = key(store)
    count(store, tmp_path, bea, 1, output=20, over=True)
    assert grant(store.database, bea, asking()).tokens == 0


def test_what_was_granted_to_ended_calls_is_taken_back_and_nothing_else(
    store: FleetStore, tmp_path: Path
) -> None:
    bea = key(store)
    assert given_to(store, bea, asking(1), asking(2)) == [256, 256]
    count(store, tmp_path, bea, 2, output=20)
    count(store, tmp_path, bea, 3, output=30, ended=NOON)
    row = {"source": "front-1", "seq": 3, "key_id": bea.key_id, "day": "2026-12-31", "tokens": 99}
    with store.database.transaction() as connection:
        connection.execute(insert(grants), [row])
    assert [sweep(store.database) for _ in range(2)] == [1, 0]
    assert grant(store.database, bea, asking(1, least=458, want=1000)).tokens == 1000 - 512 - 30


def test_what_an_ended_call_did_not_use_is_left_again(store: FleetStore, tmp_path: Path) -> None:
    bea = key(store)
    grant(store.database, bea, asking())
    count(store, tmp_path, bea, prompt=10, output=20)
    assert tokens_left(store, bea) == 1000 - 256

    count(store, tmp_path, bea, prompt=10, output=25, ended=NOON + 1)

    assert tokens_left(store, bea) == 1000 - 35


def test_a_call_whose_front_end_was_killed_costs_what_its_spool_has_kept(
    store: FleetStore, tmp_path: Path
) -> None:
    bea = key(store, period="total")
    given_to(store, bea, asking(1), asking(2))  # of the second one nothing was written
    count(store, tmp_path, bea, 1, prompt=10, output=20, over=True)
    assert tokens_left(store, bea) == 1000 - 512

    assert [give_back(store.database, ["front-1"]) for _ in range(2)] == [2, 0]

    assert tokens_left(store, bea) == 1000 - 30


def test_a_front_end_whose_calls_run_is_not_idle_and_one_that_was_killed_is(
    store: FleetStore, tmp_path: Path
) -> None:
    bea = key(store)
    assert idle_sources(store.database) == set()
    grant(store.database, bea, asking(1))
    assert idle_sources(store.database) == {"front-1"}  # as far as the ledger knows
    count(store, tmp_path, bea, 1, output=20)
    assert idle_sources(store.database) == set()
    merge(store.database, tmp_path / "front-1.sqlite", over=True)
    assert idle_sources(store.database) == {"front-1"}


def test_a_call_counts_for_the_period_in_which_it_began(store: FleetStore) -> None:
    bea, midnight = key(store), NOON + DAY_S / 2
    assert given_to(store, bea, asking(1, began=midnight - 1)) == [256]
    assert given_to(store, bea, asking(2, want=1000, began=midnight)) == [1000]
    assert given_to(store, bea, asking(1, want=1000, began=midnight - 1)) == [744]


# -- of a user, and of keys that were rotated


def test_a_users_quota_is_that_of_all_keys_together_whatever_theirs_are(
    store: FleetStore, tmp_path: Path
) -> None:
    row = store.set_user("bea", ANNA, limits={"quota": 500, "period": "month"})
    large, small = key(store, 10_000, "total"), key(store, 300, "day")
    assert given_to(store, large, asking(1)) == [256]
    assert given_to(store, small, asking(2), asking(3)) == [244, 0]
    told = grant(store.database, large, asking(4))
    assert told.why.startswith("500 tokens are left of the user bea's quota of 500 tokens a month,")

    count(store, tmp_path, small, 2, output=4, ended=NOON)

    assert [tokens_left(store, large, at=at) for at in (0, 1)] == [10_000 - 256, 500 - 256 - 4]
    assert tokens_left(store, small) == 300 - 4
    found = left(store.database, [large, small], NOON)
    assert {found[one].tokens for one in (large.origin, small.origin, row.user_id)} == {
        10_000, 300 - 4, 500 - 4,
    }  # fmt: skip


def test_a_key_without_a_quota_is_bound_by_its_users(store: FleetStore) -> None:
    store.set_user("bea", ANNA, limits={"quota": 100})
    assert given_to(store, key(store, None), asking(1), asking(2)) == [100, 0]


def test_a_key_without_any_quota_gets_what_it_wants(store: FleetStore) -> None:
    assert given_to(store, key(store, None), asking(1), asking(2)) == [256, 256]
    assert left(store.database, [key(store, None)], NOON) == {}


def test_a_rotated_key_has_what_was_left_of_the_one_before(
    store: FleetStore, tmp_path: Path
) -> None:
    old = key(store, 1000, "total")
    grant(store.database, old, asking(1))
    count(store, tmp_path, old, 2, output=44, ended=NOON)

    new = grant_of(store, store.rotate_key(old.prefix, ANNA)[0].prefix)
    newest = grant_of(store, store.rotate_key(new.prefix, ANNA)[0].prefix)

    assert tokens_left(store, newest) == 1000 - 256 - 44
    assert given_to(store, newest, asking(3, want=1000)) == [700]


def test_limits_of_a_key_change_with_those_of_the_one_that_it_takes_the_place_of(
    store: FleetStore, place: Place
) -> None:
    old = key(store)
    new = store.rotate_key(old.prefix, ANNA, keep_s=60)[0]

    store.limit_key(new.prefix, {"quota": 77}, ANNA)

    of_old = grant_of(store, old.prefix)
    assert (of_old.quota, of_old.expires) == (77, place.now + 60)
    assert grant_of(store, new.prefix).expires is None


@pytest.mark.parametrize("named", [0, quotas.MOST_NAMED])
def test_what_is_left_of_many_quotas_is_asked_of_the_ledger_once(
    store: FleetStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: int
) -> None:
    monkeypatch.setattr(quotas, "MOST_NAMED", named)
    store.set_user("bea", ANNA, limits={"quota": 10_000, "period": "month"})
    kinds: list[Period] = ["day", "month", "total"]
    keys = [key(store, 1000, kinds[at % 3]) for at in range(30)]
    days = (NOON, NOON - DAY_S, NOON - 40 * DAY_S)
    for at, (of, began) in enumerate(product(keys[:3], days), 1):
        count(store, tmp_path, of, at, prompt=1, output=at, began=began, ended=began)

    with database_reads() as reads:
        found = left(store.database, keys, NOON)

    assert len(reads.of("usage_daily")) == 1
    of_keys = [1000 - found[one.origin].tokens for one in keys]
    assert of_keys == [2, 5 + 6, 8 + 9 + 10, *[0] * 27]
    assert 10_000 - found[keys[0].user_id].tokens == 2 + 3 + 5 + 6 + 8 + 9


# -- of one model


def key_of_models(store: FleetStore, quotas: dict[str, int], quota: int | None = None) -> KeyGrant:
    """A new one of bea's, for models of the catalogue."""
    of_models = {name: ModelQuota(tokens, "day") for name, tokens in quotas.items()}
    terms = KeyTerms(quota=quota, period="day", quotas=of_models)
    return grant_of(store, store.create_key("bea", "", terms, ANNA)[0].prefix)


@pytest.fixture
def models(store: FleetStore, place: Place) -> None:
    for name in ("a", "b"):
        store.add_model(place.spec(name), ANNA)


@pytest.mark.usefixtures("models")
def test_a_quota_of_a_model_binds_calls_to_that_model_alone(store: FleetStore) -> None:
    bea = key_of_models(store, {"a": 100})
    assert given_to(store, bea, asking(1), asking(2, model="b"), asking(3)) == [100, 256, 0]
    told = grant(store.database, bea, asking(4))
    assert "the API key's quota of 100 tokens a day for model a, reserved" in told.why


@pytest.mark.usefixtures("models")
def test_a_call_is_within_the_quota_of_its_model_and_within_that_of_all(
    store: FleetStore, tmp_path: Path
) -> None:
    bea = key_of_models(store, {"a": 200, "b": 200}, 300)
    asked = asking(1), asking(2, model="b"), asking(3), asking(4, model="b")
    assert given_to(store, bea, *asked) == [200, 100, 0, 0]
    count(store, tmp_path, bea, 1, output=150, ended=NOON)
    assert [quota.id for quota in quotas_of(bea)] == [
        bea.origin,
        f"{bea.origin} a",
        f"{bea.origin} b",
    ]
    assert [tokens_left(store, bea, at=at) for at in range(3)] == [50, 50, 100]
    found = left(store.database, [bea], NOON)
    assert [one.tokens for one in found.values()] == [150, 50, 200]


@pytest.mark.usefixtures("models")
def test_a_users_quota_of_a_model_is_shared_by_all_keys(store: FleetStore, tmp_path: Path) -> None:
    row = store.set_user("bea", ANNA, limits={"quotas": {"a": {"tokens": 300, "period": "total"}}})
    keys = [key(store, None) for _ in range(2)]
    assert [given_to(store, one, asking(n))[0] for n, one in enumerate(keys, 1)] == [256, 44]
    for seq, of, tokens in zip((1, 2), keys, (256, 44), strict=True):
        count(store, tmp_path, of, seq, output=tokens, ended=NOON)
    assert left(store.database, keys, NOON)[f"{row.user_id} a"].tokens == 0
    assert grant(store.database, keys[0], asking(9)).why == (
        "the user bea's quota of 300 tokens in all for model a is used up"
    )


@pytest.mark.usefixtures("models")
def test_quotas_of_models_change_one_by_one(store: FleetStore) -> None:
    bea = key_of_models(store, {"a": 100, "b": 200})
    store.limit_key(bea.prefix, {"quotas": {"a": None, "b": {"tokens": 7}}}, ANNA)
    assert grant_of(store, bea.prefix).quotas == {"b": ModelQuota(7, "month")}


@pytest.mark.usefixtures("models")
def test_a_quota_of_a_model_that_is_not_there_is_refused_and_changes_nothing(
    store: FleetStore,
) -> None:
    bea = key_of_models(store, {"a": 100})
    sentence = "quotas: 'c' is no model, must be one of the catalogue"
    with pytest.raises(ConfigError, match=sentence):
        store.limit_key(bea.prefix, {"quotas": {"a": None, "c": {"tokens": 7}}}, ANNA)
    with pytest.raises(ConfigError, match=sentence):
        key_of_models(store, {"c": 1})
    with pytest.raises(ConfigError, match=sentence):
        store.set_user("bea", ANNA, limits={"quotas": {"c": {"tokens": 7}}})
    assert grant_of(store, bea.prefix).quotas == {"a": ModelQuota(100, "day")}


@pytest.mark.usefixtures("models")
def test_a_quota_of_a_model_that_is_gone_can_be_taken_away(store: FleetStore) -> None:
    bea = key_of_models(store, {"a": 100})
    store.remove_model("a", ANNA)
    store.limit_key(bea.prefix, {"rpm": 5}, ANNA)
    store.limit_key(bea.prefix, {"quotas": {"a": None}}, ANNA)
    assert grant_of(store, bea.prefix).quotas == {}


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


@given(steps=STEPS, quota=st.integers(1, 300), of_user=st.integers(1, 300))
@examples(40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_however_calls_of_two_keys_ask_use_end_and_die_they_never_get_more_than_the_quotas(
    sqlite_place: Place, tmp_path_factory: pytest.TempPathFactory,
    steps: list[tuple[str, int, int]], quota: int, of_user: int,
) -> None:  # fmt: skip
    folder = tmp_path_factory.mktemp("quota")
    store = FleetStore(f"sqlite:///{folder}/db.sqlite", folder / "pepper")
    store.open()
    store.add_user("bea", "user", ANNA)
    store.set_user("bea", ANNA, limits={"quota": of_user})
    grants = [grant_of(store, key(store, quota).prefix) for _ in range(2)]
    spool = folder / "front-1.sqlite"
    granted, used, over = dict.fromkeys(range(1, 6), 0), dict.fromkeys(range(1, 6), 0), set()
    try:
        for step, seq, tokens in steps:
            of = grants[seq % 2]
            if step == "merge":
                merge(store.database, spool)
            elif seq in over:
                continue
            elif step == "ask":
                granted[seq] += grant(store.database, of, asking(seq, want=tokens)).tokens
            elif step == "use":
                used[seq] = min(used[seq] + tokens, granted[seq])
            elif step == "die":  # what it used since its last record is written nowhere
                over.add(seq)
            else:
                ended = NOON if step == "end" else None
                UsageSpool(spool).write([record(of, seq, output=used[seq], ended=ended)])
                over.update([seq] if step == "end" else [])
            assert sum(used.values()) <= of_user
            assert max(used[1] + used[3] + used[5], used[2] + used[4]) <= quota
    finally:
        store.close()
