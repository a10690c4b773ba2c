"""The playground in Debian's Chromium, before a real fleet of toys."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from os import kill
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.browsers import (
    PHONE,
    Visitor,
    is_too_wide,
    serious_faults,
    slow_down,
    take_picture,
    visitor,
)
from tests.support.fleets import ToyFleet

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator, Page, Route

pytestmark = [pytest.mark.server, pytest.mark.long]

EVIL = "<img src=x onerror=alert(1)><script>alert(1)</script>\"'&amp;"
COUNTED = "0018 0019 0020"
STEP_MS = 40


@pytest.fixture(scope="module")
def fleet(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ToyFleet]:
    """With a model of two instances, and one that starts for its first call. (After the browser:
    without one nothing is started.)"""
    with ToyFleet(tmp_path_factory.mktemp("fleet")) as made:
        flags = [f"--step-ms={STEP_MS}"]
        made.add_toy("count", flags=flags, instances={"min": 2, "max": 2})
        made.add_toy("cold")
        made.until("models/count", serving=2)
        yield made


@pytest.fixture
def bea(browser: Browser, fleet: ToyFleet) -> Iterator[Visitor]:
    """An admin, who has not logged in yet."""
    with visitor(browser, fleet.url) as person:
        yield person


def new_key(fleet: ToyFleet, name: str, **more: object) -> tuple[str, str]:
    """A new user's key, and its prefix."""
    fleet.ask("POST", "users", {"name": name}).raise_for_status()
    made = fleet.ask("POST", "keys", {"user": name, **more}).raise_for_status().json()
    return made["key"], made["prefix"]


def open_playground(person: Visitor, key: str, tokens: int = 40, model: str = "count") -> Page:
    page = person.open_tab(f"playground?model={model}")
    person.log_in(page, key)
    return set_up(page, tokens, model)


def set_up(page: Page, tokens: int = 40, model: str = "count") -> Page:
    """The same page, once it chats so."""
    page.locator(f"option[value={model}]").wait_for(state="attached")
    page.get_by_text("Options", exact=True).click()
    page.get_by_label("Temperature").fill("0")
    page.get_by_label("Most tokens").fill(str(tokens))
    page.get_by_text("Options", exact=True).click()
    return page


def say(page: Page, words: str = "Count: 0017 0018") -> Locator:
    """The answer, which comes."""
    page.get_by_label("Message").fill(words)
    page.get_by_role("button", name="Send").click()
    return page.locator("article.assistant").last


def test_a_chat_streams_is_counted_and_is_the_person_s(fleet: ToyFleet, bea: Visitor) -> None:
    key, _ = new_key(fleet, "ann")
    page = open_playground(bea, key)
    answer = say(page)
    answer.locator("footer").wait_for()
    assert COUNTED in answer.locator(".words").inner_text()
    assert answer.locator("footer").inner_text() == "length · 17 + 40 tokens"
    assert page.get_by_role("button", name="Move").count() == 0
    page.get_by_label("Message").press("Enter")  # nothing: an empty message
    assert page.locator("article.assistant").count() == 1
    for _ in range(200):
        rows = fleet.get("usage?by=user,model")["data"]
        own = [one for one in rows if one["user"] == "ann"]
        if own and own[0]["output"] == 40:  # before that, what has come so far
            break
        page.wait_for_timeout(50)
    assert [(one["model"], one["output"]) for one in own] == [("count", 40)]


def test_a_move_is_seen_by_the_colour_from_the_very_token_on_and_in_a_picture(
    fleet: ToyFleet, bea: Visitor, tmp_path: Path
) -> None:
    page = open_playground(bea, fleet.key, 400)
    answer = say(page)
    answer.get_by_text("0024").wait_for()
    page.get_by_role("button", name="Move to another instance").click()
    page.get_by_text("The stream moved from").wait_for()
    answer.locator(".text").nth(1).get_by_text("0040").wait_for()
    take_picture(page, "page-playground", tmp_path)
    answer.locator("footer").wait_for()
    spans = answer.locator(".text")
    assert spans.count() == 2
    first, second = spans.nth(0), spans.nth(1)
    assert {first.get_attribute("data-instance"), second.get_attribute("data-instance")} == {
        "i0", "i1",
    }  # fmt: skip
    whole = first.inner_text() + second.inner_text()
    assert whole.split() == [f"{number:04}" for number in range(18, 98)]
    colours = [
        one.evaluate("one => getComputedStyle(one).backgroundColor") for one in (first, second)
    ]
    assert len(set(colours)) == 2
    assert page.locator(".legend li").all_inner_texts() == ["i0", "i1"] or page.locator(
        ".legend li"
    ).all_inner_texts() == ["i1", "i0"]


def test_a_cold_model_starts_for_the_chat(fleet: ToyFleet, bea: Visitor) -> None:
    page = open_playground(bea, fleet.key, model="cold")
    assert page.locator("option[value=cold]").inner_text() == "cold (cold)"
    answer = say(page)
    answer.locator("footer").wait_for()
    assert COUNTED in answer.inner_text()


