"""Protocols between processes of one host: what was recorded of each is what its ends send."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest

from kvmig.accounts.allowances import TokenGrant, TokenRequest
from kvmig.accounts.usage import HAND_OVER, HandOver
from kvmig.asgi.call import HttpCall
from kvmig.fleet.init_link import InitLink
from kvmig.fleet.orders import News, Order, encode, news_of, order_of
from kvmig.fleet.quotas import QuotaSocket
from kvmig.frontend.meter import UsageMeter
from kvmig.frontend.quotas import QuotaClient
from kvmig.frontend.usage_writer import UsageWriter
from kvmig.process.fork_server import ForkNews, ForkOrder, receive_news, send_news, send_order
from kvmig.proxy.control_link import ProxyLinks, ServerLink
from kvmig.proxy.messages import (
    Down,
    FleetSnapshot,
    ModelWanted,
    ProxyDemand,
    ProxyHello,
    ProxyMetrics,
)
from kvmig.rpc.unix_packets import PACKET_BYTES, UnixPackets
from kvmig.sharing.messages import MOST_BYTES, ToAgent, ToMember, to_agent, to_member
from scripts.corpus import CORPUS, PROTOCOLS, example, local_messages, name_of
from tests.support.waiting import until

CASES = [
    pytest.param(name, kind, union, id=f"{name}-{name_of(kind)}")
    for name, protocol in PROTOCOLS.items()
    for kind, union in protocol.kinds()
]
PATIENCE_S = 10.0


def record_of(name: str, kind: type[msgspec.Struct]) -> bytes:
    """The bytes that were recorded of one message."""
    return (CORPUS / name / f"{name_of(kind)}.{PROTOCOLS[name].framing.suffix}").read_bytes()


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        yield ours, theirs


@asynccontextmanager
async def listening(
    path: str, serve: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
) -> AsyncIterator[None]:
    """Serve each connection there; its end is awaited."""
    tasks: list[asyncio.Task[None] | None] = []

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.append(asyncio.current_task())
        await serve(reader, writer)
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_unix_server(connected, path)
    try:
        yield
    finally:
        server.close()
        await asyncio.gather(*(one for one in tasks if one is not None))


@pytest.mark.parametrize("name", PROTOCOLS)
def test_what_travels_is_what_was_recorded(name: str) -> None:
    have = {path.name: path.read_bytes() for path in (CORPUS / name).iterdir()}
    now = local_messages(PROTOCOLS[name])
    changed = sorted(file for file in now.keys() | have.keys() if now.get(file) != have.get(file))
    assert changed == [], "messages have changed: if they should, run python -m scripts.corpus"


@pytest.mark.parametrize(("name", "kind", "union"), CASES)
def test_a_recorded_message_is_read_and_written_again_as_it_was(
    name: str, kind: type[msgspec.Struct], union: Any
) -> None:
    framing, data = PROTOCOLS[name].framing, record_of(name, kind)
    message = framing.read(data, union)
    assert message == example(kind)
    assert framing.write(message) == data


# -- the real ends


async def test_a_units_ends_send_and_read_what_was_recorded(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    ours, theirs = (UnixPackets(one, MOST_BYTES) for one in ends)
    for decoder, union in ((to_agent, ToAgent), (to_member, ToMember)):
        for kind in get_args(union):
            ours.send(record_of("unit", kind))
            assert decoder.decode(await theirs.recv()) == example(kind)
    for one in (ours, theirs):
        one.close()


async def test_the_server_reads_of_proxies_and_sends_them_what_was_recorded(tmp_path: Path) -> None:
    heard: list[object] = []
    path = str(tmp_path / "s")
    links = ProxyLinks(path, lambda: [example(FleetSnapshot)], lambda _, said: heard.append(said))
    await links.open()
    reader, writer = await asyncio.open_unix_connection(path)
    try:
        async with asyncio.timeout(PATIENCE_S):
            for kind in (ProxyHello, ModelWanted, ProxyDemand, ProxyMetrics):
                writer.write(record_of("proxies", kind))
            assert await reader.readexactly(len(record_of("proxies", FleetSnapshot))) == record_of(
                "proxies", FleetSnapshot
            )
            for kind in get_args(Down):
                links.send_to_all(example(kind))
                data = record_of("proxies", kind)
                assert await reader.readexactly(len(data)) == data
    finally:
        writer.close()
        await writer.wait_closed()
        await links.close()
    assert heard == [example(ModelWanted), example(ProxyDemand), example(ProxyMetrics), None]


async def test_a_proxy_reads_of_the_server_and_sends_it_what_was_recorded(tmp_path: Path) -> None:
    heard: list[object] = []
    said: asyncio.Queue[bytes] = asyncio.Queue()
    kinds = (ProxyHello, ModelWanted, ProxyMetrics)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for kind in get_args(Down):
            writer.write(record_of("proxies", kind))
        for kind in kinds:
            said.put_nowait(await reader.readexactly(len(record_of("proxies", kind))))
        await reader.read()

    path = str(tmp_path / "s")
    async with listening(path, serve), asyncio.timeout(PATIENCE_S):
        link = ServerLink(path, example(ProxyHello).proxy, heard.append)
        try:
            assert await said.get() == record_of("proxies", ProxyHello)
            await until(lambda: len(heard) == len(get_args(Down)))
            for message in (example(ModelWanted), example(ProxyMetrics)):
                link.send(message)
                assert await said.get() == record_of("proxies", type(message))
        finally:
            await link.close()
    assert heard == [example(kind) for kind in get_args(Down)]


async def test_the_server_and_init_send_and_read_what_was_recorded(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    heard: asyncio.Queue[News] = asyncio.Queue()
    link = InitLink(ends[0], heard.put_nowait)
    link.listen()
    init = ends[1]
    for kind in get_args(Order):
        link.order(example(kind))
        data = init.recv(PACKET_BYTES)
        assert (data, order_of(data)) == (record_of("fleet-orders", kind), example(kind))
    async with asyncio.timeout(PATIENCE_S):
        for kind in get_args(News):
            data = record_of("fleet-orders", kind)
            assert (encode(example(kind)), news_of(data)) == (data, example(kind))
            init.send(data)
            assert await heard.get() == example(kind)
    link.close()


async def test_the_quota_socket_answers_as_recorded(tmp_path: Path) -> None:
    taken: list[object] = []

    async def answer(ask: TokenRequest) -> TokenGrant:
        taken.append(ask)
        return example(TokenGrant)

    async def take(handed: HandOver) -> None:
        taken.append(handed)

    path = str(tmp_path / "s")
    quotas = QuotaSocket(path, answer, take)
    await quotas.open()
    reader, writer = await asyncio.open_unix_connection(path)
    try:
        async with asyncio.timeout(PATIENCE_S):
            writer.write(record_of("quotas", TokenRequest) + record_of("quotas", HandOver))
            assert await reader.readline() == record_of("quotas", TokenGrant)
            assert await reader.readline() == HAND_OVER + b"\n"
    finally:
        writer.close()
        await writer.wait_closed()
        await quotas.close()
    assert taken == [example(TokenRequest), example(HandOver)]


async def test_a_front_end_asks_for_tokens_and_hands_records_over_as_recorded(
    tmp_path: Path,
) -> None:
    lines: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            lines.append(line)
            if line.startswith(HAND_OVER):
                writer.write(HAND_OVER + b"\n")
            else:
                number = msgspec.json.decode(line, type=TokenRequest).number
                granted = msgspec.structs.replace(example(TokenGrant), number=number, again=False)
                writer.write(PROTOCOLS["quotas"].framing.write(granted))

    path = str(tmp_path / "s")
    meter = UsageMeter("text", lambda: 1.5)
    async with listening(path, serve), asyncio.timeout(PATIENCE_S):
        quotas = QuotaClient(meter, "text", path, lambda _, __: None)
        usage = UsageWriter(meter, tmp_path / "none" / "text.sqlite", path)
        try:
            await quotas.begin(HttpCall("text", "text", quota=True), "text", 5, 1)
            (tmp_path / "none").rmdir()  # its spool can't be written
            await usage.write()
        finally:
            await quotas.close()
    framing = PROTOCOLS["quotas"].framing
    kinds: tuple[type[msgspec.Struct], ...] = (TokenRequest, HandOver)
    for line, kind in zip(lines, kinds, strict=True):
        assert _names(line) == _names(record_of("quotas", kind))
        assert framing.write(framing.read(line, kind)) == line


def _names(line: bytes) -> list[str]:
    """The fields of a line, in their order."""
    found: dict[str, object] = msgspec.json.decode(line.removeprefix(HAND_OVER))
    return list(found)


def test_a_fork_servers_ends_send_and_read_what_was_recorded(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    ours, theirs = ends
    descriptor = os.open(os.devnull, os.O_RDONLY)
    try:
        send_order(ours, example(ForkOrder), [descriptor])
    finally:
        os.close(descriptor)
    data, descriptors, _, _ = socket.recv_fds(theirs, 1 << 20, 8)
    for one in descriptors:
        os.close(one)
    assert (data, len(descriptors)) == (record_of("fork-server", ForkOrder), 1)
    for kind in get_args(ForkNews):
        send_news(theirs, example(kind))
        assert receive_news(ours) == example(kind)
        theirs.send(record_of("fork-server", kind))
        assert receive_news(ours) == example(kind)
