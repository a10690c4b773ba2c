"""Two plain `vllm serve` that have joined one scheduler by the plugin, behind an HAProxy that knows
nothing of it."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from kvmig.process.sockets import free_port
from kvmig_tools.served import SMALL, Served
from tests.support.joined import (
    CommonScheduler,
    common_scheduler,
    own_instance,
    places,
    post,
    until_they_know,
)
from tests.support.streams import Door, Stream, count_from, counted
from tests.support.waiting import until_yes, wait_until

pytestmark = [pytest.mark.server, pytest.mark.long]

ROOT = Path(__file__).parents[2]
ROUTER = """
defaults
    mode http
    timeout connect 5s
    timeout client 120s
    timeout server 120s
listen servers
    bind 127.0.0.1:{port}
    balance roundrobin
    server one 127.0.0.1:{one}
    server two 127.0.0.1:{two}
"""
STREAMS = 20
TOKENS = 1500
PATH = "/v1/completions"


class Site(NamedTuple):
    """The servers, and the router that clients call."""

    a: Served
    b: Served
    router: Door


def entry_point(folder: Path) -> Path:
    """A folder with the plugin's entry point, as an installed kvmig has it."""
    installed = folder / "kvmig_entry-1.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: kvmig-entry\nVersion: 1\n")
    entry = "[vllm.general_plugins]\nkvmig = kvmig.plugin:start\n"
    (installed / "entry_points.txt").write_text(entry)
    return folder


def plain_server(scheduler: CommonScheduler, folder: Path) -> Served:
    """`vllm serve` of one engine; as a module, since the command wants vLLM's other package."""
    folder.mkdir()
    environment = {"PYTHONPATH": f"{entry_point(folder)}:{ROOT}"}
    return Served(
        [*SMALL, "--shutdown-timeout=5", "--data-parallel-size=1"],
        command=("-m", "vllm.entrypoints.openai.api_server"),
        environment={**environment, "KVMIG": "1", **scheduler.environment},
        log=folder / "log",
    )


@contextmanager
def routed(a: Served, b: Served, folder: Path) -> Iterator[Door]:
    """HAProxy, in turns."""
    haproxy = shutil.which("haproxy") or "/usr/sbin/haproxy"
    if not Path(haproxy).exists():
        pytest.skip("no HAProxy here (apt-get install haproxy)")
    port, config = free_port(), folder / "haproxy.cfg"
    config.write_text(ROUTER.format(port=port, one=a.port, two=b.port))
    process = subprocess.Popen([haproxy, "-db", "-f", config], stderr=subprocess.DEVNULL)
    door = Door(f"http://127.0.0.1:{port}", a.model, "none")

    def up() -> bool:
        try:
            return httpx.get(f"{door.url}/health", verify=False, timeout=5).status_code == 200
        except httpx.TransportError:
            return False

    try:
        wait_until(up)
        yield door
    finally:
        process.terminate()
        process.wait(10)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("site")
    with ExitStack() as stack:
        scheduler = stack.enter_context(common_scheduler(folder))
        a, b = (plain_server(scheduler, folder / name) for name in "ab")
        with ThreadPoolExecutor() as threads:  # each start loads vLLM
            tuple(threads.map(lambda one: stack.enter_context(one), (a, b)))
        yield Site(a, b, stack.enter_context(routed(a, b, folder)))


def sampled(number: int) -> dict[str, Any]:
    """A call whose text depends on every sampled token."""
    return {
        **count_from(1000 * number, 300),
        "temperature": 1.0,
        "seed": number,
        "logprobs": 2,
    }


async def test_a_stream_moved_to_the_other_server_and_back_equals_one_that_stayed(
    site: Site,
) -> None:
    await until_they_know(site.a, site.b)
    here, there = own_instance(site.a), own_instance(site.b)
    unmoved = await Stream(site.a, PATH, sampled(1)).end()
    stream = Stream(site.a, PATH, sampled(1))

    for tokens, served, destination in ((20, site.a, there), (120, site.b, here)):
        await stream.reach(tokens)
        call = stream.answer.request_id
        moved = await asyncio.to_thread(served.migrate, call, destination)
        assert moved.json()["state"] == "committed", moved.text

    (await stream.end()).same_as(unmoved)


def count_of(served: Served, metric: str, **labels: str) -> float:
    """The sum of a metric's samples that have these labels."""
    text = httpx.get(f"{served.url}/metrics", verify=False, timeout=30).text
    return sum(
        float(line.rpartition(" ")[2])
        for line in text.splitlines()
        if line.startswith(f"{metric}{{")
        and all(f'{name}="{value}"' in line for name, value in labels.items())
    )


async def test_a_drained_server_ends_its_engine_under_20_streams_behind_a_router_and_cuts_none(
    site: Site,
) -> None:
    a, b, router = site
    await until_they_know(a, b)
    here, there = own_instance(a), own_instance(b)
    before = [count_of(one, "vllm:generation_tokens_total") for one in (a, b)]
    firsts = [100 * number for number in range(STREAMS)]
    streams = [Stream(router, PATH, count_from(first, TOKENS)) for first in firsts]
    await asyncio.gather(*(stream.reach(5) for stream in streams))
    assert set(places(a).values()) == {here, there}
    (pid,) = (row["pid"] for row in a.get("instances") if row["id"] == here)

    assert (await post(a, "drain", body={"leave": True})).status_code == 202
    await until_yes(lambda: not Path(f"/proc/{pid}").exists())
    drained = await post(a, "drain", "GET")
    assert drained.json() == {"state": "drained", "instances": [], "blocked": []}
    async with httpx.AsyncClient(verify=False) as http:
        paused = await http.post(f"{a.url}/pause")
    assert (paused.status_code, "no instance of this server" in paused.text) == (503, True)

    running = [stream for stream in streams if not stream.task.done()]
    assert len(running) >= STREAMS / 2, f"only {len(running)} streams outlived the engine"
    answers = await asyncio.gather(*(stream.end() for stream in streams))
    for answer, first in zip(answers, firsts, strict=True):
        assert answer.tokens == TOKENS
        counted(answer, first)
    given = [count_of(one, "vllm:generation_tokens_total") for one in (a, b)]
    assert sum(given) - sum(before) == STREAMS * TOKENS  # each token once
    assert count_of(a, "vllm:generation_tokens_total", instance="elsewhere") > 0
    await until_yes(lambda: count_of(b, "vllm:num_requests_running") == 0)
    moves = [one for one in b.get("migrations?limit=1000") if one["why"] == "drain"]
    assert any(one["state"] == "committed" for one in moves)
    late = await Stream(router, PATH, count_from(7, 30)).end()
    counted(late, 7)
