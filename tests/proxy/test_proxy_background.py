"""A response in the background is a call of its key until its deployment has ended with it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvmig.proxy.messages import KeyUpdates
from tests.support.proxy_site import Got, Site, streams
from tests.support.waiting import until

SOON_S = 1.0
PATH = "/v1/responses"
ASKED = {"model": "count", "input": "go", "background": True, "store": True}
QUEUED = {"id": "resp_1", "status": "queued"}


async def goes_on(got: Got) -> None:
    """Answers, and works until its client leaves."""
    got.json(QUEUED)
    await asyncio.sleep(30)


def revoke(door: Site, prefix: str) -> None:
    door.door.apply(KeyUpdates(version=9, removed=(prefix,)))


async def test_a_response_in_the_background_is_answered_at_once_and_ends_with_its_key(
    door: Site,
) -> None:
    given, grant = door.add_key()
    async with door.deployment(goes_on) as there:
        async with asyncio.timeout(SOON_S):
            answer = await door.ask(ASKED, PATH, given=given)
        await asyncio.sleep(0.1)
        assert (answer.json(), there.left) == (QUEUED, 0)  # its client has left since
        revoke(door, grant.prefix)
        async with asyncio.timeout(SOON_S):
            await until(lambda: there.left == 1)
        await until(lambda: door.door.admission.calls == 0)


async def test_a_response_in_the_background_takes_a_place_until_it_has_ended(door: Site) -> None:
    given, _ = door.add_key(parallel=1)
    ends = asyncio.Event()

    async def works(got: Got) -> None:
        got.json(QUEUED)
        await ends.wait()

    async with door.deployment(works):
        first = await door.ask(ASKED, PATH, given=given)
        during = await door.ask(ASKED, PATH, given=given)
        ends.set()
        await until(lambda: door.door.admission.calls == 0)
        after = await door.ask(ASKED, PATH, given=given)
    assert [one.status_code for one in (first, during, after)] == [200, 429, 200]


async def test_a_stream_in_the_background_goes_on_without_its_client_and_ends_with_its_key(
    door: Site,
) -> None:
    given, grant = door.add_key()
    async with door.deployment(streams) as there:
        door.key = given
        reader, writer = await door.connect(door.call({**ASKED, "stream": True}, path=PATH))
        await reader.readuntil(b"data:")
        writer.close()
        await asyncio.sleep(0.3)
        assert (there.left, door.door.admission.calls) == (0, 1)
        revoke(door, grant.prefix)
        async with asyncio.timeout(SOON_S):
            await until(lambda: there.left == 1)


async def test_a_connection_goes_on_with_other_calls_while_its_first_one_works(door: Site) -> None:
    given, _ = door.add_key()

    async def does(got: Got) -> None:
        await (goes_on(got) if "background" in got.fields else streams(got))

    async with door.deployment(does) as there:
        door.key = given
        reader, writer = await door.connect(door.call(ASKED, path=PATH))
        await reader.readuntil(b'"queued"}')
        writer.write(door.call({"model": "count", "stream": True}))
        head = await reader.readuntil(b"data:")
        assert head.startswith(b"HTTP/1.1 200 ")
        there.got[0].writer.close()  # the work of the first one ends
        await until(lambda: door.door.admission.calls == 1)
        await reader.readuntil(b"data:")
        writer.close()
        await until(lambda: there.left == 2)
        await until(lambda: door.door.admission.calls == 0)


@pytest.mark.parametrize("more", [{}, {"stream": True}])
async def test_without_background_a_client_that_leaves_ends_its_call(
    door: Site, more: dict[str, Any]
) -> None:
    async def silent(got: Got) -> None:
        await asyncio.sleep(30)

    async with door.deployment(silent) as there:
        _, writer = await door.connect(
            door.call({"model": "count", "input": "go", **more}, path=PATH)
        )
        await until(lambda: there.got)
        writer.close()
        await until(lambda: there.left == 1)
