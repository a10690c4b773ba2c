"""A proxy's connection to the server: a snapshot first, again after every loss."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest

from kvmig.core.errors import ConfigError
from kvmig.proxy.control_link import ProxyLinks, ServerLink
from kvmig.proxy.messages import (
    Down,
    FleetSnapshot,
    ModelDemand,
    ModelRoute,
    ModelWanted,
    ProxyDemand,
    ProxyMetrics,
    RouteChanges,
)
from tests.support.waiting import until

Heard = list[tuple[str, ModelWanted | ProxyDemand | ProxyMetrics | None]]


@asynccontextmanager
async def serving(path: Path, heard: Heard) -> AsyncIterator[ProxyLinks]:
    links = ProxyLinks(
        str(path),
        lambda: [FleetSnapshot(version=1, pepper=b"p")],
        lambda name, said: heard.append((name, said)),
    )
    await links.open()
    try:
        yield links
    finally:
        await links.close()


@asynccontextmanager
async def proxy(path: Path, heard: list[Down]) -> AsyncIterator[ServerLink]:
    link = ServerLink(str(path), "p0", heard.append)
    try:
        yield link
    finally:
        await link.close()


def has(heard: list[Down], count: int) -> bool:
    return len(heard) == count


async def test_a_proxy_hears_a_snapshot_then_what_changes(tmp_path: Path) -> None:
    heard: list[Down] = []
    change = RouteChanges(version=2, changed=(ModelRoute(name="a", state="cold"),), removed=("b",))
    async with serving(tmp_path / "s", []) as links, proxy(tmp_path / "s", heard):
        await until(lambda: len(heard) == 1)
        links.send_to_all(change)
        await until(lambda: len(heard) == 2)
    assert heard == [FleetSnapshot(version=1, pepper=b"p"), change]


async def test_the_server_hears_what_is_wanted_and_that_a_proxy_has_gone(tmp_path: Path) -> None:
    heard: Heard = []
    demand = ProxyDemand(2, 0.5, (ModelDemand("a", 1, 2, 3, 1.5),))
    async with serving(tmp_path / "s", heard):
        async with proxy(tmp_path / "s", []) as link:
            await until(lambda: link.connected)
            link.send(ModelWanted("a"))
            await until(lambda: len(heard) == 1)
            link.send(demand)
            await until(lambda: len(heard) == 2)
        await until(lambda: len(heard) == 3)
    assert heard == [("p0", ModelWanted("a")), ("p0", demand), ("p0", None)]


async def test_a_proxy_connects_again_to_another_server(tmp_path: Path) -> None:
    heard: list[Down] = []
    async with proxy(tmp_path / "s", heard) as link:
        for count in (1, 2):
            async with serving(tmp_path / "s", []):
                await until(partial(has, heard, count))
            await until(lambda: not link.connected)
        link.send(ModelWanted("a"))  # lost, and no error


async def test_a_message_that_a_proxy_can_not_take_costs_the_connection_and_no_more(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Else it would go on for ever with the keys that it knew, and let revoked ones in."""
    heard: list[Down] = []

    def take(message: Down) -> None:
        heard.append(message)
        if len(heard) == 2:
            raise KeyError("a mistake of ours")

    async with serving(tmp_path / "s", []) as links:
        link = ServerLink(str(tmp_path / "s"), "p0", take)
        try:
            await until(lambda: len(heard) == 1)
            links.send_to_all(RouteChanges(version=2))
            await until(lambda: len(heard) == 3)
            assert heard[2] == heard[0]
            await until(lambda: link.connected)
        finally:
            await link.close()
    assert "a mistake of ours" in caplog.text


async def test_who_says_nonsense_is_disconnected_and_the_others_are_not(tmp_path: Path) -> None:
    heard: list[Down] = []
    async with serving(tmp_path / "s", []) as links, proxy(tmp_path / "s", heard):
        await until(lambda: len(heard) == 1)
        for nonsense in (b"\xff" * 8, b"\0\0\0\1x"):
            reader, writer = await asyncio.open_unix_connection(str(tmp_path / "s"))
            writer.write(nonsense)
            assert await reader.read() == b""
            writer.close()
        links.send_to_all(RouteChanges(version=2))
        await until(lambda: len(heard) == 2)


async def test_a_socket_that_another_server_listens_on_is_refused(tmp_path: Path) -> None:
    async with serving(tmp_path / "s", []):
        other = ProxyLinks(
            str(tmp_path / "s"), lambda: [FleetSnapshot(version=1, pepper=b"")], print
        )
        with pytest.raises(ConfigError, match="can't be used"):
            await other.open()
