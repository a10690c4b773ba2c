"""The paths of the page: the server gets them without a key, and few at once."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.support.proxy_site import Deployment, Got, says_ok, site
from tests.support.waiting import until


@pytest.mark.parametrize("path", ["/ui", "/ui/", "/ui/static/page.css"])
async def test_a_browser_needs_no_key_for_the_page(tmp_path: Path, path: str) -> None:
    server = Deployment(f"{tmp_path}/api", says_ok)
    await server.open()
    async with site(tmp_path) as door:
        assert (await door.ask({}, path, given="none")).status_code == 200
    assert len(server.got) == 1
    await server.close()


async def test_a_path_that_only_begins_like_the_page_needs_a_key(tmp_path: Path) -> None:
    async with site(tmp_path) as door:
        answer = await door.ask({}, "/uix", given="none")
    assert answer.status_code == 401


async def test_few_pages_at_once_have_the_server_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvmig.proxy.app.PAGES", 2)
    goes_on = asyncio.Event()

    async def later(got: Got) -> None:
        await goes_on.wait()
        await says_ok(got)

    server = Deployment(f"{tmp_path}/api", later)
    await server.open()
    async with site(tmp_path) as door:
        asked = [asyncio.create_task(door.ask({}, "/ui/", given="none")) for _ in range(2)]
        await until(lambda: len(server.got) == 2)
        async with asyncio.timeout(5):
            refused = await door.ask({}, "/ui/", given="none")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "pages_full")
        goes_on.set()
        assert [(await one).status_code for one in asked] == [200, 200]
    await server.close()
