"""Keys of the API: who is let in, and who hears why not."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmig.accounts.keys import (
    FORM,
    KeyDenied,
    KeyGrant,
    KeyIndex,
    KeyTerms,
    ModelQuota,
    NewKey,
    allows,
    check_terms,
    new_key,
    parse_key,
)
from kvmig.core.errors import ConfigError

PEPPER = bytes(range(32))
NOW = 1000.0
HERE = "10.0.0.1"


def granted(made: NewKey | None = None, **terms: Any) -> KeyGrant:
    made = made or new_key(PEPPER)
    return KeyGrant(
        key_id="k", origin="k", user_id="u", user="bea", prefix=made.prefix, hash=made.hash, **terms
    )


def status(denied: KeyDenied | None) -> int:
    return 200 if denied is None else denied.status


# -- which key it is


def test_a_key_is_found_by_what_its_user_was_shown() -> None:
    made = new_key(PEPPER)
    grant = granted(made)
    assert KeyIndex(PEPPER, [granted(), grant, granted()]).find(made.shown) is grant


def test_two_keys_differ() -> None:
    assert len({new_key(PEPPER).shown for _ in range(100)}) == 100


def test_a_key_has_the_form_that_is_promised() -> None:
    made = new_key(PEPPER)
    assert FORM.fullmatch(made.shown)
    assert len(made.shown) == len("kv-") + 8 + 1 + 43
    assert parse_key(made.shown) == (made.prefix, made.shown[12:])


@given(st.integers(0, 42), st.sampled_from("ABCabc019_-"))
def test_another_secret_is_refused(where: int, other: str) -> None:
    made = new_key(PEPPER)
    at = len(made.shown) - 43 + where
    changed = made.shown[:at] + other + made.shown[at + 1 :]
    found = KeyIndex(PEPPER, [granted(made)]).find(changed)
    assert (found is None) == (changed != made.shown)


def test_another_keys_secret_is_refused() -> None:
    one, two = new_key(PEPPER), new_key(PEPPER)
    mixed = one.shown[:12] + two.shown[12:]
    assert KeyIndex(PEPPER, [granted(one), granted(two)]).find(mixed) is None


def test_under_another_pepper_no_key_is_good() -> None:
    made = new_key(PEPPER)
    assert KeyIndex(bytes(32), [granted(made)]).find(made.shown) is None


def test_an_unknown_key_is_none() -> None:
    assert KeyIndex(PEPPER).find(new_key(PEPPER).shown) is None


@given(st.text() | st.from_regex(r"kv-.{8}-.{43}"))
def test_any_text_may_be_presented(presented: str) -> None:
    assert KeyIndex(PEPPER, [granted()]).find(presented) is None
    parts = parse_key(presented)
    assert parts is None or "kv-{}-{}".format(*parts) == presented


def test_keys_come_and_go() -> None:
    made, stays = new_key(PEPPER), granted()
    keys = KeyIndex(PEPPER, [stays])
    keys.update([granted(made)])
    assert len(keys) == 2
    keys.update([], [made.prefix, "unknown0"])
    assert keys.find(made.shown) is None
    assert len(keys) == 1


def test_a_grant_is_the_same_after_a_message() -> None:
    grant = granted(models=("a",), cidrs=("10.0.0.0/8",), expires=5.0, rpm=1)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(grant), type=KeyGrant) == grant


# -- what it allows


def test_a_key_without_terms_allows_every_model_from_everywhere() -> None:
    assert allows(granted(), "qwen", HERE, NOW) is None
    assert allows(granted(), "qwen", "", NOW) is None


@pytest.mark.parametrize(("now", "expected"), [(999.9, 200), (1000.0, 401), (1001.0, 401)])
def test_a_key_is_good_until_it_expires(now: float, expected: int) -> None:
    assert status(allows(granted(expires=1000.0), "qwen", HERE, now)) == expected


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("10.1.2.3", 200),
        ("::ffff:10.1.2.3", 200),
        ("fd00::1", 200),
        ("11.0.0.1", 403),
        ("::ffff:11.0.0.1", 403),
        ("fe80::1%eth0", 403),
        ("", 403),
        ("10.1.2.3, 11.0.0.1", 403),
    ],
)
def test_a_key_is_good_in_its_networks(address: str, expected: int) -> None:
    grant = granted(cidrs=("10.0.0.0/8", "fd00::/8"))
    assert status(allows(grant, "qwen", address, NOW)) == expected


def test_a_model_that_the_key_may_not_use_is_as_one_that_is_not_there() -> None:
    grant = granted(models=("qwen",))
    assert allows(grant, "qwen", HERE, NOW) is None
    assert allows(grant, None, HERE, NOW) is None
    denied = allows(grant, "secret", HERE, NOW)
    assert denied == (404, "no model 'secret'", "model_not_found")


def test_a_long_name_of_a_model_is_not_repeated_whole() -> None:
    denied = allows(granted(models=("qwen",)), "x" * 10_000_000, HERE, NOW)
    assert denied is not None
    assert len(denied.message) < 200


def test_a_scope_that_the_key_has_not_is_refused() -> None:
    grant = granted(scopes=("read",))
    assert allows(grant, None, HERE, NOW, "read") is None
    denied = allows(grant, "qwen", HERE, NOW, "infer")
    assert denied is not None
    assert denied[:2] == (403, "the API key has no scope 'infer', it has read")


# -- how it is made


@pytest.mark.parametrize(
    ("terms", "sentence"),
    [
        (KeyTerms(scopes=()), "scopes is [], must be some of infer, read, admin"),
        (KeyTerms(scopes=("root",)), "scopes is ['root'], must"),  # type: ignore[arg-type]
        (KeyTerms(models=()), "models is empty, must name models"),
        (KeyTerms(models=("",)), "models has '', must be names of 1 to 260 printable characters"),
        (KeyTerms(models=("\ud800",)), "models has '\\ud800', must be names"),
        (KeyTerms(models=("x" * 261,)), "must be names of 1 to 260 printable characters"),
        (KeyTerms(classes=()), "classes is empty, must name priority classes"),
        (KeyTerms(classes=("-1",)), "classes has '-1', must be names of priority classes"),
        (KeyTerms(classes=("x" * 65,)), "digits, - or _, at most 64"),
        (KeyTerms(cidrs=()), "cidrs is empty, must name networks"),
        (KeyTerms(cidrs=("10.0.0.1/8",)), "cidrs has '10.0.0.1/8', must be networks as"),
        (KeyTerms(cidrs=("home",)), "cidrs has 'home', must be networks as"),
        (KeyTerms(expires=999.0), "expires is 999, must be a Unix time to come"),
        (KeyTerms(expires=float("nan")), "expires is nan, must be"),
        (KeyTerms(expires=float("inf")), "expires is inf, must be"),
        (KeyTerms(rpm=0), "rpm is 0, must be 1 to"),
        (KeyTerms(tpm=-1), "tpm is -1, must be 1 to"),
        (KeyTerms(parallel=10**13), "parallel is 10000000000000, must be 1 to"),
        (KeyTerms(quotas={"qwen": ModelQuota(0)}), "quotas: 'qwen' is 0, must be 1 to"),
    ],
)
def test_terms_are_checked(terms: KeyTerms, sentence: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check_terms(terms, NOW)
    assert sentence in str(refused.value)


def test_good_terms_are_taken() -> None:
    check_terms(KeyTerms(models=("a",), cidrs=("10.0.0.0/8", "::1"), expires=2000.0, rpm=1), NOW)
