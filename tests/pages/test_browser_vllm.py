"""The page in Debian's Chromium before real vLLM: a server of two instances, a fleet's model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from kvmig.models import BUNDLED
from kvmig_tools.fleet import FleetUp
from kvmig_tools.nursery import Nursery
from kvmig_tools.patience import SERVER_PATIENCE_S
from kvmig_tools.served import SMALL, Served
from tests.conftest import TWO
from tests.support import tiny_blip2
from tests.support.browsers import Visitor, visitor
from tests.support.leaks import assert_server_is_empty, leaving_nothing

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator, Page

pytestmark = [pytest.mark.server, pytest.mark.long]

KEY = "the-admins"
CHAT = "/v1/chat/completions"
TOKENS = 800
TOOLS = ("--enable-auto-tool-choice", "--tool-call-parser=hermes")
WEATHER = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
CLOCK = {"name": "clock", "parameters": {"type": "object", "additionalProperties": False}}
"""A tool without arguments: each call of it is whole after a few tokens."""
FIELDS = ("name", "arguments")
LONG_MS = 1000 * SERVER_PATIENCE_S
"""Timeout of whole answers and of starts."""


@pytest.fixture(scope="module")
def server(
    browser: Browser, nursery: Nursery, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    """Two instances of a BLIP-2 that reads with the bundled model. (After the browser: without one
    nothing is started.)"""
    folder = tmp_path_factory.mktemp("server")
    flags = [*SMALL, *TWO, *TOOLS, "--served-model-name=eye"]
    model = folder / "blip2"
    model.mkdir()
    tiny_blip2.make(model)
    made = Served(flags, model=model, nursery=nursery, log=folder / "log", admin_key=KEY)
    made.model = "eye"
    with leaving_nothing(made) as served:
        yield served


@pytest.fixture
def ada(browser: Browser, server: Served) -> Iterator[Visitor]:
    """Who has the admin key."""
    with visitor(browser, server.url) as person:
        yield person
    assert_server_is_empty(server)


def open_playground(person: Visitor, key: str, model: str, tokens: int = TOKENS) -> Page:
    """key: empty: the person has logged in before."""
    page = person.open_tab(f"playground?model={model}")
    if key:
        person.log_in(page, key)
    page.locator(f"option[value={model}]").wait_for(state="attached")
    page.get_by_text("Options", exact=True).click()
    page.get_by_label("Temperature").fill("0")
    page.get_by_label("Most tokens").fill(str(tokens))
    return page


def say(page: Page, words: str) -> Locator:
    """The answer, which comes."""
    page.get_by_label("Message").fill(words)
    page.get_by_role("button", name="Send").click()
    return page.locator("article.assistant").last


def text_of(answer: Locator) -> str:
    """What the model wrote, without the names of the writers."""
    return "".join(answer.locator(".text").all_text_contents())


def unmoved(
    url: str, key: str, model: str, content: Any, tokens: int = TOKENS, **more: Any
) -> dict[str, Any]:
    """The message of the same chat that is left alone."""
    body = {
        "model": model, "messages": [{"role": "user", "content": content}], "temperature": 0,
        "max_tokens": tokens, **more,
    }  # fmt: skip
    headers = {"authorization": f"Bearer {key}"}
    answer = httpx.post(f"{url}{CHAT}", json=body, headers=headers, timeout=SERVER_PATIENCE_S)
    message: dict[str, Any] = answer.raise_for_status().json()["choices"][0]["message"]
    return message


def moved_chat(page: Page, words: str) -> Locator:
    """The whole answer, whose stream moves while it comes."""
    answer = say(page, words)
    answer.get_by_text("0060").wait_for()
    page.get_by_role("button", name="Move to another instance").click()
    page.get_by_text("The stream moved from").wait_for()
    answer.locator("footer").wait_for(timeout=LONG_MS)
    return answer


def test_a_chat_with_a_real_model_moves_and_is_the_one_that_was_left_alone(
    server: Served, ada: Visitor
) -> None:
    page = open_playground(ada, KEY, "eye")
    answer = moved_chat(page, "Count from 0042")
    spans = answer.locator(".text")
    writers = [spans.nth(at).get_attribute("data-instance") for at in range(spans.count())]
    assert set(writers) == {"i0", "i1"}
    colours = {
        spans.nth(at).evaluate("one => getComputedStyle(one).backgroundColor") for at in (0, 1)
    }
    assert len(colours) == 2
    assert text_of(answer) == unmoved(server.url, KEY, "eye", "Count from 0042")["content"]


def called(url: str, words: str, tokens: int) -> str:
    """The tool call that the model's stream has for the same chat, as a program gets it."""
    body = {
        "model": "eye", "messages": [{"role": "user", "content": words}], "temperature": 0,
        "max_tokens": tokens, "tools": WEATHER, "tool_choice": "required", "stream": True,
    }  # fmt: skip
    headers = {"authorization": f"Bearer {KEY}"}
    answer = httpx.post(f"{url}{CHAT}", json=body, headers=headers, timeout=SERVER_PATIENCE_S)
    lines = answer.raise_for_status().text.splitlines()
    chunks = [json.loads(one.removeprefix("data: ")) for one in lines if one.startswith("data: {")]
    calls = [
        one["function"]
        for chunk in chunks
        for choice in chunk["choices"]
        for one in choice["delta"].get("tool_calls") or ()
    ]
    name, arguments = ("".join(one.get(field) or "" for one in calls) for field in FIELDS)
    return f"{name}({arguments})"


