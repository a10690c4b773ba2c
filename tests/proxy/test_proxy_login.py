"""The one path without a key: who logs in takes nothing from those who have one."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from tests.support.proxy_site import Deployment, Got, says_ok, site
from tests.support.waiting import until

LOGIN = "/kvmig/v2/login"


async def test_people_who_log_in_leave_room_for_users(tmp_path: Path) -> None:
    async with site(tmp_path, max_body=10_000) as door, door.deployment():
        _, first = await door.connect(door.call(b"x" * 39_000, path=LOGIN)[:-1])
        await until(lambda: door.door.budget.used > 38_000)
        reader, second = await door.connect(door.call(b"x" * 39_000, path=LOGIN)[:-1])
        async with asyncio.timeout(8):
            assert b" 429 " in await reader.readline()
        large = json.dumps({"model": "count", "prompt": "x" * 9000}).encode()
        assert (await door.ask(large)).status_code == 200
        for one in (first, second):
            one.close()
        await until(lambda: not door.door.budget.used)


async def test_few_people_at_once_have_the_server_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvmig.proxy.page_calls.LOGINS", 2)
    goes_on = asyncio.Event()

    async def later(got: Got) -> None:
        await goes_on.wait()
        await says_ok(got)

    server = Deployment(f"{tmp_path}/api", later)
    await server.open()
    async with site(tmp_path) as door:
        asked = [asyncio.create_task(door.ask({}, LOGIN)) for _ in range(2)]
        await until(lambda: len(server.got) == 2)
        async with asyncio.timeout(5):
            refused = await door.ask({}, LOGIN)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "logins_full")
        goes_on.set()
        assert [(await one).status_code for one in asked] == [200, 200]
        assert (await door.ask({}, LOGIN)).status_code == 200
    await server.close()


async def test_slow_readers_of_files_leave_room_for_log_ins_and_are_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvmig.proxy.page_calls.LOGINS", 2)
    monkeypatch.setattr("kvmig.proxy.page_calls.FILES", 2)
    monkeypatch.setattr("kvmig.proxy.app.VISIT_S", 2.0)
    never = asyncio.Event()

    async def answer(got: Got) -> None:
        if "/static/" in got.line:
            await never.wait()
        await says_ok(got)

    server = Deployment(f"{tmp_path}/api", answer)
    await server.open()
    async with site(tmp_path) as door:
        slow = [await door.connect(door.call(b"", path="/ui/static/page.js")) for _ in range(2)]
        await until(lambda: len(server.got) == 2)
        async with asyncio.timeout(5):
            assert (await door.ask({}, LOGIN)).status_code == 200
        for reader, writer in slow:
            async with asyncio.timeout(10):
                assert b" 408 " in await reader.readline()
            writer.close()
    await server.close()


async def test_an_address_without_a_key_tries_to_log_in_a_few_times_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvmig.proxy.page_calls.EACH_S", 1e-3)
    server = Deployment(f"{tmp_path}/api", says_ok)
    await server.open()
    async with site(tmp_path) as door, door.deployment():
        assert [(await door.ask({}, LOGIN)).status_code for _ in range(10)] == [200] * 10
        refused = await door.ask({}, LOGIN)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too_many_logins")
        assert len(server.got) == 10
        assert (await door.ask({"model": "count", "prompt": "a"})).status_code == 200
    await server.close()
