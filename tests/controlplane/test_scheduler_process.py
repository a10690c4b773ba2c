"""The scheduler's own process over real sockets, with llumlets played by the test."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import msgspec
import pytest

from kvmig.controlplane.messages import (
    ClusterMember,
    ClusterMessage,
    LoadReport,
    Members,
    MessagesRefused,
    PairedDestination,
    Pairs,
)
from kvmig.controlplane.scheduler import UNPAIR
from kvmig.controlplane.scheduler_process import SchedulerLaunch, SchedulerReady
from kvmig.core.config import ClusterConfig, SchedulerConfig
from kvmig.core.errors import TransportError
from kvmig.engines.base import EngineLoad
from kvmig.rpc.zmq_sockets import RpcClient, RpcServer
from tests.support.inside import socket_of

SECRET = b"a secret of the cluster"
SCHEDULER = SchedulerConfig(interval_ms=20, source_below=3, destination_above=6, min_gain=1)
CROWDED = EngineLoad(100, 90, 9, 0, 0, 0)
EVEN = EngineLoad(100, 50, 5, 0, 0, 0)
ROOMY = EngineLoad(100, 10, 1, 0, 0, 0)
ROOT = Path(__file__).parents[2]


class Llumlet:
    """Reports `load` every 10 ms to who said hello, and keeps the pairs that it gets."""

    def __init__(self, name: str, load: EngineLoad, port: int = 0) -> None:
        self.load = load
        self.pairs: asyncio.Queue[PairedDestination | None] = asyncio.Queue()
        self.server = RpcServer(SECRET, "llumlet", name, ClusterMessage, port=port)
        self.member = ClusterMember(name, self.server.endpoint)
        self.peer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._tasks = [asyncio.ensure_future(self._hear()), asyncio.ensure_future(self._report())]

    async def _hear(self) -> None:
        while True:
            sender, message, _ = await self.server.recv()
            if isinstance(message, Pairs):
                self.pairs.put_nowait(message.pairs[0] if message.pairs else None)
            elif not self.peer.done():
                self.peer.set_result(sender)

    async def _report(self) -> None:
        peer = await asyncio.shield(self.peer)
        seq = 0
        while True:
            with suppress(TransportError):
                self.server.send(peer, LoadReport(self.member.instance, seq, self.load, 0, 0))
            seq += 1
            await asyncio.sleep(0.01)

    async def hang(self) -> None:
        """Neither hear nor report any more."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def lost(self, peer: bytes) -> None:
        """Wait until `peer` is not connected any more."""
        with suppress(TransportError):
            while True:
                self.server.send(peer, UNPAIR)
                await asyncio.sleep(0.02)

    async def close(self) -> None:
        await self.hang()
        self.server.close()

    async def next_pair(self) -> PairedDestination | None:
        """None: it shall stop."""
        return await asyncio.wait_for(self.pairs.get(), 20)

    async def until(self, wanted: Callable[[PairedDestination | None], bool]) -> None:
        while not wanted(await self.next_pair()):
            pass

    async def until_to(self, destination: str) -> None:
        await self.until(lambda pair: pair is not None and pair.destination == destination)


class Process:
    """The scheduler's process as its launcher sees it."""

    def __init__(self, popen: subprocess.Popen[bytes], ready: SchedulerReady) -> None:
        self.popen = popen
        self.client = RpcClient(ready.endpoint, SECRET, "gateway", "test", ClusterMessage)

    def members(self, *llumlets: Llumlet | ClusterMember) -> None:
        named = [one.member if isinstance(one, Llumlet) else one for one in llumlets]
        self.client.send(Members(named))

    async def ended(self) -> int:
        return await asyncio.to_thread(self.popen.wait, 20)


