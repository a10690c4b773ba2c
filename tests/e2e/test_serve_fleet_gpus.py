"""A fleet of toys on GPUs of the tests' own: who gets which, who waits and why, what comes free."""

from __future__ import annotations

import asyncio
import json
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvmig_tools.served import SMALL
from tests.placement.test_replace import placement_text
from tests.support.fake_devices import GIB, FakeMachine, FakeProcess, devices
from tests.support.fleets import (
    PATH,
    ToyFleet,
    answer,
    ask,
    counted,
    instances_by_socket,
    kill,
)
from tests.support.waiting import wait_until

pytestmark = pytest.mark.server

FIRST, SECOND = (one.uuid for one in devices(2))
SIZE = 16 * GIB
CLAIM = 6 * GIB


class GpuFleet(ToyFleet):
    """On a machine with two GPUs."""

    machine: FakeMachine

    def held(self) -> dict[str, dict[str, int]]:
        """Bytes of each model by GPU."""
        return {one["uuid"]: one["models"] for one in self.get("status")["gpus"]}

    def once(self, holds: Callable[[], bool]) -> None:
        """Wait for it."""
        wait_until(holds)

    def gpus_of(self, model: str) -> list[list[str]]:
        """As the processes of its instances see them."""
        for rows in instances_by_socket(self).values():
            if rows and rows[0]["model"] == model:
                return [row["gpus"] for row in rows]
        return []


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GpuFleet]:
    folder = tmp_path_factory.mktemp("machine")
    machine = FakeMachine(folder)
    machine.install(devices(2, SIZE))
    with pytest.MonkeyPatch.context() as patch:
        for name, value in machine.environment.items():
            patch.setenv(name, value)
        patch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
        with GpuFleet(tmp_path_factory.mktemp("fleet")) as fleet:
            fleet.machine = machine
            yield fleet


@pytest.fixture
def fleet(made: GpuFleet) -> Iterator[GpuFleet]:
    yield made
    made.hold(None)
    made.machine.install(devices(2, SIZE))
    for one in made.get("models")["data"]:
        made.ask("DELETE", f"models/{one['name']}")
    made.until("status", claimed_bytes=0)


def add(fleet: GpuFleet, name: str, each: int = CLAIM, **more: Any) -> None:
    fleet.add_toy(name, gpu_memory=each, **more)


async def run(fleet: GpuFleet, *names: str) -> None:
    """Let each answer."""
    async with fleet.client() as client:
        for name in names:
            assert await answer(client, ask(name)) == counted(10)


async def test_two_models_share_a_gpu_and_a_third_waits_until_an_idle_one_gives_its_bytes(
    fleet: GpuFleet,
) -> None:
    add(fleet, "a", gpus=["0"], instances={"min": 1})
    for name in "bc":
        add(fleet, name, gpus=["0"])
    await run(fleet, "a", "b")
    assert fleet.held() == {FIRST: {"a": CLAIM, "b": CLAIM}, SECOND: {}}
    async with fleet.client() as client:
        third = asyncio.create_task(answer(client, ask("c")))
        found = await asyncio.to_thread(fleet.until, "models/c", state="waiting")
        assert found["why"].startswith("no room: it needs 6.0 GiB of a GPU's memory, 4.0 GiB is")
        title = f"GPU 0 (NVIDIA H100 80GB HBM3, {FIRST})"
        assert found["no_room"][0] == (
            f"{title}: needs {CLAIM} bytes, {SIZE - 2 * CLAIM} of {SIZE} are free (model a has 6.00"
            " GiB, model b has 6.00 GiB)"
        )
        assert await third == counted(10), "an idle model ends for it, in time"
    (here,) = fleet.get("why-not/a")["nodes"]
    (why,) = here["refusals"]
    assert (why["filter"], why["need_bytes"]) == ("gpu_memory", CLAIM)
    assert why["why"].endswith("(model a has 6.00 GiB, model c has 6.00 GiB)")
    (decided,) = fleet.get("why/c?instance=i0")["decision"]["nodes"]
    assert (decided["node"], decided["chosen"], decided["gpus"]) == ("local", True, [title])
    assert decided["score"] == pytest.approx(90 + 10 / 3 / 2), "beside one of another model"
    assert fleet.held()[FIRST] == {"a": CLAIM, "c": CLAIM}
    assert fleet.get("models/a")["state"] == "serving", "it has a least number"


