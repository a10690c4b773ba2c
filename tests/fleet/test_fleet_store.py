"""The catalogue and the accounts: each order is whole, and has its row in the audit."""

from __future__ import annotations

import json
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from sqlalchemy import delete, text, update

from kvmig.accounts.keys import EXPIRED_S, KeyIndex, KeyTerms
from kvmig.core.errors import ConfigError
from kvmig.fleet.account_lists import ListWindow
from kvmig.fleet.based_on import limits_of_key, values_of_user
from kvmig.fleet.spec import FleetFile
from kvmig.fleet.store import FleetStore, KeyRow, NameTaken, NotThere, OrderActor
from kvmig.fleet.tables import StoreError, api_keys, audit, revisions, rollouts
from tests.support.fleet_stores import ANNA, Place, database_reads

# -- models


def test_a_model_is_as_it_was_added(store: FleetStore, place: Place) -> None:
    spec = place.spec(flags="--dtype float32", instances={"max": 3}, aliases=["q"])
    added = store.add_model(spec, ANNA)
    assert (added.spec, added.revision, added.on, added.author) == (spec, 1, True, "anna")
    assert store.models() == [added] == [store.model("qwen")]


def test_a_model_is_there_after_the_next_start(store: FleetStore, place: Place) -> None:
    added = store.add_model(place.spec(), ANNA)
    store.close()
    store.open()
    assert store.models() == [added]


def test_a_model_is_added_once(store: FleetStore, place: Place) -> None:
    store.add_model(place.spec(), ANNA)
    with pytest.raises(NameTaken, match="a model 'qwen' is there already"):
        store.add_model(place.spec(max_held=3), ANNA)
    assert store.model("qwen").spec.max_held == 1000


def test_a_revision_is_made_where_the_spec_differs_only(store: FleetStore, place: Place) -> None:
    store.add_model(place.spec(), ANNA)
    store.apply(FleetFile((place.spec(),)), ANNA)
    assert store.model("qwen").revision == 1
    store.apply(FleetFile((place.spec(max_held=5),)), OrderActor("bea"))
    newest, first = store.revisions("qwen")
    assert (newest.revision, newest.spec.max_held, newest.author) == (2, 5, "bea")
    assert (first.revision, first.spec.max_held, first.author) == (1, 1000, "anna")


def test_scaling_is_a_revision(store: FleetStore, place: Place) -> None:
    store.add_model(place.spec(), ANNA)
    scaled = store.scale("qwen", ANNA, least=1, most=4)
    assert (scaled.revision, scaled.spec.instances.min, scaled.spec.instances.max) == (2, 1, 4)


def test_wrong_bounds_change_nothing(store: FleetStore, place: Place) -> None:
    added = store.add_model(place.spec(), ANNA)
    version = store.version()
    with pytest.raises(ConfigError, match="max is 1, must be 2 or more"):
        store.scale("qwen", ANNA, least=2)
    assert (store.model("qwen"), store.version()) == (added, version)


def test_a_model_is_switched_off_and_on(store: FleetStore, place: Place) -> None:
    store.add_model(place.spec(), ANNA)
    assert not store.switch("qwen", ANNA, on=False).on
    assert not store.model("qwen").on
    assert store.switch("qwen", ANNA, on=True) == store.model("qwen")
    assert [row.action for row in store.audit()] == ["model.switch", "model.switch", "model.add"]


def test_a_model_that_is_removed_is_gone_with_its_revisions(
    store: FleetStore, place: Place
) -> None:
    store.add_model(place.spec(), ANNA)
    store.scale("qwen", ANNA, most=3)
    store.remove_model("qwen", ANNA)
    assert store.models() == []
    assert store.add_model(place.spec(), ANNA).revision == 1


@pytest.mark.parametrize("order", ["model", "revisions", "scale", "switch", "remove_model"])
def test_what_is_not_there_is_named(store: FleetStore, order: str) -> None:
    arguments = {"scale": (ANNA,), "switch": (ANNA,), "remove_model": (ANNA,)}.get(order, ())
    more = {"on": True} if order == "switch" else {}
    with pytest.raises(NotThere, match="no model 'nowhere'"):
        getattr(store, order)("nowhere", *arguments, **more)


