"""Hosts with addresses, shared memory and disks of their own, on a slow network and a broken one.

`kvmig.serve --ray` on one host, an instance on each of two others (see `tests.support.network`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from kvmig_tools.patience import SERVER_PATIENCE_S
from kvmig_tools.served import SMALL, Served
from tests.conftest import NEVER_BY_ITSELF
from tests.support.leaks import assert_server_is_empty
from tests.support.network import Host, Network, hosts_or_skip
from tests.support.streams import (
    Stream,
    count_from,
    counted,
    move_one,
    other,
    place,
    row_of,
    run_moved,
    run_unmoved,
)

pytest.importorskip("ray", reason="needs the extra kvmig[ray]")
from contextlib import closing

from tests.support.ray_nodes import RayHosts
from tests.support.waiting import until_yes

pytestmark = [pytest.mark.server, pytest.mark.long]

PATH = "/v1/completions"
DELAY_S = 0.02
"""One way."""
LONG_PROMPT = " ".join(f"{n:04d}" for n in range(1200, 2000))
SLOWLY = ("--max-bandwidth=5", "--chunk-bytes=65536")
"""The long prompt's KV cache takes seconds, so that a test can come in between."""
IMPATIENT = ("--reply-timeout-ms=3000", "--lease-ms=5000")


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    with hosts_or_skip(3) as made:
        yield made


@pytest.fixture(scope="module")
def far_apart(network: Network, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One server for this file; its instances are on the network's last two hosts."""
    logs, front = tmp_path_factory.mktemp("far_apart"), network.hosts[0]
    with closing(RayHosts(network, logs)) as ray:
        flags = [*SMALL, *SLOWLY, *IMPATIENT, NEVER_BY_ITSELF, "--instances=2",
                 f"--ray={ray.address}", '--ray-resources={"CPU": 1}']  # fmt: skip
        with Served(
            flags, log=logs / "log", host=front.address, enter=front.enter, admin_key="admin"
        ) as served:
            assert len(ray.running("kvmig.launcher.llumlet_main")) == 2
            yield served
        assert not ray.running("kvmig.launcher.llumlet_main")


@pytest.fixture
def server(network: Network, far_apart: Served) -> Iterator[Served]:
    network.delay(DELAY_S)
    yield far_apart
    network.heal()
    network.delay(0)
    assert_server_is_empty(far_apart)


def rows(served: Served) -> dict[str, dict[str, Any]]:
    """Instances by id."""
    return {row["id"]: row for row in served.get("instances")}


def host_of(network: Network, row: dict[str, Any]) -> Host:
    (found,) = [host for host in network.hosts if f"//{host.address}:" in row["endpoint"]]
    return found


async def test_a_stream_moves_between_hosts_and_its_client_sees_no_difference(
    server: Served, network: Network
) -> None:
    hosts = {host_of(network, row).address for row in rows(server).values()}
    assert hosts == {host.address for host in network.hosts[1:]}
    body = {"prompt": "Count: 0017 0018", "max_tokens": 3000, "ignore_eos": True, "logprobs": 2,
            "temperature": 1.2, "top_p": 0.9, "seed": 7}  # fmt: skip
    unmoved = await run_unmoved(server, PATH, body)

    moved, reports = await run_moved(server, PATH, body)

    assert [(report["state"], report["reason"]) for report in reports] == [("committed", "")] * 2
    assert {report["transport"] for report in reports} == {"tcp"}, "they share no memory"
    moved.same_as(unmoved)


async def test_a_cut_between_two_hosts_leaves_the_request_where_it_is(
    server: Served, network: Network
) -> None:
    stream = Stream(server, PATH, count_from(17, 4000, prompt=f"{LONG_PROMPT} 2000 2001"))
    row = await row_of(server, stream, output_tokens=1)
    source, destination = row["instance"], other(row["instance"])
    moving = asyncio.create_task(move_one(server, row))
    await until_yes(lambda: rows(server)[destination]["blocks_used"] > 0)
    assert not moving.done()

    network.cut(*(host_of(network, one) for one in rows(server).values()))
    report = await moving

    assert (report["state"], report["reason"]) == ("aborted", "timeout"), report
    assert (await row_of(server, stream))["instance"] == source
    await until_yes(lambda: rows(server)[destination]["blocks_used"] == 0)
    assert not stream.task.done(), "the source went on meanwhile"
    network.heal()
    await until_one_moves(server)
    answer = await stream.end()
    assert answer.tokens == 4000
    counted(answer, 2000)


async def test_an_unreachable_instances_stream_goes_on_elsewhere_and_it_comes_back(
    server: Served, network: Network
) -> None:
    streams = [Stream(server, PATH, count_from(1000 * n, 2000)) for n in range(2)]
    for number, stream in enumerate(streams):
        await place(server, stream, f"i{number}")
    network.isolate(host_of(network, rows(server)["i1"]))

    await streams[1].reach(streams[1].answer.tokens + 300)

    network.heal()
    for number, stream in enumerate(streams):
        answer = await stream.end()
        assert answer.tokens == 2000
        counted(answer, 1000 * number)
    await until_yes(lambda: {row["state"] for row in rows(server).values()} == {"serving"})
    await until_one_moves(server)


async def until_one_moves(served: Served) -> None:
    """Both ends first have to notice that their old connection is dead: longer than a stream."""
    async with asyncio.timeout(SERVER_PATIENCE_S):
        state = ""
        while state != "committed":
            stream = Stream(served, PATH, count_from(40, 1500))
            state = (await move_one(served, await row_of(served, stream)))["state"]
            counted(await stream.end(), 40)
