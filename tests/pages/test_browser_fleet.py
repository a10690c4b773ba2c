"""The fleet's pages in Debian's Chromium: what an admin does there, and what others can't."""

from __future__ import annotations

import json
import re
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from os import kill
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest

from kvmig_tools.patience import SERVER_PATIENCE_S
from tests.support.browsers import (
    PHONE,
    Visitor,
    is_too_wide,
    serious_faults,
    slow_down,
    take_picture,
    visitor,
)
from tests.support.fleets import PATH, ToyFleet, ask, counted
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = [pytest.mark.server, pytest.mark.long]

EVIL = "<img src=x onerror=alert(1)><script>alert(1)</script>\"'"
STREAMS = 20
TOKENS = 700
ADMINS = ("", "models", "models/count", "keys", "users", "usage", "audit", "workers")


@pytest.fixture(scope="module")
def fleet(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ToyFleet]:
    """With a model of two instances. (After the browser: without one nothing is started.)"""
    with ToyFleet(tmp_path_factory.mktemp("fleet")) as made:
        made.add_toy("count", flags=["--step-ms=40"], instances={"min": 2, "max": 2})
        made.until("models/count", serving=2)
        yield made


@pytest.fixture
def bea(browser: Browser, fleet: ToyFleet) -> Iterator[Visitor]:
    """An admin, who has not logged in yet."""
    with visitor(browser, fleet.url) as person:
        yield person


def open_page(person: Visitor, key: str, path: str = "") -> Page:
    page = person.open_tab("login")
    person.log_in(page, key)
    person.visit(page, path)
    return page


@contextmanager
def streams(fleet: ToyFleet, count: int) -> Iterator[list[str]]:
    """So many streams at once; their whole texts, once they have ended."""
    texts: list[str] = [""] * count

    def run(at: int) -> None:
        headers = {"authorization": f"Bearer {fleet.key}"}
        with httpx.Client(base_url=fleet.url, headers=headers, timeout=SERVER_PATIENCE_S) as client:
            answer = client.post(PATH, json=ask("count", TOKENS, start=at))
            texts[at] = answer.json()["choices"][0]["text"]

    threads = [threading.Thread(target=run, args=(at,)) for at in range(count)]
    for one in threads:
        one.start()
    try:
        yield texts
    finally:
        for one in threads:
            one.join(SERVER_PATIENCE_S)


# -- log-in


def test_a_wrong_key_is_refused_and_a_right_one_leads_to_the_page_that_was_asked_for(
    fleet: ToyFleet, bea: Visitor
) -> None:
    bea.expected = "status of 401"
    page = bea.open_tab("audit")
    assert page.url.endswith("/ui/login?next=%2Fui%2Faudit")
    page.get_by_label("API key").fill("kv-00000000-wrong")
    page.get_by_label("API key").press("Enter")
    assert page.get_by_role("alert").inner_text() == "no such API key"
    bea.log_in(page, fleet.key)
    assert page.url == f"{fleet.url}/ui/audit"
    (cookie,) = bea.context.cookies()
    assert (cookie["httpOnly"], cookie["sameSite"], cookie["path"]) == (True, "Strict", "/ui")
    assert fleet.key.split("-", 2)[2] not in cookie["value"]
    page.get_by_role("button", name="Log out").click()
    page.get_by_label("API key").wait_for()
    bea.visit(page, "audit")
    assert "/ui/login" in page.url


# -- whether the page is live


def test_a_page_that_is_not_live_says_since_when_and_is_live_again(
    fleet: ToyFleet, bea: Visitor
) -> None:
    bea.expected = "ERR_FAILED"
    bea.context.add_init_script(
        """window.feeds = []; const Native = EventSource;
        window.EventSource = class extends Native {
            constructor(path) { super(path); window.feeds.push(this) } }"""
    )
    page = open_page(bea, fleet.key)
    page.get_by_text("Live.", exact=True).wait_for()
    page.route("**/ui/live", lambda route: route.abort())
    page.evaluate("() => feeds.at(-1).dispatchEvent(new Event('error'))")
    page.get_by_text(re.compile(r"Not live since \d\d:\d\d:\d\d UTC: ")).wait_for()
    page.unroute("**/ui/live")
    page.get_by_text("Live.", exact=True).wait_for()
    page.evaluate(
        """() => feeds.at(-1).dispatchEvent(
            new MessageEvent("stale", {data: '{"since": 3661}'}))"""
    )
    page.get_by_text("Not live since 01:01:01 UTC: the server can't see what runs").wait_for()
    page.get_by_text("Live.", exact=True).wait_for()  # by the next event