def test_a_real_models_tool_call_is_shown_as_the_api_has_it(server: Served, ada: Visitor) -> None:
    """The model knows no tools: the grammar lets it call one, with arguments of its own."""
    page = open_playground(ada, KEY, "eye", 60)
    page.get_by_label("Tools").fill(json.dumps(WEATHER))
    page.get_by_label("Tool choice").select_option("required")
    answer = say(page, "The weather in 0042")
    answer.locator("footer").wait_for(timeout=LONG_MS)
    shown = answer.locator(".tool-call code").all_inner_texts()
    assert shown == [called(server.url, "The weather in 0042", 60)]
    assert shown[0].startswith("weather(")
    assert answer.get_by_label("Result of weather").is_visible()


def test_a_real_model_goes_on_with_the_result_of_its_tool_call(
    server: Served, ada: Visitor
) -> None:
    page = open_playground(ada, KEY, "eye", 200)
    page.get_by_label("Tools").fill(json.dumps([{"type": "function", "function": CLOCK}]))
    page.get_by_label("Tool choice").select_option("required")
    first = say(page, "The time after 0042")
    first.locator("footer").wait_for(timeout=LONG_MS)
    page.get_by_label("Tool choice").select_option("auto")
    first.get_by_label("Result of clock").fill("It is 0300.")
    with page.expect_request("**/ui/v1/chat/completions") as sent:
        first.get_by_role("button", name="Send the result").click()
    second = page.locator("article.assistant").nth(1)
    second.locator("footer").wait_for(timeout=LONG_MS)
    assert page.locator("article.tool .words").inner_text() == "It is 0300."
    assert text_of(second).split()[:3] == ["0300", "0301", "0302"]

    asked: dict[str, Any] = sent.value.post_data_json or {}
    (call,) = asked["messages"][1]["tool_calls"]
    assert call["function"]["name"] == "clock"
    result = {"role": "tool", "tool_call_id": call["id"], "content": "It is 0300."}
    assert asked["messages"][2:] == [result]
    names = ("model", "messages", "temperature", "max_tokens", "tools")
    body = {name: asked[name] for name in names}
    headers = {"authorization": f"Bearer {KEY}"}
    answer = httpx.post(
        f"{server.url}{CHAT}", json=body, headers=headers, timeout=SERVER_PATIENCE_S
    )
    alone = answer.raise_for_status().json()["choices"][0]["message"]["content"]
    assert text_of(second) == alone


def test_a_real_model_sees_the_image_and_its_answer_moves_unchanged(
    server: Served, ada: Visitor, tmp_path: Path
) -> None:
    from base64 import b64encode

    from PIL import Image

    file = tmp_path / "red.png"
    Image.new("RGB", (tiny_blip2.PIXELS,) * 2, (200, 80, 160)).save(file)
    page = open_playground(ada, KEY, "eye")
    page.get_by_label("Image").set_input_files(file)
    answer = moved_chat(page, "Count from 0042")
    url = f"data:image/png;base64,{b64encode(file.read_bytes()).decode()}"
    content = [
        {"type": "text", "text": "Count from 0042"},
        {"type": "image_url", "image_url": {"url": url}},
    ]
    assert text_of(answer) == unmoved(server.url, KEY, "eye", content)["content"]


def test_a_fleets_real_model_is_added_started_asked_and_drained_and_its_dots_travel(
    browser: Browser, tmp_path: Path
) -> None:
    with FleetUp(tmp_path) as fleet, visitor(browser, fleet.url) as bea:
        page = bea.open_tab("models")
        bea.log_in(page, fleet.key)
        form = page.locator("form", has=page.get_by_role("button", name="Add"))
        fields = {
            "name": "count", "source": f"path:{BUNDLED}", "flags": " ".join(SMALL), "min": "2",
            "max": "2",
        }  # fmt: skip
        for name, value in fields.items():
            form.locator(f"[name={name}]").fill(value)
        form.get_by_role("button", name="Add").click()
        page.locator("h1", has_text="count").wait_for(timeout=LONG_MS)
        row = page.locator("tr[data-key]")
        row.get_by_text("starting").wait_for()
        row.get_by_text("serving").wait_for(timeout=LONG_MS)
        fleet.until("models/count", serving=2)

        live = bea.open_tab("")
        live.get_by_text("Live.", exact=True).wait_for()
        live.locator(".instance", has_text="count").nth(1).wait_for()
        chat = open_playground(bea, "", "count", 4 * TOKENS)
        answer = say(chat, "Count from 0042")
        answer.get_by_text("0060").wait_for()
        live.locator("#dots .dot").wait_for(state="attached")
        writer = answer.locator(".text").first.get_attribute("data-instance")

        bea.visit(page, "models/count")
        drained = page.locator(
            "tr", has=page.get_by_role("rowheader", name=str(writer), exact=True)
        )
        drained.locator("summary", has_text="Drain").click()
        drained.get_by_role("button", name="Drain").click()
        live.locator("#dots .moved").wait_for(state="attached")
        live.locator(".events li", has_text=f"moved from {writer}").first.wait_for()
        answer.locator("footer").wait_for(timeout=LONG_MS)
        assert answer.locator(".text").count() == 2
        alone = unmoved(fleet.url, fleet.key, "count", "Count from 0042", 4 * TOKENS)["content"]
        assert text_of(answer) == alone
