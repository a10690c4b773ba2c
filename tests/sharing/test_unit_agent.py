"""The agent of a unit as a process, and its members' end of the socket."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from kvmig.core.background import cancel_tasks
from kvmig.core.errors import ConfigError, StartupError, TransportError
from kvmig.engines.base import KVUse
from kvmig.process.sockets import take_path
from kvmig.rpc.unix_packets import UnixPackets
from kvmig.sharing.__main__ import main, shown
from kvmig.sharing.agent import UnitAgent
from kvmig.sharing.lease_ledger import MIB, LeaseLedger, MemberClaim
from kvmig.sharing.member import UnitMember
from kvmig.sharing.member_locks import MemberLocks
from kvmig.sharing.messages import (
    MOST_BYTES,
    VERSION,
    AskUnit,
    HeldMemory,
    InUnit,
    MemberHello,
    MemberRefused,
    MemberShare,
    UnitState,
    encode,
    to_member,
)
from kvmig.sharing.unit_state import fetch_unit
from tests.support import unit_site
from tests.support.unit_site import agent
from tests.support.waiting import until

PATIENCE_S = 20.0


class Engine:
    """What a member holds, MiB: it gives and takes at once, but never what its requests use."""

    def __init__(self) -> None:
        self.on_use: Callable[[], None] = lambda: None
        self.looks = 0
        self.quota = self.lease = self.used = self.wanted = 0
        self.limit = 0

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, value)
        if name in ("used", "wanted"):
            self.on_use()

    def watch(self, on_use: Callable[[], None]) -> None:
        self.on_use = on_use

    async def resize(self, quota: int, limit: int) -> None:
        self.quota, self.limit = quota // MIB, limit // MIB
        self.lease = max(self.quota, self.used)

    def use(self) -> KVUse:
        self.looks += 1
        self.lease = max(self.quota, self.used)
        return KVUse(self.lease * MIB, self.used * MIB, 0, max(self.used, self.wanted) * MIB)


def member(
    path: Path, name: str, engine: Engine, *, guarantee: int = 0, floor: int = 4
) -> UnitMember:
    claim = MemberClaim("llama", floor * MIB, 64 * MIB, MIB, guarantee * MIB)
    return UnitMember(str(path), name, claim, engine.use, engine.watch, engine.resize)


@contextlib.asynccontextmanager
async def joined(path: Path, name: str) -> AsyncIterator[Engine]:
    engine = Engine()
    async with unit_site.joined(member(path, name, engine)):
        yield engine


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "unit"


async def test_a_member_gets_what_another_has_no_use_for_and_gives_it_back(path: Path) -> None:
    async with agent(path) as ledger, joined(path, "a") as a, joined(path, "b") as b:
        await until(lambda: (a.quota, b.quota) == (32, 32))
        assert a.limit == 60
        a.wanted = 100
        await until(lambda: (a.quota, b.quota) == (60, 4))
        a.used = 60
        b.wanted = 20
        await until(lambda: (a.quota, b.quota) == (44, 4))
        assert ledger.leased == 64 * MIB, "a holds it still"
        a.used = 40
        await until(lambda: (a.quota, b.quota) == (44, 20))


async def test_a_member_says_what_it_has_and_is_promised(path: Path) -> None:
    async with agent(path):
        engine = Engine()
        one = member(path, "a", engine, guarantee=8)
        await one.join()
        engine.wanted = 9
        assert one.state == InUnit(
            64 * MIB, 9 * MIB, 8 * MIB, 0.0, connected=True, used=0, asked=8 * MIB
        )
        one.close()
        assert not one.state.connected


async def test_a_guarantee_that_changes_is_told_to_the_next_agent_too(path: Path) -> None:
    engine = Engine()
    one = member(path, "a", engine, guarantee=8)
    async with agent(path) as ledger:
        await one.join()
        running = asyncio.create_task(one.run())
        await one.guarantee(16 * MIB)
        assert ledger.guarantees() == {"a": 16 * MIB}
        assert (one.state.guarantee, one.state.asked) == (16 * MIB, 16 * MIB)
        await one.guarantee(0)
        await until(lambda: one.state.guarantee == 64 * MIB)
        assert one.state.asked == 0, "a fair part, which others may make smaller"
        await one.guarantee(16 * MIB)
    async with agent(path) as ledger:
        await until(lambda: ledger.guarantees().get("a") == 16 * MIB)
    await cancel_tasks(running)
    one.close()


async def test_a_guarantee_that_cannot_be_is_refused_and_the_connection_goes_on(path: Path) -> None:
    engine = Engine()
    one = member(path, "a", engine, guarantee=8)
    async with agent(path) as ledger:
        await one.join()
        running = asyncio.create_task(one.run())
        with pytest.raises(ConfigError, match=r"no room for a: its guarantee takes 65\.0 MiB"):
            await one.guarantee(65 * MIB)
        assert ledger.guarantees() == {"a": 8 * MIB}
        engine.wanted = 3
        await until(lambda: ledger.members["a"].wanted == 3 * MIB)
        assert one.state.guarantee == 8 * MIB
    await until(lambda: not one.connected)
    with pytest.raises(TransportError, match="isn't there"):
        await one.guarantee(9 * MIB)
    await cancel_tasks(running)
    one.close()


async def test_who_waits_for_an_agent_that_dies_hears_of_it(path: Path) -> None:
    engine = Engine()
    one = member(path, "a", engine)
    with take_path(str(path), socket.SOCK_SEQPACKET) as sock:
        sock.setblocking(True)
        running = asyncio.create_task(UnitAgent(sock, LeaseLedger(64 * MIB), 0.0).run())
        await one.join()
        serving = asyncio.create_task(one.run())
        asking = asyncio.create_task(one.guarantee(16 * MIB))
        await cancel_tasks(running)
        with pytest.raises(TransportError, match=r"gone|isn't there"):
            await asking
    await cancel_tasks(serving)
    one.close()
    assert one._wanted == {}


async def test_an_engine_that_does_nothing_is_not_looked_at(path: Path) -> None:
    async with agent(path), joined(path, "a") as a:
        await until(lambda: a.quota == 64)
        await asyncio.sleep(0.1)
        before = a.looks
        await asyncio.sleep(0.3)
        assert a.looks == before
        a.wanted = 1
        await until(lambda: a.looks == before + 1)


MEMBER = """
import asyncio, sys
from pathlib import Path
from tests.sharing.test_unit_agent import Engine, member
from tests.support.unit_site import joined