async def test_a_model_of_two_workers_has_both_gpus_and_models_spread_over_them(
    fleet: GpuFleet,
) -> None:
    add(fleet, "two", gpus_per_instance=2)
    add(fleet, "one", 2 * GIB, instances={"min": 2, "max": 2})
    await asyncio.to_thread(fleet.until, "models/one", serving=2)
    await run(fleet, "two")
    assert fleet.gpus_of("two") == [["0", "1"]]
    assert sorted(fleet.gpus_of("one")) == [["0"], ["1"]]
    each = {"one": 2 * GIB, "two": CLAIM}
    assert fleet.held() == {FIRST: each, SECOND: each}
    assert [one["bytes"] for one in fleet.get("models/two")["gpus"]] == [CLAIM, CLAIM]


async def test_the_fleet_chooses_one_gpu_where_that_is_enough_and_else_two(fleet: GpuFleet) -> None:
    for name, whole in (("small", CLAIM), ("large", 18 * GIB)):
        add(fleet, name, whole, tensor_parallel="auto")
    await run(fleet, "small", "large")
    assert (len(fleet.gpus_of("small")[0]), fleet.gpus_of("large")) == (1, [["0", "1"]])
    held = fleet.held()
    assert held[FIRST]["large"] == held[SECOND]["large"] == 9 * GIB
    assert not fleet.get("models/large")["stale"]


async def test_a_busy_instance_moves_to_another_gpu_so_that_a_large_model_has_room(
    fleet: GpuFleet,
) -> None:
    for name in "ab":
        add(fleet, name)
    add(fleet, "large", 12 * GIB)
    await run(fleet, "a", "b")
    assert fleet.held() == {FIRST: {"a": CLAIM}, SECOND: {"b": CLAIM}}
    fleet.hold(8)
    async with fleet.client() as client:
        streams = [asyncio.create_task(answer(client, ask(name, 20))) for name in "ab"]
        for name in "ab":
            await asyncio.to_thread(fleet.until, f"models/{name}", running=1)
        planned = fleet.get("why-not/large")["moves"]
        assert [(one["model"], one["instance"]) for one in planned["moves"]] == [("a", "i0")]
        streams.append(asyncio.create_task(answer(client, ask("large", 20))))
        await asyncio.to_thread(fleet.until, "models/large", serving=1)
        assert fleet.held() == {FIRST: {"large": 12 * GIB}, SECOND: {"a": CLAIM, "b": CLAIM}}
        assert not any(one.done() for one in streams)
        fleet.hold(None)
        assert await asyncio.gather(*streams) == [counted(20)] * 3, "no token is lost"
    assert fleet.gpus_of("a") == [["1"]]


@pytest.mark.long
async def test_what_others_use_is_no_room_and_they_are_named_to_admins_alone(
    fleet: GpuFleet,
) -> None:
    gpus = devices(2, SIZE)
    for one in gpus:
        one.processes = [FakeProcess(1, SIZE - GIB)]
    fleet.machine.install(gpus)
    await asyncio.to_thread(
        fleet.once, lambda: fleet.get("status")["gpus"][0]["others_bytes"] == SIZE - GIB
    )
    add(fleet, "a", instances={"start_timeout_s": 2})
    async with fleet.client() as client:
        refused = await client.post(PATH, json=ask("a"))
    assert refused.status_code == 503
    said = refused.json()["error"]["message"]
    assert "it needs 6.0 GiB of a GPU's memory, 1.0 GiB is free, the rest is taken for good" in said
    assert "process" not in said
    fits = fleet.ask("POST", "evaluate", fleet.get("models/a")["spec"]).json()
    assert not fits["fits"]
    assert "process 1 (" in fits["why"]


