"""What all pages share: who may see them, errors, headers, forms."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Mount, Route

from kvmig.pages.rendering import PREFIX, render
from kvmig.pages.session import PagePerson, PageSessions
from kvmig.pages.site import NavigationLink, PageSite
from tests.support.page_people import TOKEN, FixedPerson

ADMIN = PagePerson("bea", admin=True)
USER = PagePerson("<b>tom</b>", admin=False)
HTML = {"accept": "text/html"}
LINKS = (NavigationLink("/", "Home"), NavigationLink("/keys", "Keys", admin=True))


@asynccontextmanager
async def browser(sessions: PageSessions) -> AsyncIterator[httpx.AsyncClient]:
    site = PageSite(sessions, LINKS)

    async def home(request: Request) -> Response:
        site.find_person(request)
        return site.page(request, "error", {"title": "Home", "sentence": "<i>here</i>"})

    async def keys(request: Request) -> Response:
        site.find_person(request, admin=True)
        return PlainTextResponse("keys")

    async def save(request: Request) -> Response:
        form = await site.read_form(request)
        return PlainTextResponse(str(form["name"]))

    routes = [Route("/", home), Route("/keys", keys), Route("/save", save, methods=["POST"])]
    app = Starlette(routes=[Mount(PREFIX, site.make_app(routes))])
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://x", headers=HTML
    ) as http:
        yield http


async def test_a_page_without_a_session_leads_to_the_log_in_and_back() -> None:
    async with browser(FixedPerson(None)) as http:
        answer = await http.get("/ui/")
    assert (answer.status_code, answer.headers["location"]) == (303, "/ui/login?next=/ui/")


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_a_script_without_a_session_is_refused(method: str) -> None:
    async with browser(FixedPerson(None)) as http:
        path = "/ui/save" if method == "POST" else "/ui/"
        answer = await http.request(method, path, headers={"accept": "*/*"})
    assert answer.status_code == 401


async def test_a_page_for_admins_is_refused_to_users_in_a_sentence() -> None:
    async with browser(FixedPerson(USER)) as http:
        answer = await http.get("/ui/keys")
    assert answer.status_code == 403
    assert "this page is for admins" in answer.text


async def test_the_navigation_shows_users_no_pages_of_admins() -> None:
    async with browser(FixedPerson(USER)) as http:
        assert "/ui/keys" not in (await http.get("/ui/")).text
    async with browser(FixedPerson(ADMIN)) as http:
        assert "/ui/keys" in (await http.get("/ui/")).text


async def test_names_are_escaped() -> None:
    async with browser(FixedPerson(USER)) as http:
        text = (await http.get("/ui/")).text
    assert "&lt;b&gt;tom&lt;/b&gt;" in text
    assert "&lt;i&gt;here&lt;/i&gt;" in text
    assert "<b>" not in text


async def test_every_answer_forbids_inline_code_other_origins_and_frames() -> None:
    async with browser(FixedPerson(ADMIN)) as http:
        for path in ("/ui/", "/ui/static/page.css", "/ui/nothing"):
            policy = (await http.get(path)).headers["content-security-policy"]
            assert "script-src 'self'" in policy
            assert "frame-ancestors 'none'" in policy
            assert "unsafe" not in policy


async def test_a_form_without_the_sessions_token_is_refused() -> None:
    async with browser(FixedPerson(ADMIN)) as http:
        refused = await http.post("/ui/save", data={"name": "x", "csrf": "other"})
        taken = await http.post("/ui/save", data={"name": "x", "csrf": TOKEN})
    assert (refused.status_code, taken.status_code, taken.text) == (403, 200, "x")


async def test_a_path_that_is_not_there_is_a_page_with_404() -> None:
    async with browser(FixedPerson(ADMIN)) as http:
        answer = await http.get("/ui/nothing")
    assert (answer.status_code, "<h1>Not Found</h1>" in answer.text) == (404, True)


def test_a_template_with_a_name_that_is_missing_is_an_error() -> None:
    with pytest.raises(Exception, match="undefined"):
        render("error")
