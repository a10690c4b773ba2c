"""HTTPS at the door: handshakes that fail, hang, or are too many. Streams: test_proxy_streams."""

from __future__ import annotations

import asyncio
import ssl
import time
from pathlib import Path

import httpx
import pytest

from kvmig.asgi import tls
from tests.support.certificates import Authority
from tests.support.proxy_site import Site, site


@pytest.fixture
def authority() -> Authority:
    return Authority.make()


async def closed_after(door: Site, sent: bytes) -> float:
    """Seconds until the door has closed a connection without TLS on which this was sent."""
    began = time.monotonic()
    reader, writer = await asyncio.open_connection("127.0.0.1", door.port)
    writer.write(sent)
    try:
        async with asyncio.timeout(10):
            await reader.read()
    except ConnectionError:
        pass  # closed, too
    writer.close()
    return time.monotonic() - began


async def test_a_client_of_plain_http_is_closed_and_others_go_on(
    tmp_path: Path, authority: Authority
) -> None:
    async with site(tmp_path, authority=authority) as door, door.deployment():
        assert await closed_after(door, b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n") < 5
        assert await closed_after(door, b"\x16\x03\x01\xff\xff" + b"x" * 20_000) < 5
        assert (await door.ask()).status_code == 200


async def test_a_client_with_another_authority_fails_and_others_go_on(
    tmp_path: Path, authority: Authority
) -> None:
    async with site(tmp_path, authority=authority) as door, door.deployment():
        base = f"https://127.0.0.1:{door.port}"
        async with httpx.AsyncClient(base_url=base, verify=Authority.make().trusting()) as client:
            with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
                await client.get("/health")
        assert (await door.ask()).status_code == 200


async def test_tls_before_1_2_is_refused(tmp_path: Path, authority: Authority) -> None:
    async with site(tmp_path, authority=authority) as door:
        old = authority.trusting()
        with pytest.warns(DeprecationWarning, match="TLSv1_1"):
            old.minimum_version = old.maximum_version = ssl.TLSVersion.TLSv1_1
        with pytest.raises(ssl.SSLError):
            await asyncio.open_connection("127.0.0.1", door.port, ssl=old)


async def test_a_handshake_has_its_time(
    tmp_path: Path, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tls, "HANDSHAKE_S", 0.3)
    async with site(tmp_path, authority=authority) as door:
        assert 0.2 < await closed_after(door, b"") < 5
        assert 0.2 < await closed_after(door, b"\x16\x03\x01") < 5


async def test_handshakes_count_as_connections(
    tmp_path: Path, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvmig.asgi.connection.most_clients", lambda each: 3)
    async with site(tmp_path, authority=authority) as door, door.client() as client:
        assert (await client.get("/health")).status_code == 200  # and connected
        waiting = [await asyncio.open_connection("127.0.0.1", door.port) for _ in range(2)]
        assert await closed_after(door, b"") < 5
        assert (await client.get("/health")).status_code == 200
        for _, writer in waiting:
            writer.close()


async def test_a_door_that_ends_waits_for_no_handshake(
    tmp_path: Path, authority: Authority
) -> None:
    async with site(tmp_path, authority=authority) as door:
        reader, writer = await asyncio.open_connection("127.0.0.1", door.port)
        await asyncio.sleep(0.1)
        began = time.monotonic()
    async with asyncio.timeout(5):
        assert await reader.read() == b""
    assert time.monotonic() - began < 5
    writer.close()