# -- models, streams


def test_a_model_is_added_starts_and_ends_by_forms_alone(fleet: ToyFleet, browser: Browser) -> None:
    with visitor(browser, fleet.url, java_script_enabled=False) as person:
        page = open_page(person, fleet.key, "models")
        form = page.locator("form", has=page.get_by_role("button", name="Add"))
        form.locator("[name=name]").fill("new")
        form.locator("[name=source]").fill("path:/toy")
        form.locator("[name=engine]").select_option("toy")
        form.locator("[name=flags]").fill("--nonsense")
        form.get_by_role("button", name="Add").click()
        assert "unrecognized arguments: --nonsense" in page.get_by_role("alert").inner_text()
        form.locator("[name=flags]").fill("")
        form.get_by_role("button", name="Add").click()
        person.visit(page, "models/new")
        page.get_by_role("button", name="Start now").click()
        fleet.until("models/new", state="serving")
        person.visit(page, "models")
        row = page.locator("tr", has=page.get_by_role("link", name="new", exact=True))
        assert "1 of 0 to 1" in row.inner_text()
        row.get_by_role("link").click()
        page.locator("summary", has_text="Remove").click()
        page.get_by_role("button", name="Remove").click()
        person.visit(page, "models")
        assert page.get_by_role("link", name="new", exact=True).count() == 0


def test_a_start_is_watched_live(fleet: ToyFleet, bea: Visitor) -> None:
    page = open_page(bea, fleet.key)
    page.get_by_text("Live.").wait_for()
    fleet.add_toy("watched")
    row = page.locator("tr", has=page.get_by_role("link", name="watched"))
    row.get_by_text("zero").wait_for()
    fleet.ask("POST", "models/watched/wake").raise_for_status()
    row.get_by_text("serving").wait_for()
    page.locator(".instance", has_text="watched").wait_for()
    fleet.ask("DELETE", "models/watched").raise_for_status()
    row.wait_for(state="detached")


def test_a_roll_out_is_paused_and_undone_on_the_models_page(fleet: ToyFleet, bea: Visitor) -> None:
    fleet.add_toy("rolled", instances={"min": 1, "max": 1})
    fleet.until("models/rolled", serving=1)
    page = open_page(bea, fleet.key, "models/rolled")
    form = page.locator("form", has=page.get_by_role("button", name="Change", exact=True))
    spec = json.loads(form.locator("[name=spec]").input_value())
    before = spec["flags"]
    weights = f"--script={fleet.folder.parent / 'other-script'}"
    changed = [weights if "--script" in one else one for one in before]
    form.locator("[name=spec]").fill(json.dumps(spec | {"flags": changed}))
    form.get_by_label("Canary steps").fill("50")
    form.get_by_label("Seconds of a step").fill("3600")
    form.get_by_role("button", name="Change", exact=True).click()
    page.get_by_role("heading", name="Roll-out").wait_for()
    page.get_by_role("button", name="Pause", exact=True).click()
    page.get_by_role("button", name="Resume", exact=True).wait_for()
    assert fleet.get("models/rolled/rollout")["rollout"]["state"] == "paused"
    wait_until(lambda: (fleet.get("models/rolled/rollout")["rollout"]["new"] or {}).get("serving"))
    bea.visit(page, "models/rolled")
    new = page.get_by_role("group", name="Deployments").locator("tr", has_text="new")
    new.get_by_text("serving", exact=True).wait_for()
    assert serious_faults(page) == []

    page.get_by_role("button", name="Resume", exact=True).click()
    page.get_by_role("button", name="Pause", exact=True).wait_for()
    page.locator("summary", has_text="Undo").click()
    page.get_by_role("button", name="Undo", exact=True).click()
    page.get_by_text(re.compile("to revision 2")).first.wait_for(state="attached")
    wait_until(lambda: fleet.get("models/rolled/rollout")["rollout"] is None)
    bea.visit(page, "models/rolled")
    assert page.get_by_role("heading", name="Roll-out").count() == 0
    assert fleet.get("models/rolled")["spec"]["flags"] == before
    fleet.ask("DELETE", "models/rolled").raise_for_status()


