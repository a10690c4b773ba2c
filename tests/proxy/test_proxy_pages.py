"""Calls of web pages at the door, and of clients that know no chunks."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from kvmig.core.errors import ConfigError
from kvmig.fleet.settings import FleetSettings, check_settings
from kvmig.proxy.messages import ModelRoute
from tests.support.proxy_site import Got, Site, site

PAGE = "https://chat.example.com"
ASKS = {
    "origin": PAGE,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization, content-type",
}
PATHS = ["/v1/chat/completions", "/models/count/v1/chat/completions", "/v1/models", "/tokenize"]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("pages", "said"), [((PAGE,), PAGE), (("*",), "*")])
async def test_a_preflight_is_answered_without_a_key(
    tmp_path: Path, path: str, pages: tuple[str, ...], said: str
) -> None:
    async with site(tmp_path, pages=pages) as door, door.client("-") as client:
        client.headers.pop("authorization")
        answer = await client.options(path, headers=ASKS)
    assert answer.status_code == 204
    assert answer.headers["access-control-allow-origin"] == said
    assert answer.headers["access-control-allow-headers"] == "authorization, content-type"
    assert "POST" in answer.headers["access-control-allow-methods"]


@pytest.mark.parametrize(
    ("pages", "path", "status"),
    [((PAGE,), "/kvmig/v2/models", 401), ((), "/v1/models", 401),
     (("https://other.example.com",), "/v1/models", 403)],
)  # fmt: skip
async def test_a_preflight_of_a_page_that_may_not_call_is_refused(
    tmp_path: Path, pages: tuple[str, ...], path: str, status: int
) -> None:
    async with site(tmp_path, pages=pages) as door, door.client("-") as client:
        client.headers.pop("authorization")
        answer = await client.options(path, headers=ASKS)
    assert answer.status_code == status
    assert "access-control-allow-origin" not in answer.headers


async def test_every_answer_to_a_page_can_be_read_by_it_errors_too(tmp_path: Path) -> None:
    async def streams(got: Got) -> None:
        got.head("content-type: text/event-stream", "transfer-encoding: chunked",
                 "access-control-allow-origin: https://elsewhere")  # fmt: skip
        got.chunk()
        got.last()

    headers = {"origin": PAGE}
    async with site(tmp_path, pages=(PAGE,), max_body=2000) as door, door.deployment(streams):
        door.tell(ModelRoute(name="broken", state="failed", why="no"))
        answers = [
            await door.ask(headers=headers),
            await door.ask(given="-", headers=headers),
            await door.ask({"model": "broken"}, headers=headers),
            await door.ask({"model": "count", "prompt": "x" * 3000}, headers=headers),
            await door.ask(path="/v1/nothing", headers=headers),
            await door.ask(b"{}", headers=headers),
        ]
        async with door.client() as client:
            answers.append(await client.get("/v1/models", headers=headers))
            other = await client.get("/v1/models", headers={"origin": "https://other"})
    assert [one.status_code for one in answers] == [200, 401, 503, 413, 404, 400, 200]
    said = [one.headers.get_list("access-control-allow-origin") for one in answers]
    assert said == [[PAGE]] * len(answers)
    assert "access-control-allow-origin" not in other.headers
    assert other.headers["vary"] == "Origin"


async def test_a_held_streams_sign_of_life_can_be_read_by_its_page(tmp_path: Path) -> None:
    async with site(tmp_path, pages=("*",)) as door:
        door.tell(ModelRoute(name="count", state="cold", heartbeat_after_s=0.05))
        reader, writer = await door.connect(
            door.call({"model": "count", "stream": True}, f"origin: {PAGE}")
        )
        head = await reader.readuntil(b"\r\n\r\n")
        writer.close()
    assert b"access-control-allow-origin: *\r\n" in head


@pytest.mark.parametrize("origin", ["chat.example.com", "https://a/b", "https://a b", "", "**"])
def test_an_origin_that_no_browser_sends_is_refused_by_name(origin: str) -> None:
    with pytest.raises(ConfigError, match=r"--allowed-origins is .*, must be as https://"):
        check_settings(FleetSettings(data="/tmp/x", allowed_origins=(origin,)))


# -- HTTP/1.0


def call_1_0(door: Site, fields: Any) -> bytes:
    return door.call(fields).replace(b" HTTP/1.1\r\n", b" HTTP/1.0\r\n", 1)


async def ask_1_0(door: Site, fields: Any) -> tuple[bytes, bytes]:
    reader, writer = await door.connect(call_1_0(door, fields))
    async with asyncio.timeout(5):
        said = await reader.read()
    writer.close()
    head, _, body = said.partition(b"\r\n\r\n")
    return head.lower(), body


@pytest.mark.parametrize("size", [1, 7, 100_000])
async def test_a_client_of_http_1_0_gets_no_chunks(door: Site, size: int) -> None:
    async def streams(got: Got) -> None:
        got.events()
        for _ in range(3):
            got.chunk(b"x" * size)
            await asyncio.sleep(0.01)
        got.writer.write(b"5;ext=1\r\nab\r\nc\r\n0\r\n\r\n")

    async with door.deployment(streams):
        head, body = await ask_1_0(door, {"model": "count", "stream": True})
    assert b"transfer-encoding" not in head
    assert b"connection: close" in head
    assert body == b"x" * (3 * size) + b"ab\r\nc"


async def test_a_client_of_http_1_0_gets_its_signs_of_life_and_error_without_chunks(
    door: Site,
) -> None:
    door.tell(ModelRoute(name="count", state="cold", heartbeat_after_s=0.05))
    reader, writer = await door.connect(call_1_0(door, {"model": "count", "stream": True}))
    async with asyncio.timeout(5):
        begin = await reader.readuntil(b"\r\n\r\n: starting")
        door.tell(ModelRoute(name="count", state="failed", why="it broke"))
        rest = await reader.read()
    writer.close()
    assert b"transfer-encoding" not in begin.lower()
    assert b"it broke" in rest
    assert rest.endswith(b"data: [DONE]\n\n")


async def test_an_answer_of_known_length_is_the_same_for_http_1_0(door: Site) -> None:
    async with door.deployment():
        head, body = await ask_1_0(door, {"model": "count"})
        refused, _ = await ask_1_0(door, {"model": "nobody"})
    assert b" 200 " in head
    assert body == b'{"ok": true}'
    assert b" 404 " in refused