def start(descriptor: int, launch: bytes, stderr: int | None = None) -> subprocess.Popen[bytes]:
    popen = subprocess.Popen(
        [sys.executable, "-m", "kvmig.launcher.scheduler", str(descriptor)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stderr=stderr,
        pass_fds=(descriptor,),
    )
    assert popen.stdin is not None
    popen.stdin.write(launch + b"\n")
    popen.stdin.flush()
    return popen


@asynccontextmanager
async def running() -> AsyncIterator[Process]:
    reader, writer = os.pipe()
    launch = SchedulerLaunch(SECRET, ClusterConfig(scheduler=SCHEDULER))
    popen = start(writer, msgspec.json.encode(launch))
    os.close(writer)
    with popen, os.fdopen(reader, "rb") as pipe:
        try:
            line = await asyncio.to_thread(pipe.readline)
            process = Process(popen, msgspec.json.decode(line, type=SchedulerReady))
            try:
                yield process
            finally:
                process.client.close()
        finally:
            popen.kill()


@asynccontextmanager
async def llumlets(*loads: EngineLoad) -> AsyncIterator[list[Llumlet]]:
    made = [Llumlet(name, load) for name, load in zip("abcdef", loads, strict=False)]
    try:
        yield made
    finally:
        for one in made:
            await one.close()


async def test_the_crowded_one_of_two_is_paired_with_the_other_and_undone_when_even() -> None:
    async with llumlets(EVEN, EVEN) as (a, b), running() as process:
        process.members(a, b)
        await asyncio.gather(a.peer, b.peer)
        await asyncio.sleep(0.2)
        assert a.pairs.empty()
        assert b.pairs.empty()
        a.load, b.load = CROWDED, ROOMY
        pair = await a.next_pair()
        assert pair is not None
        assert (pair.destination, pair.endpoint) == ("b", b.member.endpoint)
        await a.until(lambda pair: pair is not None and pair.budget_blocks == 40)
        a.load, b.load = EVEN, EVEN
        await a.until(lambda pair: pair is None)
        assert b.pairs.empty()


async def test_llumlets_that_hang_or_are_gone_do_not_keep_others_from_their_pairs() -> None:
    async with llumlets(CROWDED, ROOMY, CROWDED, ROOMY) as (a, b, hung, dead), running() as process:
        with socket.create_server(("127.0.0.1", 0)) as deaf:
            mute = ClusterMember("mute", f"tcp://127.0.0.1:{deaf.getsockname()[1]}")
            process.members(mute, hung, a, b, dead)
            await asyncio.gather(hung.next_pair(), a.next_pair())
            await hung.hang()
            await dead.close()
            for _ in range(10):
                await a.until_to("b")


async def test_a_llumlet_that_comes_back_is_found_again_and_known_by_its_new_reports() -> None:
    async with llumlets(CROWDED, ROOMY) as (a, b), running() as process:
        process.members(a, b)
        await a.until_to("b")
        port = int(b.member.endpoint.rpartition(":")[2])
        await b.close()
        await a.until(lambda pair: pair is None)
        again = Llumlet("b", ROOMY, port)
        try:
            await a.until_to("b")
        finally:
            await again.close()


async def test_a_removed_member_is_disconnected_and_no_destination_any_more() -> None:
    async with llumlets(CROWDED, ROOMY) as (a, b), running() as process:
        process.members(a, b)
        await a.until_to("b")
        process.members(a)
        await a.until(lambda pair: pair is None)
        peer = await b.peer
        await b.hang()
        await asyncio.wait_for(b.lost(peer), 20)


async def test_what_it_refuses_is_counted_and_told_to_the_launcher() -> None:
    async with llumlets(EVEN) as (a,), running() as process:
        process.members(a)
        peer = await a.peer
        await socket_of(a.server).send_multipart([peer, b"no message"])
        process.client.send(UNPAIR)  # isn't for a scheduler
        port = int(process.client.endpoint.rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port), timeout=20) as stranger:
            stranger.sendall(b"GET / HTTP/1.1")
        wanted = {"unreadable": 1, "unexpected": 1, "unauthenticated": 1}
        async with asyncio.timeout(20):
            while True:
                told, _ = await process.client.recv()
                assert isinstance(told, MessagesRefused)
                if told == MessagesRefused("scheduler", wanted):
                    break


async def test_it_ends_with_its_launcher() -> None:
    async with running() as process:
        assert process.popen.stdin is not None
        process.popen.stdin.close()
        assert await process.ended() == 0


async def test_it_ends_at_sigterm_and_not_at_a_terminals_sigint() -> None:
    async with llumlets(CROWDED, ROOMY) as (a, b), running() as process:
        process.members(a, b)
        await a.next_pair()
        process.popen.send_signal(signal.SIGINT)
        for _ in range(5):
            await a.next_pair()
        process.popen.send_signal(signal.SIGTERM)
        assert await process.ended() == 0


@pytest.mark.parametrize(
    ("launch", "sentence"),
    [
        (b"", "no SchedulerLaunch on stdin"),
        (b'{"secret": "c2hvcnQ=", "config": {}}', "at least 16 bytes"),
        (
            msgspec.json.encode(SchedulerLaunch(SECRET, ClusterConfig(control_host="203.0.113.1"))),
            "203.0.113.1",
        ),
    ],
    ids=["nothing", "short secret", "foreign address"],
)
def test_what_can_not_be_started_is_said_in_one_sentence(launch: bytes, sentence: str) -> None:
    reader, writer = os.pipe()
    with start(writer, launch, stderr=subprocess.PIPE) as popen:
        os.close(writer)
        os.close(reader)
        _, said = popen.communicate(timeout=20)
    assert popen.returncode == 1
    assert said.startswith(b"kvmig scheduler: ")
    assert sentence.encode() in said
    assert said.count(b"\n") == 1


def test_its_imports_are_light() -> None:
    code = "import sys, kvmig.launcher.scheduler; print({'torch', 'vllm'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=True)
    assert done.stdout == b"set()\n"