def test_the_reasons_of_a_place_and_of_those_of_another_instance_are_shown(
    fleet: ToyFleet, bea: Visitor
) -> None:
    page = open_page(bea, fleet.key, "models/count")
    page.get_by_role("link", name="Why here?").first.click()
    page.get_by_text("is on worker local").wait_for()
    decided = page.get_by_role("group", name="Decisions about workers").locator("tbody tr")
    assert decided.count() == 1
    assert "chosen" in decided.inner_text()
    assert serious_faults(page) == []
    bea.visit(page, "models/count")
    page.get_by_role("link", name="Where would another instance go").click()
    page.get_by_role("heading", name="why not elsewhere").wait_for()
    assert "local" in decided.inner_text()
    assert serious_faults(page) == []


def test_dots_travel_on_the_picture_while_an_instance_is_drained_and_no_token_is_lost(
    fleet: ToyFleet, bea: Visitor, tmp_path: Path
) -> None:
    page = open_page(bea, fleet.key)
    page.get_by_text("Live.").wait_for()
    with streams(fleet, STREAMS) as texts:
        page.get_by_text(f"{STREAMS} streams.").wait_for()
        page.locator("#dots .dot").nth(STREAMS - 1).wait_for()
        order = bea.open_tab("models/count")
        order.locator("summary", has_text="Drain").last.click()
        name = order.locator("details[open] button").inner_text().split()[-1]
        order.locator("details[open] button").click()
        page.locator("#dots .moved").first.wait_for(state="attached")
        page.locator(".events li", has_text=f"moved from {name}").first.wait_for()
        page.wait_for_timeout(300)  # the dots are between two boxes then
        take_picture(page, "page-fleet", tmp_path)
        assert page.locator("#dots .dot").count() == STREAMS
    assert texts == [counted(TOKENS, start) for start in range(STREAMS)]
    fleet.until("models/count", serving=2)


def test_the_picture_comes_back_by_itself_after_the_server_was_killed(
    fleet: ToyFleet, bea: Visitor
) -> None:
    bea.expected = "ERR_INCOMPLETE_CHUNKED_ENCODING|status of 503|net::ERR"
    page = open_page(bea, fleet.key)
    page.get_by_text("Live.").wait_for()
    (server,) = fleet.processes("kvmig.fleet.server")
    kill(server, signal.SIGKILL)
    page.get_by_text("The connection is lost; trying again.").wait_for()
    page.get_by_text("Live.").wait_for()
    page.locator(".instance", has_text="count").first.wait_for()
    fleet.until("models/count", serving=2)


def test_two_tabs_show_the_same_picture(fleet: ToyFleet, bea: Visitor) -> None:
    for page in (open_page(bea, fleet.key), bea.open_tab("")):
        page.get_by_text("Live.").wait_for()
        page.locator(".instance").nth(1).wait_for()


def test_a_slow_network_shows_the_picture_all_the_same(fleet: ToyFleet, bea: Visitor) -> None:
    page = open_page(bea, fleet.key, "models")
    slow_down(page)
    page.get_by_role("link", name="Fleet").click()
    page.get_by_text("Live.").wait_for()
    page.locator(".instance").nth(1).wait_for()


# -- users and keys


def test_a_key_is_made_shown_once_and_revoked(fleet: ToyFleet, bea: Visitor) -> None:
    fleet.ask("POST", "users", {"name": "tom"}).raise_for_status()
    page = open_page(bea, fleet.key, "keys")
    form = page.locator("form", has=page.get_by_role("button", name="Make the key"))
    form.get_by_label("User").fill("tom")
    form.locator("[name=name]").fill("notebook")
    form.get_by_role("button", name="Make the key").click()
    key = page.locator("#new-key").inner_text()
    assert status_of(fleet, key) == 200
    page.get_by_role("link", name="Keys").click()
    assert key not in page.content()
    row = page.locator("tr", has_text="notebook")
    row.locator("summary", has_text="Revoke").click()
    row.get_by_role("button", name="Revoke").click()
    page.locator("tr.gone", has_text="notebook").wait_for()
    assert status_of(fleet, key) == 401


def status_of(fleet: ToyFleet, key: str) -> int:
    headers = {"authorization": f"Bearer {key}"}
    return httpx.get(f"{fleet.url}/v1/models", headers=headers, timeout=30).status_code


