"""What runs in a fleet now, as the API shows it, and orders about single instances and requests."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from kvmig.core.api_records import InstanceRow, RequestRow
from kvmig.core.errors import StartupError
from kvmig.core.live_records import LiveStream, MoveRecord
from kvmig.fleet import live_view
from kvmig.fleet.callers import FORWARDED
from kvmig.fleet.deployments import DeploymentEvent, DeploymentWatcher
from kvmig.fleet.live_view import fair_part
from kvmig.fleet.managed_model import CatalogEntry
from kvmig.fleet.spec import InstanceCounts, ModelSpec
from tests.support import fake_devices
from tests.support.fleet_api import Api, said
from tests.support.fleet_stores import Place
from tests.support.model_bench import shown, watched_of

ROWS = [RequestRow(id=f"r{at}", call_id="call", instance="i0", state="running", tokens=at, blocks=1)
        for at in range(3)]  # fmt: skip


class Watched:
    """Orders that a deployment got."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.orders: list[tuple[object, ...]] = []
        self.asked = 0
        self.fails = ""
        self.refuses = ""
        watched = self

        async def requests(_: DeploymentWatcher, timeout_s: float) -> list[RequestRow]:
            watched.asked += 1
            await asyncio.sleep(0.01)
            if watched.fails:
                raise StartupError(watched.fails)
            return ROWS

        def order(name: str, result: object = None) -> Any:
            async def given(_: DeploymentWatcher, *words: object) -> object:
                if watched.refuses:
                    raise StartupError(watched.refuses)
                watched.orders.append((name, *words))
                return result

            return given

        moved = MoveRecord(request_id="r1", source="i0", destination="i1", state="committed")
        monkeypatch.setattr("kvmig.fleet.deployments.RETRY_S", 60.0)
        monkeypatch.setattr(DeploymentWatcher, "requests", requests)
        monkeypatch.setattr(DeploymentWatcher, "drain", order("drain"))
        monkeypatch.setattr(DeploymentWatcher, "stop_drain", order("stop_drain"))
        monkeypatch.setattr(DeploymentWatcher, "move", order("move", moved))


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    return Watched(monkeypatch)


@pytest.fixture
async def api(sqlite_place: Place, watched: Watched) -> AsyncIterator[Api]:
    """Model qwen with the instances i0, which serves, and i1, which is drained."""
    made = Api(sqlite_place)
    await made.backend.stored(made.store.open)
    counts = InstanceCounts(min=1, max=2)
    spec = ModelSpec(name="qwen", source=f"path:{made.folder}", engine="toy", instances=counts)
    made.models.take_catalogue([CatalogEntry("m1", "qwen", 1, True, spec)])
    made.models.reconcile()
    there = watched_of(made.models, "qwen")
    await there.looked.wait()
    there.told = DeploymentEvent(
        2, data=(InstanceRow(id="i0", state="serving"), InstanceRow(id="i1", state="draining"))
    )
    yield made
    await made.close()


async def test_a_look_has_models_instances_streams_and_migrations(api: Api) -> None:
    reports = watched_of(api.models, "qwen").reports
    for at in (5.0, 7.0):
        reports.append(MoveRecord(request_id=f"at {at}", ended_at=at))
    status, found = await api.ask("GET", "live")
    assert status == 200
    (model,) = found["models"]
    counts = {"name": "qwen", "serving": 1, "running": 2, "streams": 3}
    assert model == model | counts
    assert [one["row"]["id"] for one in found["instances"]] == ["i0", "i1"]
    assert found["instances"][0]["worker"] == "local"
    assert [one["row"]["id"] for one in found["streams"]] == ["r2", "r1", "r0"]
    assert [one["move"]["request_id"] for one in found["moves"]] == ["at 7.0", "at 5.0"]


async def test_however_many_look_a_deployment_is_asked_once(api: Api, watched: Watched) -> None:
    await asyncio.gather(*(api.ask("GET", "live") for _ in range(5)))
    assert watched.asked == 1
    await api.ask("GET", "live?streams=0")
    assert watched.asked == 1