def test_a_model_that_an_alias_stands_for_stays(store: FleetStore, place: Place) -> None:
    store.add_model(place.spec(), ANNA)
    store.set_alias("best", {"qwen": 1}, ANNA)
    with pytest.raises(NameTaken, match="alias best stands for model qwen"):
        store.remove_model("qwen", ANNA)
    store.set_alias("best", {}, ANNA)
    store.remove_model("qwen", ANNA)


def test_an_alias_has_no_models_name(store: FleetStore, place: Place) -> None:
    store.add_model(place.spec(), ANNA)
    with pytest.raises(ConfigError, match=r"aliases\.qwen: that is name of model qwen already"):
        store.set_alias("qwen", {"qwen": 1}, ANNA)
    assert store.fleet().aliases == {}


# -- a whole file


def test_a_file_is_applied_whole(store: FleetStore, place: Place) -> None:
    store.add_model(place.spec("old"), ANNA)
    store.add_model(place.spec("qwen"), ANNA)
    given = FleetFile(
        (place.spec("qwen", max_held=3), place.spec("new")), {"best": {"qwen": 90, "new": 10}}
    )
    found = store.apply(given, ANNA)
    assert [(one.action, one.kind, one.name) for one in found] == [
        ("add", "model", "new"),
        ("change", "model", "qwen"),
        ("add", "alias", "best"),
    ]
    assert [one.name for one in store.models()] == ["new", "old", "qwen"]
    assert store.fleet().aliases == given.aliases


def test_a_file_that_is_there_changes_nothing(store: FleetStore, place: Place) -> None:
    given = FleetFile((place.spec(),), {"best": {"qwen": 1}})
    store.apply(given, ANNA)
    version = store.version()
    assert store.apply(given, ANNA) == []
    assert store.version() == version


def test_a_dry_run_says_what_would_change_and_changes_nothing(
    store: FleetStore, place: Place
) -> None:
    given = FleetFile((place.spec(),))
    found = store.apply(given, ANNA, dry_run=True)
    assert store.models() == []
    assert store.apply(given, ANNA) == found


def test_pruning_removes_what_the_file_does_not_name(store: FleetStore, place: Place) -> None:
    store.apply(FleetFile((place.spec("a"), place.spec("b")), {"x": {"a": 1, "b": 1}}), ANNA)
    found = store.apply(FleetFile((place.spec("b"),), {"y": {"b": 1}}), ANNA, prune=True)
    assert [(one.action, one.name) for one in found] == [
        ("remove", "a"), ("remove", "x"), ("add", "y"),
    ]  # fmt: skip
    assert store.fleet() == FleetFile((place.spec("b"),), {"y": {"b": 1}})


def test_a_model_may_take_the_name_of_an_alias_that_goes(store: FleetStore, place: Place) -> None:
    store.apply(FleetFile((place.spec("a"),), {"b": {"a": 1}}), ANNA)
    store.apply(FleetFile((place.spec("b"),), {"a": {"b": 1}}), ANNA, prune=True)
    assert store.fleet() == FleetFile((place.spec("b"),), {"a": {"b": 1}})


# -- users and keys


def beas(store: FleetStore, **terms: Any) -> tuple[KeyRow, str]:
    """A key of a new user's, bea, and what she is shown."""
    store.add_user("bea", "user", ANNA)
    return store.create_key("bea", "laptop", KeyTerms(**terms), ANNA)


