"""Calls of the page at the door: a session in place of a key, and little for who has none."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import httpx
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmig.accounts.keys import KeyGrant
from kvmig.accounts.page_sessions import CSRF_HEADER, LoginSession, SessionCookies
from kvmig.asgi.answer_writers import HEADER as WRITERS
from kvmig.proxy.messages import KeyUpdates
from kvmig.proxy.page_calls import (
    BURST,
    EACH_S,
    FORM_BYTES,
    MOST_ADDRESSES,
    MOST_PAGES,
    LoginRedirect,
    VisitorRates,
    judge,
    network_of,
)
from tests.support.proxy_site import PEPPER, Answer, Deployment, Site, key, says_ok, site, streams
from tests.support.waiting import until

COOKIES = SessionCookies(PEPPER)
CHAT = "/ui/v1/chat/completions"


@asynccontextmanager
async def browser(
    door: Site, grant: KeyGrant | None = None
) -> AsyncIterator[tuple[httpx.AsyncClient, LoginSession | None]]:
    """A client without a key; with a session of this grant."""
    async with door.client() as client:
        del client.headers["authorization"]
        client.headers["accept"] = "text/html"
        session = None if grant is None else COOKIES.begin(grant, time.time())
        if session is not None:
            client.headers["cookie"] = f"{COOKIES.cookie}={session.value}"
        yield client, session


def writing(session: LoginSession | None) -> dict[str, str]:
    assert session is not None
    return {CSRF_HEADER: COOKIES.token(session), "content-type": "application/json"}


@asynccontextmanager
async def server(folder: Path, answer: Answer = says_ok) -> AsyncIterator[Deployment]:
    one = Deployment(f"{folder}/api", answer)
    await one.open()
    try:
        yield one
    finally:
        await one.close()


async def test_who_has_no_session_is_sent_to_the_log_in_by_the_door_itself(
    door: Site, tmp_path: Path
) -> None:
    async with server(tmp_path) as api, browser(door) as (client, _):
        answer = await client.get("/ui/models?state=ready")
        assert answer.status_code == 303
        assert answer.headers["location"] == "/ui/login?next=%2Fui%2Fmodels%3Fstate%3Dready"
        events = await client.get("/ui/events", headers={"accept": "text/event-stream"})
        assert (events.status_code, events.json()["error"]["code"]) == (401, "no_session")
        assert not api.got


async def test_only_the_log_in_and_what_it_looks_like_need_no_session(
    door: Site, tmp_path: Path
) -> None:
    async with server(tmp_path) as api, browser(door) as (client, _):
        for path in ("/ui/login", "/ui/static/page.css"):
            assert (await client.get(path)).status_code == 200
        assert (await client.post("/ui/login", data={"key": "x"})).status_code == 200
        assert [one.line.split()[1] for one in api.got] == [
            "/ui/login", "/ui/static/page.css", "/ui/login",
        ]  # fmt: skip
        for path in ("/ui/keys", "/ui/loginx/../keys", "/ui"):
            assert (await client.post(path)).status_code in (200, 401)
        assert len(api.got) <= 4


async def test_a_session_s_call_goes_to_the_server_with_its_cookie_and_address(
    door: Site, tmp_path: Path
) -> None:
    _, grant = door.add_key()
    async with server(tmp_path) as api, browser(door, grant) as (client, session):
        assert session is not None
        claims = {"x-forwarded-for": "1.2.3.4", "x-kvmig-account": "other"}
        assert (await client.get("/ui/keys", headers=claims)).status_code == 200
        headers = api.got[0].headers
        assert session.value in headers["cookie"]
        assert headers["x-forwarded-for"] == "127.0.0.1"
        assert "x-kvmig-account" not in headers


async def test_a_chat_of_the_page_has_the_rights_and_limits_of_the_session_s_key(
    door: Site,
) -> None:
    _, grant = door.add_key(models=("count",), rpm=1)
    async with (
        door.deployment() as count,
        door.deployment(name="secret"),
        browser(door, grant) as (client, session),
    ):
        other = await client.post(CHAT, json={"model": "secret"}, headers=writing(session))
        assert (other.status_code, other.json()["error"]["code"]) == (404, "model_not_found")
        first = await client.post(CHAT, json={"model": "count"}, headers=writing(session))
        assert first.status_code == 200, first.text
        got = count.got[0]
        assert got.line.split()[1] == "/v1/chat/completions"
        assert got.headers["x-kvmig-account"] == grant.key_id
        assert got.headers[WRITERS] == "1"
        assert not {"cookie", CSRF_HEADER, "authorization"} & set(got.headers)
        second = await client.post(CHAT, json={"model": "count"}, headers=writing(session))
        assert second.status_code == 429
        listed = await client.get("/ui/v1/models")
        assert [one["id"] for one in listed.json()["data"]] == ["count"]


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {CSRF_HEADER: "0" * 64},
        {CSRF_HEADER: "mine", "origin": "https://evil.example.com"},
        {CSRF_HEADER: "mine", "sec-fetch-site": "cross-site"},
        {CSRF_HEADER: "mine", "sec-fetch-site": "same-site"},
    ],
)
async def test_no_other_page_writes_with_a_session(door: Site, headers: dict[str, str]) -> None:
    _, grant = door.add_key()
    async with door.deployment() as count, browser(door, grant) as (client, session):
        assert session is not None
        own = {
            name: COOKIES.token(session) if value == "mine" else value
            for name, value in headers.items()
        }
        answer = await client.post(CHAT, json={"model": "count"}, headers=own)
        assert answer.status_code == 403
        assert not count.got


async def test_a_write_of_another_origin_never_reaches_the_server(tmp_path: Path) -> None:
    _, grant = key()
    async with (
        site(tmp_path, grant, pages=("*",)) as door,
        server(tmp_path) as api,
        browser(door, grant) as (client, _),
    ):
        evil = {"origin": "https://evil.example.com"}
        for path in ("/ui/login", "/ui/keys", "/ui/logout"):
            answer = await client.post(path, headers=evil)
            assert (answer.status_code, answer.json()["error"]["code"]) == (403, "cross_origin")
            assert "access-control-allow-origin" not in answer.headers
        preflight = evil | {"access-control-request-method": "POST"}
        assert (await client.options("/ui/keys", headers=preflight)).status_code == 403
        assert not api.got


async def test_who_writes_an_answer_is_shown_to_the_page_only(door: Site) -> None:
    async with door.deployment() as count:
        assert (await door.ask(headers={WRITERS: "1"})).status_code == 200
        assert WRITERS not in count.got[0].headers


async def test_a_revoked_key_ends_its_streams_and_its_session(door: Site) -> None:
    _, grant = door.add_key()
    async with door.deployment(streams) as count, browser(door, grant) as (client, session):
        body = {"model": "count", "stream": True}
        headers = writing(session)
        async with client.stream("POST", CHAT, json=body, headers=headers) as answer:
            assert answer.status_code == 200
            await until(lambda: count.got)
            door.door.apply(KeyUpdates(version=9, removed=(grant.prefix,)))
            rest = b"".join([part async for part in answer.aiter_bytes()])
        assert b"no such API key" in rest
        assert (await client.get("/ui/keys")).status_code == 303
        assert (await client.get("/ui/v1/models", headers={"accept": "*/*"})).status_code == 401


async def test_a_form_of_the_page_is_smaller_than_an_order_to_the_api(
    door: Site, tmp_path: Path
) -> None:
    shown, ann = door.add_key(scopes=("infer", "read", "admin"))
    body = b"x" * (FORM_BYTES + 1)
    async with server(tmp_path) as api, browser(door, ann) as (client, _):
        assert (await client.post("/ui/models", content=body)).status_code == 413
        assert not api.got
        headers = {"authorization": f"Bearer {shown}"}
        answer = await client.post("/kvmig/v2/apply", content=body, headers=headers)
        assert answer.status_code == 200


async def test_an_address_without_a_session_has_the_server_asked_seldom(
    door: Site, tmp_path: Path
) -> None:
    async with server(tmp_path) as api, browser(door) as (client, _):
        answers = [await client.post("/ui/login", data={"key": "kv-x"}) for _ in range(14)]
        codes = [one.status_code for one in answers]
        assert codes[0] == 200
        assert codes[-1] == 429
        assert len(api.got) == codes.count(200) <= 13
        assert int(answers[-1].headers["retry-after"]) >= 1


async def test_one_user_s_open_pages_leave_room_for_others_and_for_chats(tmp_path: Path) -> None:
    (_, ann), (_, other) = key(), key()
    bob = msgspec.structs.replace(other, user_id="u2", user="bob")
    async with (
        site(tmp_path, ann, bob) as door,
        server(tmp_path, streams) as api,
        door.deployment(),
        browser(door, ann) as (client, session),
        browser(door, bob) as (his, _),
    ):
        async with AsyncExitStack() as tabs:
            for _ in range(MOST_PAGES):
                await tabs.enter_async_context(client.stream("GET", "/ui/events"))
            refused = await client.get("/ui/keys")
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "pages_full")
            chat = await client.post(CHAT, json={"model": "count"}, headers=writing(session))
            assert chat.status_code == 200
            async with his.stream("GET", "/ui/events") as answer:
                assert answer.status_code == 200
        await until(lambda: api.left == len(api.got))
        async with client.stream("GET", "/ui/events") as answer:
            assert answer.status_code == 200


def test_the_pages_address_without_its_last_slash_leads_there_by_the_same_scheme() -> None:
    _, grant = key()
    for session in (None, COOKIES.begin(grant, time.time())):
        found = judge("GET", "/ui", b"", {"host": "x"}, session, COOKIES)
        assert found == LoginRedirect("/ui/")


async def test_a_path_that_only_begins_like_the_page_needs_a_key(door: Site) -> None:
    async with browser(door) as (client, _):
        assert (await client.get("/uix")).status_code == 401


async def test_a_browser_at_the_door_is_shown_the_page_and_a_program_what_it_is(door: Site) -> None:
    async with browser(door) as (client, _):
        assert (await client.get("/")).headers["location"] == "/ui/"
        plain = await client.get("/", headers={"accept": "*/*"})
        assert plain.json()["models"] == "/v1/models"


@given(st.lists(st.tuples(st.floats(0, 5), st.floats(1, 20)), max_size=80))
def test_no_address_gets_more_than_its_burst_and_its_rate(asked: list[tuple[float, float]]) -> None:
    rates, now, given_out = VisitorRates(), 100.0, 0.0
    for pause, calls in asked:
        now += pause
        if not rates.wait_s("10.0.0.1", calls, now):
            given_out += calls
        assert given_out <= BURST + EACH_S * (now - 100.0) + 1e-6


def test_who_waits_as_long_as_told_is_let_in() -> None:
    rates, now = VisitorRates(), 5.0
    while not (wait_s := rates.wait_s("10.0.0.1", 30.0, now)):
        pass
    assert not rates.wait_s("10.0.0.2", 30.0, now)
    assert not rates.wait_s("10.0.0.1", 30.0, now + wait_s + 1e-6)


def test_addresses_are_bounded_and_those_of_one_ipv6_network_are_one() -> None:
    rates = VisitorRates()
    for number in range(MOST_ADDRESSES + 50):
        rates.wait_s(f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}", 1.0, 1.0)
    assert len(rates) == MOST_ADDRESSES
    assert network_of("2001:db8::1") == network_of("2001:db8::ffff") != network_of("2001:db9::1")
    assert network_of("::ffff:10.0.0.1") == "::ffff:10.0.0.1"