async def test_after_a_second_it_is_asked_again(
    api: Api, watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    await api.ask("GET", "live")
    monkeypatch.setattr(live_view, "LOOK_S", 0.0)
    await api.ask("GET", "live")
    assert watched.asked == 2


async def test_a_deployment_that_lists_no_requests_costs_its_streams_only(
    api: Api, watched: Watched
) -> None:
    watched.fails = "it hangs"
    status, found = await api.ask("GET", "live")
    assert (status, found["streams"], found["unanswered"]) == (200, [], ["qwen"])
    assert len(found["instances"]) == 2


async def test_fewer_streams_are_listed_where_fewer_are_asked_for(api: Api) -> None:
    _, found = await api.ask("GET", "live?streams=1")
    assert [one["row"]["id"] for one in found["streams"]] == ["r2"]
    assert found["models"][0]["streams"] == 3
    for wrong in ("-1", "1001", "many"):
        assert (await api.ask("GET", f"live?streams={wrong}"))[0] == 400


async def test_a_look_has_gpus_with_their_use_and_power(
    api: Api, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(fake_devices.MODULES)
    monkeypatch.delitem(sys.modules, "pynvml", raising=False)
    monkeypatch.setenv(fake_devices.FOLDER, str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    (gpu,) = fake_devices.devices(1)
    fake_devices.FakeMachine(tmp_path).install([gpu])
    api.models.memory.devices.watch.read_sample()
    _, found = await api.ask("GET", "live")
    (shown,) = found["devices"]
    assert (shown["uuid"], shown["worker"], shown["total_bytes"]) == (gpu.uuid, "", gpu.total)
    assert (shown["busy"], shown["watts"]) == (0.35, 301.5)


async def test_an_instance_is_drained_and_serves_again_and_the_audit_says_who(
    api: Api, watched: Watched
) -> None:
    assert (await api.ask("POST", "live/drain", {"model": "qwen", "instance": "i0"}))[0] == 200
    assert (await api.ask("POST", "live/undrain", {"model": "qwen", "instance": "i1"}))[0] == 200
    assert watched.orders == [("drain", "i0"), ("stop_drain", "i1")]
    _, found = await api.ask("GET", "audit")
    noted = [(one["action"], one["object"], one["actor"]) for one in found["data"][:4:2]]
    assert noted == [
        ("instance.undrain", "qwen/i1", "local"),
        ("instance.drain", "qwen/i0", "local"),
    ]


async def test_an_order_that_is_repeated_does_nothing_again(api: Api, watched: Watched) -> None:
    assert (await api.ask("POST", "live/drain", {"model": "qwen", "instance": "i1"}))[0] == 200
    assert (await api.ask("POST", "live/undrain", {"model": "qwen", "instance": "i0"}))[0] == 200
    assert watched.orders == []


async def test_a_deployment_that_refuses_says_why(api: Api, watched: Watched) -> None:
    watched.refuses = "it is the only one that serves"
    order = {"model": "qwen", "instance": "i0"}
    assert said(await api.ask("POST", "live/drain", order)) == (409, watched.refuses)


async def test_a_request_is_moved_by_its_own_id_or_its_calls(api: Api, watched: Watched) -> None:
    status, found = await api.ask("POST", "live/move", {"model": "qwen", "request_id": "r1"})
    assert (status, found["move"]["destination"]) == (200, "i1")
    order = {"model": "qwen", "request_id": "call", "destination": "i1"}
    assert (await api.ask("POST", "live/move", order))[0] == 200
    assert watched.orders == [("move", "r1", None), ("move", "call", "i1")]


@pytest.mark.parametrize(
    ("path", "body", "sentence"),
    [
        ("drain", {"model": "x", "instance": "i0"}, "there is no model 'x'"),
        ("drain", {"model": "qwen", "instance": "i9"}, "model qwen has no instance 'i9'"),
        ("undrain", {"model": "qwen", "instance": "../park"}, "has no instance '../park'"),
        ("move", {"model": "qwen", "request_id": "r9"}, "model qwen has no request 'r9' now"),
        ("move", {"model": "x", "request_id": "r1"}, "there is no model 'x'"),
    ],
)
async def test_what_is_not_there_is_named(
    api: Api, watched: Watched, path: str, body: dict[str, str], sentence: str
) -> None:
    status, found = said(await api.ask("POST", f"live/{path}", body))
    assert status == 404
    assert sentence in found
    assert watched.orders == []


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "live"), ("POST", "live/drain"), ("POST", "live/undrain"), ("POST", "live/move")],
)
async def test_a_call_from_elsewhere_needs_an_admins_key(
    api: Api, watched: Watched, method: str, path: str
) -> None:
    body = {"model": "qwen", "instance": "i0"} if method == "POST" else None
    headers = {FORWARDED: "192.0.2.7", "authorization": "Bearer kv-nobody"}
    assert (await api.ask(method, path, body, **headers))[0] == 401
    assert (watched.orders, watched.asked) == ([], 0)


def test_each_model_has_its_part_of_the_streams_that_are_listed() -> None:
    def streams(model: str, count: int) -> list[LiveStream]:
        return [
            LiveStream(model=model, row=replace(ROWS[0], id=f"{model}{at}", tokens=at))
            for at in range(count)
        ]

    found = fair_part([*streams("busy", 100), *streams("calm", 2)], 10)
    assert [one.row.id for one in found if one.model == "calm"] == ["calm1", "calm0"]
    assert [one.row.id for one in found if one.model == "busy"][:2] == ["busy99", "busy98"]
    assert len(found) == 10
    assert fair_part([], 10) == []


async def test_the_audit_has_what_was_ordered_and_what_came_of_it(
    api: Api, watched: Watched
) -> None:
    body = {"model": "qwen", "instance": "i0"}
    assert (await api.ask("POST", "live/drain", body))[0] == 200
    watched.refuses = "it is the last one"
    assert (await api.ask("POST", "live/drain", body))[0] == 409
    rows = (await api.ask("GET", "audit"))[1]["data"]
    found = [one["after"] for one in rows if one["action"] == "instance.drain"]
    assert found[::-1] == [
        {"state": "ordered"},
        {"state": "begun"},
        {"state": "ordered"},
        {"state": "refused", "why": "it is the last one"},
    ]


async def test_a_stream_of_a_model_that_was_asked_for_by_another_name_moves(
    api: Api, watched: Watched
) -> None:
    api.backend.live.aliases = {"chat": {"qwen": 1}}
    for name, status in (("chat", 200), ("chats", 404)):
        body = {"model": name, "request_id": "r1", "destination": "i1"}
        assert (await api.ask("POST", "live/move", body))[0] == status
    assert watched.orders == [("move", "r1", "i1")]


async def test_instances_of_a_removed_model_do_not_count_for_one_that_has_its_name(
    api: Api,
) -> None:
    model = shown(api.models, "qwen")
    model.wanted = replace(model.wanted, model_id="m2")
    (row,) = (await api.ask("GET", "live?streams=0"))[1]["models"]
    assert (row["serving"], row["running"]) == (0, 0)