@pytest.mark.parametrize(
    "wrong",
    [
        {"name": 7},
        [],
        {"name": "qwen", "engine": "of tomorrow"},
        {"name": "qwen", "source": "of-tomorrow:org/name"},
    ],
)
def test_a_model_that_cannot_be_read_is_named_and_the_others_are_there(
    wrong: object, store: FleetStore, place: Place
) -> None:
    for name in ("one", "two"):
        store.add_model(place.spec(name), ANNA)
    store.add_model(place.spec("bad"), ANNA)
    ids = {one.name: one.model_id for one in store.models()}
    with store.database.transaction() as connection:
        bad = update(revisions).where(revisions.c.model_id == ids["bad"])
        connection.execute(bad.values(spec=wrong))
    rows, _, _ = store.catalogue()
    assert [one.name for one in rows] == ["one", "two"]
    assert [one.name for one in store.models()] == ["one", "two"]
    assert store.set_aside.count == {"model": 1}
    with pytest.raises(StoreError, match="bad"):
        store.model("bad")


def test_orders_about_others_are_carried_out_beside_a_model_that_cannot_be_read(
    store: FleetStore, place: Place
) -> None:
    store.add_model(place.spec("bad"), ANNA)
    (bad,) = store.models()
    with store.database.transaction() as connection:
        row = update(revisions).where(revisions.c.model_id == bad.model_id)
        connection.execute(row.values(spec={"name": 7}))
    store.add_model(place.spec("one"), ANNA)
    store.set_alias("first", {"one": 1}, ANNA)
    store.scale("one", ANNA, most=3)
    assert [one.name for one in store.fleet().models] == ["one"]
    store.remove_model("bad", ANNA)
    store.add_model(place.spec("bad"), ANNA)
    assert [(one.name, one.revision) for one in store.models()] == [("bad", 1), ("one", 2)]


def test_a_roll_out_that_cannot_be_read_is_set_aside_and_its_model_is_there(
    store: FleetStore, place: Place
) -> None:
    store.add_model(place.spec("one"), ANNA)
    other = replace(place.spec("one"), flags=("--max-model-len=64",))
    store.apply(FleetFile((other,)), ANNA)
    assert len(store.catalogue()[2]) == 1
    with store.database.transaction() as connection:
        connection.execute(update(rollouts).values(state="of tomorrow"))
    rows, _, found = store.catalogue()
    assert [one.name for one in rows] == ["one"]
    assert found == {}
    assert store.set_aside.count == {"roll-out": 1}
    store.apply(FleetFile((replace(other, flags=("--max-model-len=32",)),)), ANNA)
    assert len(store.catalogue()[2]) == 1


def test_a_key_that_cannot_be_read_lets_nobody_in_and_the_others_do(store: FleetStore) -> None:
    store.add_user("bea", "user", ANNA)
    keys = [store.create_key("bea", name, KeyTerms(), ANNA)[0] for name in ("one", "bad")]
    with store.database.transaction() as connection:
        bad = update(api_keys).where(api_keys.c.id == keys[1].key_id)
        connection.execute(bad.values(terms={"scopes": "of tomorrow"}))
    changes = store.key_changes()
    assert keys[0].prefix in [one.prefix for one in changes.granted]
    assert changes.revoked == (keys[1].prefix,)
    listed = [one.prefix for one in store.keys("bea")]
    assert listed == [keys[0].prefix]
    assert store.set_aside.count == {"key": 1}


def test_a_column_of_json_that_has_none_is_as_any_row_that_cannot_be_read(
    store: FleetStore, place: Place
) -> None:
    if store.database.path is None:
        pytest.skip("PostgreSQL keeps JSON only")
    store.add_model(place.spec("one"), ANNA)
    store.add_model(place.spec("two"), ANNA)
    with store.database.transaction() as connection:
        cut = "UPDATE revisions SET spec = substr(spec, 1, 9) WHERE spec LIKE '%two%'"
        connection.exec_driver_sql(cut)
    assert [one.name for one in store.models()] == ["one"]


def test_the_first_start_has_an_admin_key_once(store: FleetStore) -> None:
    shown = store.first_admin_key()
    assert shown is not None
    granted = KeyIndex(store.pepper, store.key_changes().granted).find(shown)
    assert granted is not None
    assert (granted.user, granted.scopes) == ("admin", ("infer", "read", "admin"))
    assert store.first_admin_key() is None