def test_names_with_markup_are_text_everywhere(fleet: ToyFleet, bea: Visitor) -> None:
    bea.expected = "status of 4"
    page = open_page(bea, fleet.key, "users")
    form = page.locator("form", has=page.get_by_role("button", name="Add"))
    form.locator("[name=name]").fill(EVIL)
    form.get_by_role("button", name="Add").click()
    assert EVIL in page.locator("main").inner_text() + form.locator("[name=name]").input_value()
    bea.visit(page, "models")
    form = page.locator("form", has=page.get_by_role("button", name="Add"))
    form.locator("[name=name]").fill(EVIL)
    form.locator("[name=source]").fill(f"path:/{EVIL}")
    form.get_by_role("button", name="Add").click()
    page.get_by_role("alert").wait_for()
    bea.visit(page, "keys")
    form = page.locator("form", has=page.get_by_role("button", name="Make the key"))
    fleet.ask("POST", "users", {"name": "tim"}).raise_for_status()
    form.get_by_label("User").fill("tim")
    form.locator("[name=name]").fill(EVIL)
    form.get_by_role("button", name="Make the key").click()
    page.locator("#new-key").wait_for()
    fleet.ask("PUT", "aliases/a%22%3E%3Cimg%3E", {"targets": {"count": 1}})
    for path in (*ADMINS, "playground"):
        bea.visit(page, path)
        page.wait_for_timeout(100)
        assert page.locator("main img, main script:not([src])").count() == 0, path
    bea.visit(page, "keys")
    assert EVIL in page.locator("main").inner_text()


def test_a_user_sees_and_changes_only_what_is_theirs(fleet: ToyFleet, bea: Visitor) -> None:
    bea.expected = "status of 403|status of 404"
    fleet.ask("POST", "users", {"name": "una"}).raise_for_status()
    body = {"user": "una", "scopes": ["infer", "read"], "models": ["count"]}
    key = fleet.ask("POST", "keys", body).raise_for_status().json()["key"]
    page = open_page(bea, key, "keys")
    assert page.locator("tbody tr").count() == 1
    links = page.locator("nav a").all_inner_texts()
    assert not {"Fleet", "Workers", "Users", "Audit"} & set(links)
    for path in ("audit", "users", "workers", "models/count", "why-not/count", "live"):
        answer = page.request.get(f"{fleet.url}/ui/{path}")
        assert answer.status in (403, 404), path
    token = page.locator("input[name=csrf]").first.get_attribute("value") or ""
    prefix = fleet.key.split("-")[1]
    for path in (
        f"keys/{prefix}/revoke", "keys", "users", "models", "models/count/remove",
        "models/count/drain", "playground/move",
    ):  # fmt: skip
        form: dict[str, str | float | bool] = {
            "csrf": token, "user": "una", "name": "x", "source": "path:/toy", "engine": "toy",
            "scope": "admin", "instance": "i0",
        }  # fmt: skip
        answer = page.request.post(f"{fleet.url}/ui/{path}", form=form, max_redirects=0)
        assert answer.status == 403, path
    assert fleet.until("models/count", serving=2)["on"]


def test_another_site_can_write_nothing_with_the_person_s_cookie(
    fleet: ToyFleet, bea: Visitor
) -> None:
    bea.expected = "status of 4|Refused to|Access to fetch|net::ERR"
    page = open_page(bea, fleet.key, "keys")
    token = page.locator("input[name=csrf]").first.get_attribute("value")
    evil = bea.context.new_page()
    evil.route("http://evil.test/", lambda route: route.fulfill(
        content_type="text/html",
        body=f"<form method=post action='{fleet.url}/ui/users'><input name=csrf value='{token}'>"
             "<input name=name value=mallory><button>go</button></form>",
    ))  # fmt: skip
    evil.goto("http://evil.test/")
    evil.get_by_role("button").click()
    evil.get_by_text(re.compile("another origin|Log in")).first.wait_for()
    assert "mallory" not in {one["name"] for one in fleet.get("users")["data"]}
    framed = bea.context.new_page()
    framed.route("http://evil.test/", lambda route: route.fulfill(
        content_type="text/html", body=f"<iframe src='{fleet.url}/ui/login'></iframe>"
    ))  # fmt: skip
    framed.goto("http://evil.test/")
    assert framed.frames[-1].get_by_label("API key").count() == 0


# -- screens


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("phone", [False, True])
def test_anybody_can_use_every_page_on_any_screen(
    browser: Browser, fleet: ToyFleet, scheme: str, phone: bool
) -> None:
    more = {"viewport": PHONE} if phone else {}
    with visitor(browser, fleet.url, color_scheme=scheme, **more) as person:
        page = open_page(person, fleet.key)
        for path in ADMINS:
            person.visit(page, path)
            assert serious_faults(page) == [], path
            assert not is_too_wide(page), path
            page.keyboard.press("Tab")
            focused = page.evaluate("document.activeElement.textContent")
            assert focused == "Skip to the content", path
