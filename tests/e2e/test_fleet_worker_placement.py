"""A placement whose units are on workers, on a real Ray cluster of a head and two nodes, which are
processes of this machine, with toys. The tests are in order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tests.support.fleets import Streamed, ToyFleet, ask, counted, hold_streams
from tests.support.waiting import until_yes, wait_until

pytest.importorskip("ray", reason="needs the extra kvmig[ray]")

from tests.e2e.test_fleet_workers import NamedNodes, workers
from tests.support.ray_nodes import RAYS_OWN

pytestmark = [pytest.mark.server, pytest.mark.long]

TOKENS, HELD = 120, 20
Cluster = TypeVar("Cluster", bound=NamedNodes)


@contextmanager
def left_and_right(make: Callable[[], Cluster]) -> Iterator[Cluster]:
    """A cluster of Ray with nodes of these two names, until the end of the block."""
    with pytest.MonkeyPatch.context() as patched:
        for name, value in RAYS_OWN.items():
            patched.setenv(name, value)
        made = make()
        try:
            for name in ("left", "right"):
                made.add(name)
            yield made
        finally:
            made.cluster.shutdown()


@contextmanager
def fleet_on(nodes: NamedNodes, folder: Path) -> Iterator[ToyFleet]:
    """A fleet on such nodes, which are ready, until the end of the block."""
    with ToyFleet(folder, f"--ray={nodes.cluster.address}", "--threads=1") as made:
        wait_until(lambda: {"left", "right"} <= ready(made))
        yield made


@pytest.fixture(scope="module")
def nodes() -> Iterator[NamedNodes]:
    with left_and_right(NamedNodes) as made:
        yield made


@pytest.fixture(scope="module")
def fleet(nodes: NamedNodes, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ToyFleet]:
    """With model a on both workers, and b on one."""
    with fleet_on(nodes, tmp_path_factory.mktemp("fleet")) as made:
        for name, count in (("a", 2), ("b", 1)):
            made.add_toy(name, instances={"min": count, "max": 2})
            made.until(f"models/{name}", state="serving", serving=count)
        yield made


def ready(fleet: ToyFleet) -> set[str]:
    return {name for name, one in workers(fleet).items() if one["state"] == "ready"}


def body(**units: str) -> dict[str, Any]:
    """Units by their workers, with the models in them."""
    return {
        "placement": {
            "units": [
                {
                    "name": f"of {worker}", "worker": worker, "memory_bytes": 10,
                    "models": [{"name": one, "kv_bytes": 1} for one in models.split()],
                }
                for worker, models in units.items()
            ]
        }
    }  # fmt: skip


def places(fleet: ToyFleet) -> dict[str, set[str]]:
    """The workers on which instances of models serve."""
    found: dict[str, set[str]] = {}
    for name, one in workers(fleet).items():
        for instance in one["instances"]:
            if instance["state"] == "serving":
                found.setdefault(instance["model"], set()).add(name)
    return found


def reached(fleet: ToyFleet) -> bool:
    found = fleet.get("placement")
    assert found["state"] != "failed", found
    return bool(found["state"] == "reached")


async def held(fleet: ToyFleet) -> list[Streamed]:
    """Streams of both models that stand in the middle."""
    bodies = [ask(name, TOKENS, start) for name in "ab" for start in (100, 200, 300)]
    return await hold_streams(fleet, *bodies, tokens=HELD)


async def all_whole(streams: list[Streamed]) -> None:
    wanted = [counted(TOKENS, start) for _ in "ab" for start in (100, 200, 300)]
    assert [await one.task for one in streams] == wanted


def test_what_no_worker_can_be_is_refused_in_one_sentence(fleet: ToyFleet) -> None:
    nowhere = body(east="a b")
    on_gpus = body(left="a")
    on_gpus["placement"]["units"][0] |= {"gpus": [0], "name": "left"}
    for given, sentence in (
        (nowhere, "unit of east: worker is 'east', must be one of head, left, right"),
        (
            on_gpus,
            "unit left: gpus has 0, allowed are those of worker left: none, as none of its GPUs"
            " is known now",
        ),
    ):
        said = fleet.ask("PUT", "placement", given)
        assert said.status_code == 400
        assert sentence in said.json()["error"]["message"]


async def test_models_change_workers_under_streams_as_the_placement_names_them(
    fleet: ToyFleet,
) -> None:
    streams = await held(fleet)
    for units in ({"left": "a b", "right": "a"}, {"left": "a", "right": "a b"}):
        said = fleet.ask("PUT", "placement", body(**units))
        assert said.status_code == 200, said.text
        await until_yes(lambda: reached(fleet))
        wanted = {
            name: {worker for worker, models in units.items() if name in models} for name in "ab"
        }
        assert places(fleet) == wanted
    fleet.hold(None)
    await all_whole(streams)


async def test_a_lost_workers_unit_says_so_and_starts_on_the_worker_that_comes_back(
    fleet: ToyFleet, nodes: NamedNodes
) -> None:
    nodes.kill("left")
    await until_yes(lambda: "left" not in ready(fleet))
    await until_yes(
        lambda: fleet.get("placement")["why"].startswith("worker left of unit of left: it is lost")
    )
    streams = await held(fleet)
    fleet.hold(None)
    await all_whole(streams)
    nodes.add("left")  # Ray wants the main thread
    await until_yes(lambda: reached(fleet) and places(fleet)["a"] == {"left", "right"})
    assert places(fleet)["b"] == {"right"}