def test_a_key_is_granted_as_it_was_made(store: FleetStore, place: Place) -> None:
    store.add_model(place.spec(), ANNA)
    store.add_user("bea", "user", ANNA)
    terms = KeyTerms(
        models=("qwen",), cidrs=("10.0.0.0/8",), classes=("low",), expires=2e6, rpm=1, tpm=2,
        parallel=3,
    )  # fmt: skip
    row, shown = store.create_key("bea", "laptop", terms, ANNA)
    granted = KeyIndex(store.pepper, store.key_changes().granted).find(shown)
    assert granted is not None
    assert (granted.models, granted.cidrs, granted.expires) == (terms.models, terms.cidrs, 2e6)
    assert (granted.rpm, granted.tpm, granted.parallel, granted.user) == (1, 2, 3, "bea")
    assert granted.classes == ("low",)
    assert store.keys("bea") == [row]
    assert row.terms == terms


def test_a_key_of_before_there_were_classes_may_use_all(store: FleetStore) -> None:
    row, _ = beas(store)
    with store.database.transaction() as connection:
        terms = {"scopes": ["infer"]}
        connection.execute(
            update(api_keys).where(api_keys.c.prefix == row.prefix).values(terms=terms)
        )
    (granted,) = store.key_changes().granted
    assert (granted.scopes, granted.classes) == (("infer",), None)


def test_no_secret_is_kept(store: FleetStore) -> None:
    _, shown = beas(store)
    secret = shown.split("-", 2)[2]  # which may hold dashes
    with store.database.transaction(reading=True) as connection:
        for table in ("api_keys", "audit", "users", "meta"):
            rows = connection.execute(text(f"SELECT * FROM {table}")).all()
            assert secret not in repr(rows)
    assert secret not in repr(store.keys()) + repr(store.key_changes())


def test_a_revoked_key_is_told_as_a_change(store: FleetStore, place: Place) -> None:
    row, _ = beas(store)
    known = store.key_changes()
    assert [one.prefix for one in known.granted] == [row.prefix]
    place.now += 5
    assert store.revoke_key(row.prefix, ANNA).revoked_at == place.now
    told = store.key_changes(known.version)
    assert (told.granted, told.revoked) == ((), (row.prefix,))
    assert store.key_changes(told.version) == (told.version, (), ())
    with pytest.raises(NotThere, match="has been revoked"):
        store.revoke_key(row.prefix, ANNA)


def test_rotation_makes_a_new_key_and_ends_the_old(store: FleetStore) -> None:
    old, _ = beas(store, rpm=7)
    new, _ = store.rotate_key(old.prefix, ANNA)
    assert (new.terms, new.name, new.user) == (old.terms, "laptop", "bea")
    assert [one.prefix for one in store.key_changes().granted] == [new.prefix]


def test_a_rotated_key_may_live_a_while(store: FleetStore, place: Place) -> None:
    old, _ = beas(store)
    new, _ = store.rotate_key(old.prefix, ANNA, keep_s=60)
    ends = {one.prefix: one.expires for one in store.key_changes().granted}
    assert ends == {old.prefix: place.now + 60, new.prefix: None}


def test_a_key_that_expired_a_day_ago_is_known_to_nobody(store: FleetStore, place: Place) -> None:
    """People who log in get a new key each day."""
    row, _ = beas(store, expires=place.now + 60)
    place.now += 60 + EXPIRED_S - 1
    assert [one.prefix for one in store.key_changes().granted] == [row.prefix]
    place.now += 1
    told = store.key_changes()
    assert (told.granted, told.revoked) == ((), (row.prefix,))
    assert store.keys("bea") == [row]


def test_an_expired_key_is_not_rotated(store: FleetStore, place: Place) -> None:
    old, _ = beas(store, expires=place.now + 1)
    place.now += 2
    with pytest.raises(ConfigError, match="expires is 1000001, must be a Unix time to come"):
        store.rotate_key(old.prefix, ANNA)
    assert len(store.keys()) == 1