async def main():
    async with joined(member(Path(sys.argv[1]), "a", Engine(), guarantee=40)):
        print(flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


@contextlib.asynccontextmanager
async def stopped_without_an_agent(path: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    """A process that has leased all, and can't speak; its agent is dead."""
    async with agent(path) as ledger:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", MEMBER, str(path)), stdout=subprocess.PIPE
        )
        assert process.stdout is not None
        assert await process.stdout.readline(), "it has joined"
        assert ledger.leased == 64 * MIB
        process.send_signal(signal.SIGSTOP)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.communicate()


async def test_a_member_that_is_stopped_while_its_agent_dies_keeps_its_lease(path: Path) -> None:
    async with stopped_without_an_agent(path) as process, agent(path) as ledger:
        engine = Engine()
        other = member(path, "b", engine)
        coming = asyncio.create_task(other.join())
        await asyncio.sleep(0.5)
        assert ledger.leased == 0, "it may have all"
        process.send_signal(signal.SIGCONT)
        await coming
        assert engine.quota >= 4
        assert ledger.leased == 64 * MIB
        other.close()


async def test_what_a_stopped_member_had_is_leased_when_it_is_killed(path: Path) -> None:
    async with stopped_without_an_agent(path) as process, agent(path):
        engine = Engine()
        other = member(path, "b", engine)
        coming = asyncio.create_task(other.join())
        process.kill()
        await coming
        assert engine.quota == 64
        other.close()


async def test_a_member_that_comes_back_late_has_its_place_before_a_new_one(path: Path) -> None:
    """Else it would hold memory that no agent knows of, and that others get."""
    async with stopped_without_an_agent(path) as process, agent(path) as ledger:
        other = member(path, "b", Engine(), guarantee=40)
        coming = asyncio.create_task(other.join())
        await asyncio.sleep(0.2)
        process.send_signal(signal.SIGCONT)
        with pytest.raises(StartupError, match="no room for b: its guarantee takes 40"):
            await coming
        assert list(ledger.members) == ["a"]
        assert ledger.leased == 64 * MIB


async def test_a_member_that_may_not_come_back_keeps_nobody_from_growing(path: Path) -> None:
    async with stopped_without_an_agent(path) as process, agent(path, arena=32):
        engine = Engine()
        other = member(path, "b", engine)
        coming = asyncio.create_task(other.join())
        await asyncio.sleep(0.2)
        process.send_signal(signal.SIGCONT)
        await coming
        assert engine.quota == 32
        other.close()


def test_two_processes_of_one_number_are_both_in_the_roll(tmp_path: Path) -> None:
    """As of two containers."""
    enters = (
        "import os, sys; from kvmig.sharing.member_locks import MemberLocks; os.getpid = lambda: 7;"
        " MemberLocks(sys.argv[1]).enter(); print(flush=True); sys.stdin.read()"
    )
    path = str(tmp_path / "unit")
    with contextlib.ExitStack() as stack:
        both = [
            stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-c", enters, path],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                )
            )
            for _ in range(2)
        ]
        for one in both:
            assert one.stdout is not None
            assert one.stdout.readline()
        roll = MemberLocks(path)
        assert roll.processes() == {one.pid for one in both}
        for one in both:
            one.kill()
            one.wait()
        assert roll.processes() == set()
        roll.close()