def test_markup_of_a_model_and_of_a_person_is_text(fleet: ToyFleet, bea: Visitor) -> None:
    page = open_playground(bea, fleet.key)

    def evil(route: Route) -> None:
        chunks = [
            f": kvmig {json.dumps({'instance': EVIL, 'token': 0})}\n\n",
            *(
                f"data: {json.dumps({'choices': [{'index': 0, 'delta': delta}]})}\n\n"
                for delta in (
                    {"reasoning": EVIL},
                    {"content": EVIL},
                    {
                        "tool_calls": [
                            {"index": 0, "id": "1", "function": {"name": EVIL, "arguments": EVIL}}
                        ]
                    },
                )
            ),
            f"data: {json.dumps({'choices': [{'delta': {}, 'finish_reason': EVIL}]})}\n\n",
            "data: [DONE]\n\n",
        ]
        route.fulfill(content_type="text/event-stream", body="".join(chunks))

    page.route("**/ui/v1/chat/completions", evil)
    answer = say(page, EVIL)
    answer.locator("footer").wait_for()
    page.get_by_text("View code").click()
    assert page.locator("#playground img, #playground script").count() == 0
    assert answer.locator(".words").inner_text().count(EVIL) == 3  # with the instance's name
    assert f"{EVIL}({EVIL})" in answer.locator("code").inner_text()
    assert page.locator("article.user .words").inner_text() == EVIL


def test_a_tool_s_result_goes_back_to_the_model_and_an_image_along(
    fleet: ToyFleet, bea: Visitor, tmp_path: Path
) -> None:
    page = open_playground(bea, fleet.key)
    asked: list[dict[str, object]] = []

    def answers(route: Route) -> None:
        asked.append(route.request.post_data_json or {})
        delta: dict[str, object] = {"content": "It is warm."}
        if len(asked) == 1:
            call = {"index": 0, "id": "c1", "function": {"name": "weather", "arguments": '{"at":'}}
            more = {"index": 0, "function": {"arguments": '"Oslo"}'}}
            delta = {"tool_calls": [call, more]}
        chunk = json.dumps({"choices": [{"index": 0, "delta": delta}]})
        route.fulfill(content_type="text/event-stream", body=f"data: {chunk}\n\ndata: [DONE]\n\n")

    page.route("**/ui/v1/chat/completions", answers)
    picture = tmp_path / "dot.png"
    page.screenshot(path=picture, clip={"x": 0, "y": 0, "width": 8, "height": 8})
    page.get_by_text("Options", exact=True).click()
    page.get_by_label("Tools").fill('[{"type": "function", "function": {"name": "weather"}}]')
    page.get_by_label("Image").set_input_files(picture)
    answer = say(page, "What is the weather there?")
    answer.get_by_label("Result of weather").fill("20 degrees")
    answer.get_by_role("button", name="Send the result").click()
    page.get_by_text("It is warm.").wait_for()
    first, second = asked
    assert first["tools"] == [{"type": "function", "function": {"name": "weather"}}]
    kinds = [one["type"] for one in first["messages"][0]["content"]]  # type: ignore[index]
    assert kinds == ["text", "image_url"]
    call, result = second["messages"][1:]  # type: ignore[index]
    assert call["tool_calls"][0]["function"]["arguments"] == '{"at":"Oslo"}'
    assert (result["tool_call_id"], result["content"]) == ("c1", "20 degrees")


def test_two_quick_enters_send_one_message(fleet: ToyFleet, bea: Visitor, tmp_path: Path) -> None:
    page = open_playground(bea, fleet.key)
    asked: list[object] = []

    def answers(route: Route) -> None:
        asked.append(route.request.post_data_json)
        chunk = json.dumps({"choices": [{"index": 0, "delta": {"content": "Yes."}}]})
        route.fulfill(content_type="text/event-stream", body=f"data: {chunk}\n\ndata: [DONE]\n\n")

    page.route("**/ui/v1/chat/completions", answers)
    picture = tmp_path / "dot.png"
    page.screenshot(path=picture, clip={"x": 0, "y": 0, "width": 8, "height": 8})
    page.get_by_text("Options", exact=True).click()
    page.get_by_label("Image").set_input_files(picture)
    page.get_by_label("Message").fill("What is this?")
    page.get_by_label("Message").evaluate(
        """box => { for (let time = 0; time < 2; time++)
            box.dispatchEvent(new KeyboardEvent("keydown", {key: "Enter", bubbles: true})) }"""
    )
    page.locator("article.assistant footer").first.wait_for()
    page.wait_for_timeout(200)
    assert len(asked) == 1
    assert page.locator("article.user").count() == 1


