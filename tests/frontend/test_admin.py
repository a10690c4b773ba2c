"""The admin API over a router on llumlets without engines."""

from __future__ import annotations

import asyncio
import math

import httpx
import pytest
from pydantic import ValidationError

from kvmig.controlplane.messages import OrderDone, SetGuarantee
from kvmig.core.background import cancel_tasks
from kvmig.core.config import ClusterConfig, SchedulerConfig
from kvmig.engines.base import EngineLoad
from kvmig.frontend.admin import AddBody, DrainBody, RestartBody
from kvmig.rpc.messages import RpcMessage
from kvmig.sharing.messages import InUnit
from tests.support.admin_site import admin_client, problem
from tests.support.fake_llumlet import Cluster, cluster
from tests.support.waiting import until


async def move(client: httpx.AsyncClient, request_id: str, destination: str) -> httpx.Response:
    body = {"request_id": request_id, "destination": destination}
    return await client.post("/migrations", json=body)


async def test_instances_are_listed_and_infinite_freeness_is_null(
    it: Cluster, client: httpx.AsyncClient
) -> None:
    it.llumlets[1].report(EngineLoad(100, 0, 0, 0, 0, 0))
    await until(lambda: it.router.fleet.rows()[1].freeness == math.inf)
    await until(lambda: it.router.fleet.rows()[0].freeness == 90.0)
    rows = (await client.get("/instances")).json()["data"]
    first, second = rows
    assert first == {
        "id": "0", "index": 0, "state": "serving", "model": "the model",
        "endpoint": it.llumlets[0].endpoint, "blocks_total": 100, "blocks_used": 10,
        "blocks_limit": 100,
        "running": 1, "waiting": 0, "freeness": 90.0, "migrations_in": 0, "migrations_out": 0,
        "staging_used": 0, "detail": "", "unmovable": "", "weights": "", "numerics": "n",
        "vllm": "", "flags": "", "unit": "", "shared": None, "pid": 7, "host": "here",
        "node": "", "gpus": ["1"], "block_bytes": 0, "beside_kv": 5, "times": None,
        "server": "", "seats": 0, "unread": 0,
    }  # fmt: skip
    assert second["freeness"] is None


async def test_an_instance_of_a_unit_shows_what_it_has_of_it(
    it: Cluster, client: httpx.AsyncClient
) -> None:
    one = it.llumlets[0]
    one.shared = InUnit(300, 500, 400, 1.5, connected=True, used=200)
    await until(lambda: it.router.fleet.views()[0].shared == one.shared)
    (row, _) = (await client.get("/instances")).json()["data"]
    assert row["shared"] == {
        "lease_bytes": 300, "used_bytes": 200, "wanted_bytes": 500, "guarantee_bytes": 400,
        "connected": True, "decode_share": 0,
    }  # fmt: skip


async def test_a_guarantee_is_asked_of_the_instance_and_answered_with_its_row(
    it: Cluster, client: httpx.AsyncClient
) -> None:
    one, asked = it.llumlets[0], list[RpcMessage]()

    def answer(message: RpcMessage) -> RpcMessage:
        assert isinstance(message, SetGuarantee)
        asked.append(message)
        return OrderDone(message.call_id, (one.instance,))

    one.on[SetGuarantee] = answer
    done = await client.patch("/instances/0", json={"guarantee_bytes": 4096})
    assert done.status_code == 200
    assert [row["id"] for row in done.json()["data"]] == ["0"]
    assert [one.size for one in asked if isinstance(one, SetGuarantee)] == [4096]
    why = "instance 0: the unit has no room"
    one.on[SetGuarantee] = lambda message: OrderDone(
        getattr(message, "call_id", 0), (), "conflict", why
    )
    status, error = problem(await client.patch("/instances/0", json={"guarantee_bytes": 0}))
    assert (status, error["message"]) == (409, why)
    status, error = problem(await client.patch("/instances/9", json={"guarantee_bytes": 0}))
    assert (status, error["message"]) == (404, "there is no instance 9, only 0, 1")


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"guarantee_bytes": -1}, "guarantee_bytes is -1: Input should be greater than or equal"),
        ({"guarantee_bytes": 1 << 61}, "should be less than or equal to 1152921504606846976"),
        ({"guarantee_bytes": "1GiB"}, "guarantee_bytes is '1GiB'"),
        ({}, "guarantee_bytes is missing, needed are guarantee_bytes"),
        ({"guarantee": 1}, "guarantee_bytes is missing"),
    ],
)
async def test_a_guarantee_that_is_no_size_is_refused(
    client: httpx.AsyncClient, body: dict[str, object], words: str
) -> None:
    status, error = problem(await client.patch("/instances/0", json=body))
    assert status == 400
    assert words in error["message"]


