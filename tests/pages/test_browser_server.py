"""The page of a single server in Debian's Chromium: what is seen there, and what its forms do."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import httpx
import pytest

from kvmig.engines.toy.script import ToyScript
from kvmig_tools.patience import SERVER_PATIENCE_S
from tests.conftest import TWO
from tests.support.browsers import PHONE, Visitor, is_too_wide, serious_faults, visitor
from tests.support.fleets import PATH, ask, counted
from tests.support.leaks import assert_server_is_empty, leaving_nothing
from tests.support.toys import Toys

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = [pytest.mark.server, pytest.mark.long]

KEY = "the-admins"
STREAMS = 3
TOKENS = 60
PAGES = ("", "instances", "playground")


@pytest.fixture(scope="module")
def server(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Toys]:
    """Two instances. (After the browser: without one nothing is started.)"""
    folder = tmp_path_factory.mktemp("server")
    with leaving_nothing(Toys(TWO, folder, admin_key=KEY)) as made:
        yield made


@pytest.fixture
def ada(browser: Browser, server: Toys) -> Iterator[Visitor]:
    """Who has the admin key; the picture is followed."""
    with visitor(browser, server.url) as person:
        yield person
    assert_server_is_empty(server)


def open_page(person: Visitor, path: str = "") -> Page:
    page = person.open_tab("login")
    person.log_in(page, KEY)
    person.visit(page, path)
    return page


@contextmanager
def held_streams(server: Toys) -> Iterator[list[str]]:
    """Streams that stand still inside the block; afterwards, their whole texts."""
    texts = [""] * STREAMS

    def run(at: int) -> None:
        with httpx.Client(base_url=server.url, timeout=SERVER_PATIENCE_S) as client:
            answer = client.post(PATH, json=ask("toy", TOKENS, start=at))
            texts[at] = answer.json()["choices"][0]["text"]

    server.play(ToyScript(hold=8))
    threads = [threading.Thread(target=run, args=(at,)) for at in range(STREAMS)]
    for one in threads:
        one.start()
    try:
        yield texts
    finally:
        server.play(ToyScript())
        for one in threads:
            one.join(90)


def test_streams_of_a_single_server_are_dots_that_its_forms_move_and_drain_without_scripts(
    browser: Browser, server: Toys, ada: Visitor
) -> None:
    with (
        visitor(browser, server.url, java_script_enabled=False) as other,
        held_streams(server) as texts,
    ):
        live = open_page(ada)
        live.get_by_text("Live.", exact=True).wait_for()
        live.locator("#dots .dot").nth(STREAMS - 1).wait_for()
        assert live.locator("#dots .dot").count() == STREAMS

        forms = open_page(other, "instances")
        forms.get_by_role("button", name="Move: ").first.click()
        live.locator(".events li", has_text="a stream moved from").first.wait_for()

        row = forms.locator("tr", has=forms.get_by_role("rowheader", name="i0", exact=True))
        row.locator("summary").click()
        row.get_by_role("button", name="Drain i0").click()
        row.get_by_text("draining").wait_for()
        live.locator(".instance", has_text="/i0").get_by_text("0 running").wait_for()
        assert live.locator("#dots .dot").count() == STREAMS
        row.get_by_role("button", name="Stop the drain: i0").click()
        row.get_by_text("serving").wait_for()
    assert texts == [counted(TOKENS, start) for start in range(STREAMS)]


def test_another_key_opens_nothing(server: Toys, ada: Visitor) -> None:
    ada.expected = "status of 401"
    page = ada.open_tab("instances")
    page.get_by_label("API key").fill("another")
    page.get_by_label("API key").press("Enter")
    assert page.get_by_role("alert").inner_text() == "no such API key"
    ada.log_in(page, KEY)
    assert page.url == f"{server.url}/ui/instances"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("phone", [False, True])
def test_anybody_can_use_every_page_of_a_single_server_on_any_screen(
    browser: Browser, server: Toys, scheme: str, phone: bool
) -> None:
    more = {"viewport": PHONE} if phone else {}
    with (
        visitor(browser, server.url, color_scheme=scheme, **more) as person,
        held_streams(server),
    ):
        page = open_page(person)
        for path in PAGES:
            person.visit(page, path)
            assert serious_faults(page) == [], path
            assert not is_too_wide(page), path
