"""The page of a single server: who may look, what it shows, and the orders it gives."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator

import httpx
import pytest
from starlette.requests import Request

from kvmig.accounts.page_sessions import SESSION_S, LoginSession
from kvmig.core.config import HttpConfig
from kvmig.frontend.server_pages import AdminSessions
from tests.support.stubbed_front import stubbed_front

KEY = "the-admins"
HTML = {"accept": "text/html"}


@pytest.fixture
async def browser() -> AsyncIterator[httpx.AsyncClient]:
    async with stubbed_front(HttpConfig(), admin_key=KEY) as front, front.client(HTML) as http:
        yield http


async def log_in(http: httpx.AsyncClient, key: str = KEY) -> httpx.Response:
    return await http.post("/ui/login", data={"key": key, "next": "/ui/"})


async def token_of(http: httpx.AsyncClient) -> str:
    found = re.search(r'name="csrf" value="([^"]+)"', (await http.get("/ui/")).text)
    assert found is not None
    return found[1]


async def test_without_an_admin_key_there_is_no_page() -> None:
    async with stubbed_front(HttpConfig()) as front, front.client(HTML) as http:
        assert (await http.get("/ui/")).status_code == 404


async def test_only_the_admin_key_opens_the_page(browser: httpx.AsyncClient) -> None:
    answer = await browser.get("/ui/")
    assert (answer.status_code, answer.headers["location"]) == (303, "/ui/login?next=/ui/")
    assert "KVMIG_ADMIN_KEY" in (await browser.get("/ui/login")).text
    refused = await log_in(browser, "another")
    assert (refused.status_code, "no such API key" in refused.text) == (401, True)
    assert (await log_in(browser)).status_code == 303
    assert (await browser.get("/ui/")).status_code == 200


async def test_a_long_admin_key_opens_the_page() -> None:
    key = "k" * 1000
    async with stubbed_front(HttpConfig(), admin_key=key) as front, front.client(HTML) as http:
        assert (await log_in(http, key[:-1])).status_code == 401
        assert (await log_in(http, key)).status_code == 303


async def test_a_visitors_form_is_small(browser: httpx.AsyncClient) -> None:
    answer = await browser.post("/ui/login", data={"key": "%" * 100_000})
    assert (answer.status_code, "a form of the page" in answer.text) == (413, True)


async def test_an_admin_logs_in_while_there_is_no_instance() -> None:
    async with stubbed_front(HttpConfig(), admin_key=KEY) as front, front.client(HTML) as http:
        await front.router.fleet.remove("i0")
        assert (await http.post("/v1/completions", json={})).status_code == 503
        assert (await log_in(http)).status_code == 303


async def test_the_page_shows_instances_and_streams(browser: httpx.AsyncClient) -> None:
    await log_in(browser)
    live = await browser.get("/ui/")
    assert 'data-key="i:bytes//i0"' in live.text
    shown = await browser.get("/ui/instances")
    assert ">i0</th>" in shown.text
    assert "None runs." in shown.text


async def test_the_picture_is_followed_with_a_session_only(browser: httpx.AsyncClient) -> None:
    events = {"accept": "text/event-stream"}
    assert (await browser.get("/ui/live", headers=events)).status_code == 401
    await log_in(browser)
    async with browser.stream("GET", "/ui/live", headers=events) as answer:
        first = await anext(answer.aiter_lines())
    assert first == "event: picture"


async def test_a_stream_that_is_not_there_is_not_moved(browser: httpx.AsyncClient) -> None:
    await log_in(browser)
    form = {"request_id": "nothing", "csrf": await token_of(browser)}
    answer = await browser.post("/ui/move", data=form)
    assert (answer.status_code, "nothing" in answer.text) == (404, True)


async def test_a_form_without_the_sessions_token_is_refused(browser: httpx.AsyncClient) -> None:
    await log_in(browser)
    answer = await browser.post("/ui/instances/i0/drain", data={})
    assert answer.status_code == 403


async def test_the_page_lets_nobody_into_the_admin_api(browser: httpx.AsyncClient) -> None:
    await log_in(browser)
    assert (await browser.get("/kvmig/v1/instances")).status_code == 401
    assert (await browser.post("/uix", data={})).status_code == 401


async def test_the_playground_asks_the_model_with_a_session_and_its_token_only(
    browser: httpx.AsyncClient,
) -> None:
    path, body = "/ui/v1/completions", {"prompt": "a", "max_tokens": 2, "stream": True}
    assert (await browser.post(path, json=body)).status_code == 401
    assert (await browser.get("/ui/v1/models")).status_code == 401
    await log_in(browser)
    token = {"x-csrf-token": await token_of(browser)}
    assert "playground.js" in (await browser.get("/ui/playground")).text
    assert (await browser.get("/ui/v1/models")).json()["data"][0]["id"] == "bytes"
    assert (await browser.post(path, json=body)).status_code == 403
    elsewhere = {**token, "sec-fetch-site": "cross-site"}
    assert (await browser.post(path, json=body, headers=elsewhere)).status_code == 403
    assert (await browser.get("/ui/kvmig/v1/instances")).status_code == 404
    other = await browser.post("/ui/v1/load_lora_adapter", json={}, headers=token)
    assert other.status_code in (404, 405)


async def test_an_answer_of_the_playground_says_who_writes_it() -> None:
    async with (
        stubbed_front(HttpConfig(), admin_key=KEY, api_keys=["the-apis"]) as front,
        front.client(HTML) as http,
    ):
        await log_in(http)
        front.metronome.set(1000.0)
        body = {"prompt": "a", "max_tokens": 4, "stream": True}
        headers = {"x-csrf-token": await token_of(http), "x-kvmig-writers": "1"}
        answer = await http.post("/ui/v1/completions", json=body, headers=headers)
        assert (await http.post("/v1/completions", json=body)).status_code == 401
    assert answer.status_code == 200, answer.text
    assert ': kvmig {"instance":"i0","token":0}' in answer.text
    assert answer.text.rstrip().endswith("data: [DONE]")


async def test_the_playground_says_why_a_stream_does_not_move(browser: httpx.AsyncClient) -> None:
    await log_in(browser)
    form = {"model": "bytes", "request_id": "nothing", "csrf": await token_of(browser)}
    answer = await browser.post("/ui/playground/move", data=form)
    assert (answer.status_code, "nothing" in answer.json()["sentence"]) == (404, True)


def test_a_session_ends_with_its_key() -> None:
    now = 1_000_000.0

    def sessions(key: str) -> AdminSessions:
        return AdminSessions(key, lambda: now, tls=False)

    session = sessions(KEY).log_in(asking(), KEY)
    assert isinstance(session, LoginSession)
    cookie = sessions(KEY).set_cookie(session).partition(";")[0]
    assert sessions(KEY).find_person(asking(cookie)) is not None
    assert sessions("another").find_person(asking(cookie)) is None
    now += SESSION_S
    assert sessions(KEY).find_person(asking(cookie)) is None


def asking(cookie: str = "") -> Request:
    return Request({"type": "http", "headers": [(b"cookie", cookie.encode())]})
