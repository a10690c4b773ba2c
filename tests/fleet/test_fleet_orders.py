"""Orders to init that are long: a model with many adapters."""

from __future__ import annotations

import asyncio
import fcntl
import resource
import socket
from collections.abc import Iterator

import pytest

from kvmig.fleet.init_link import InitLink
from kvmig.fleet.orders import (
    MESSAGE_BYTES,
    LoadEngine,
    News,
    Order,
    StartDeployment,
    StepDown,
    order_of,
)
from kvmig.process.fork_server import _ready
from kvmig.process.sockets import take_long


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for one in (ours, theirs):
        take_long(one)
    with ours, theirs:
        yield ours, theirs


def unheard(_: News) -> None:
    """Init says nothing here."""


async def heard(link: InitLink, init: socket.socket, orders: list[Order]) -> list[Order]:
    """What comes of orders until one for an engine's libraries."""
    init.setblocking(False)
    for one in orders:
        link.order(one)
    link.order(LoadEngine("toy"))
    found: list[Order] = []
    async with asyncio.timeout(10):
        while not found or found[-1] != LoadEngine("toy"):
            message = await asyncio.get_running_loop().sock_recv(init, MESSAGE_BYTES)
            found.append(order_of(message))
    return found[:-1]


async def test_a_model_with_many_adapters_starts(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    words = tuple(f"adapter-{at:04}=/models/adapters/{'x' * 110}/{at:04}" for at in range(1_700))
    start = StartDeployment("d1", "vllm", words, "", "")
    assert await heard(InitLink(ends[0], unheard), ends[1], [start]) == [start]


async def test_an_order_that_is_too_long_takes_no_other_one_with_it(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    short = StartDeployment("d2", "vllm", (), "", "")
    long = StartDeployment("d1", "vllm", ("x" * 8_000_000,), "", "")
    assert await heard(InitLink(ends[0], unheard), ends[1], [long, short]) == [short]


def test_a_fork_server_hears_clients_whose_files_have_high_numbers() -> None:
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most < 1_500:
        pytest.skip("no file may have such a number here")
    ours, theirs = socket.socketpair()
    with ours, theirs:
        number = fcntl.fcntl(ours, fcntl.F_DUPFD_CLOEXEC, 1_400)
        with socket.socket(fileno=number) as far:
            theirs.send(b"x")
            assert _ready([far]) == [far]


async def test_orders_wait_until_it_is_known_that_their_server_leads(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    link, init = InitLink(ends[0], unheard), ends[1]
    init.setblocking(False)
    leads = False
    link.may_order = lambda: leads
    for engine in ("one", "two"):
        link.order(LoadEngine(engine))
    with pytest.raises(BlockingIOError):
        init.recv(MESSAGE_BYTES)
    leads = True
    link.give_orders()
    assert [order_of(init.recv(MESSAGE_BYTES)) for _ in range(2)] == [
        LoadEngine("one"),
        LoadEngine("two"),
    ]
    leads = False
    link.order(LoadEngine("late"))
    link.step_down(StepDown("b:/data", leads=6))
    leads = True
    link.give_orders()
    assert order_of(init.recv(MESSAGE_BYTES)) == StepDown("b:/data", leads=6)
    with pytest.raises(BlockingIOError):
        init.recv(MESSAGE_BYTES)
    link.close()
