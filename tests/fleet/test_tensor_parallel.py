"""The number of GPUs of an instance where the fleet chooses it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmig.core.errors import ConfigError
from kvmig.core.model_sizes import LayerSizes, ModelSizes
from kvmig.fleet.device_room import DeviceMemory, DeviceNeed
from kvmig.fleet.managed_model import DeploymentRecord
from kvmig.fleet.orders import StartDeployment
from kvmig.fleet.place_choice import choose_places
from kvmig.fleet.rollout import need_of
from kvmig.fleet.spec import InstanceCounts, ModelSpec
from kvmig.fleet.tensor_parallel import candidates, choose_gpus, sized, split
from kvmig.fleet.worker_nodes import InstanceNeed, WorkerNode, room_now
from tests.fleet.test_fleet_units import GIB, Fleet
from tests.support.model_bench import running


def test_one_gpu_is_tried_first_and_then_as_many_as_divide_the_heads() -> None:
    assert candidates(8, 32) == (1, 2, 4, 8)
    assert candidates(8, 12) == (1, 2, 4)
    assert candidates(3, 0) == (1, 2)
    assert candidates(0, 7) == candidates(8, 7) == (1,)


@given(
    st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), min_size=1, max_size=5),
    st.integers(1, 60),
    st.integers(1, 2),
)
def test_the_first_number_with_room_is_taken_now_or_else_on_empty_gpus(
    gpus: list[tuple[int, int]], whole: int, instances: int
) -> None:
    ids = frozenset(f"g{at}" for at in range(len(gpus)))
    devices = tuple(
        DeviceMemory(f"g{at}", f"g{at}", total + taken, others=taken, peers=ids)
        for at, (total, taken) in enumerate(gpus)
    )
    now = {"w": room_now(WorkerNode("w", 9, 9, devices), 9)}
    empty = {"w": replace(now["w"], devices=now["w"].node.sizes)}

    def need(count: int) -> InstanceNeed:
        return InstanceNeed("a", 0, (DeviceNeed(-(-whole // count), count),))

    sizes = candidates(len(gpus), 0)
    chosen = choose_gpus(sizes, need, now, empty, instances)
    fits_now = [one for one in sizes if choose_places(now, need(one), instances) is not None]
    fits = [one for one in sizes if choose_places(empty, need(one), instances) is not None]
    assert chosen == next(iter([*fits_now, *fits, sizes[-1]]))


def test_sizes_of_one_worker_are_divided_evenly() -> None:
    layer = LayerSizes(kind="full", layers=2, token=7, request=70)
    whole = ModelSizes(weights=9, files=9, tokens=10, layers=(layer,))
    found = split(whole, 2)
    assert (found.weights, found.files, found.workers) == (5, 9, 2)
    assert (found.token, found.request) == (4, 35)


def test_another_number_is_no_change_of_the_model() -> None:
    spec = ModelSpec(name="a", source="path:/a", tensor_parallel="auto")
    assert need_of(sized(spec, 4), spec) == "nothing"
    assert need_of(spec, msgspec.structs.replace(spec, tensor_parallel="")) == "beside"


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[Fleet]:
    made = Fleet(tmp_path / "data")
    yield made
    await made.models.close()


def put(fleet: Fleet, name: str, whole: int, **more: Any) -> None:
    more |= {"unit": "", "unit_memory": 0, "tensor_parallel": "auto", "engine": "toy"}
    fleet.add(name, gpu_memory=whole, **more)


def started(fleet: Fleet, name: str, whole: int) -> tuple[list[str], DeploymentRecord]:
    """The words of the only start, once requests wait for a model of that size, and its note."""
    put(fleet, name, whole)
    fleet.want(name)
    (start,) = fleet.taken(StartDeployment)
    return list(start.words), msgspec.json.decode(start.note, type=DeploymentRecord)


async def test_a_model_that_fits_on_one_gpu_starts_on_one_and_a_larger_one_on_two(
    fleet: Fleet,
) -> None:
    words, note = started(fleet, "small", 15 * GIB)
    assert "--tensor-parallel-size=1" in words
    assert note.gpus == {"i0": ("GPU-0",)}
    words, note = started(fleet, "large", 12 * GIB)
    assert note.gpus == {"i0": ("GPU-1",)}, "one GPU has room for it"
    words, note = started(fleet, "third", 10 * GIB)
    assert "--tensor-parallel-size=2" in words
    assert note.gpus == {"i0": ("GPU-0", "GPU-1")}
    assert note.gpu_bytes == 5 * GIB
    assert fleet.named("third").is_newest


async def test_a_model_that_runs_keeps_its_number_and_the_next_server_knows_it(
    fleet: Fleet,
) -> None:
    put(fleet, "a", 30 * GIB, instances=InstanceCounts(min=1))
    fleet.turn()
    (start,) = fleet.taken(StartDeployment)
    fleet.catalogue()
    fleet.turn()
    model = fleet.named("a")
    assert (model.wanted.spec.workers, model.is_newest) == (2, True)
    assert fleet.models.places.device_need(model.wanted.spec) == DeviceNeed(15 * GIB, 2)
    await fleet.begin_again(running(start))
    fleet.turn()
    model = fleet.named("a")
    assert (model.wanted.spec.workers, model.is_newest) == (2, True)


async def test_what_fits_with_no_number_is_refused_and_what_does_with_some_is_not(
    fleet: Fleet,
) -> None:
    spec = ModelSpec(
        name="a", source="path:/a", engine="toy", tensor_parallel="auto", gpu_memory=40 * GIB
    )
    fleet.memory.devices.check(spec)
    with pytest.raises(ConfigError, match="of each of 2 GPUs that reach each other"):
        fleet.memory.devices.check(msgspec.structs.replace(spec, gpu_memory=41 * GIB))