def test_a_user_who_is_disabled_has_no_keys_until_enabled(store: FleetStore) -> None:
    store.first_admin_key()
    row, _ = beas(store)
    version = store.key_changes().version
    store.set_user("bea", ANNA, disabled=True)
    assert store.key_changes(version).revoked == (row.prefix,)
    store.set_user("bea", ANNA, disabled=False)
    assert [one.prefix for one in store.key_changes(version).granted] == [row.prefix]


def test_a_users_key_has_no_admins_scope(store: FleetStore) -> None:
    store.add_user("bea", "user", ANNA)
    with pytest.raises(ConfigError, match="scopes has admin, bea is no admin"):
        store.create_key("bea", "laptop", KeyTerms(scopes=("admin",)), ANNA)


def test_who_is_no_admin_any_more_has_no_admins_keys(store: FleetStore) -> None:
    store.first_admin_key()
    store.add_user("bea", "admin", ANNA)
    row, _ = store.create_key("bea", "x", KeyTerms(scopes=("infer", "admin")), ANNA)
    store.set_user("bea", ANNA, role="user")
    scopes = {one.prefix: one.scopes for one in store.key_changes().granted}
    assert scopes[row.prefix] == ("infer",)


def test_what_an_order_about_one_user_or_key_is_compared_with_is_read_without_the_others(
    sqlite_place: Place,
) -> None:
    store = sqlite_place.store()
    store.open()
    for name in ("bea", *(f"bea-{at}" for at in range(20))):
        store.add_user(name, "user", ANNA)
    row, _ = store.create_key("bea", "x", KeyTerms(rpm=7), ANNA)
    for _ in range(20):
        store.create_key("bea", row.prefix, KeyTerms(), ANNA)
    with database_reads() as reads:
        assert values_of_user(store, "bea", ["role"]) == {"role": "user"}
        assert (limits_of_key(store, row.prefix) or {})["rpm"] == 7
        assert values_of_user(store, "nobody", ["role"]) is None
        assert limits_of_key(store, "nothing") is None
    assert len(reads.rows) == 2
    store.close()


@pytest.mark.parametrize("change", [{"role": "user"}, {"disabled": True}])
def test_one_admin_remains(store: FleetStore, change: dict[str, str | bool]) -> None:
    store.first_admin_key()
    with pytest.raises(ConfigError, match="admin is the only admin"):
        store.set_user("admin", ANNA, **change)  # type: ignore[arg-type]
    assert store.find_users(ListWindow()).rows[0].role == "admin"
    assert not store.find_users(ListWindow()).rows[0].disabled