async def test_a_member_whose_process_lives_keeps_its_lease_without_a_connection(
    path: Path,
) -> None:
    async with agent(path) as ledger:
        async with joined(path, "a") as a:
            await until(lambda: a.quota == 64)
        unit = await fetch_unit(str(path))
        assert [(one.lease, one.connected) for one in unit.shares] == [(64 * MIB, False)]
        assert ledger.leased == 64 * MIB


async def test_a_member_whose_process_is_gone_leaves_its_lease(path: Path) -> None:
    async with agent(path), joined(path, "a") as a:
        other = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", JOINS, str(path)), stdin=subprocess.PIPE
        )
        await until(lambda: a.quota == 32)
        other.kill()
        await other.wait()
        await until(lambda: a.quota == 64)


JOINS = """
import socket, sys
from kvmig.sharing.messages import VERSION, MemberHello, encode
sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
sock.connect(sys.argv[1])
sock.send(encode(MemberHello(VERSION, "other", "llama", 4 << 20, 64 << 20, 1 << 20)))
sys.stdin.read()
"""


async def test_members_keep_their_leases_while_there_is_no_agent_and_tell_the_next(
    path: Path,
) -> None:
    async with contextlib.AsyncExitStack() as members:
        async with agent(path):
            a, b = [await members.enter_async_context(joined(path, name)) for name in "ab"]
            a.wanted = 40
            await until(lambda: (a.quota, b.quota) == (40, 24))
            a.used = 40
        assert (a.quota, b.quota) == (40, 24)
        async with agent(path, settle_s=0.6) as ledger:
            await until(lambda: len(ledger.members) == 2)
            assert ledger.leased == 64 * MIB
            await until(lambda: ledger.members["a"].used // MIB == 40)
            b.wanted = 100
            await until(lambda: b.quota == 24)
            a.wanted = a.used = 0
            await until(lambda: b.quota == 60)


async def test_what_does_not_fit_is_refused_at_the_door(path: Path) -> None:
    async with agent(path), joined(path, "a"):
        with pytest.raises(StartupError, match=r"no room for b: one request .* 1.0 MiB are missin"):
            await member(path, "b", Engine(), floor=61).join()
        with pytest.raises(StartupError, match=r"no room for b: its guarantee .* are missing"):
            await member(path, "b", Engine(), guarantee=62).join()


async def test_a_name_that_another_process_has_is_refused(path: Path) -> None:
    async with agent(path), joined(path, "other"):
        other = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", TWICE, str(path)), stdout=subprocess.PIPE
        )
        said, _ = await other.communicate()
        assert b"other is in the unit already, as another process" in said


TWICE = JOINS.replace("sys.stdin.read()", "print(sock.recv(4096))")


async def test_an_agent_without_a_file_for_a_connection_rests_before_it_looks_again(
    path: Path,
) -> None:
    looks, full = list[int](), [True]

    class NoFile:
        """The socket of a process that may open no more files, until it may."""

        def __init__(self, inner: socket.socket) -> None:
            self._inner = inner

        def accept(self) -> Any:
            looks.append(1)
            if full[0]:
                raise OSError(errno.EMFILE, "too many open files")
            return self._inner.accept()

        def __getattr__(self, name: str) -> Any:
            return getattr(self._inner, name)

    with take_path(str(path), socket.SOCK_SEQPACKET) as sock:
        served = UnitAgent(cast("socket.socket", NoFile(sock)), LeaseLedger(64 * MIB), 0.0, None)
        running = asyncio.create_task(served.run())
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as waits:
            waits.connect(str(path))
            await asyncio.sleep(0.2)
            assert len(looks) == 1
            full[0] = False
            waits.sendall(encode(AskUnit(VERSION)))
            waits.setblocking(False)
            async with asyncio.timeout(5):
                assert await asyncio.get_running_loop().sock_recv(waits, 4096)
        await cancel_tasks(running)


async def test_where_no_agent_listens_a_member_cannot_start(path: Path) -> None:
    with pytest.raises(StartupError, match=f"no process listens at {path}: .*No such file"):
        await member(path, "a", Engine()).join()


