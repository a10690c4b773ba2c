"""Two models of vLLM on a node of a real Ray cluster: their instances are forked by the node's fork
server, and share the KV cache of a unit whose agent the node's has started. The unit's node is
drained, and another one is lost, under streams: they go on elsewhere with the tokens that they have
undisturbed, and each token is counted once. The tests are in order.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from kvmig.models import BUNDLED
from kvmig_tools.patience import SERVER_PATIENCE_S
from tests.support.fleets import Streamed, ToyFleet, answer, ask, counted
from tests.support.waiting import until_yes, wait_until

pytest.importorskip("ray", reason="needs the extra kvmig[ray]")

from tests.e2e.test_fleet_node_forks import FORK_SERVER, forks, instance_of, running, text_of
from tests.e2e.test_fleet_workers import NamedNodes, order, workers
from tests.support.ray_nodes import RAYS_OWN

pytestmark = [pytest.mark.server, pytest.mark.long]

MODELS = ("a", "b")
ARENA = 512 << 20
FLAGS = ["--enforce-eager", "--block-size=32", "--max-num-seqs=16", "--max-model-len=4096",
         "--dtype=float32"]  # fmt: skip
TOKENS, BEGUN = 3000, 50
ANSWERS, ANSWERED = 4, 20
"""Of the first test: their number, and tokens of each."""
DRAWN = {"temperature": 1.0, "seed": 7, "allowed_token_ids": [50, 51, 52, 53]}


@pytest.fixture(scope="module")
def nodes() -> Iterator[NamedNodes]:
    """A head and one node."""
    with pytest.MonkeyPatch.context() as patched:
        for name, value in RAYS_OWN.items():
            patched.setenv(name, value)
        made = NamedNodes()
        try:
            made.add("left")
            yield made
        finally:
            made.cluster.shutdown()


@pytest.fixture(scope="module")
def fleet(nodes: NamedNodes, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ToyFleet]:
    flags = [f"--ray={nodes.cluster.address}", "--threads=1"]
    with ToyFleet(tmp_path_factory.mktemp("fleet"), *flags) as made:
        yield made


def leased(fleet: ToyFleet) -> dict[str, int]:
    """Bytes that models have of the unit on the node, by model."""
    units: list[dict[str, Any]] = fleet.get("status")["units"]
    return next((one["leased_bytes"] or {} for one in units if one["worker"] == "left"), {})


def unit_agents(fleet: ToyFleet) -> list[psutil.Process]:
    node = fleet.get("workers/left")["node"]
    return [one for one in running("kvmig.sharing") if f"/node-{node[:16]}/" in text_of(one)]


async def both_answer(fleet: ToyFleet) -> None:
    async with fleet.client() as client:
        client.timeout = SERVER_PATIENCE_S
        answers = await asyncio.gather(*(answer(client, ask(name, ANSWERED)) for name in MODELS))
    assert answers == [counted(ANSWERED)] * 2


async def test_two_models_on_a_node_are_forked_there_and_share_the_cache_of_their_unit(
    fleet: ToyFleet,
) -> None:
    for name in MODELS:
        spec = {
            "name": name, "source": f"path:{BUNDLED}", "flags": FLAGS, "memory": 1 << 30,
            "unit": "u", "unit_memory": ARENA,
            "instances": {"min": 0, "max": 1, "start_timeout_s": SERVER_PATIENCE_S},
        }  # fmt: skip
        await asyncio.to_thread(fleet.add, spec)
    wait_until(lambda: forks(fleet, "left") == {"vllm": "ready"}, within_s=SERVER_PATIENCE_S)
    await both_answer(fleet)
    instances = [instance_of(fleet, name) for name in MODELS]
    assert all(FORK_SERVER in text_of(one.parent()) for one in instances)
    await until_yes(lambda: leased(fleet).keys() == {"a", "b"})
    assert sum(leased(fleet).values()) <= ARENA

    (agent,) = unit_agents(fleet)
    agent.kill()
    await until_yes(lambda: unit_agents(fleet) not in ([], [agent]))
    await until_yes(lambda: leased(fleet).keys() == {"a", "b"})
    await both_answer(fleet)
    assert [instance_of(fleet, name) for name in MODELS] == instances, "they have served on"


# -- under streams


class Calls:
    """All streams that were begun, and what the drawn ones have undisturbed."""

    begun = 0
    drawn: dict[str, str]


def bodies() -> list[dict[str, Any]]:
    """Of each model two that count, and one whose tokens are drawn."""
    found = []
    for model in MODELS:
        found += [ask(model, TOKENS, start=100 * number) for number in range(2)]
        found.append(ask(model, TOKENS, start=40, **DRAWN))
    return found


async def begin(fleet: ToyFleet, asked: list[dict[str, Any]]) -> list[Streamed]:
    streams = [Streamed(fleet, body) for body in asked]
    Calls.begun += len(streams)
    for one in streams:
        await one.reach(BEGUN)
    return streams


async def all_as_undisturbed(streams: list[Streamed]) -> None:
    async with asyncio.timeout(SERVER_PATIENCE_S):
        for body, stream in zip(bodies(), streams, strict=True):
            text = await stream.task
            assert stream.error is None
            start = int(body["prompt"].split()[1])
            drawn = "seed" in body
            assert text == (Calls.drawn[body["model"]] if drawn else counted(TOKENS, start))


def sums(fleet: ToyFleet) -> dict[str, int]:
    """Of the ledger."""
    rows = fleet.get("usage?by=model")["data"]
    return {name: sum(int(row[name]) for row in rows) for name in ("prompt", "output", "calls")}


def serves_at(fleet: ToyFleet, worker: str) -> bool:
    """Whether both models serve there, and on no other node that is alive."""
    found = sorted(
        (one["model"], name)
        for name, row in workers(fleet).items()
        for one in row["instances"]
        if one["state"] == "serving" and row["state"] == "ready"
    )
    return found == [(model, worker) for model in MODELS]


def home(fleet: ToyFleet) -> str:
    """The worker of the unit."""
    (unit,) = fleet.get("status")["units"]
    return str(unit["worker"])


async def until_counted(fleet: ToyFleet) -> None:
    """Wait until the ledger has exactly all answers and streams."""
    prompt = len(ask("a")["prompt"])
    whole = {
        "prompt": (ANSWERS + Calls.begun) * prompt,
        "output": ANSWERS * ANSWERED + Calls.begun * TOKENS,
        "calls": ANSWERS + Calls.begun,
    }
    await until_yes(lambda: sums(fleet) == whole)


async def test_a_worker_with_a_unit_is_drained_under_streams(
    fleet: ToyFleet, nodes: NamedNodes
) -> None:
    nodes.add("right")  # Ray wants the main thread
    drawn = await begin(fleet, [ask(model, TOKENS, start=40, **DRAWN) for model in MODELS])
    Calls.drawn = {model: await one.task for model, one in zip(MODELS, drawn, strict=True)}
    assert Calls.drawn["a"] != counted(TOKENS, 40)
    await until_yes(lambda: forks(fleet, "right") == {"vllm": "ready"}, SERVER_PATIENCE_S)

    streams = await begin(fleet, bodies())
    order(fleet, "left", "drain")
    await until_yes(
        lambda: workers(fleet)["left"]["drain"]["state"] == "drained", SERVER_PATIENCE_S
    )
    assert not all(one.task.done() for one in streams), "they ended before they moved"
    await until_yes(lambda: serves_at(fleet, "right"))
    assert home(fleet) == "right"
    await all_as_undisturbed(streams)
    await until_counted(fleet)
    order(fleet, "left", "uncordon")


async def test_a_node_with_a_unit_is_lost_under_streams(fleet: ToyFleet, nodes: NamedNodes) -> None:
    streams = await begin(fleet, bodies())
    there = nodes.processes("right")
    for process in there:
        process.kill()
    await until_yes(lambda: workers(fleet)["right"]["state"] == "lost")
    assert not any(one.task.done() for one in streams)
    await until_yes(lambda: serves_at(fleet, "left"), SERVER_PATIENCE_S)
    assert home(fleet) == "left"
    await all_as_undisturbed(streams)
    await until_counted(fleet)
    assert not any(map(text_of, there)), "nothing of it runs"
