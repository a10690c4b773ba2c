"""What a key may do is looked at again: wherever a call is when that changes, it ends."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import msgspec
import pytest

from kvmig.accounts.keys import AccountLimits, KeyGrant
from kvmig.proxy.messages import AliasTable, KeyUpdates, ModelRoute, QuotaLeft, SpentLimits
from tests.support.proxy_site import Got, Site, says_ok_after, streams
from tests.support.waiting import until

SOON_S = 1.0


def changed(door: Site, grant: KeyGrant, **terms: Any) -> None:
    now = msgspec.structs.replace(grant, **terms)
    door.door.apply(KeyUpdates(version=9, changed=(now,)))


def revoke(door: Site, grant: KeyGrant) -> None:
    door.door.apply(KeyUpdates(version=9, removed=(grant.prefix,)))


def use_up(door: Site, grant: KeyGrant) -> None:
    changed(door, grant, quota=10)
    door.door.apply(SpentLimits(left={grant.origin: QuotaLeft(0, None)}))


CHANGES: dict[str, tuple[Callable[[Site, KeyGrant], None], int, str]] = {
    "revoked": (revoke, 401, "no such API key"),
    "expired": (lambda door, one: changed(door, one, expires=1.0), 401, "has expired"),
    "moved": (lambda door, one: changed(door, one, cidrs=("10.0.0.0/8",)), 403, "this network"),
    "scope": (lambda door, one: changed(door, one, scopes=("read",)), 403, "no scope 'infer'"),
    "model": (lambda door, one: changed(door, one, models=("other",)), 404, "no model 'count'"),
    "quota": (use_up, 429, "quota of 10 tokens a month is used up"),
}
"""What happens to a key, and what its call is answered."""
FOR_ALL = [one for one in CHANGES if one not in ("model", "quota")]
"""Those that end a call whose model isn't known yet."""


async def stays_silent(got: Got) -> None:
    await asyncio.sleep(30)


async def read_rest(reader: asyncio.StreamReader) -> bytes:
    """All that comes until the connection ends, or the answer does."""
    said = b""
    with suppress(TimeoutError):
        async with asyncio.timeout(SOON_S):
            while part := await reader.read(1 << 16):
                said += part
                if said.endswith((b"}", b"0\r\n\r\n")):
                    break
    return said


@pytest.mark.parametrize("kind", FOR_ALL)
async def test_a_body_that_trickles_ends_with_the_right_of_its_key(door: Site, kind: str) -> None:
    given, grant = door.add_key()
    change, status, sentence = CHANGES[kind]
    async with door.deployment() as there:
        door.key = given
        reader, writer = await door.connect(door.call({"model": "count", "prompt": "x" * 99})[:-50])
        await until(lambda: door.door.admission.calls)
        change(door, grant)
        said = await read_rest(reader)
        writer.close()
    assert b" %d " % status in said.split(b"\r\n")[0]
    assert sentence.encode() in said
    assert there.got == []


@pytest.mark.parametrize("kind", CHANGES)
async def test_a_held_call_ends_with_the_right_of_its_key(door: Site, kind: str) -> None:
    given, grant = door.add_key()
    change, status, sentence = CHANGES[kind]
    door.tell(ModelRoute(name="count", state="cold"))
    held = asyncio.create_task(door.ask(given=given))
    await until(lambda: door.door.hold.waiting("count"))
    change(door, grant)
    async with asyncio.timeout(SOON_S):
        answer = await held
    assert answer.status_code == status
    assert sentence in answer.json()["error"]["message"]


@pytest.mark.parametrize("kind", CHANGES)
@pytest.mark.parametrize("behaviour", [stays_silent, streams])
async def test_a_relayed_call_ends_with_the_right_of_its_key(
    door: Site, kind: str, behaviour: Callable[[Got], Awaitable[None]]
) -> None:
    given, grant = door.add_key()
    change, _, sentence = CHANGES[kind]
    async with door.deployment(behaviour) as there:
        door.key = given
        reader, writer = await door.connect(door.call({"model": "count", "stream": True}))
        await until(lambda: there.got)
        change(door, grant)
        said = await read_rest(reader)
        await until(lambda: there.left == 1)
        writer.close()
    assert sentence.encode() in said


async def test_a_listing_and_an_order_on_its_way_end_with_their_key(door: Site) -> None:
    given, grant = door.add_key(scopes=("admin",))
    async with door.deployment(name="api") as server:
        door.key = given
        reader, writer = await door.connect(
            door.call({"name": "x" * 99}, path="/kvmig/v2/keys")[:-50]
        )
        await until(lambda: door.door.admission.calls)
        revoke(door, grant)
        said = await read_rest(reader)
        writer.close()
    assert b" 401 " in said
    assert server.got == []


async def test_an_answer_of_the_server_that_goes_on_ends_with_its_key(door: Site) -> None:
    given, grant = door.add_key(scopes=("admin",))
    async with door.deployment(streams, name="api") as server:
        door.key = given
        reader, writer = await door.connect(door.call({}, path="/kvmig/v2/logs"))
        await until(lambda: server.got)
        revoke(door, grant)
        await read_rest(reader)
        await until(lambda: server.left == 1)
        writer.close()


