"""Orders to init and its news, however long they are: a model with many adapters, many models."""

from __future__ import annotations

import fcntl
import resource
import socket
from collections.abc import Iterator

import pytest

from kvmig.fleet.init_link import InitLink
from kvmig.fleet.orders import (
    DeployedProgram,
    DeployedPrograms,
    LoadEngine,
    News,
    Order,
    StartDeployment,
    StepDown,
    encode,
    order_of,
)
from kvmig.process.fork_server import _ready
from kvmig.rpc.unix_packets import PACKET_BYTES, QueuedPackets
from tests.support.waiting import until


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        yield ours, theirs


def unheard(_: News) -> None:
    """Init says nothing here."""


async def heard(link: InitLink, init: socket.socket, orders: list[Order]) -> list[Order]:
    """What comes of orders until one for an engine's libraries."""
    found: list[Order] = []
    other = QueuedPackets(init, lambda message: found.append(order_of(message)), lambda: None)
    other.listen()
    for one in (*orders, LoadEngine("toy")):
        link.order(one)
    await until(lambda: found and found[-1] == LoadEngine("toy"))
    other.close()
    return found[:-1]


async def test_a_model_with_many_adapters_starts(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    words = tuple(f"adapter-{at:04}=/models/adapters/{'x' * 110}/{at:04}" for at in range(1_700))
    start = StartDeployment("d1", "vllm", words, "", "")
    assert await heard(InitLink(ends[0], unheard), ends[1], [start]) == [start]


@pytest.mark.parametrize("size", [PACKET_BYTES - 100, PACKET_BYTES, 2 * PACKET_BYTES, 8_000_000])
async def test_an_order_of_any_length_comes_whole_and_in_its_turn(
    ends: tuple[socket.socket, socket.socket], size: int
) -> None:
    short = StartDeployment("d2", "vllm", (), "", "")
    long = StartDeployment("d1", "vllm", ("x" * size,), "", "")
    given: list[Order] = [short, long, short]
    assert await heard(InitLink(ends[0], unheard), ends[1], given) == given


async def test_a_server_learns_of_all_that_runs_however_much_that_is(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    """It would never decide anything, as long as it does not know."""
    news: list[News] = []
    link = InitLink(ends[0], news.append)
    link.listen()
    notes = (f"{at:08}" * 1_000 for at in range(400))
    told = DeployedPrograms(tuple(DeployedProgram(note[:8], "vllm", note, 7) for note in notes))
    init = QueuedPackets(ends[1], lambda _: None, lambda: None)
    init.send(encode(told))
    init.send(encode(DeployedPrograms(())))
    await until(lambda: len(news) == 2)
    assert news == [told, DeployedPrograms(())]
    link.close()
    init.close()


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
        init.recv(PACKET_BYTES)
    leads = True
    link.give_orders()
    assert [order_of(init.recv(PACKET_BYTES)) for _ in range(2)] == [
        LoadEngine("one"),
        LoadEngine("two"),
    ]
    leads = False
    link.order(LoadEngine("late"))
    link.step_down(StepDown("b:/data", leads=6))
    leads = True
    link.give_orders()
    assert order_of(init.recv(PACKET_BYTES)) == StepDown("b:/data", leads=6)
    with pytest.raises(BlockingIOError):
        init.recv(PACKET_BYTES)
    link.close()
