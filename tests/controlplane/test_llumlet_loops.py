"""A llumlet around a toy engine, and what happens to it when somebody is gone or fails."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, get_args
from unittest import mock

import pytest

from kvmig.controlplane.llumlet import Llumlet
from kvmig.controlplane.messages import (
    AbortRequests,
    CallDone,
    ClusterMessage,
    EngineCall,
    Fence,
    ListedRequests,
    ListRequests,
    LoadReport,
    Migrate,
    Migrated,
    OrderDone,
    Outputs,
    Overrun,
    PairedDestination,
    SetGuarantee,
    Submit,
    Welcome,
    Why,
)
from kvmig.core.config import ClusterConfig, UnitConfig
from kvmig.core.errors import PeerBehind, TransportError
from kvmig.engines.base import CacheRoom, CameBlocks, KVUse, RequestTail
from kvmig.engines.gate import StepGate
from kvmig.engines.held_marks import HeldMarks, PrefixNews, unpack_marks
from kvmig.engines.toy.engine import ToyEngine
from kvmig.engines.toy.script import ScriptFile
from kvmig.kvtransfer.report import MigrationReport
from kvmig.kvtransfer.transports import shm
from kvmig.rpc.messages import RpcMessage
from kvmig.rpc.zmq_sockets import RpcClient
from kvmig.sharing.lease_ledger import MIB
from tests.support.fake_llumlet import report
from tests.support.inside import (
    carry_out_pairing,
    hear_from,
    parts_of,
    put_out_nothing,
    report_every,
)
from tests.support.unit_site import agent
from tests.support.waiting import until

SECRET = b"a secret of 16 b"


class Toy(ToyEngine):
    """It never steps."""

    async def _steps(self) -> None:
        await asyncio.sleep(600)


class SlowToy(ToyEngine):
    """Its commits wait, as for a copy of the last blocks, until `go` is set."""

    def __init__(self, script: ScriptFile) -> None:
        super().__init__(script=script)
        self.commits = asyncio.Event()
        self.go = asyncio.Event()

    async def commit(
        self, request_id: str, tail: RequestTail, last: CameBlocks | None = None
    ) -> None:
        self.commits.set()
        await self.go.wait()
        await super().commit(request_id, tail, last)


@asynccontextmanager
async def llumlet(
    engine: ToyEngine, config: ClusterConfig | None = None, name: str = "i0"
) -> AsyncIterator[Llumlet]:
    it = Llumlet(name, "cluster", SECRET, config or ClusterConfig(), engine)
    await it.start()
    try:
        yield it
    finally:
        await it.close(2.0)


class FrontEnd:
    """A connection of a front end's."""

    def __init__(self, it: Llumlet, name: str = "front") -> None:
        self.client = RpcClient(it.endpoint, SECRET, "gateway", name, ClusterMessage)
        self._news: list[PrefixNews] = []
        """Of reports that came while another message was awaited."""

    async def hear(self, kind: type[RpcMessage]) -> RpcMessage:
        async with asyncio.timeout(10):
            while not isinstance(message := (await self.client.recv())[0], kind):
                if isinstance(message, LoadReport) and message.prefixes is not None:
                    self._news.append(message.prefixes)
            return message

    async def hears_untold(self, count: int) -> None:
        """Until a report says so; nothing that comes before Migrated is passed over."""
        async with asyncio.timeout(10):
            while True:
                message = (await self.client.recv())[0]
                assert not isinstance(message, Migrated)
                if isinstance(message, LoadReport) and message.untold == count:
                    return

    async def hears_prefixes(self) -> PrefixNews:
        """The next that a report says of them."""
        async with asyncio.timeout(10):
            while not self._news:
                report = await self.hear(LoadReport)
                assert isinstance(report, LoadReport)
                if report.prefixes is not None:
                    self._news.append(report.prefixes)
            return self._news.pop(0)

    async def requests(self) -> set[str]:
        self.client.send(ListRequests(1))
        answer = await self.hear(ListedRequests)
        assert isinstance(answer, ListedRequests)
        assert set(answer.fronts) == {one.request_id for one in answer.requests}
        return set(answer.fronts)