async def test_an_order_that_revokes_its_own_key_is_answered(door: Site) -> None:
    given, grant = door.add_key(scopes=("admin",))

    async def revokes(got: Got) -> None:
        revoke(door, grant)
        await asyncio.sleep(0.1)
        got.json({"revoked": True})

    async with door.deployment(revokes, name="api"):
        answer = await door.ask({}, "/kvmig/v2/keys/mine/revoke", given=given)
        after = await door.ask({}, "/kvmig/v2/keys", given=given)
    assert answer.json() == {"revoked": True}
    assert after.status_code == 401


async def test_what_is_allowed_while_the_body_comes_is_what_the_call_is_judged_by(
    door: Site,
) -> None:
    given, grant = door.add_key()
    async with door.deployment() as there:
        door.key = given
        reader, writer = await door.connect()
        call = door.call({"model": "count", "prompt": "x" * 99})
        writer.write(call[:-50])
        await until(lambda: door.door.admission.calls)
        changed(door, grant, quota=1000, rpm=1)
        writer.write(call[-50:])
        head = await reader.readuntil(b"\r\n\r\n")
        writer.close()
        second = await door.ask(given=given)
    assert b"x-ratelimit-limit-requests: 1" in head
    assert there.got[0].headers["x-kvmig-quota"] == "1"
    assert second.status_code == 429


async def test_a_limit_that_was_lowered_is_not_raised_by_a_call_that_came_before(
    door: Site,
) -> None:
    given, grant = door.add_key(user=AccountLimits(parallel=5), parallel=5)
    async with door.deployment(stays_silent) as there:
        door.key = given
        _, late = await door.connect()
        call = door.call({"model": "count", "prompt": "x" * 99})
        late.write(call[:-50])
        await until(lambda: door.door.admission.calls)
        changed(door, grant, parallel=1)
        running = asyncio.create_task(door.ask(given=given))
        await until(lambda: there.got)
        late.write(call[-50:])
        await asyncio.sleep(0.2)
        refused = await door.ask(given=given)
        running.cancel()
        late.close()
    assert refused.status_code == 429
    assert len(there.got) == 1


async def test_a_quota_that_came_while_the_call_was_held_counts_its_tokens(door: Site) -> None:
    given, grant = door.add_key()
    door.tell(ModelRoute(name="count", state="cold"))
    held = asyncio.create_task(door.ask(given=given))
    await until(lambda: door.door.hold.waiting("count"))
    changed(door, grant, quota=1000)
    async with door.deployment() as there:
        await held
    assert there.got[0].headers["x-kvmig-quota"] == "1"


async def test_a_call_whose_tokens_are_granted_is_left_to_its_grants(door: Site) -> None:
    given, grant = door.add_key(quota=1000)

    async with door.deployment(says_ok_after(0.3)) as there:
        running = asyncio.create_task(door.ask(given=given))
        await until(lambda: there.got)
        door.door.apply(SpentLimits(left={grant.origin: QuotaLeft(0, None)}))
        answer = await running
    assert answer.status_code == 200


async def test_an_alias_that_is_given_another_model_leaves_running_calls_alone(door: Site) -> None:
    given, _ = door.add_key(models=("gpt",))

    async with door.deployment(says_ok_after(0.2)) as there:
        door.door.apply(AliasTable(version=9, aliases={"gpt": {"count": 1}}))
        running = asyncio.create_task(door.ask({"model": "gpt"}, given=given))
        await until(lambda: there.got)
        door.door.apply(AliasTable(version=10, aliases={"gpt": {"other": 1}}))
        answer = await running
    assert answer.status_code == 200


async def test_a_key_that_is_given_an_earlier_end_ends_its_calls_then(door: Site) -> None:
    given, grant = door.add_key()
    async with door.deployment(streams) as there:
        door.key = given
        reader, writer = await door.connect(door.call({"model": "count", "stream": True}))
        await until(lambda: there.got)
        changed(door, grant, expires=time.time() + 0.3)
        began = time.monotonic()
        async with asyncio.timeout(3):
            said = await reader.readuntil(b"\r\n0\r\n\r\n")
        writer.close()
    assert b"the API key has expired" in said
    assert 0.2 <= time.monotonic() - began < 0.3 + SOON_S


async def test_a_call_that_was_cut_leaves_the_next_one_on_its_connection_alone(door: Site) -> None:
    given, grant = door.add_key(scopes=("infer", "admin"))
    async with door.deployment(name="api"), door.deployment(streams) as there:
        door.key = given
        reader, writer = await door.connect(door.call({}, path="/kvmig/v2/keys"))
        head = await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(len(json.dumps({"ok": True})))
        assert b" 200 " in head
        other_key = door.call({"model": "count", "stream": True})
        writer.write(other_key)
        await until(lambda: there.got)
        revoke(door, grant)
        said = await read_rest(reader)
        writer.close()
    assert said.count(b"no such API key") >= 1
    assert door.door.admission.calls == 0
