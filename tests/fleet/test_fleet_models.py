"""The server's models: what is ordered and told when catalogue, proxies and deployments change."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from kvmig.core.api_records import InstanceRow
from kvmig.core.errors import ConfigError, StartupError
from kvmig.core.priorities import NORMAL
from kvmig.fleet.api import model_json
from kvmig.fleet.capacity import HostCapacity
from kvmig.fleet.controller import WANT_S
from kvmig.fleet.deployments import DeploymentEvent, DeploymentWatcher
from kvmig.fleet.lifecycle import FIRST_RETRY_S
from kvmig.fleet.managed_model import CatalogEntry, ManagedModel, MissingFiles
from kvmig.fleet.metrics import of_models
from kvmig.fleet.model_routes import classes_of
from kvmig.fleet.model_rows import ModelRow
from kvmig.fleet.orders import (
    DeployedProgram,
    DeployedPrograms,
    DeploymentEnded,
    DeploymentStarted,
    LoadEngine,
    StopDeployment,
)
from kvmig.fleet.schedule import ScheduledFloor
from kvmig.fleet.spec import InstanceCounts, ModelSpec
from kvmig.proxy.messages import ModelDemand, ModelWanted, ProxyDemand
from tests.support.model_bench import Bench, served, spec


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    made = Bench(tmp_path)
    yield made
    await made.models.close()


async def test_a_model_that_nobody_wants_is_cold_and_its_engine_is_loaded(bench: Bench) -> None:
    bench.catalogue(spec())
    assert bench.ordered == [LoadEngine("toy")]
    assert (bench.route.state, bench.route.socket) == ("cold", "")


async def test_proxies_know_a_catalogue_before_the_next_round(bench: Bench) -> None:
    """An order is answered once proxies know what was told by then."""
    bench.turn()
    one = CatalogEntry("m1", "a", 1, True, spec())
    bench.models.take_catalogue([one])
    assert (bench.route.name, bench.route.state) == ("a", "cold")
    bench.models.take_catalogue([replace(one, on=False)])
    assert bench.route.state == "off"
    bench.models.take_catalogue([])
    assert bench.told[-1] == ([], ["a"])


async def test_a_deployment_that_nobody_knows_is_not_over_before_its_streams_have_ended(
    bench: Bench,
) -> None:
    """What it uses until then would not be counted."""
    bench.catalogue(spec())
    odd = DeployedProgram("d9", "toy", "a note of tomorrow", 7)
    bench.models.take_news(DeployedPrograms((odd,)))
    assert bench.ordered[-1] == StopDeployment("d9")
    assert not bench.models.is_over("d9")
    bench.models.take_news(DeploymentEnded("d9", "exit code 0"))
    assert bench.models.is_over("d9")


async def test_before_the_first_round_proxies_go_on_with_what_they_know(bench: Bench) -> None:
    bench.models.take_catalogue([CatalogEntry("m1", "a", 1, True, spec())])
    assert not bench.told


async def test_however_many_want_it_one_is_started(bench: Bench) -> None:
    bench.catalogue(spec())
    for _ in range(50):
        bench.models.take_want(ModelWanted("a"))
        bench.demand(held=50)
        bench.turn(0.1)
    (start,) = bench.started
    assert start.words[0] == "/models/a"
    assert "--served-model-name=a" in start.words
    assert bench.route.state == "starting"


async def test_it_is_routed_to_once_it_serves(bench: Bench) -> None:
    bench.catalogue(spec())
    bench.want("a")
    bench.models.take_news(DeploymentStarted(bench.started[0].deployment, 7))
    bench.serve()
    bench.turn(3)
    assert (bench.route.state, bench.route.socket) == ("ready", bench.notes[0].socket)
    told = len(bench.told)
    bench.turn(1)
    assert len(bench.told) == told, "nothing has changed"


async def test_one_that_is_always_warm_starts_by_itself_and_stays(bench: Bench) -> None:
    bench.catalogue(spec(warm="always", instances=InstanceCounts(zero_after_s=60)))
    assert "--instances=1" in bench.started[0].words
    bench.serve()
    bench.turn(1)
    bench.demand()
    bench.turn(600)
    assert bench.route.state == "ready"


async def test_a_want_that_is_not_repeated_does_not_wait_for_room(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench.models.memory, "host", lambda: HostCapacity(1 << 40, 0))
    bench.catalogue(spec())
    bench.want("a")
    assert (bench.route.state, bench.started) == ("cold", [])
    assert bench.route.why.startswith("no room: it needs 0.1 GiB, 0.0 GiB is free")
    bench.turn(WANT_S)
    assert bench.route.why == ""


async def test_one_that_is_too_large_for_what_is_allowed_now_says_so(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench.models.memory, "host", lambda: HostCapacity(1000, 1000))
    bench.catalogue(spec(memory=1001))
    bench.want("a")
    assert (bench.route.state, bench.started) == ("failed", [])
    assert bench.route.why == (
        "model a needs 1001 bytes of memory, 1 more than the 1000 that all models may take"
    )


async def test_a_schedule_starts_it_and_lets_it_go(bench: Bench) -> None:
    bench.now = 8 * 3600.0 - 1  # on 1 January 1970
    floors = (ScheduledFloor(during="* 8 * * *", min=1),)
    bench.catalogue(spec(instances=InstanceCounts(zero_after_s=60, schedule=floors)))
    assert bench.started == []
    bench.turn(1)
    assert len(bench.started) == 1
    bench.serve()
    assert bench.states_after(3599, 61) == ["ready", "cold"]


async def serving(bench: Bench, **more: Any) -> None:
    bench.catalogue(spec(**more))
    bench.want("a")
    bench.serve()
    bench.turn(1)
    bench.demand()


async def gone_idle(bench: Bench) -> None:
    """It is to be parked, and proxies know that no call goes to it any more."""
    await serving(bench, warm="parked", instances=InstanceCounts(zero_after_s=60))
    bench.turn(60)
    bench.demand()
    bench.turn()


async def test_an_idle_one_stops_only_after_every_proxy_has_heard_of_it(bench: Bench) -> None:
    await serving(bench, instances=InstanceCounts(zero_after_s=60))
    told = len(bench.told)
    bench.turn(59)
    assert len(bench.told) == told
    bench.turn(1)
    assert bench.route.state == "cold"
    bench.demand(version=len(bench.told) - 1)
    bench.turn(1)
    assert bench.stopped == []
    bench.demand()
    bench.turn(1)
    assert bench.stopped == [StopDeployment(bench.started[0].deployment)]


async def test_one_that_has_woken_is_idle_only_after_its_time(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def done(_: DeploymentWatcher) -> None: ...

    monkeypatch.setattr(DeploymentWatcher, "park", done)
    monkeypatch.setattr(DeploymentWatcher, "unpark", done)
    await gone_idle(bench)
    bench.watched.told = DeploymentEvent(parked=True)
    bench.turn()
    bench.turn(600)
    bench.want("a")
    bench.serve()
    bench.turn()
    states = [bench.route.state]
    for seconds in (59, 1):
        bench.turn(seconds)
        states.append(bench.route.state)
    assert states == ["ready", "ready", "cold"]


async def test_a_refused_order_of_before_ends_nothing_that_was_ordered_since(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = asyncio.Event()

    async def refused(_: DeploymentWatcher) -> None:
        raise StartupError("it doesn't answer")

    async def refused_late(_: DeploymentWatcher) -> None:
        await late.wait()
        raise StartupError("it has requests")

    monkeypatch.setattr(DeploymentWatcher, "park", refused_late)
    monkeypatch.setattr(DeploymentWatcher, "unpark", refused)
    await gone_idle(bench)
    model = bench.named()
    ordering = model.ordering
    assert (model.life.state, ordering is not None) == ("parking", True)
    bench.watched.told = DeploymentEvent(parked=True)
    bench.turn(1)
    bench.models.take_want(ModelWanted("a"))
    bench.turn(1)
    assert model.life.state == "waking"
    await bench.ordered_all()
    late.set()
    assert ordering is not None
    await ordering
    assert model.refused == "it doesn't answer"
    bench.serve()
    bench.turn()
    assert (bench.route.state, bench.stopped) == ("ready", [])


async def test_what_an_instance_took_of_the_host_counts_for_its_model_and_for_others(
    bench: Bench,
) -> None:
    one, other = (
        ModelSpec(name=name, source=f"path:{bench.folder}", flags=("--enforce-eager",))
        for name in "ab"
    )
    bench.catalogue(one, other)
    bench.want("a")
    before = bench.models.places.evaluate(other)
    bench.watched.told = DeploymentEvent(data=(replace(served("i0"), beside_kv=700 << 20),))
    bench.turn(1)
    bench.turn(1)
    found = bench.models.places.evaluate(other)
    assert (before.rest_bytes, before.rest_basis) == (1 << 30, "assumed")
    assert found.rest_bytes == 700 << 20
    assert found.rest_basis == "measured on 1970-01-01 with a"
    assert found.host.need_bytes == before.host.need_bytes - (324 << 20)
    assert bench.learned == [one]


async def test_one_that_finds_no_room_to_be_parked_in_ends_and_says_why(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = bench.models.memory.host().total
    monkeypatch.setattr(bench.models.memory, "parked", lambda spec: 2 * whole)
    await gone_idle(bench)
    assert isinstance(bench.ordered[-1], StopDeployment)
    (why,) = [one.what for one in bench.models.events if "is not parked" in one.what]
    assert "of the host" in why


async def test_a_request_that_came_and_went_between_two_looks_keeps_it(bench: Bench) -> None:
    await serving(bench, instances=InstanceCounts(zero_after_s=60))
    bench.turn(59)
    demand = ProxyDemand(len(bench.told), 0.5, (ModelDemand("a", 0, 0, 1, 0.1),))
    bench.models.take_demand("p0", demand)
    assert bench.states_after(59, 1) == ["ready", "cold"]


async def test_without_its_proxy_it_does_not_stop(bench: Bench) -> None:
    await serving(bench, instances=InstanceCounts(zero_after_s=60))
    bench.models.reports.forget("p0")
    bench.turn(60)
    bench.turn(60)
    assert bench.stopped == []


async def test_requests_that_its_own_front_end_has_keep_it(bench: Bench) -> None:
    await serving(bench, instances=InstanceCounts(zero_after_s=60))
    bench.serve(live=1)
    bench.turn(600)
    assert bench.route.state == "ready"


async def test_a_failed_start_is_told_with_the_childs_own_sentence(bench: Bench) -> None:
    bench.catalogue(spec())
    bench.want("a")
    deployment = bench.started[0].deployment
    bench.report_end(deployment, "exit code 2", "not enough memory")
    bench.turn(1)
    assert (bench.route.state, bench.route.why) == ("failed", "not enough memory")
    assert bench.route.retry_s == FIRST_RETRY_S
    told = len(bench.told)
    bench.turn(FIRST_RETRY_S / 2)
    assert len(bench.told) == told
    bench.turn(FIRST_RETRY_S / 2)
    assert bench.route.state == "cold"
    assert len(bench.started) == 1
    bench.want("a")
    assert len(bench.started) == 2


async def test_a_server_takes_over_what_another_one_has_started(bench: Bench) -> None:
    bench.catalogue(spec())
    bench.take_over("d1")
    bench.turn()
    bench.serve()
    bench.turn()
    assert (bench.route.state, bench.route.socket) == ("ready", bench.note.socket)
    assert bench.started == []


async def test_nothing_is_started_before_it_is_known_what_runs(bench: Bench) -> None:
    least = spec(instances=InstanceCounts(min=1))
    bench.models.take_catalogue([CatalogEntry("m1", "a", 1, True, least)])
    running = asyncio.create_task(bench.models.run())
    await asyncio.sleep(0)
    bench.take_over("d1")
    await asyncio.sleep(0.01)
    running.cancel()
    assert (bench.started, bench.stopped) == ([], [])


async def test_the_first_thing_that_is_told_of_one_that_serves_is_that_it_does(
    bench: Bench,
) -> None:

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        await asyncio.sleep(0.2)
        told = msgspec.json.encode(DeploymentEvent(data=(served("i0"),)))
        writer.write(b"HTTP/1.1 200 OK\r\n\r\nevent: instances\ndata: " + told + b"\n\n")
        await reader.read()
        writer.close()

    bench.models.take_catalogue([CatalogEntry("m1", "a", 1, True, spec())])
    async with await asyncio.start_unix_server(answer, bench.note.socket):
        bench.take_over("d1")
        await bench.models.wait_first_round(60)
        assert [route.state for route in bench.told[0][0]] == ["ready"]
        await bench.models.close()


async def test_one_that_tells_nothing_is_waited_for_no_longer(bench: Bench) -> None:
    bench.models.take_catalogue([CatalogEntry("m1", "a", 1, True, spec())])
    with socket.socket(socket.AF_UNIX) as mute:
        mute.bind(bench.note.socket)
        mute.listen()
        bench.take_over("d1")
        await bench.models.wait_first_round(0.05)
        assert bench.route.state == "starting"
        await bench.models.close()


async def test_one_that_dies_before_the_next_server_has_heard_of_it_starts_again_at_once(
    bench: Bench,
) -> None:
    bench.catalogue(spec())
    bench.take_over("d1")
    bench.turn()
    bench.report_end("d1", "killed by SIGKILL")
    bench.demand(held=1)
    bench.turn()
    bench.turn()
    assert len(bench.started) == 1
    bench.report_end(bench.started[0].deployment, "killed by SIGKILL")
    bench.turn()
    assert (bench.route.state, bench.route.why) == ("failed", "killed by SIGKILL")


async def test_of_two_deployments_of_a_model_one_is_ended(bench: Bench) -> None:
    bench.catalogue(spec())
    bench.take_over("d1", "d2")
    bench.turn()
    assert bench.stopped == [StopDeployment("d2")]


async def test_one_that_was_removed_while_no_server_was_there_ends_when_it_is_empty(
    bench: Bench,
) -> None:
    bench.take_over("d1")
    bench.turn()
    bench.serve(live=1)
    bench.turn()
    bench.demand(running=1)
    bench.turn()
    assert bench.stopped == []
    bench.serve(live=0)
    bench.demand()
    bench.turn()
    assert bench.stopped == [StopDeployment("d1")]
    bench.report_end("d1")
    bench.turn()
    assert bench.models.shown("a") is None


async def test_why_one_has_ended_has_no_secret_of_a_url(bench: Bench) -> None:
    await serving(bench)
    said = "cannot reach http://u:pw@h/x?token=t"
    bench.report_end(bench.started[0].deployment, "exit code 1", said)
    bench.turn()
    shown = "cannot reach http://u:***@h/x?token=***"
    assert any(shown in one.what for one in bench.models.events), bench.models.events
    assert ":pw@" not in str(bench.models.events) + str(bench.every[0].life)


async def test_one_that_is_removed_is_not_there_for_clients_at_once(bench: Bench) -> None:
    await serving(bench)
    bench.demand(running=1)
    bench.catalogue()
    assert bench.told[-1] == ([], ["a"])
    bench.demand(running=1)
    bench.turn()
    assert bench.stopped == []
    bench.demand()
    bench.turn()
    assert bench.stopped == [StopDeployment(bench.started[0].deployment)]


def row_of(model: ManagedModel) -> ModelRow:
    """As the catalogue has it."""
    wanted = model.wanted
    return ModelRow(
        model_id=wanted.model_id, name=wanted.name, revision=wanted.revision, on=wanted.on,
        spec=wanted.spec, created=0.0, changed=0.0, author="ann",
    )  # fmt: skip


async def test_one_that_has_a_removed_ones_name_starts_when_that_has_ended(bench: Bench) -> None:
    await serving(bench)
    bench.demand(running=1)
    bench.catalogue()
    bench.model_id = "m2"
    bench.catalogue(spec(flags=("--seed=7",)))
    assert (bench.route.state, bench.route.socket) == ("cold", "")
    (model,) = bench.every
    assert (model.serving, model.ready) == (1, 0)
    assert model_json(row_of(model), model, bench.models)["serving"] == 0
    figures = {one.name: one.samples for one in of_models([model], lambda _: 0)}
    assert [one.value for one in figures["kvmig_model_ready"]] == [0]
    bench.demand(running=1, held=1)
    bench.turn()
    assert bench.stopped == []
    bench.demand(held=1)
    bench.turn()
    former = bench.started[0].deployment
    assert bench.stopped == [StopDeployment(former)]
    bench.report_end(former)
    bench.turn()
    bench.turn()
    assert len(bench.started) == 2
    assert "--seed=7" in bench.started[1].words


async def test_a_deployment_of_a_removed_model_is_not_taken_over_by_one_of_its_name(
    bench: Bench,
) -> None:
    bench.model_id = "m2"
    bench.catalogue(spec())
    bench.take_over("d1")
    bench.turn()
    bench.serve()
    bench.turn()
    bench.demand()
    bench.turn()
    assert bench.route.state == "cold"
    assert bench.stopped == [StopDeployment("d1")]


async def test_one_that_is_switched_off_says_so(bench: Bench) -> None:
    bench.catalogue(spec(), on=False)
    bench.want("a")
    assert bench.route.state == "off"
    assert bench.started == []


async def test_more_instances_come_when_more_requests_run(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    await serving(bench, instances=InstanceCounts(max=4, target=2))
    asked: list[int] = []

    async def add(count: int) -> set[str]:
        asked.append(count)
        return {"i1", "i2"}

    monkeypatch.setattr(bench.watched, "add", add)
    for _ in range(12):
        bench.now += 0.5
        bench.demand(running=6)
    bench.turn()
    await bench.ordered_all()
    assert asked == [2]
    assert [score_of(bench, one) for one in ("i1", "i2")] == [80 + 10 / 2, 80 + 10 / 3]
    assert bench.models.events[-1].what == "up to 3: 6.0 at 2 an instance"


async def test_the_next_server_takes_no_instance_away_before_it_has_seen_the_demand(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.catalogue(spec(instances=InstanceCounts(max=3, target=2)))
    bench.take_over("d1")
    bench.turn()
    drained: list[str] = []

    async def drain(instance: str, deadline_s: float | None = None) -> None:
        drained.append(instance)

    async def rounds(running: int) -> list[str]:
        for _ in range(300):
            bench.serve(3)
            bench.demand(running=running)
            bench.turn(0.5)
            await asyncio.sleep(0)
        return drained

    monkeypatch.setattr(bench.watched, "drain", drain)
    assert await rounds(6) == []
    assert await rounds(1), "for want of requests one goes"


async def test_an_order_that_fails_as_nobody_expected_is_logged(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def add(count: int) -> None:
        raise ValueError("no")

    await serving(bench, instances=InstanceCounts(min=2, max=2))
    monkeypatch.setattr(bench.watched, "add", add)
    with pytest.raises(ValueError, match="no"):
        await bench.ordered_all()
    (record,) = caplog.records
    assert record.getMessage().startswith("models: <coroutine object InstanceOrders.set_instances")


async def test_an_instance_that_has_failed_is_taken_out_and_another_one_comes_after_a_pause(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvmig.fleet.instance_orders.PAUSE_S", 0.0)
    await serving(bench, instances=InstanceCounts(min=2, max=2))
    ordered: list[object] = []

    async def add(count: int) -> set[str]:
        ordered.append(count)
        return {"i1"}

    async def drain(instance: str, deadline_s: float | None = None) -> None:
        ordered.append(instance)
        bench.serve(1)

    monkeypatch.setattr(bench.watched, "add", add)
    monkeypatch.setattr(bench.watched, "drain", drain)
    await bench.ordered_all()  # the second one was asked for
    assert ordered == [1]
    failed = InstanceRow(id="i1", state="failed")
    bench.watched.told = DeploymentEvent(0, data=(served("i0"), failed))
    for seconds in (1, 1, 10):
        bench.turn(seconds)
        await bench.ordered_all()
    assert ordered == [1, "i1", 1]


def score_of(bench: Bench, instance: str) -> float | None:
    """The score of the place that an instance of its deployment has; None: it is not kept."""
    found = bench.models.places.history.decision(bench.named().deployment, instance)
    return None if found is None else found.explanation.nodes[0].score


async def test_why_each_instance_is_on_its_worker_is_kept(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def add(count: int) -> set[str]:
        assert count == 1
        return {"i1"}

    bench.catalogue(spec(instances=InstanceCounts(min=1, max=3, target=1)))
    assert score_of(bench, "i0") == 100, "nothing else was there"
    bench.serve()
    bench.turn(1)
    monkeypatch.setattr(bench.watched, "add", add)
    for _ in range(10):  # a second is too short to count
        bench.demand(running=3)
        bench.turn(1)
    await bench.ordered_all()
    assert score_of(bench, "i1") == 85, "beside one of its own model"
    assert score_of(bench, "i2") is None


async def test_a_model_says_why_no_worker_takes_it(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench.models.memory, "host", lambda: HostCapacity(1 << 40, 7))
    bench.catalogue(spec(memory=9))
    (node,) = bench.models.why_not(bench.named()).nodes
    (why,) = node.refusals
    assert (node.node, node.chosen, why.filter) == ("local", False, "memory")
    assert why.why == f"memory: needs 9 bytes, 7 of {1 << 40} are free"


async def test_a_model_for_other_workers_than_this_host_is_refused_by_its_labels(
    bench: Bench,
) -> None:
    memory = bench.models.memory
    memory.check(spec(worker_selector={"os": "linux", "worker": "local"}))
    with pytest.raises(ConfigError, match="worker_selector has zone=b, must have labels of the"):
        memory.check(spec(worker_selector={"zone": "b"}))


def test_the_classes_that_calls_may_name_are_those_of_the_deployments_flags() -> None:
    flags = ("--priority-class", "high=-1,headroom=100", "--priority_class=low=9", "--seed=0")
    assert [one.name for one in classes_of(flags)] == ["high", "normal", "low"]
    assert classes_of(()) == classes_of(("--priority-class",)) == (NORMAL,)


# -- files that are not here yet


def downloading(bench: Bench, why: str = "its files are downloaded", failed: bool = False) -> None:
    bench.missing["hf:a/b"] = MissingFiles(why, failed)


async def test_a_wanted_model_waits_for_its_files_says_so_and_then_starts(bench: Bench) -> None:
    downloading(bench)
    bench.catalogue(spec("hf:a/b"))
    bench.demand(held=1)
    bench.turn()
    assert bench.started == []
    assert (bench.route.state, bench.route.why) == ("cold", "its files are downloaded")

    del bench.missing["hf:a/b"]
    bench.catalogue(spec(f"path:{bench.folder}"))
    (start,) = bench.started
    assert start.words[0] == str(bench.folder)
    assert bench.models.folders() == {str(bench.folder)}


async def test_files_that_can_not_be_fetched_fail_the_start_and_whole_ones_start_at_once(
    bench: Bench,
) -> None:
    downloading(bench, "its files can't be downloaded: no such model", failed=True)
    bench.catalogue(spec("hf:a/b"))
    bench.demand(held=1)
    bench.turn()
    why = "its files can't be downloaded: no such model"
    assert (bench.route.state, bench.route.why) == ("failed", why)
    bench.demand(held=1)
    bench.catalogue(spec(f"path:{bench.folder}"))
    assert len(bench.started) == 1


async def test_a_model_that_serves_goes_on_while_files_of_another_source_come(
    bench: Bench,
) -> None:
    bench.catalogue(spec())
    bench.demand(held=1)
    bench.turn()
    bench.serve()
    bench.turn()
    downloading(bench)
    bench.catalogue(spec("hf:a/b"))
    bench.demand(running=1)
    bench.turn(1)
    assert bench.route.state == "ready"