@asynccontextmanager
async def front_end(it: Llumlet, name: str = "front") -> AsyncIterator[FrontEnd]:
    front = FrontEnd(it, name)
    try:
        await front.hear(Welcome)
        yield front
    finally:
        front.client.close()


async def test_answers_to_a_front_end_that_has_gone_are_no_failures(
    caplog: pytest.LogCaptureFixture,
) -> None:
    questions = (ListRequests(1), Fence(2, "r", 1), Migrate(3, "r", "i1", "tcp://127.0.0.1:1"))
    async with llumlet(ToyEngine()) as it, front_end(it) as front:
        for question in questions:
            hear_from(it, b"nobody", question)
        assert await front.requests() == set()
        await asyncio.sleep(0.1)
    # Of kvmig only: asyncio may tell now of a socket that an earlier test left.
    failures = [one for one in caplog.records if one.levelno >= logging.ERROR]
    assert not [one for one in failures if one.name.startswith("kvmig")]


async def test_an_abort_of_many_ends_all_though_one_has_left_for_an_instance_that_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def gone(endpoint: str, message: RpcMessage) -> None:
        raise TransportError(f"{endpoint}: connection lost or refused")

    engine = Toy()
    async with llumlet(engine) as it, front_end(it) as front:
        for name in ("a", "b"):
            front.client.send(Submit(name), engine.encode_request([1, 2, 3], 100))
        assert await front.requests() == {"a", "b"}
        parts_of(it).tracking.left("gone", "tcp://127.0.0.1:1")
        monkeypatch.setattr(parts_of(it).host, "send_to", gone)
        front.client.send(AbortRequests(["gone", "a", "b"]))
        assert await front.requests() == set()


@pytest.mark.parametrize("where", ["source", "destination"])
async def test_a_request_that_is_aborted_while_it_is_committed_ends_at_the_destination(
    tmp_path: Path, where: str
) -> None:
    script = tmp_path / "script.json"
    script.write_text('{"hold": 5}')  # then it runs without end
    source, destination = (
        ToyEngine(script=ScriptFile(str(script))),
        SlowToy(ScriptFile(str(script))),
    )
    async with (
        llumlet(source) as here,
        llumlet(destination, name="i1") as there,
        front_end(here) as front,
        front_end(there) as other,
    ):
        front.client.send(Submit("r"), source.encode_request([1, 2, 3], 100))
        await front.hear(Outputs)
        front.client.send(Migrate(1, "r", "i1", there.endpoint))
        async with asyncio.timeout(10):
            await destination.commits.wait()
        one = front if where == "source" else other
        one.client.send(AbortRequests(["r"]))
        assert await one.requests() == set()
        destination.go.set()
        answer = await front.hear(Migrated)
        assert isinstance(answer, Migrated)
        assert answer.report.state == "committed"

        await until(lambda: destination.load().running == 0, within_s=10.0)

        assert destination.load().used_blocks == source.load().used_blocks == 0


async def test_a_migration_is_reported_until_front_ends_were_told_how_it_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    over = asyncio.Event()

    async def migrate(*_: Any, **__: Any) -> MigrationReport:
        await over.wait()
        return report()

    async with llumlet(Toy()) as it, front_end(it) as front:
        monkeypatch.setattr(parts_of(it).host.migrations, "migrate", migrate)
        front.client.send(Migrate(1, "r", "1", "tcp://127.0.0.1:1"))
        await front.hears_untold(1)
        over.set()
        await front.hear(Migrated)
        await front.hears_untold(0)


async def test_a_front_end_that_connects_again_has_no_runs_of_before() -> None:
    engine = Toy()
    async with llumlet(engine) as it, front_end(it) as before:
        before.client.send(Submit("r"), engine.encode_request([1, 2, 3], 100))
        assert await before.requests() == {"r"}
        async with front_end(it) as again:
            assert await again.requests() == set()
            again.client.send(Submit("s"), engine.encode_request([1, 2, 3], 100))
            assert await again.requests() == {"s"}


async def test_a_front_end_that_reads_too_slowly_is_told_that_its_requests_are_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, behind = Toy(), [True]
    async with llumlet(engine) as it, front_end(it) as front:
        front.client.send(Submit("r"), engine.encode_request([1, 2, 3], 100))
        assert await front.requests() == {"r"}
        send = parts_of(it).server.send

        def full(identity: bytes, *message: Any) -> None:
            if behind[0]:
                raise PeerBehind("it has not read so many messages")
            send(identity, *message)

        monkeypatch.setattr(parts_of(it).server, "send", full)
        await until(lambda: not parts_of(it).tracking.gateways())
        behind[0] = False
        await front.hear(Overrun)
    assert parts_of(it).overrun == set()