@pytest.mark.parametrize("failure", ["refused", "cut"])
def test_a_question_that_got_no_answer_is_not_sent_with_the_next_and_can_be_sent_again(
    fleet: ToyFleet, bea: Visitor, failure: str
) -> None:
    bea.expected = "status of 429|ERR_FAILED"
    page = open_playground(bea, fleet.key)
    asked: list[list[object]] = []

    def answers(route: Route) -> None:
        asked.append((route.request.post_data_json or {})["messages"])
        if len(asked) > 1:
            chunk = json.dumps({"choices": [{"index": 0, "delta": {"content": "Yes."}}]})
            route.fulfill(content_type="text/event-stream", body=f"data: {chunk}\n\n")
        elif failure == "cut":
            route.abort()
        else:
            route.fulfill(status=429, json={"error": {"message": "too many"}})

    page.route("**/ui/v1/chat/completions", answers)
    say(page, "First?").locator("footer").wait_for()
    page.get_by_text("not answered").wait_for()
    assert page.get_by_label("Message").input_value() == "First?"
    say(page, "Second?").get_by_text("Yes.").wait_for()
    assert asked[1] == [{"role": "user", "content": "Second?"}]


def test_a_refusal_is_shown_in_the_api_s_words(fleet: ToyFleet, bea: Visitor) -> None:
    key, _ = new_key(fleet, "rpm", rpm=1)
    bea.expected = "status of 429|status of 400"
    page = open_playground(bea, key)
    say(page).locator("footer").wait_for()
    say(page)
    page.get_by_role("alert").get_by_text("requests per minute").wait_for()
    page.get_by_text("Options", exact=True).click()
    page.get_by_label("Tools").fill("{nonsense")
    say(page)
    page.get_by_role("alert").get_by_text("The tools are not JSON").wait_for()


def test_a_key_that_is_revoked_while_it_chats_ends_the_stream_and_the_session(
    fleet: ToyFleet, bea: Visitor
) -> None:
    key, prefix = new_key(fleet, "eva")
    bea.expected = "status of 401"
    page = open_playground(bea, key, 4000)
    answer = say(page)
    answer.get_by_text("0020").wait_for()
    fleet.ask("DELETE", f"keys/{prefix}").raise_for_status()
    page.get_by_role("alert").get_by_text("no such API key").wait_for()
    say(page)
    page.get_by_role("button", name="Log in").wait_for()
    assert page.url.startswith(f"{fleet.url}/ui/login?next=%2Fui%2Fplayground")


def test_a_stream_goes_on_without_the_server_and_the_session_with_the_next_one(
    fleet: ToyFleet, bea: Visitor
) -> None:
    page = open_playground(bea, fleet.key, 300)
    answer = say(page)
    answer.get_by_text("0020").wait_for()
    (server,) = fleet.processes("kvmig.fleet.server")
    kill(server, signal.SIGKILL)
    answer.locator("footer").wait_for()
    assert answer.locator("footer").inner_text().startswith("length")
    fleet.until_it_listens()
    page.reload()
    page.locator("option[value=count]").wait_for(state="attached")
    assert page.locator("header .who").inner_text().startswith("admin")


def test_a_stopped_answer_ends_and_the_chat_goes_on(fleet: ToyFleet, bea: Visitor) -> None:
    page = open_playground(bea, fleet.key, 4000)
    answer = say(page)
    answer.get_by_text("0020").wait_for()
    page.get_by_role("button", name="Stop").click()
    answer.get_by_text("stopped").wait_for()
    for _ in range(200):
        if not fleet.get("models/count")["running"]:
            break
        page.wait_for_timeout(50)
    assert fleet.get("models/count")["running"] == 0


def test_two_tabs_chat_side_by_side_and_a_log_out_ends_both(fleet: ToyFleet, bea: Visitor) -> None:
    bea.expected = "status of 401"
    one = open_playground(bea, fleet.key)
    two = set_up(bea.open_tab("playground?model=count"))
    first, second = say(one), say(two, "Count: 0001 0002")
    first.locator("footer").wait_for()
    second.locator("footer").wait_for()
    assert COUNTED in first.inner_text()
    two.get_by_role("button", name="Log out").click()
    two.get_by_label("API key").wait_for()
    say(one)
    one.get_by_label("API key").wait_for()


def test_a_slow_network_shows_the_answer_as_it_comes(fleet: ToyFleet, bea: Visitor) -> None:
    page = open_playground(bea, fleet.key, 60)
    slow_down(page)
    answer = say(page)
    answer.get_by_text("0020").wait_for()
    answer.locator("footer").wait_for()
    assert COUNTED in answer.inner_text()


def test_without_scripts_the_page_says_that_the_playground_needs_them(
    browser: Browser, fleet: ToyFleet
) -> None:
    with visitor(browser, fleet.url, java_script_enabled=False) as person:
        page = person.open_tab("playground")
        person.log_in(page, fleet.key)
        assert "needs JavaScript" in page.get_by_role("alert").inner_text()
        assert page.get_by_label("Message").is_hidden()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("phone", [False, True])
def test_anybody_can_use_it_on_any_screen(
    browser: Browser, fleet: ToyFleet, scheme: str, phone: bool
) -> None:
    more = {"viewport": PHONE} if phone else {}
    with visitor(browser, fleet.url, color_scheme=scheme, **more) as person:
        page = person.open_tab("login")
        assert serious_faults(page) == []
        page.close()
        page = open_playground(person, fleet.key)
        say(page, "Count: 0017 0018 " + "x" * 300).locator("footer").wait_for()
        page.get_by_text("Options", exact=True).click()
        page.get_by_text("View code").click()
        assert serious_faults(page) == []
        assert not is_too_wide(page)