def test_what_no_gpu_can_hold_is_refused_in_bytes_at_the_door(fleet: GpuFleet) -> None:
    spec = {"name": "a", "source": "path:/toy", "engine": "toy", "gpu_memory": SIZE + 5}
    said = fleet.ask("POST", "models", spec).json()["error"]["message"]
    assert said.startswith(f"model a needs {SIZE + 5} bytes (16.00 GiB) of a GPU; GPU 0 (NVIDIA")
    assert f"has {SIZE} bytes, 5 too few; GPU 1" in said
    for wrong, named in (
        ({"gpus": ["2"]}, f"gpus has '2', must be some of 0 ({FIRST}), 1 ({SECOND})"),
        (
            {"instances": {"min": 5, "max": 5}, "gpu_memory": CLAIM},
            "instances.min is 5, must be at most 4: an instance needs",
        ),
        ({"gpus_per_instance": 3, "gpu_memory": CLAIM}, "of each of 3 GPUs that reach each other"),
        ({"tensor_parallel": "auto", "gpu_memory": 40 * GIB}, "of each of 2 GPUs that reach each"),
    ):
        refused = fleet.ask("POST", "models", {**spec, **wrong})
        assert refused.status_code == 400
        assert named in refused.json()["error"]["message"]


async def test_a_model_of_a_placement_starts_on_its_units_gpu(fleet: GpuFleet) -> None:
    for name, gpu in (("a", "0"), ("b", "1"), ("c", "1")):
        add(fleet, name, gpus=[gpu], instances={"min": 1})
    for name in "abc":
        await asyncio.to_thread(fleet.until, f"models/{name}", state="serving")
    text = placement_text(left="a", right="b c")
    for at in (0, 1):
        text = text.replace(f"memory_bytes = {2000 + at}", f"memory_bytes = 2000\ngpus = [{at}]")
    text = text.replace("held_bytes", "decode_share = 0.5\nheld_bytes")
    for wrong, sentence in (
        ("gpus = [2]", "placement: unit right: gpus has 2, allowed are 0, 1"),
        ("gpus = [1, 2]", "placement: unit right: gpus has 2, allowed are 0, 1"),
        ("node = 1\ngpus = [1]", "placement: unit right: node is 1, must be 0"),
    ):
        body = {"placement": tomllib.loads(text.replace("gpus = [1]", wrong))}
        assert sentence in fleet.ask("PUT", "placement", body).text
    body = {"placement": tomllib.loads(text)}
    assert fleet.ask("PUT", "placement", body).json() == {"plan": ["nothing moves"]}
    for name in "abc":  # the GPUs of the specification were others' reason
        spec = fleet.get(f"models/{name}")["spec"] | {"gpus": []}
        assert fleet.ask("POST", "apply", {"fleet": {"models": [spec]}}).status_code == 200
    (deployment,) = fleet.processes("kvmig.serve /toy --engine=toy --served-model-name=b ")
    starts = fleet.get("status")["starts"]
    kill(deployment)  # of both GPUs the first one is emptier then
    await asyncio.to_thread(fleet.once, lambda: fleet.get("status")["starts"] > starts)
    await asyncio.to_thread(fleet.until, "models/b", serving=1)
    assert fleet.gpus_of("b") == [["1"]]
    assert fleet.held() == {FIRST: {"a": CLAIM}, SECOND: {"b": CLAIM, "c": CLAIM}}
    assert fleet.ask("DELETE", "placement").status_code == 200


@pytest.mark.long
async def test_a_named_gpu_is_the_only_one(fleet: GpuFleet) -> None:
    add(fleet, "a", gpus=["1"])
    add(fleet, "b", gpus=[SECOND])
    await run(fleet, "a", "b")
    assert fleet.held() == {FIRST: {}, SECOND: {"a": CLAIM, "b": CLAIM}}
    assert fleet.gpus_of("a") == [["1"]]