async def test_a_front_end_that_has_connected_again_hears_all_that_is_held() -> None:
    engine = Toy()
    engine.held_marks = HeldMarks()
    engine.held_marks.hold(1, 77)
    async with llumlet(engine) as it:
        async with front_end(it) as front:
            assert (await front.hears_prefixes()).whole
            report_every(parts_of(it).reporter, 600.0)  # none fails while it is away
        engine.held_marks.hold(2, 78)
        async with front_end(it) as front:
            report_every(parts_of(it).reporter, 0.01)
            await front.requests()
            again = await front.hears_prefixes()
            assert again.whole
            assert set(unpack_marks(again.added)) == {77, 78}


async def test_what_one_front_end_hears_for_the_first_time_others_do_not_hear_again() -> None:
    engine = Toy()
    engine.held_marks = HeldMarks()
    engine.held_marks.hold(1, 77)
    async with llumlet(engine) as it, front_end(it) as front:
        assert (await front.hears_prefixes()).whole
        async with front_end(it, "other") as other:
            assert unpack_marks((await other.hears_prefixes()).added) == (77,)
            engine.held_marks.hold(2, 78)
            for one in (front, other):
                news = await one.hears_prefixes()
                assert (news.whole, unpack_marks(news.added)) == (False, (78,))


async def test_a_scheduler_that_reads_too_slowly_gets_later_reports(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with llumlet(Toy()) as it:
        scheduler = RpcClient(it.endpoint, SECRET, "scheduler", "s", ClusterMessage)
        try:
            await scheduler.recv()
            with monkeypatch.context() as full:
                behind = mock.Mock(side_effect=PeerBehind("it has not read so many messages"))
                full.setattr(parts_of(it).server, "send", behind)
                await until(lambda: behind.called)
            async with asyncio.timeout(10):
                while not isinstance((await scheduler.recv())[0], LoadReport):
                    pass
            assert parts_of(it).fronts.listeners() == [b"s"]
        finally:
            scheduler.close()


async def test_a_llumlet_that_can_not_take_messages_any_more_has_failed() -> None:
    class Broken(ToyEngine):
        def abort(self, request_ids: Sequence[str]) -> None:
            raise ValueError("a bug")

    async with llumlet(Broken()) as it, front_end(it) as front:
        front.client.send(AbortRequests(["r"]))
        async with asyncio.timeout(10):
            error = await it.failed()
        assert isinstance(error, ValueError)


class Pool:
    """KV cache of a toy in a unit: it does what it is told, at once."""

    room = CacheRoom(4 * MIB, 64 * MIB, MIB)
    unlimited = ""

    def __init__(self) -> None:
        self.use = KVUse(0, 0, 0, 0)
        self.on_use: Callable[[], None] = lambda: None

    def watch(self, on_use: Callable[[], None]) -> None:
        self.on_use = on_use

    async def resize(self, quota: int, limit: int, patience_s: float) -> None:
        self.use = KVUse(quota, 0, 0, 0)

    async def gated(self, gate: StepGate) -> None:
        raise AssertionError("it asks for no steps")


async def guaranteed(front: FrontEnd, size: int) -> OrderDone:
    front.client.send(SetGuarantee(7, size))
    answer = await front.hear(OrderDone)
    assert isinstance(answer, OrderDone)
    assert answer.call_id == 7
    return answer


async def test_an_instance_of_a_unit_has_the_guarantee_that_it_is_told_and_says_so_first(
    tmp_path: Path,
) -> None:
    toy = Toy()
    toy.sharing = Pool()
    config = ClusterConfig(unit=UnitConfig(path=str(tmp_path / "unit"), model="m"))
    async with (
        agent(tmp_path / "unit") as ledger,
        llumlet(toy, config) as it,
        front_end(it) as front,
    ):
        front.client.send(SetGuarantee(7, 20 * MIB))
        while not isinstance(message := (await front.client.recv())[0], OrderDone):
            if isinstance(message, LoadReport):
                report = message
        assert (message.refused, message.instances) == ("", ("i0",))
        assert report.shared is not None
        assert report.shared.guarantee == 20 * MIB
        assert ledger.guarantees() == {"cluster.i0": 20 * MIB}
        refused = await guaranteed(front, 65 * MIB)
        assert refused.refused == "conflict"
        assert "instance i0: the unit has no room for cluster.i0" in refused.error
        assert ledger.guarantees() == {"cluster.i0": 20 * MIB}


async def test_an_instance_without_a_unit_takes_no_guarantee() -> None:
    async with llumlet(Toy()) as it, front_end(it) as front:
        refused = await guaranteed(front, MIB)
        assert refused.refused == "conflict"
        assert refused.error == "instance i0 is in no unit: it runs without --unit"
    own = ClusterConfig(unit=UnitConfig(path="/nowhere", model="m"))
    async with llumlet(Toy(), own) as it, front_end(it) as front:
        assert (await guaranteed(front, MIB)).error == "instance i0 is in no unit: it is a toy"


@pytest.mark.parametrize("why", get_args(Why))
async def test_moves_that_somebody_waits_for_are_urgent(
    why: Why, monkeypatch: pytest.MonkeyPatch
) -> None:
    urgent: list[bool] = []

    async def migrate(*_: object, **how: object) -> MigrationReport:
        urgent.append(how["urgent"] is True)
        return MigrationReport(
            id="m", request_id="r", source="i0", destination="i1", state="aborted", reason="busy"
        )

    async with llumlet(Toy()) as it:
        monkeypatch.setattr(parts_of(it).host.migrations, "migrate", migrate)
        await carry_out_pairing(it, "r", PairedDestination("i1", "tcp://127.0.0.1:1", why=why))
    assert urgent == [why in ("drain", "priority", "defragment", "relieve")]


async def test_an_engine_that_has_nothing_to_do_is_looked_at_no_more_often_than_it_tells() -> None:
    class Counted(ToyEngine):
        looks = 0

        def step_s(self) -> float:
            self.looks += 1
            return super().step_s()

    engine = Counted()
    async with llumlet(engine):
        await asyncio.sleep(0.4)
        before = engine.looks
        await asyncio.sleep(0.5)
        assert engine.looks - before <= 12


async def test_outputs_without_tokens_don_t_make_an_engine_busy() -> None:
    async with llumlet(ToyEngine()) as it:
        await asyncio.sleep(0.4)
        engine = parts_of(it).engine
        with mock.patch.object(engine, "step_s", side_effect=engine.step_s) as looks:
            for _ in range(10):
                put_out_nothing(it, 1)
                await asyncio.sleep(0.05)
        assert looks.call_count <= 20


async def test_a_request_that_comes_to_an_idle_engine_is_told_at_once() -> None:
    engine = Toy()
    async with llumlet(engine) as it, front_end(it) as front:
        await asyncio.sleep(0.4)
        report_every(parts_of(it).reporter, 60.0)
        front.client.send(Submit("r"), engine.encode_request([1, 2, 3], 100))
        async with asyncio.timeout(1.0):
            while not (told := await front.hear(LoadReport)).load.running + told.load.waiting:  # type: ignore[attr-defined]
                pass


async def test_a_call_that_an_engine_can_not_read_is_answered() -> None:
    class Strict(ToyEngine):
        def call(self, *_: object) -> None:
            raise ValueError("no such argument")

    async with llumlet(Strict()) as it, front_end(it) as front:
        front.client.send(EngineCall(7, "reset"))
        assert await front.hear(CallDone) == CallDone(7, "ValueError('no such argument')")
        assert await front.requests() == set()


async def test_a_llumlet_whose_requests_can_not_be_moved_says_so_and_stages_nothing() -> None:
    class Unmovable(Toy):
        unmovable = "7 kinds of cache"

    before = set(shm.FOLDER.glob("kvmig-cluster-*"))
    async with llumlet(Unmovable()) as it, front_end(it) as front:
        report = await front.hear(LoadReport)
        assert isinstance(report, LoadReport)
        assert report.unmovable == "7 kinds of cache"
        assert set(shm.FOLDER.glob("kvmig-cluster-*")) <= before
