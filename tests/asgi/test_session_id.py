"""The session that a call names: kvmig.asgi.session_id."""

from __future__ import annotations

import json

import pytest

from kvmig.asgi.call_work import work_of
from kvmig.asgi.route_table import find_route
from kvmig.asgi.session_id import LONGEST_SESSION, SessionTooLong, session_in, session_key

SECRET = b"of one front end"


def session_of_body(**fields: object) -> str:
    found = find_route("POST", "/v1/completions")
    assert found is not None
    return work_of(found.route, json.dumps({"prompt": "a", **fields}).encode()).session


def test_the_first_of_the_headers_counts() -> None:
    assert session_in({"x-session-id": " a ", "x-smg-routing-key": "b"}) == "a"
    assert session_in({"x-session-id": "", "x-smg-routing-key": "b"}) == "b"
    assert session_in({}) == ""


def test_a_header_that_is_too_long_is_named_with_what_is_allowed() -> None:
    with pytest.raises(SessionTooLong, match="x-session-id has 257 characters, allowed are 256"):
        session_in({"x-session-id": "a" * (LONGEST_SESSION + 1)})


def test_the_cache_key_of_a_body_counts_before_its_user() -> None:
    assert session_of_body(prompt_cache_key="key", user="me") == "key"
    assert session_of_body(user="me") == "me"


@pytest.mark.parametrize("odd", [7, None, ["a"], {"a": 1}, "", "a" * (LONGEST_SESSION + 1)])
def test_a_field_that_is_no_id_names_no_session(odd: object) -> None:
    assert session_of_body(prompt_cache_key=odd) == ""


def test_two_owners_with_the_same_id_have_two_sessions() -> None:
    assert session_key(SECRET, "a", "s") == session_key(SECRET, "a", "s")
    assert session_key(SECRET, "a", "s") != session_key(SECRET, "b", "s")
    assert session_key(SECRET, "a", "1 s") != session_key(SECRET, "a 1", "s")
    assert session_key(SECRET, "a", "s") != session_key(b"of another one", "a", "s")
    assert session_key(SECRET, "a", "") is None
