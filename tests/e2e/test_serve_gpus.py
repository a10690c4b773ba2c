"""kvmig.serve with real vLLM engines that have their KV caches on two GPUs of the tests' own, one
instance on each (tests/support/gpu_nursery.py): requests move between processes by `cuda-ipc`."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from signal import SIGKILL, SIGSTOP
from typing import Any, TypeVar

import httpx
import psutil
import pytest

from bench.chaos.answers import LAST_DIGITS
from bench.gpu import kill, pause, serving, sharing
from kvmig.kvtransfer import destination_machine, source_machine
from kvmig_tools.nursery import Nursery
from kvmig_tools.patience import SERVER_PATIENCE_S
from kvmig_tools.served import SMALL, Served
from tests.conftest import NEVER_BY_ITSELF, PATIENT
from tests.support import fake_devices, fake_gpu, gpu_nursery
from tests.support.fake_devices import GIB, FakeMachine, devices
from tests.support.gpu_nursery import Blow, Orders, State
from tests.support.leaks import Footprint, assert_server_is_empty
from tests.support.retries import SESSION, EndedEarly, until_moved
from tests.support.streams import (
    Answer,
    ask,
    count_from,
    other,
    row_of,
    run_moved,
    run_unmoved,
    start_stream,
)
from tests.support.waiting import until

pytestmark = [pytest.mark.server, pytest.mark.long]

PATH = "/v1/completions"
SERVING = "serving"
FLAGS = (
    *SMALL,
    *("--instances=2", NEVER_BY_ITSELF, "--max-restarts=100"),
    "--chunk-bytes=1048576",  # small /dev/shm do
    *(*PATIENT, "--shutdown-timeout=5"),
    "--no-enable-prefix-caching",  # every move copies all blocks
)
OVERLAPPING = "--async-scheduling"
GPU_BYTES = 80 * GIB
"""Of each GPU: what a server leaves is enough for another one beside it."""
TOKENS, MOVED_AT = 400, (10, 40)
TOKENS_OF_V2 = 120
"""Each of these takes as long as ten of the others: Triton is interpreted."""


def nursery_in(folder: Path, **variables: str) -> Nursery:
    """Whose instances see a GPU each; `folder` is for orders."""
    fake_gpu.path()  # compiled here, or the test is skipped
    (gpus := folder / "gpus").mkdir()
    (machine := FakeMachine(gpus)).install(devices(2, GPU_BYTES))
    own = {
        **machine.environment,
        "CUDA_VISIBLE_DEVICES": "0,1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    environment = {**os.environ, **own, gpu_nursery.ORDERS: str(folder), **variables}
    return Nursery("vllm", environment, module=gpu_nursery.__name__)


class Machine:
    """A server on the two GPUs, and what its instances hold of these."""

    def __init__(self, served: Served, orders: Orders) -> None:
        self.served = served
        self.orders = orders
        self.fresh = self.held()
        """What instances hold that have just started."""

    def processes(self) -> list[psutil.Process]:
        """The instances', by their names, once both serve."""

        def there() -> list[psutil.Process]:
            found = Footprint.of(self.served).llumlets()
            serving = {row["id"] for row in self.served.get("instances") if row["state"] == SERVING}
            return [found[name] for name in sorted(found.keys() & serving)]

        return once(there, lambda found: len(found) == 2)

    def memory(self) -> list[set[int]]:
        """Of the GPUs, that each instance maps, or could."""
        return [fake_gpu.memory_of(one.pid) for one in self.processes()]

    def held(self) -> list[int]:
        """How many pieces of memory each instance has."""
        return list(map(len, self.memory()))

    def assert_fresh(self) -> None:
        """Nothing is left of a peer that has ended."""
        once(self.held, lambda held: held == self.fresh)


T = TypeVar("T")


def once(look: Callable[[], T], right: Callable[[T], bool]) -> T:
    """What it finds, once that is right."""
    deadline = time.monotonic() + SERVER_PATIENCE_S
    while not right(found := look()):
        assert time.monotonic() < deadline, found
        time.sleep(0.05)
    return found


