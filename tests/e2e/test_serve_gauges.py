"""Whatever process goes, its gauges are gone or zero: autoscalers and routers go by them."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvmig_tools.nursery import Nursery
from kvmig_tools.patience import SERVER_PATIENCE_S
from tests.conftest import NEVER_BY_ITSELF, PATIENT
from tests.support.leaks import Footprint
from tests.support.streams import Stream, count_from, start_streams
from tests.support.toys import Toys

pytestmark = pytest.mark.server

PATH = "/v1/completions"
TOKENS, HELD = 60, 20
OF_WORK = {f"kvmig_instance_{name}" for name in ("running", "waiting", "blocks_used")}
REFUSED = "kvmig_messages_refused"


@pytest.fixture(scope="module")
def served(toy_nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Toys]:
    """Three instances behind two front ends."""
    flags = [*PATIENT, NEVER_BY_ITSELF, "--instances=3", "--front-ends=2", "--max-num-seqs=32"]
    with Toys(
        [*flags, "--heartbeat-timeout=20"], tmp_path_factory.mktemp("gauges"), nursery=toy_nursery
    ) as made:
        yield made


def gauges(text: str, **labels: str) -> dict[str, float]:
    """Those that have these labels, and that aren't 0."""
    return {
        one.name: one.value
        for family in text_string_to_metric_families(text)
        if family.type == "gauge"
        for one in family.samples
        if labels.items() <= one.labels.items() and one.value
    }


async def shown(served: Toys, **labels: str) -> dict[str, float]:
    """By whichever of the front ends takes the connection."""
    async with httpx.AsyncClient(verify=False, timeout=SERVER_PATIENCE_S) as client:
        answer = await client.get(f"{served.url}/metrics")
    return gauges(answer.text, **labels)


async def until(
    served: Toys, holds: Callable[[dict[str, float]], object], times: int = 1, **labels: str
) -> None:
    """times: one after the other, so that both front ends have said so."""
    said = 0
    async with asyncio.timeout(SERVER_PATIENCE_S):
        while said < times:
            said = said + 1 if holds(await shown(served, **labels)) else 0
            await asyncio.sleep(0.05)


async def streams(served: Toys, count: int) -> list[Stream]:
    """So many, all running up to where they are held."""
    return await start_streams(served, [count_from(100 * n, TOKENS) for n in range(count)], HELD)


async def knock(process: psutil.Process) -> None:
    """Say what is no message to all ports where it listens: it refuses that, and counts it."""
    ports = {one.laddr.port for one in process.net_connections("tcp") if one.status == "LISTEN"}
    assert ports
    for port in ports:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)) as sock:
            sock.sendall(b"GET / HTTP/1.1\r\n\r\n" * 20)


async def test_of_an_instance_that_is_killed_nothing_runs_and_of_one_that_is_removed_nothing_is(
    served: Toys,
) -> None:
    with served.held(HELD):
        started = await streams(served, 9)
        await until(served, lambda found: OF_WORK & found.keys(), instance="i0")
        llumlets = Footprint.of(served).llumlets()
        await knock(llumlets["i1"])
        await until(served, lambda found: found.get(REFUSED), process="i1")

        llumlets["i0"].kill()
        async with httpx.AsyncClient(base_url=served.url, verify=False) as client:
            removed = await client.delete("/kvmig/v1/instances/i1", params={"now": True})
        assert removed.status_code == 202

        await until(served, lambda found: not OF_WORK & found.keys(), times=8, instance="i0")
        for label in ("instance", "process"):
            await until(served, lambda found: not found, times=8, **{label: "i1"})
        assert OF_WORK & (await shown(served, instance="i2")).keys()
    for stream in started:
        assert (await stream.end()).tokens == TOKENS
    await until(served, lambda found: not OF_WORK & found.keys(), times=8)


async def test_of_a_scheduler_that_is_killed_nothing_is_said(served: Toys) -> None:
    (scheduler,) = Footprint.of(served).named("kvmig.launcher.scheduler")
    await knock(scheduler)
    await until(served, lambda found: found.get(REFUSED), process="scheduler")
    scheduler.kill()
    await until(served, lambda found: not found, times=8, process="scheduler")


async def test_of_a_front_end_that_is_killed_no_stream_runs_and_no_gauge_is_kept(
    served: Toys,
) -> None:
    front, other = Footprint.of(served).named("kvmig.frontend.process_main")
    instance = next(iter(Footprint.of(served).llumlets().values()))
    await knock(instance)
    await until(served, lambda found: found.get(REFUSED), times=8)
    files = [one.path for one in front.memory_maps() if f"_{front.pid}.db" in one.path]
    kept = [path for path in map(Path, files) if path.name.startswith("gauge_")]
    assert kept
    with served.held(HELD):
        started = await streams(served, 8)
        front.kill()
        await until(served, lambda found: not any(path.exists() for path in kept))
    await asyncio.gather(*(stream.end() for stream in started), return_exceptions=True)
    await until(served, lambda found: not OF_WORK & found.keys(), times=8)
    assert other in Footprint.of(served).named("kvmig.frontend.process_main")