@pytest.mark.parametrize(
    ("packet", "words"),
    [
        (b"\xc1", "can't be read"),
        (b"\x00" * (MOST_BYTES + 1), None),
        (msgspec.msgpack.encode({"type": "Hello"}), "missing required field"),
        (
            encode(AskUnit(VERSION + 1)),
            f"version {VERSION + 1} of the unit's messages isn't known, only {VERSION}",
        ),
        (
            encode(MemberHello(VERSION + 1, "a", "m", 1, 1, 1)),
            f"version {VERSION + 1} of the unit's",
        ),
        (encode(HeldMemory(0, 0, 0, 0, 0)), "Held isn't expected now"),
        (encode(MemberHello(VERSION, "b", "m", 0, 1, 1)), "one request of the greatest length"),
    ],
)
async def test_what_is_no_message_ends_that_connection_alone(
    path: Path, packet: bytes, words: str | None
) -> None:
    async with agent(path), joined(path, "a") as a:
        bad = UnixPackets.connect(str(path), MOST_BYTES)
        bad.send(packet)
        answer = await bad.recv()
        if words is None:
            assert answer == b""
        else:
            refused = to_member.decode(answer)
            assert isinstance(refused, MemberRefused)
            assert words in refused.why
            assert await bad.recv() == b""
        bad.close()
        a.wanted = 64
        assert isinstance(await fetch_unit(str(path)), UnitState)


async def test_another_users_listener_is_not_trusted(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with agent(path):
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
        with pytest.raises(TransportError, match="another user listens"):
            await fetch_unit(str(path))


async def test_another_users_process_is_not_let_in(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with agent(path):
        packets = UnixPackets.connect(str(path), MOST_BYTES)
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
        assert await packets.recv() == b""
        packets.close()


# -- the process


@pytest.fixture
def process(path: Path) -> Iterator[subprocess.Popen[str]]:
    made = subprocess.Popen(
        [sys.executable, "-m", "kvmig.sharing", str(path), "--memory", "64MiB", "--end-with-stdin"],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with made:
        try:
            assert made.stderr is not None
            assert "unit of 64 MiB" in made.stderr.readline()
            yield made
        finally:
            made.kill()


def test_its_socket_is_this_users_and_goes_with_it(
    path: Path, process: subprocess.Popen[str]
) -> None:
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    unit = asyncio.run(fetch_unit(str(path)))
    assert (unit.arena, unit.rule, unit.shares) == (64 * MIB, "kvmig", [])
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE_S) == 0
    assert not path.exists()


def test_it_shows_what_the_unit_is_like(
    path: Path, process: subprocess.Popen[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(path), "--show"]) == 0
    assert capsys.readouterr().out == "64 MiB, 0 leased, quotas by kvmig\n"
    one = MemberShare("c.i0", "llama", 7, 32 * MIB, 31 * MIB, 30 * MIB, MIB, 0, 2 * MIB, False)
    assert shown(UnitState(64 * MIB, "kvmig", [one]))[1] == (
        "c.i0 (llama): lease 30.0, quota 31.0, guaranteed 32.0, used 1.0, cached 0.0, wanted 2.0,"
        " not connected"
    )


def test_it_ends_with_its_stdin(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(PATIENCE_S) == 0


def test_a_second_agent_is_refused_and_a_killed_ones_path_taken_over(
    path: Path, process: subprocess.Popen[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(path), "--memory", "64MiB"]) == 2
    assert f"PATH {path} can't be used" in capsys.readouterr().err
    process.kill()
    process.wait()
    with take_path(str(path), socket.SOCK_SEQPACKET):
        pass


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--memory", "1GiB"], "required: PATH"),
        (["/tmp/unit"], "--memory is missing, must be the KV cache of all members"),
        (["/none/unit", "--show"], "PATH is /none/unit, must be a unit's socket: no process"),
        (["/tmp/unit", "--memory", "0"], "--memory is 0 bytes, must be 1 MiB or more"),
        (["/tmp/unit", "--memory", "much"], "'much' must be a number of GiB"),
        (["/tmp/unit", "--memory", "nan"], "'nan' must be a number of GiB"),
        (["/tmp/unit", "--memory", "1GiB", "--quotas", "x"], "--quotas is 'x', must be muxserve"),
        (["/none/unit", "--memory", "1GiB"], "PATH /none/unit can't be used: "),
        (["/tmp/unit", "--memory", "1GiB", "--more"], "unrecognized arguments: --more"),
    ],
)
def test_what_is_wrong_is_said_in_one_sentence(
    words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    said = capsys.readouterr().err
    assert sentence in said
    assert said.count("\n") == 1