@pytest.mark.parametrize(
    ("name", "role", "sentence"),
    [
        ("be a", "user", "name is 'be a', must be"),
        ("bea", "root", "role is 'root', must be admin or"),
    ],
)
def test_a_user_is_checked(store: FleetStore, name: str, role: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        store.add_user(name, role, ANNA)
    assert store.find_users(ListWindow()).rows == []


def test_users_and_keys_that_are_not_there_are_named(store: FleetStore) -> None:
    with pytest.raises(NotThere, match="no user 'bea'"):
        store.create_key("bea", "laptop", KeyTerms(), ANNA)
    with pytest.raises(NotThere, match="no key 'abcdefgh'"):
        store.revoke_key("abcdefgh", ANNA)


ODD = ["\0", "\ud800", "a\nb", "x" * 10_000, "' OR 1=1 --"]


@pytest.mark.parametrize("name", ODD)
def test_names_that_no_database_takes_are_as_all_others_that_are_not_there(
    store: FleetStore, name: str
) -> None:
    with pytest.raises(NotThere, match="no model"):
        store.model(name)
    with pytest.raises(NotThere, match="no user"):
        store.set_user(name, ANNA, role="user")
    with pytest.raises(NotThere, match="no key"):
        store.rotate_key(name, ANNA)
    with pytest.raises(NotThere, match="no alias"):
        store.set_alias(name, {}, ANNA)


@pytest.mark.parametrize("name", ["\0", "\ud800", "a\nb", "x" * 129])
def test_a_keys_name_is_printable(store: FleetStore, name: str) -> None:
    store.add_user("bea", "user", ANNA)
    with pytest.raises(ConfigError, match="must be at most 128 printable characters"):
        store.create_key("bea", name, KeyTerms(), ANNA)


# -- the audit


def test_a_change_says_who_made_it_and_what_was_there(store: FleetStore, place: Place) -> None:
    store.add_model(place.spec(), ANNA)
    store.scale("qwen", OrderActor("bea", "10.0.0.2"), most=3)
    row = store.audit(limit=1)[0]
    assert (row.at, row.actor, row.address) == (place.now, "bea", "10.0.0.2")
    assert (row.action, row.object) == ("model.change", "qwen")
    assert (row.before["instances"]["max"], row.after["instances"]["max"]) == (1, 3)


def test_the_audit_is_read_page_by_page(store: FleetStore, place: Place) -> None:
    for name in ("a", "b", "c"):
        store.add_model(place.spec(name), ANNA)
    newest = store.audit(limit=2)
    assert [row.object for row in newest] == ["c", "b"]
    assert [row.object for row in store.audit(before=newest[-1].id)] == ["a"]


@pytest.mark.parametrize("statement", [delete(audit), update(audit).values(actor="nobody")])
def test_the_audit_is_never_changed(store: FleetStore, place: Place, statement: object) -> None:
    store.add_model(place.spec(), ANNA)
    rows = store.audit()
    with (
        pytest.raises(StoreError, match="rows of audit are never changed"),
        store.database.transaction() as connection,
    ):
        connection.execute(statement)  # type: ignore[call-overload]
    assert store.audit() == rows


def test_the_audits_rows_are_not_replaced_nor_all_removed(store: FleetStore, place: Place) -> None:
    store.add_model(place.spec(), ANNA)
    rows = store.audit()
    if store.database.path is None:
        statement = "TRUNCATE audit"
    else:
        statement = f"INSERT OR REPLACE INTO audit VALUES ({rows[0].id}, 0, '', '', '', '', '', '')"
    with (
        pytest.raises(StoreError, match="rows of audit are never changed"),
        store.database.transaction() as connection,
    ):
        connection.execute(text(statement))
    assert store.audit() == rows


NAMES = st.sampled_from(["a", "b", "c"])
ORDERS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), NAMES, st.integers(1, 3)),
        st.tuples(st.just("scale"), NAMES, st.integers(0, 3)),
        st.tuples(st.just("remove"), NAMES),
        st.tuples(st.just("alias"), NAMES, st.dictionaries(NAMES, st.integers(1, 9))),
        st.tuples(st.just("apply"), st.lists(NAMES, unique=True), st.booleans()),
    ),
    max_size=12,
)


@given(ORDERS)
def test_the_audit_tells_the_whole_story(orders: list[tuple[Any, ...]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        place = Place(f"sqlite:///{folder}/fleet.sqlite", Path(folder))
        store = place.store()
        store.open()
        for order in orders:
            with suppress(NotThere, NameTaken, ConfigError):
                give(store, place, *order)
        told: dict[tuple[str, str], Any] = {}
        for row in reversed(store.audit(limit=1000)):
            kind = row.action.partition(".")[0]
            assert told.pop((kind, row.object), None) == row.before
            if row.after is not None:
                told[kind, row.object] = row.after
        fleet = store.fleet()
        assert told == {
            **{("model", one.name): json.loads(msgspec.json.encode(one)) for one in fleet.models},
            **{("alias", name): to for name, to in fleet.aliases.items()},
        }
        store.close()


def give(store: FleetStore, place: Place, order: str, name: Any, value: Any = None) -> None:
    match order:
        case "add":
            store.add_model(place.spec(name, instances={"max": value}), ANNA)
        case "scale":
            store.scale(name, ANNA, most=value)
        case "remove":
            store.remove_model(name, ANNA)
        case "alias":
            store.set_alias(f"x{name}", value, ANNA)
        case "apply":
            store.apply(FleetFile(tuple(place.spec(one) for one in name)), ANNA, prune=value)