async def test_a_parked_model_gives_back_what_it_can_of_its_gpu(fleet: GpuFleet) -> None:
    add(fleet, "a", gpus=["0"], warm="parked", instances={"zero_after_s": 1})
    await run(fleet, "a")
    assert fleet.held()[FIRST] == {"a": CLAIM}
    await asyncio.to_thread(fleet.until, "models/a", state="parked")
    assert fleet.held()[FIRST] == {"a": CLAIM // 2}
    await run(fleet, "a")
    assert fleet.held()[FIRST] == {"a": CLAIM}


async def test_more_instances_come_as_far_as_gpus_have_room_and_a_new_server_knows_them(
    fleet: GpuFleet,
) -> None:
    add(fleet, "a", 9 * GIB, instances={"min": 1, "max": 3, "target": 1})
    await asyncio.to_thread(fleet.until, "models/a", serving=1)
    fleet.hold(8)
    async with fleet.client() as client:
        calls = [asyncio.create_task(answer(client, ask("a", 20))) for _ in range(6)]
        await asyncio.to_thread(fleet.until, "models/a", serving=2)
        await asyncio.sleep(1)
        assert fleet.get("models/a")["serving"] == 2
        before = fleet.held()
        assert before == {FIRST: {"a": 9 * GIB}, SECOND: {"a": 9 * GIB}}
        (server,) = fleet.processes("kvmig.fleet.server")
        kill(server)
        await asyncio.to_thread(
            fleet.once,
            lambda: fleet.processes("kvmig.fleet.server") not in ([], [server]) and fleet.listens(),
        )
        await asyncio.to_thread(fleet.until, "models/a", serving=2)
        assert fleet.held() == before
        fleet.hold(None)
        assert await asyncio.gather(*calls) == [counted(20)] * 6


async def test_what_an_instance_uses_goes_before_what_it_was_thought_to(fleet: GpuFleet) -> None:
    add(fleet, "a", 0, gpus=["0"], flags=["--num-blocks=500"])
    await run(fleet, "a")
    assert fleet.held()[FIRST] == {"a": 0}
    (rows,) = instances_by_socket(fleet).values()
    fleet.machine.take(FIRST, 2 * GIB, rows[0]["pid"])

    await asyncio.to_thread(fleet.once, lambda: fleet.held()[FIRST] == {"a": 2 * GIB})
    assert json.dumps(fleet.get("models/a")["events"]).count("uses 2147483648 bytes of a GPU") == 1


@pytest.mark.long
async def test_a_vllm_model_claims_what_vllm_says_of_it_and_runs_on_its_gpu(
    fleet: GpuFleet,
) -> None:
    folder = Path(__file__).parents[2] / "kvmig" / "models" / "count"
    flags = [*SMALL, "--gpu-memory-utilization=0.1", "--kv-cache-memory-bytes=64M"]
    spec = {"name": "count", "source": f"path:{folder}", "flags": flags}
    found = fleet.ask("POST", "evaluate", spec)
    assert found.status_code == 200, found.text
    fits = found.json()
    assert fits["fits"]
    assert fits["basis"] == "flags"
    assert fits["token_bytes"] == sum(one["token"] for one in fits["layers"]) > 0
    each = fits["weights_bytes"] + (64 << 20) + 3 * GIB
    assert fits["place"] == [FIRST]
    assert fits["gpus"][0]["need_bytes"] == each
    fleet.add(spec)
    async with fleet.client() as client:
        said = await client.post(PATH, json=ask("count", 5))
        assert said.status_code == 200, said.text
    assert fleet.held()[FIRST] == {"count": each}
    assert fleet.gpus_of("count") == [["0"]]


@pytest.mark.long
async def test_two_vllm_models_without_a_memory_flag_answer_from_one_gpu_and_a_third_waits(
    fleet: GpuFleet,
) -> None:
    folder = Path(__file__).parents[2] / "kvmig" / "models" / "count"
    spec = {"source": f"path:{folder}", "flags": [*SMALL, "--max-model-len=1024"], "gpus": ["0"]}
    for name in ("one", "two"):
        fleet.add({"name": name, **spec})
    async with fleet.client() as client:
        calls = (answer(client, ask(name, 20, 300)) for name in ("one", "two"))
        assert await asyncio.gather(*calls) == [counted(20, 300)] * 2
    assert fleet.gpus_of("one") == fleet.gpus_of("two") == [["0"]]
    held = fleet.held()[FIRST]
    assert held.keys() == {"one", "two"}
    large = SIZE - min(held.values()) - GIB
    found = fleet.ask("POST", "evaluate", {"name": "three", **spec, "gpu_memory": large}).json()
    assert not found["fits"]
    assert str(large) in found["why"]
