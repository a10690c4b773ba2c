"""Where the only instance is killed, /health is ready exactly while calls are answered."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import NamedTuple

import httpx
import pytest

from kvmig_tools.nursery import Nursery
from kvmig_tools.patience import SERVER_PATIENCE_S
from kvmig_tools.served import SMALL, Served
from tests.e2e.test_serve_gauges import gauges
from tests.support.leaks import Footprint, assert_server_is_empty
from tests.support.streams import count_from, counted, start_stream
from tests.support.toys import Toys

pytestmark = pytest.mark.server

PATH = "/v1/completions"
FLAGS = ("--instances=1", "--shutdown-timeout=2")
RUNNING = {"kvmig_instance_running", "vllm:num_requests_running", "vllm:kv_cache_usage_perc"}


@pytest.fixture(
    scope="module", params=["vllm", pytest.param("transformers", marks=pytest.mark.long), "toy"]
)
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "vllm":
        nursery: Nursery = request.getfixturevalue("nursery")
        made = Served([*SMALL, *FLAGS], nursery=nursery, log=folder / "log")
    elif request.param == "toy":
        made = Toys(FLAGS, folder, nursery=request.getfixturevalue("toy_nursery"))
    else:
        flags = ["--engine=transformers", "--num-blocks=200", *FLAGS]
        made = Served(flags, log=folder / "log")
    with made:
        yield made


class Seen(NamedTuple):
    """Statuses of a call and of what was asked before and after it."""

    before: int
    call: int
    after: int
    live: int


async def look(client: httpx.AsyncClient, model: str) -> Seen:
    body = {"model": model, "prompt": "1", "max_tokens": 1}
    before = await client.get("/health")
    call = await client.post(PATH, json=body)
    after, live = await client.get("/health"), await client.get("/live")
    return Seen(*(one.status_code for one in (before, call, after, live)))


async def test_health_is_ready_exactly_while_calls_are_answered(served: Served) -> None:
    stream = await start_stream(served, count_from(100, 600), 1)
    (llumlet,) = Footprint.of(served).named("kvmig.launcher.llumlet_main")
    llumlet.kill()
    seen: list[Seen] = []
    async with (
        asyncio.timeout(SERVER_PATIENCE_S),
        httpx.AsyncClient(base_url=served.url, verify=False, timeout=SERVER_PATIENCE_S) as client,
    ):
        # A call that comes before the front end knows is answered by the next instance.
        while (await client.get("/health")).status_code == 200:  # noqa: ASYNC110 - another process
            await asyncio.sleep(0.01)
        while not seen or seen[-1].call != 200:
            seen.append(await look(client, served.model))
            shown = await gauges_of_it(client)
            if seen[-1].after == (await client.get("/health")).status_code == 503:
                assert not RUNNING & shown
        counted(await stream.end(), 100)
        await asyncio.to_thread(assert_server_is_empty, served)
        assert not RUNNING & await gauges_of_it(client)

    steady = [one for one in seen if one.before == one.after]
    assert all((one.call == 200) == (one.before == 200) for one in steady), seen
    assert {one.before for one in steady} >= {503}
    assert {one.call for one in seen} == {200, 503}
    assert {one.live for one in seen} == {200}


async def gauges_of_it(client: httpx.AsyncClient) -> set[str]:
    """Those of the instance that aren't 0."""
    text = (await client.get("/metrics")).text
    return set(gauges(text, instance="i0"))
