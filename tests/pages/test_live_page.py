"""The first page: what it shows at once, and who may follow it."""

from __future__ import annotations

import asyncio

import pytest

from tests.support.page_api import Pages
from tests.support.waiting import until


async def test_the_first_page_shows_the_models_without_a_script(pages: Pages) -> None:
    await pages.log_in("bea", "admin")
    pages.run_here()
    answer = await pages.browse("")
    assert 'href="/ui/models/qwen"' in answer.text
    assert 'data-live="/ui/live"' in answer.text


async def test_an_admin_follows_the_picture_until_the_key_is_revoked(
    pages: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvmig.pages.live_feed.BEAT_S", 0.05)
    prefix = await pages.log_in("bea", "admin")
    pages.run_here()
    following = asyncio.create_task(pages.browse("live", accept="text/event-stream"))
    await until(lambda: pages.backend.feed.viewers == 1)
    await asyncio.sleep(0.1)
    assert (await pages.ask("DELETE", f"keys/{prefix}"))[0] == 200
    async with asyncio.timeout(5):
        answer = await following
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.text.startswith("event: picture")
    assert "event: closed" in answer.text
    assert pages.backend.feed.viewers == 0


async def test_users_and_visitors_do_not_follow_the_picture(pages: Pages) -> None:
    assert (await pages.browse("live", accept="text/event-stream")).status_code == 401
    await pages.log_in("tom", "infer", "read")
    assert (await pages.browse("live", accept="text/event-stream")).status_code == 403
    assert pages.backend.feed.viewers == 0


async def test_an_instance_that_is_not_there_is_not_drained(pages: Pages) -> None:
    await pages.log_in("bea", "admin")
    await pages.ask("POST", "models", pages.model(name="qwen"))
    pages.run_here()
    answer = await pages.send("models/qwen/drain", instance="i9")
    assert (answer.status_code, "has no instance" in answer.text) == (404, True)
