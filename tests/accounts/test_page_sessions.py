"""Sessions of the page: who has one, until when, and which writes are its own."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmig.accounts.keys import KeyGrant, KeyIndex, KeyTerms, NewKey, Scope, new_key
from kvmig.accounts.page_sessions import (
    SESSION_S,
    LoginSession,
    SessionCookies,
    cookie_of,
    is_own_page,
)

PEPPER = b"p" * 32
NOW = 1_800_000_000.0
HERE = "10.1.2.3"


def grant_of(
    made: NewKey, scopes: tuple[Scope, ...] = ("infer", "read"), **more: object
) -> KeyGrant:
    terms = msgspec.structs.asdict(KeyTerms(scopes=scopes, **more))  # type: ignore[arg-type]
    return KeyGrant(
        **terms, key_id=made.prefix, origin=made.prefix, user_id="u1", user="ann",
        prefix=made.prefix, hash=made.hash,
    )  # fmt: skip


class Fleet:
    """One key, one session of it."""

    def __init__(self, **terms: object) -> None:
        self.made = new_key(PEPPER)
        self.grant = grant_of(self.made, **terms)  # type: ignore[arg-type]
        self.keys = KeyIndex(PEPPER, [self.grant])
        self.sessions = SessionCookies(PEPPER)
        self.session = self.sessions.begin(self.grant, NOW)

    def read(
        self, value: str | None = None, now: float = NOW, address: str = HERE
    ) -> LoginSession | None:
        shown = self.session.value if value is None else value
        cookies = f'theme=dark; {self.sessions.cookie}={shown}; other={{"a": 1}}'
        return self.sessions.read(cookies, self.keys.of_prefix, address, now)


def test_a_session_is_that_of_the_key_it_was_made_of() -> None:
    fleet = Fleet()
    found = fleet.read()
    assert found is not None
    assert (found.grant, found.ends, found.is_admin) == (fleet.grant, NOW + SESSION_S, False)


def test_a_cookie_has_neither_the_key_nor_its_hash_in_it() -> None:
    fleet = Fleet()
    header = fleet.sessions.set_cookie(fleet.session, tls=False)
    assert fleet.made.shown.split("-", 2)[2] not in header
    assert fleet.made.hash.hex() not in header


def test_a_session_ends_after_its_time_and_not_before() -> None:
    fleet = Fleet()
    assert fleet.read(now=NOW + SESSION_S - 1) is not None
    assert fleet.read(now=NOW + SESSION_S) is None


def test_a_revoked_key_ends_its_sessions_at_once() -> None:
    fleet = Fleet()
    fleet.keys.update((), [fleet.grant.prefix])
    assert fleet.read() is None


def test_another_key_with_the_same_prefix_does_not_take_over_a_session() -> None:
    fleet = Fleet()
    other = msgspec.structs.replace(fleet.grant, hash=new_key(PEPPER).hash)
    fleet.keys.update([other])
    assert fleet.read() is None


def test_an_expired_key_has_no_session() -> None:
    fleet = Fleet(expires=NOW + 60)
    assert fleet.read(now=NOW + 59) is not None
    assert fleet.read(now=NOW + 60) is None


def test_a_key_for_one_network_has_no_session_elsewhere() -> None:
    fleet = Fleet(cidrs=("10.0.0.0/8",))
    assert fleet.read() is not None
    assert fleet.read(address="192.0.2.1") is None


def test_a_session_is_of_one_fleet() -> None:
    fleet, other = Fleet(), SessionCookies(b"q" * 32)
    cookies = f"{other.cookie}={fleet.session.value}"
    assert other.read(cookies, fleet.keys.of_prefix, HERE, NOW) is None
    assert other.cookie != fleet.sessions.cookie


@given(st.integers(0, 200), st.characters(codec="ascii"))
def test_a_changed_cookie_is_none(at: int, char: str) -> None:
    fleet = Fleet()
    value = fleet.session.value
    at %= len(value)
    changed = value[:at] + char + value[at + 1 :]
    found = fleet.read(changed)
    assert (found is not None) == (changed == value)


@given(st.text())
def test_no_header_of_cookies_raises(cookies: str) -> None:
    fleet = Fleet()
    assert fleet.sessions.read(cookies, fleet.keys.of_prefix, HERE, NOW) is None


def test_a_session_can_not_be_made_older_than_it_lives() -> None:
    fleet = Fleet()
    ahead = fleet.sessions.begin(fleet.grant, NOW + 3600)
    assert fleet.read(ahead.value) is None


def test_a_form_s_token_is_of_its_session() -> None:
    fleet = Fleet()
    token = fleet.sessions.token(fleet.session)
    assert fleet.sessions.is_token(fleet.session, token)
    later = fleet.sessions.begin(fleet.grant, NOW)
    assert not fleet.sessions.is_token(later, token)
    assert not fleet.sessions.is_token(fleet.session, "ü")
    assert token not in fleet.session.value


@pytest.mark.parametrize("tls", [False, True])
def test_scripts_and_other_sites_never_get_the_cookie(tls: bool) -> None:
    fleet = Fleet()
    for header in (
        fleet.sessions.set_cookie(fleet.session, tls=tls),
        fleet.sessions.clear_cookie(tls=tls),
    ):
        assert "; HttpOnly; SameSite=Strict" in header
        assert ("; Secure" in header) == tls
        assert "Path=/ui;" in header


@pytest.mark.parametrize(
    ("headers", "own"),
    [
        ({}, True),
        ({"sec-fetch-site": "same-origin"}, True),
        ({"sec-fetch-site": "none"}, True),
        ({"sec-fetch-site": "same-site"}, False),
        ({"sec-fetch-site": "cross-site", "origin": "http://here:1", "host": "here:1"}, False),
        ({"origin": "http://here:1", "host": "here:1"}, True),
        ({"origin": "https://evil", "host": "here:1"}, False),
        ({"origin": "null", "host": "here:1"}, False),
        ({"origin": "http://[", "host": "here:1"}, False),
        ({"origin": ""}, True),
    ],
)
def test_a_write_of_another_page_is_known_by_what_its_browser_says(
    headers: dict[str, str], own: bool
) -> None:
    assert is_own_page(headers) == own


def test_a_cookie_is_found_beside_others_that_are_no_good() -> None:
    assert cookie_of('x={"a": "b"}; y; =; k=v', "k") == "v"
    assert cookie_of("", "k") == ""
