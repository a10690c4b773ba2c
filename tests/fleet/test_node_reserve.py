"""The spare nodes that a fleet asks Ray's autoscaler for."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvmig.core.errors import ConfigError
from kvmig.fleet.node_reserve import ReserveLadder, parse_ladder, wanted_bundles
from kvmig.fleet.settings import FleetSettings, check_settings
from kvmig.fleet.workers import FleetWorker
from tests.support.made_up_nodes import made_up_node
from tests.support.model_bench import silence
from tests.support.worker_bench import WorkerBench

LADDER = ReserveLadder(((3, 1), (16, 2)))
CPUS = {"CPU": 4.0}


def worker(name: str, **resources: float) -> FleetWorker:
    return FleetWorker(name, node=name, state="ready", resources=resources)


@pytest.mark.parametrize(("workers", "spare"), [(0, 1), (2, 1), (3, 2), (15, 2), (100, 2)])
def test_the_last_step_holds_for_more_workers_too(workers: int, spare: int) -> None:
    assert LADDER.spare(workers) == spare


WRONG = (
    "1",
    "3=",
    "=1",
    "3=1,2=1",
    "3=1,3=2",
    "-1=1",
    "3=x",
    "3=1,",
    "3=9999",
    "9999999=1",
    "\u0663=1",
)


@pytest.mark.parametrize("text", WRONG)
def test_a_ladder_that_is_none_is_refused_with_what_is_allowed(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--reserve is .*, must be as 3=1,16=2"):
        parse_ladder(text)


def test_a_ladder_is_read() -> None:
    assert parse_ladder("3=1, 16=2") == LADDER
    assert parse_ladder("") is None


def test_a_spare_node_is_as_the_largest_worker_unless_it_is_named() -> None:
    there = [worker("head"), worker("a", CPU=4), worker("b", CPU=2, GPU=1)]
    assert wanted_bundles(LADDER, {}, there, (), ()) == ({"CPU": 2.0, "GPU": 1.0},)
    assert wanted_bundles(LADDER, {"GPU": 8.0}, there, (), ()) == ({"GPU": 8.0},)
    assert wanted_bundles(LADDER, {}, [worker("head")], (), ()) == ()
    assert wanted_bundles(LADDER, {"GPU": 8.0}, [], (), ()) == ({"GPU": 8.0},)


def test_nodes_in_use_and_instances_that_wait_count_beside_what_is_spare() -> None:
    """Ray counts what all nodes are to hold together."""
    there = [worker("a", CPU=4), worker("b", CPU=4)]
    found = wanted_bundles(LADDER, {}, there, ["a"], [{"CPU": 2.0}])
    assert found == (CPUS, {"CPU": 2.0}, CPUS)


def test_it_is_refused_without_a_cluster(tmp_path: Path) -> None:
    for settings in (
        FleetSettings(data=str(tmp_path), reserve="3=1"),
        FleetSettings(data=str(tmp_path), reserve_node=CPUS),
    ):
        with pytest.raises(ConfigError, match=r"--reserve.* is .*must be given together with"):
            check_settings(settings)


@pytest.fixture
async def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[WorkerBench]:
    silence(monkeypatch)  # what a deployment tells, the test says
    made = WorkerBench(tmp_path, reserve=ReserveLadder(((1, 0), (9, 1))))
    yield made
    await made.models.close()


async def test_a_model_that_waits_for_a_node_asks_for_it(bench: WorkerBench) -> None:
    bench.see(made_up_node("a"))
    bench.turn()
    assert bench.pool.wish().bundles == (CPUS,)
    bench.add(flags=("--ray-resources", '{"CPU": 5}'))
    bench.turn()
    assert bench.pool.wish().bundles == ({"CPU": 5.0}, CPUS)


async def test_a_node_with_an_instance_is_not_spare(bench: WorkerBench) -> None:
    bench.see(made_up_node("a"), made_up_node("b"))
    bench.add()
    bench.turn()
    assert bench.model.life.state == "starting"
    assert bench.pool.wish().bundles == (CPUS, CPUS)


async def test_without_a_ladder_the_autoscaler_is_not_asked(tmp_path: Path) -> None:
    bench = WorkerBench(tmp_path)
    bench.turn()
    assert bench.pool.wish().bundles is None