@contextmanager
def machine(
    nursery: Nursery, folder: Path, *flags: str, visible: str = "0,1", **environment: str
) -> Iterator[Machine]:
    """visible: GPUs; environment: of its instances."""
    orders = Orders(Path(nursery.environment[gpu_nursery.ORDERS]))
    orders.environment(environment)
    sees, log = {"CUDA_VISIBLE_DEVICES": visible}, folder / "log"
    with Served([*FLAGS, *flags], nursery=nursery, environment=sees, log=log) as served:
        yield Machine(served, orders)


@pytest.fixture(scope="module")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    with nursery_in(tmp_path_factory.mktemp("orders")) as made:
        yield made


@pytest.fixture(scope="module")
def server(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    """Two instances whose steps overlap."""
    with machine(nursery, tmp_path_factory.mktemp("served"), OVERLAPPING) as made:
        yield made


def body(number: int, tokens: int = TOKENS) -> dict[str, Any]:
    """A completion of several blocks from the start."""
    prompt = " ".join(f"{one:04d}" for one in range(number, number + 30))
    return count_from(number, tokens, prompt=f"Count: {prompt}", logprobs=1)


async def moves_exactly(at: Machine, transport: str, tokens: int = TOKENS) -> None:
    moved, reports = await run_moved(at.served, PATH, body(100, tokens), MOVED_AT)
    assert [(one["state"], one["transport"]) for one in reports] == [("committed", transport)] * 2
    assert sum(stage["blocks"] for stage in reports[0]["stages"]) >= 4
    for parts in (stage["parts"] for stage in reports[0]["stages"]):
        assert 0 < parts["gather_device"] <= parts["gather"]
        assert 0 < parts["scatter_device"] <= parts["scatter"]
    moved.same_as(await run_unmoved(at.served, PATH, body(100, tokens)))
    await asyncio.to_thread(assert_server_is_empty, at.served)


def are(at: Machine, runner: str, overlap: bool, gpus: Sequence[str] = ("0", "1")) -> None:
    """The instances' engines, each on its GPUs."""
    usual = {"runner": runner, "steps overlap": overlap}
    found = [at.orders.engine(one.pid) for one in at.processes()]
    assert found == [{"GPUs": each, **usual} for each in gpus]


async def test_a_request_moves_there_and_back_by_cuda_ipc_which_auto_has_chosen(
    server: Machine,
) -> None:
    await asyncio.to_thread(are, server, "V1", True)
    await moves_exactly(server, "cuda-ipc")
    first, second = await asyncio.to_thread(server.memory)
    assert len(first & second) == 2  # each has mapped the other's inbox


# -- kill -9

SIDES = {"source": source_machine.SourceState, "destination": destination_machine.DestinationState}
STATES = [(side, str(state)) for side, states in SIDES.items() for state in states]
COPIES = ("source", "copying"), ("destination", "scattering")
IN_COPY_S = 0.03
"""Until a kernel copies; it takes some 80 ms here."""
KILLS = [*((one, 0.0) for one in STATES), *((one, IN_COPY_S) for one in COPIES)]
BEFORE: dict[State, dict[State, Blow]] = {
    ("source", "resolving"): {("destination", "committing"): Blow(SIGKILL)},
    ("source", "aborted"): {("destination", "receiving"): Blow(SIGKILL)},
    ("destination", "cancelled"): {("source", "copying"): Blow(SIGSTOP)},
}
"""What leads to a state that a migration that goes well hasn't."""


def kill_of(state: State, delay_s: float) -> Any:
    """A case."""
    name = " ".join(state) + (" in a copy" if delay_s else "")
    return pytest.param(state, delay_s, id=name)


@pytest.fixture(scope="module")
def unmoved(server: Machine) -> Answer:
    return asyncio.run(run_unmoved(server.served, PATH, body(200)))


@pytest.mark.parametrize(("state", "delay_s"), [kill_of(*one) for one in KILLS])
async def test_an_instance_that_is_killed_in_a_state_leaves_nothing_and_no_client_notices(
    server: Machine, unmoved: Answer, state: State, delay_s: float
) -> None:
    async def killed() -> Answer:
        instances = await asyncio.to_thread(server.processes)
        blows = {state: Blow(SIGKILL, delay_s), **BEFORE.get(state, {})}
        with server.orders.blows(blows) as to_come:
            stream = await start_stream(server.served, body(200), MOVED_AT[0])
            row = await row_of(server.served, stream)
            asked = asyncio.create_task(ask(server.served, row["id"], other(row["instance"])))
            await until(lambda: stream.task.done() or not to_come())
            for one in instances:
                with suppress(psutil.NoSuchProcess):
                    one.resume()
            answer, status = await stream.end(), (await asked).status_code
            if to_come():
                raise EndedEarly(f"before {to_come()}")
            assert status in (200, 503)
        return answer

    # A request that lost its source runs again: its tokens so far are computed as one prefill.
    within = LAST_DIGITS if state[0] == "source" else 0.0
    (await until_moved(killed, SESSION)).same_as(unmoved, within)
    await asyncio.to_thread(assert_server_is_empty, server.served)
    await asyncio.to_thread(server.assert_fresh)


# -- GPUs that don't reach each other's memory


@pytest.mark.parametrize(
    ("what", "fails"),
    [
        ("KVMIG_FAKE_NO_PEERS", "cuMemSetAccess"),
        ("KVMIG_FAKE_MIG", "cuMemImportFromShareableH"),
    ],
)
async def test_auto_goes_through_the_hosts_memory_where_gpus_do_not_reach_each_other_and_says_so(
    nursery: Nursery, tmp_path: Path, what: str, fails: str
) -> None:
    with machine(nursery, tmp_path, **{what: "1"}) as at:
        await moves_exactly(at, "shm")
        said = at.served.output()
    assert f"GPU 0 doesn't reach a source on this host by cuda-ipc: {fails}" in said


# -- a server that is parked


async def test_a_parked_server_gives_its_gpus_memory_back_and_then_answers_and_moves_as_before(
    nursery: Nursery, tmp_path: Path
) -> None:
    with machine(nursery, tmp_path, OVERLAPPING, "--enable-sleep-mode") as at:
        before = await run_unmoved(at.served, PATH, body(100))
        gpus = FakeMachine(Path(nursery.environment[fake_devices.FOLDER]))
        awake = [gpus.taken(one.pid) for one in at.processes()]

        def order(what: str) -> httpx.Response:
            return httpx.post(f"{at.served.url}/kvmig/v1/{what}", timeout=SERVER_PATIENCE_S)

        assert (await asyncio.to_thread(order, "park")).status_code == 200
        asleep = [gpus.taken(one.pid) for one in at.processes()]
        assert asleep == [GIB // 2] * 2, "a context each"
        assert all(taken > 3 * GIB for taken in awake), "weights, graphs and KV cache, too"

        woken = await asyncio.to_thread(order, "unpark")
        assert woken.status_code == 200, woken.text
        assert [gpus.taken(one.pid) for one in at.processes()] == awake
        before.same_as(await run_unmoved(at.served, PATH, body(100)))
        await moves_exactly(at, "cuda-ipc")


# -- what a lent GPU is to show


def test_the_benchmark_for_a_gpu_moves_streams_by_cuda_ipc(
    nursery: Nursery, tmp_path: Path
) -> None:
    Orders(Path(nursery.environment[gpu_nursery.ORDERS])).environment({})
    file = tmp_path / "result.json"
    flags = [*SMALL, OVERLAPPING]
    assert serving.main(["--quick", "--out", str(file)], flags, nursery) == 0
    result = json.loads(file.read_text())
    found = [(sample["load"], sample["tokens"]) for sample in result["samples"]]
    assert found == [(0, 64), (0, 256), (2, 64), (2, 256)]
    assert (result["summary"]["wrong"], result["summary"]["by_cuda_ipc"]) == (0, 1)


def test_the_benchmark_of_drains_and_kills_loses_no_stream(
    nursery: Nursery, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kill, "MOST_S", 600.0)  # tests share their machine
    Orders(Path(nursery.environment[gpu_nursery.ORDERS])).environment({})
    file = tmp_path / "result.json"
    assert kill.main(["--quick", "--out", str(file)], [*SMALL, OVERLAPPING], nursery) == 0
    result = json.loads(file.read_text())
    assert [sample["what"] for sample in result["samples"]] == ["drain", "kill -9"]
    assert result["summary"]["unfinished"] == 0
    assert min(result["summary"][f"{what}_longest_ms"] for what in ("drain", "kill")) > 0


def test_the_benchmark_of_two_models_in_a_unit_keeps_within_the_arena(
    nursery: Nursery, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharing, "MOST_S", 600.0)  # tests share their machine
    Orders(Path(nursery.environment[gpu_nursery.ORDERS])).environment({})
    file = tmp_path / "result.json"
    flags = ["--enforce-eager", "--block-size=32", "--max-num-seqs=16", "--max-model-len=2048",
             "--dtype=float32", "--instance-gpus=i0: 0"]  # fmt: skip
    assert sharing.main(["--quick", "--out", str(file)], flags, nursery) == 0
    result = json.loads(file.read_text())
    found = [(sample["model"], sample["at_once"]) for sample in result["samples"]]
    assert found == [("a", 1), ("b", 1), ("a", 2), ("b", 2)]
    assert (result["summary"]["unfinished"], result["summary"]["over_arena_bytes"]) == (0, 0)
    assert result["summary"]["ratio"] > 0


def test_the_benchmark_of_the_pause_says_what_a_stage_would_do_if_the_gpus_never_waited(
    nursery: Nursery, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pause, "MOST_S", 600.0)  # tests share their machine
    Orders(Path(nursery.environment[gpu_nursery.ORDERS])).environment({})
    file = tmp_path / "pause.json"
    assert pause.main(["--quick", "--out", str(file)], [*SMALL, OVERLAPPING], nursery) == 0
    result = json.loads(file.read_text())
    stages = {one["load"]: one for one in result["samples"] if one["what"] == "stage"}
    assert sorted(stages) == [0, 1]
    for load, stage in stages.items():
        assert stage["transport"] == "cuda-ipc"
        parts = stage["parts"]
        device_ms = max(parts["gather_device"], parts["scatter_device"])
        found = result["summary"][f"stage_gpu_gb_s_{load}"]
        assert found == pytest.approx(stage["bytes"] / device_ms / 1e6)
        assert "of it on the GPU" in (tmp_path / f"pause-stage-{load}.svg").read_text()


# -- other ways to run an engine


async def test_steps_that_do_not_overlap_move_as_exactly(nursery: Nursery, tmp_path: Path) -> None:
    with machine(nursery, tmp_path) as at:
        are(at, "V1", False)
        await moves_exactly(at, "cuda-ipc")


async def test_instances_on_one_gpu_move_blocks_within_it(nursery: Nursery, tmp_path: Path) -> None:
    with machine(nursery, tmp_path, OVERLAPPING, visible="1") as at:
        are(at, "V1", True, ("1", "1"))
        await moves_exactly(at, "cuda-ipc")


async def test_instances_of_two_workers_move_blocks_of_both_gpus(
    nursery: Nursery, tmp_path: Path
) -> None:
    with machine(nursery, tmp_path, OVERLAPPING, "--tensor-parallel-size=2") as at:
        are(at, "V1", True, ("0,1", "0,1"))
        await moves_exactly(at, "cuda-ipc")


@pytest.mark.parametrize("flags", [[OVERLAPPING], []], ids=["async", "sync"])
async def test_requests_move_as_exactly_on_model_runner_v2(
    tmp_path: Path, flags: list[str]
) -> None:
    variables = {"VLLM_USE_V2_MODEL_RUNNER": "1", "TRITON_INTERPRET": "1"}
    with (
        nursery_in(tmp_path, **variables) as nursery,
        machine(nursery, tmp_path, *flags) as at,
    ):
        are(at, "V2", OVERLAPPING in flags)
        await moves_exactly(at, "cuda-ipc", TOKENS_OF_V2)
