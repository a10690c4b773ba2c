"""What a front end fetches for a client, and from where."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmig.frontend.media_rules import MediaRefused, MediaRules, is_public
from kvmig.frontend.openai.media_fetch import NOT_FETCHED, fetch_media

HERE = MediaRules("public", ("localhost",))
"""The operator has named this machine."""


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1", "127.9.9.9", "0.0.0.0", "10.0.0.1", "172.16.0.1", "192.168.1.1",
        "169.254.169.254", "100.100.100.200", "168.63.129.16", "192.0.0.192", "198.18.0.1",
        "224.0.0.1", "240.0.0.1", "255.255.255.255", "::", "::1", "fe80::1", "fe80::1%lo",
        "fc00::1", "fd00:ec2::254", "fec0::1", "ff02::1", "::ffff:127.0.0.1",
        "::ffff:169.254.169.254", "::127.0.0.1", "2002:7f00:1::", "2002:a00:1::",
        "2001:0:7f00:1::", "64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe", "64:ff9b:1::808:808",
        "2001:db8::1", "", "localhost", "0x7f.1",
    ],
)  # fmt: skip
def test_an_address_of_special_use_is_not_public(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize(
    "address",
    ["8.8.8.8", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808", "2002:808:808::"],
)
def test_an_address_of_the_internet_is_public(address: str) -> None:
    assert is_public(address)


@given(st.ip_addresses(v=4))
def test_an_address_is_judged_alike_however_it_is_carried(plain: Any) -> None:
    number = int(plain)
    carried = [
        ipaddress.IPv6Address((0xFFFF << 32) | number),
        ipaddress.IPv6Address((0x64FF9B << 96) | number),
        ipaddress.IPv6Address((0x2002 << 112) | (number << 80)),
    ]
    assert {is_public(str(one)) for one in carried} == {is_public(str(plain))}


def test_hosts_that_nobody_named_are_not_fetched_where_names_are_asked_for() -> None:
    with pytest.raises(MediaRefused, match="fetches nothing"):
        MediaRules("named").check_url("https", "example.com")
    with pytest.raises(MediaRefused, match="allowed-media-domains"):
        MediaRules("named", ("a.org",)).check_url("https", "b.org")
    MediaRules("named", ("a.org",)).check_url("https", "A.org")


def test_a_named_host_may_be_private_only_where_clients_are_the_operators_own() -> None:
    assert MediaRules("public", ("a.org",)).allows_address("a.org", "10.0.0.1")
    assert not MediaRules("named", ("a.org",)).allows_address("a.org", "10.0.0.1")
    assert not MediaRules("public").allows_address("a.org", "10.0.0.1")


# -- over sockets


class Site:
    """A server on the loopback, and what it was asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.answers: dict[str, bytes] = {}
        self.port = 0
        self.writers: list[asyncio.StreamWriter] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writers.append(writer)
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        path = head.split()[1]
        self.asked.append(path)
        writer.write(self.answers.get(path, b"HTTP/1.1 404 No\r\ncontent-length: 0\r\n\r\n"))
        if path != "/silent":
            writer.close()

    def redirect(self, path: str, to: str) -> None:
        head = f"HTTP/1.1 302 Found\r\nlocation: {to}\r\ncontent-length: 0\r\n\r\n"
        self.answers[path] = head.encode()


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    one = Site()
    one.answers["/image"] = b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nimage"
    server = await asyncio.start_server(one.serve, "127.0.0.1", 0)
    one.port = server.sockets[0].getsockname()[1]
    async with server:
        yield one
        for writer in one.writers:
            writer.close()
            await writer.wait_closed()


async def test_a_named_host_is_fetched(site: Site) -> None:
    assert await fetch_media(HERE, f"http://localhost:{site.port}/image") == b"image"


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1", "[::ffff:127.0.0.1]", "localhost", "0.0.0.0", "2130706433", "127.1",
        "0x7f000001",
    ],
)  # fmt: skip
async def test_this_machine_is_not_fetched_from_however_it_is_spelt(site: Site, host: str) -> None:
    with pytest.raises(MediaRefused) as refused:
        await fetch_media(MediaRules(), f"http://{host}:{site.port}/image")
    assert str(refused.value) == NOT_FETCHED
    assert site.asked == []


async def test_a_name_that_means_this_machine_is_not_fetched(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", site.port))]

    async def resolve(*_: object, **__: object) -> object:
        return ours

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", resolve, raising=False)
    with pytest.raises(MediaRefused, match=NOT_FETCHED):
        await fetch_media(MediaRules(), f"http://images.example.com:{site.port}/image")
    assert site.asked == []


@pytest.mark.parametrize("to", ["http://127.0.0.1:{}/image", "//127.0.0.1:{}/image"])
async def test_a_redirect_is_judged_as_the_first_url_was(site: Site, to: str) -> None:
    site.redirect("/away", to.format(site.port))
    site.redirect("/here", "/image")
    with pytest.raises(MediaRefused):
        await fetch_media(HERE, f"http://localhost:{site.port}/away")
    assert site.asked == ["/away"]
    assert await fetch_media(HERE, f"http://localhost:{site.port}/here") == b"image"


async def test_a_redirect_to_a_file_is_refused(site: Site) -> None:
    site.redirect("/away", "file:///etc/passwd")
    with pytest.raises(MediaRefused):
        await fetch_media(HERE, f"http://localhost:{site.port}/away")


async def test_a_circle_of_redirects_ends(site: Site) -> None:
    site.redirect("/round", "/round")
    with pytest.raises(MediaRefused):
        await fetch_media(HERE, f"http://localhost:{site.port}/round")
    assert len(site.asked) == 4


@pytest.mark.parametrize("path", ["/long", "/endless", "/silent", "/nothing", "/odd"])
async def test_whatever_goes_wrong_is_one_sentence(site: Site, path: str) -> None:
    site.answers["/long"] = b"HTTP/1.1 200 OK\r\ncontent-length: 2000\r\n\r\n" + 2000 * b"x"
    site.answers["/endless"] = b"HTTP/1.1 200 OK\r\n\r\n" + 9000 * b"x"
    site.answers["/silent"] = b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n"
    site.answers["/odd"] = b"220 mail.example.com ESMTP\r\n"
    with pytest.raises(MediaRefused) as refused:
        await fetch_media(
            HERE, f"http://localhost:{site.port}{path}", timeout_s=0.3, most_bytes=1000
        )
    assert str(refused.value) == NOT_FETCHED


async def test_a_port_that_nobody_listens_on_is_the_same_sentence() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        for rules in (HERE, MediaRules()):
            with pytest.raises(MediaRefused) as refused:
                await fetch_media(rules, f"http://localhost:{free.getsockname()[1]}/")
            assert str(refused.value) == NOT_FETCHED


@pytest.mark.parametrize("url", ["http://[", "http://", "ftp://a.org/x", "http://a b/", "x" * 9])
async def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(MediaRefused):
        await fetch_media(MediaRules(), url)