async def test_requests_are_listed_before_any_instance_tells_of_them(
    it: Cluster, client: httpx.AsyncClient
) -> None:
    a = await it.submit("cmpl-x-0-12345678", "cmpl-x-0")
    (row,) = (await client.get("/requests")).json()["data"]
    assert row == {
        "id": "cmpl-x-0-12345678", "call_id": "x", "instance": a.instance,
        "state": "submitted", "tokens": 20, "output_tokens": 0, "blocks": 0, "priority": 0,
        "unmovable": "", "age_ms": 0.0, "migrating_to": None,
    }  # fmt: skip


async def test_a_migration_answers_with_its_report_and_is_listed(
    it: Cluster, client: httpx.AsyncClient
) -> None:
    a = await it.submit("cmpl-x-0-12345678", "cmpl-x-0")
    b = it.others(a)[0]
    a.moves("no_blocks")
    aborted = await move(client, "x", b.instance)
    a.moves()
    committed = await move(client, "x", b.instance)
    assert (aborted.status_code, committed.status_code) == (200, 200)
    assert (aborted.json()["state"], aborted.json()["reason"]) == ("aborted", "no_blocks")
    assert aborted.json()["downtime_ms"] is None
    told = committed.json()
    assert (told["state"], told["source"], told["destination"]) == (
        "committed", a.instance, b.instance,
    )  # fmt: skip
    host = dict.fromkeys(("wait", "gather", "push", "scatter"), 0.0)
    parts = {**host, "gather_device": None, "scatter_device": None}
    assert told["stages"] == [
        {"blocks": 3, "bytes": 3000, "ms": 1.5, "parts": parts, "chunks": [], "began_ms": None}
    ]
    assert told["downtime_ms"] == {
        "drain": 1.0, "tail_copy": 2.0, "commit": 3.0, "first_token": 4.0, "began_ms": None,
    }  # fmt: skip
    listed = (await client.get("/migrations")).json()
    assert listed == {"object": "list", "data": [told, aborted.json()]}
    assert (await client.get("/migrations?limit=1")).json()["data"] == [told]


async def test_a_request_is_moved_without_a_destination_to_the_one_with_most_room(
    it: Cluster, client: httpx.AsyncClient
) -> None:
    a = await it.submit("cmpl-x-0-12345678", "cmpl-x-0")
    b = it.others(a)[0]
    a.moves()
    moved = await client.post("/migrations", json={"request_id": "x"})
    assert moved.status_code == 200
    assert (moved.json()["source"], moved.json()["destination"]) == (a.instance, b.instance)


async def test_a_request_that_can_be_moved_nowhere_is_409(
    it: Cluster, client: httpx.AsyncClient
) -> None:
    a = await it.submit()
    b = it.others(a)[0]
    await it.router.remove_instance(b.instance)
    status, error = problem(await client.post("/migrations", json={"request_id": "r"}))
    assert status == 409
    assert error["message"] == (
        f"no instance serves besides {a.instance} that its requests could be moved to"
    )


async def test_an_instance_is_known_by_its_process_and_host(client: httpx.AsyncClient) -> None:
    rows = (await client.get("/instances")).json()["data"]
    assert [(row["pid"], row["host"], row["gpus"]) for row in rows] == [(7, "here", ["1"])] * 2


async def test_what_cannot_begin_is_404_or_409_and_names_what_is_wrong(
    it: Cluster, client: httpx.AsyncClient
) -> None:
    a = await it.submit("0_cmpl-x-0-12345678", "cmpl-x-0")
    b = it.others(a)[0].instance
    status, error = problem(await move(client, "nobody", b))
    assert (status, error["type"], error["param"]) == (404, "NotFoundError", "request_id")
    status, error = problem(await move(client, "x", "9"))
    assert (status, error["type"], error["param"]) == (404, "NotFoundError", "destination")
    assert error["message"] == "there is no instance 9, only 0, 1"
    status, error = problem(await move(client, "x", a.instance))
    assert (status, error["type"], error["param"]) == (409, "ConflictError", "destination")
    await it.submit("1_cmpl-x-0-12345678", "cmpl-x-0")
    status, error = problem(await move(client, "x", b))
    assert (status, error["param"]) == (409, "request_id")
    assert "0_cmpl-x-0-12345678, 1_cmpl-x-0-12345678" in error["message"]
    a.moves("already_migrating")
    assert problem(await move(client, "0_cmpl-x-0-12345678", b))[0] == 409
    await it.router.abort(["0_cmpl-x-0-12345678", "1_cmpl-x-0-12345678"])
    status, error = problem(await move(client, "x", b))
    assert (status, error["message"]) == (409, "request x has finished")


