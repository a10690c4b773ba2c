"""Log-in to the fleet's pages, and what a session is good for, over a store."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmig.pages.login import own_path
from tests.support.fleet_api import Api
from tests.support.fleet_stores import Place
from tests.support.page_logins import key_of, log_in, token_on

HERE = "10.0.0.9"


@pytest.fixture
async def api(sqlite_place: Place) -> AsyncIterator[Api]:
    made = Api(sqlite_place)
    await made.backend.stored(made.store.open)
    yield made
    await made.close()


async def test_a_key_opens_the_page_and_the_log_out_closes_it(api: Api) -> None:
    key, _ = await key_of(api, "bea", "admin")
    assert await log_in(api, f" {key}\n") == "/ui/"
    page = await api.browse("")
    assert page.status_code == 200
    out = await api.browse("logout", {"csrf": token_on(page.text)})
    assert (out.status_code, out.headers["location"]) == (303, "/ui/login")
    assert (await api.browse("")).status_code == 303


@pytest.mark.parametrize("key", ["", "kv-x", "kv-00000000-" + "A" * 43, "<script>", "k" * 60_000])
async def test_a_wrong_key_opens_nothing_and_is_not_shown_again(api: Api, key: str) -> None:
    answer = await api.browse("login", {"key": key, "next": "/ui/keys"})
    assert answer.status_code == 401
    assert "no such API key" in answer.text
    assert key not in answer.text or not key
    assert "set-cookie" not in answer.headers
    assert 'value="/ui/keys"' in answer.text


async def test_an_expired_key_and_one_of_another_network_open_nothing(api: Api) -> None:
    key, _ = await key_of(api, "ann", "infer", cidrs=["192.0.2.0/24"])
    answer = await api.browse("login", {"key": key})
    assert answer.status_code == 403
    assert "isn&#39;t for requests from this network" in answer.text


async def test_a_revoked_key_ends_the_session_at_once(api: Api) -> None:
    key, prefix = await key_of(api, "bea", "admin")
    await log_in(api, key)
    assert (await api.ask("DELETE", f"keys/{prefix}"))[0] == 200
    assert (await api.browse("")).status_code == 303


async def test_a_session_goes_on_with_the_next_server(api: Api) -> None:
    key, _ = await key_of(api, "bea", "admin")
    await log_in(api, key)
    await api.restart()
    assert (await api.browse("")).status_code == 200


async def test_a_log_out_without_the_session_s_token_does_nothing(api: Api) -> None:
    key, _ = await key_of(api, "bea", "admin")
    await log_in(api, key)
    for form in ({}, {"csrf": "0" * 64}):
        assert (await api.browse("logout", form)).status_code == 403
    assert (await api.browse("")).status_code == 200


async def test_a_token_is_of_one_session(api: Api) -> None:
    key, _ = await key_of(api, "bea", "admin")
    await log_in(api, key)
    earlier = token_on((await api.browse("")).text)
    await log_in(api, key)
    assert (await api.browse("logout", {"csrf": earlier})).status_code == 403


async def test_a_user_s_session_is_no_admin_s(api: Api) -> None:
    key, _ = await key_of(api, "tom", "infer", "read")
    await log_in(api, key)
    assert (await api.browse("workers")).status_code == 403


@pytest.mark.parametrize(
    ("given_", "found"),
    [
        ("/ui/", "/"),
        ("/ui/models?state=ready&a=%3Cb%3E", "/models?state=ready&a=%3Cb%3E"),
        ("/ui//evil.example.com", "//evil.example.com"),
        ("", "/"),
        ("//evil.example.com", "/"),
        ("https://evil.example.com/ui/", "/"),
        ("/ui@evil.example.com", "/"),
        ("/ui/\\evil", "/"),
        ("/ui/\r\nset-cookie: a=b", "/"),
        ("/uix", "/"),
        ("javascript:alert(1)", "/"),
    ],
)
def test_a_log_in_leads_to_pages_only(given_: str, found: str) -> None:
    assert own_path(given_) == found


@given(st.text())
def test_no_way_after_the_log_in_leaves_the_page(text: str) -> None:
    assert own_path(text).startswith("/")
    assert not set(own_path(f"/ui/{text}")) & set("\\\r\n\"'<> ")


async def test_the_log_in_page_s_next_is_text(api: Api) -> None:
    answer = await api.browse('login?next=/ui/"><script>alert(1)</script>')
    assert "<script>alert" not in answer.text
    assert answer.headers["content-security-policy"].startswith("default-src 'none'")
