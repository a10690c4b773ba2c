"""A pooling model behind kvmig.serve."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import httpx
import pytest

from kvmig_tools.nursery import Nursery
from kvmig_tools.patience import SERVER_PATIENCE_S
from kvmig_tools.served import SMALL, Served
from tests.support.leaks import Footprint, assert_server_is_empty
from tests.support.waiting import until_yes

pytestmark = pytest.mark.server


@pytest.fixture(scope="module")
def server(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    flags = [
        *SMALL, "--instances=2", "--runner=pooling", "--convert=embed", "--failover-timeout=0.1",
        "--shutdown-timeout=5",
    ]  # fmt: skip
    log = tmp_path_factory.mktemp("pooling") / "log"
    with Served(flags, nursery=nursery, log=log) as served:
        yield served


async def embed(client: httpx.AsyncClient, served: Served) -> httpx.Response:
    body = {"model": served.model, "input": [1, 2, 3, 4]}
    return await client.post(f"{served.url}/v1/embeddings", json=body)


def vector(answer: httpx.Response) -> list[float]:
    assert answer.status_code == 200, answer.text
    found: list[float] = answer.json()["data"][0]["embedding"]
    return found


def test_its_instances_say_that_nothing_of_them_moves(server: Served) -> None:
    assert {row["unmovable"] for row in server.get("instances")} == {"pooling model"}
    for name in ("i0", "i1"):
        assert f"kvmig {name}: its requests can't be moved: pooling model\n" in server.output()


async def test_embeddings_whose_instances_all_die_fail_and_the_server_serves_on(
    server: Served,
) -> None:
    async with httpx.AsyncClient(timeout=SERVER_PATIENCE_S, verify=False) as client:
        before = vector(await embed(client, server))
        llumlets = Footprint.of(server).named("kvmig.launcher.llumlet_main")
        assert len(llumlets) == 2
        for one in llumlets:
            one.suspend()
        calls = [asyncio.create_task(embed(client, server)) for _ in range(4)]
        await until_yes(lambda: len(server.get("requests")) == len(calls))
        for one in llumlets:
            one.kill()
        for answer in await asyncio.gather(*calls):
            # Which one depends on whether the front end heard of both ends before it asked again.
            said = {503: "no other one was there", 500: "crashed while they ran this request"}
            assert said[answer.status_code] in answer.json()["error"]["message"]
        await until_yes(
            lambda: {row["state"] for row in server.get("instances")} == {"serving"},
            SERVER_PATIENCE_S,
        )
        assert vector(await embed(client, server)) == pytest.approx(before)
    assert_server_is_empty(server)
