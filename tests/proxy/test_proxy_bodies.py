"""Bodies in a proxy: one user's leave room for others, until all of them are written."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import msgspec
import pytest

from kvmig.process.sockets import take_path
from tests.support.proxy_site import Got, Site, key, site
from tests.support.waiting import until

MEGABYTE = 10**6


def body(size: int) -> bytes:
    return json.dumps({"model": "count", "prompt": "x" * size}).encode()


async def test_a_body_counts_until_it_is_written_to_a_deployment_that_does_not_read(
    door: Site, tmp_path: Path
) -> None:
    deployment = take_path(f"{tmp_path}/count")
    deployment.listen()
    deployment.setblocking(False)
    door.ready()
    call = asyncio.create_task(door.ask(body(10 * MEGABYTE)))
    loop = asyncio.get_running_loop()
    connection, _ = await loop.sock_accept(deployment)
    await until(lambda: door.door.budget.used > 10 * MEGABYTE)
    await asyncio.sleep(0.1)
    assert door.door.budget.used > 10 * MEGABYTE
    got = 0
    while got < 10 * MEGABYTE:
        got += len(await loop.sock_recv(connection, 1 << 20))
    await until(lambda: not door.door.budget.used)
    await loop.sock_sendall(connection, b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
    assert (await call).status_code == 200
    connection.close()
    deployment.close()


async def test_a_body_counts_no_more_while_its_answer_goes_by(door: Site) -> None:
    goes_on = asyncio.Event()

    async def slowly(got: Got) -> None:
        got.events()
        got.chunk()
        await goes_on.wait()
        got.last()

    async with door.deployment(slowly) as there:
        call = asyncio.create_task(door.ask(body(1000)))
        await until(lambda: there.got)
        await until(lambda: not door.door.budget.used)
        goes_on.set()
        assert (await call).status_code == 200


async def test_one_user_whose_bodies_are_in_leaves_room_for_others(tmp_path: Path) -> None:
    other, anns = key()
    grant = msgspec.structs.replace(anns, user_id="u2", user="bob")
    async with site(tmp_path, grant, max_body=10_000) as door, door.deployment():
        writers = []
        for _ in range(4):
            _, writer = await door.connect(door.call(body(9000))[:-1])
            writers.append(writer)
        await until(lambda: door.door.budget.used > 4 * 9000)
        refused = await door.ask(body(9000))
        assert refused.status_code == 429
        assert "room" in refused.json()["error"]["message"]
        assert (await door.ask(body(9000), given=other)).status_code == 200
        for writer in writers:
            writer.close()
        await until(lambda: not door.door.budget.used)
        assert (await door.ask(body(9000))).status_code == 200


async def test_who_is_over_a_rate_is_told_so_before_the_body_is_sent(door: Site) -> None:
    shown, _ = door.add_key(rpm=1)
    async with door.deployment():
        assert (await door.ask(given=shown)).status_code == 200
        reader, writer = await door.connect()
        writer.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: door\r\nexpect: 100-continue\r\n"
            b"authorization: Bearer %s\r\ncontent-length: 50000000\r\n\r\n" % shown.encode()
        )
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)
        writer.close()
        assert head.startswith(b"HTTP/1.1 429 ")
        assert b"x-ratelimit-limit-requests: 1" in head


@pytest.mark.parametrize(
    ("path", "more", "status"),
    [
        ("/models/nothing/v1/chat/completions", "", 404),
        ("/models/other/v1/completions", "", 404),  # which the key may not use
        ("/models/nothing/v1/audio/transcriptions", "", 404),
        ("/v1/responses/resp_nothing/cancel", "", 404),
        ("/v1/chat/completions", "content-encoding: gzip\r\n", 415),
        ("/v1/chat/completions", "x-vllm-priority: first\r\n", 400),
        ("/models/count/v1/completions", "x-vllm-priority: first\r\n", 400),
    ],
)
async def test_what_path_and_head_decide_is_answered_before_the_body_is_sent(
    door: Site, path: str, more: str, status: int
) -> None:
    given, _ = door.add_key(models=("count",))
    async with door.deployment(), door.deployment(name="other"):
        reader, writer = await door.connect()
        head = f"POST {path} HTTP/1.1\r\nhost: door\r\nauthorization: Bearer {given}\r\n{more}"
        writer.write(f"{head}content-length: 9000000\r\nexpect: 100-continue\r\n\r\n".encode())
        async with asyncio.timeout(2):
            line = await reader.readline()
        writer.close()
    assert line.startswith(b"HTTP/1.1 %d " % status)