async def test_a_lost_instance_is_503(it: Cluster, client: httpx.AsyncClient) -> None:
    a = await it.submit()
    b = it.others(a)[0]
    await it.router.remove_instance(b.instance)
    assert problem(await move(client, "r", b.instance))[0] == 404
    assert not it.front.failed
    await a.close()
    await until(lambda: it.state(a) == "lost")
    rows = (await client.get("/instances")).json()["data"]
    assert [(row["id"], row["state"]) for row in rows] == [(a.instance, "lost")]
    assert problem(await move(client, "r", a.instance))[0] == 503


async def test_an_instance_that_was_never_connected_starts_and_is_not_lost(
    it: Cluster, client: httpx.AsyncClient
) -> None:
    """Who waits for one that was added would take it for failed."""
    late = it.router.add_instance("late", "tcp://127.0.0.1:9", 60.0)
    adding = asyncio.create_task(late)
    await until(lambda: len(it.router.fleet.rows()) == 3)
    rows = (await client.get("/instances")).json()["data"]
    assert [row["state"] for row in rows if row["id"] == "late"] == ["starting"]
    await cancel_tasks(adding)


async def test_with_migration_off_it_is_409() -> None:
    config = ClusterConfig(scheduler=SchedulerConfig(migration=False))
    async with cluster(config) as it, admin_client(it) as client:
        await it.submit()
        assert problem(await move(client, "r", "1"))[0] == 409


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        (b"{", None, "the body is not JSON"),
        (b"", None, "the body is missing, needed are request_id, destination"),
        (b"[]", None, "the body is []"),
        (b'{"destination": "1"}', "request_id", "request_id is missing"),
        (
            b'{"request_id": 5, "destination": "1"}',
            "request_id",
            "request_id is 5: Input should be a valid string",
        ),
        (b'{"request_id": "", "destination": "1"}', "request_id", "request_id is '': String"),
        (
            b'{"request_id": "r", "destination": "1", "force": true}',
            "force",
            "there is no field force, allowed are request_id, destination",
        ),
    ],
)
async def test_a_bad_body_is_400_and_names_the_field(
    client: httpx.AsyncClient, body: bytes, param: str | None, words: str
) -> None:
    headers = {"content-type": "application/json"}
    status, error = problem(await client.post("/migrations", content=body, headers=headers))
    assert (status, error["type"], error["param"]) == (400, "BadRequestError", param)
    assert words in error["message"]


async def test_a_bad_limit_is_400(client: httpx.AsyncClient) -> None:
    status, error = problem(await client.get("/migrations?limit=0"))
    assert (status, error["param"]) == (400, "limit")
    assert "'0'" in error["message"]


@pytest.mark.parametrize(
    ("header", "status"),
    [(None, 401), ("Bearer wrong", 401), ("Basic one", 401), ("Bearer one", 200)],
)
async def test_a_key_is_asked_for_where_there_is_one(
    it: Cluster, header: str | None, status: int
) -> None:
    async with admin_client(it, "one", "two") as client:
        headers = {} if header is None else {"authorization": header}
        answer = await client.get("/instances", headers=headers)
        assert answer.status_code == status
        if status == 401:
            assert problem(answer)[1]["type"] == "AuthenticationError"


async def test_the_api_is_documented(client: httpx.AsyncClient) -> None:
    schema = (await client.get("http://localhost/openapi.json")).json()
    post = schema["paths"]["/kvmig/v1/migrations"]["post"]
    assert {"200", "400", "404", "409"} <= post["responses"].keys()
    assert "MigrationBody" in str(post["requestBody"])
    schemas = schema["components"]["schemas"]
    assert {"Migration", "Instance", "Request", "ErrorBody"} <= schemas.keys()
    row = (await client.get("/instances")).json()["data"][0]
    assert list(row) == list(schemas["Instance"]["required"])
    assert "epoch" not in schemas["Migration"]["properties"]


def test_an_order_for_more_instances_than_anybody_has_is_refused() -> None:
    with pytest.raises(ValidationError, match="less than or equal to 10000"):
        AddBody(count=10**30)


@pytest.mark.parametrize("body", [DrainBody, RestartBody])
@pytest.mark.parametrize("seconds", [math.inf, math.nan, -1.0])
def test_a_deadline_is_a_number_of_seconds(body: type[RestartBody], seconds: float) -> None:
    with pytest.raises(ValidationError, match="deadline_s"):
        body.model_validate({"deadline_s": seconds})
