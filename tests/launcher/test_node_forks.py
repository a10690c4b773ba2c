"""The fork servers that an agent keeps on its node, without Ray: who is forked, and what a failure
costs."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from kvmig.core.config import ClusterConfig
from kvmig.core.errors import StartupError
from kvmig.launcher.environment import llumlet_environment
from kvmig.launcher.launch import LlumletLaunch
from kvmig.launcher.node_forks import (
    FIRST_PAUSE_S,
    LAST_PAUSE_S,
    READY,
    NodeForks,
    fork_address,
    forked_or,
    node_folder,
    pause_after,
)
from kvmig.launcher.ray_environment import base_environment
from kvmig.process.fork_server import HUB_TOKEN, ForkedProcess, join
from kvmig.process.supervisor import ProcessPort
from tests.support.waiting import wait_until

ROOT = str(Path(__file__).parents[2])
NODE, FLEET = "0123456789abcdef0123", "f" * 32
GIVEN = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
"""As `kvmig.process.child.quiet` leaves it."""
LAUNCH = LlumletLaunch(
    cluster="test", instance="i0", secret=b"s", config=ClusterConfig(engine="toy"), engine_argv=[]
)
TRIED = """
import sys
if "kvmig.launcher.shared_fork_server" in sys.orig_argv:
    with open({tried!r}, "a") as tried:
        tried.write("x")
    sys.exit("no library")
"""


@pytest.fixture(scope="module", autouse=True)
def short(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Nodes of these tests alone; their sockets have short paths, unlike those in tmp_path."""
    tmp_path_factory.getbasetemp()
    with (
        tempfile.TemporaryDirectory(prefix="kvmig-", dir="/tmp") as folder,
        pytest.MonkeyPatch.context() as patched,
    ):
        patched.setattr(tempfile, "tempdir", folder)
        yield


@pytest.fixture(scope="module")
def own() -> dict[str, str]:
    """The environment of an agent."""
    return {**os.environ, "PYTHONPATH": ROOT, "RAY_JOB_ID": "1", "CUDA_VISIBLE_DEVICES": ""}


@pytest.fixture(scope="module")
def forks(own: dict[str, str]) -> Iterator[NodeForks]:
    made = NodeForks(NODE, own)
    yield made
    made.close()


def instance_environment(own: Mapping[str, str], **more: str) -> dict[str, str]:
    """That of an instance on the node."""
    base = base_environment({**GIVEN, **more}, {**own, "OMP_NUM_THREADS": "2"})
    return llumlet_environment("toy", [], 3, base)


async def started(
    environment: Mapping[str, str], node: str = NODE
) -> tuple[ProcessPort, list[str]]:
    """An instance that ends at once, for it has no orders; and whether it was spawned."""
    spawned = []

    async def spawn(stdin: int, announced: int) -> ProcessPort:
        spawned.append("spawned")
        return await asyncio.create_subprocess_exec("true")

    stdin, announced = os.open(os.devnull, os.O_RDONLY), os.open(os.devnull, os.O_WRONLY)
    try:
        fork = forked_or(spawn, node, FLEET, LAUNCH, environment)
        process = await fork(stdin, announced)
        async with asyncio.timeout(20):
            await process.wait()
        return process, spawned
    finally:
        os.close(stdin)
        os.close(announced)


def until_ready(forks: NodeForks) -> None:
    wait_until(lambda: forks.keep_engines(FLEET, ["toy"], GIVEN) == {"toy": READY})


async def test_an_instance_is_forked_where_its_environment_is_the_fork_servers(
    forks: NodeForks, own: dict[str, str]
) -> None:
    await asyncio.to_thread(until_ready, forks)
    process, spawned = await started(instance_environment(own))
    assert isinstance(process, ForkedProcess)
    assert not spawned


async def test_a_token_of_the_hub_is_not_known_to_the_fork_server_and_is_no_difference(
    forks: NodeForks, own: dict[str, str]
) -> None:
    await asyncio.to_thread(until_ready, forks)
    process, _ = await started(instance_environment(own, **{HUB_TOKEN: "hf_secret"}))
    assert isinstance(process, ForkedProcess)


async def test_an_instance_with_other_variables_starts_by_itself(
    forks: NodeForks, own: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    await asyncio.to_thread(until_ready, forks)
    _, spawned = await started(instance_environment(own, VLLM_LOGGING_LEVEL="DEBUG"))
    assert spawned
    assert "differs in the environment of instances; this instance starts by" in caplog.text


async def test_where_there_is_no_fork_server_an_instance_starts_by_itself(
    own: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    _, spawned = await started(instance_environment(own), "another node")
    assert (spawned, caplog.text) == (["spawned"], "")


async def test_a_fork_server_of_an_earlier_agent_is_not_taken_for_the_own_one(
    forks: NodeForks, own: dict[str, str]
) -> None:
    await asyncio.to_thread(until_ready, forks)
    later = NodeForks(NODE, own)
    why = {"toy": "the fork server of toy has failed (exit code 2)"}
    try:
        await asyncio.to_thread(
            wait_until, lambda: later.keep_engines(FLEET, ["toy"], GIVEN) == why
        )
    finally:
        later.close()


async def test_a_fork_server_of_another_fleet_is_another_one(
    forks: NodeForks, own: dict[str, str]
) -> None:
    await asyncio.to_thread(until_ready, forks)
    others = NodeForks(NODE, own)
    ready = {"toy": READY}
    try:
        await asyncio.to_thread(
            wait_until, lambda: others.keep_engines("e" * 32, ["toy"], GIVEN) == ready
        )
    finally:
        others.close()
    assert isinstance((await started(instance_environment(own)))[0], ForkedProcess)


@pytest.mark.long
def test_what_is_closed_leaves_no_socket_and_can_begin_again(forks: NodeForks) -> None:
    until_ready(forks)
    forks.close()
    with pytest.raises(StartupError):
        join(fork_address(NODE, FLEET, "toy"), {})
    until_ready(forks)


async def test_one_that_fails_says_why_and_orders_do_not_start_it_again(
    tmp_path: Path, own: dict[str, str]
) -> None:
    tried, library = tmp_path / "tried", tmp_path / "library"
    library.mkdir()
    (library / "sitecustomize.py").write_text(TRIED.format(tried=str(tried)))
    node = "a node without libraries"
    forks = NodeForks(node, {**own, "PYTHONPATH": f"{library}{os.pathsep}{ROOT}"})
    why = {"toy": "the fork server of toy has failed (exit code 1)"}

    def says_why() -> bool:
        return forks.keep_engines(FLEET, ["toy"], GIVEN) == why

    try:
        await asyncio.to_thread(wait_until, says_why)
        for _ in range(5):
            _, spawned = await started(instance_environment(own), node)
            assert spawned
        assert tried.read_text() == "x"
    finally:
        forks.close()


def test_pauses_after_failures_in_a_row_are_ever_longer_up_to_a_bound() -> None:
    assert [pause_after(count) for count in (1, 2, 3)] == [FIRST_PAUSE_S, 20.0, 40.0]
    assert pause_after(10_000) == LAST_PAUSE_S


def test_a_folder_that_others_can_enter_is_not_used() -> None:
    folder = node_folder(NODE)
    folder.parent.chmod(0o755)
    try:
        with pytest.raises(StartupError, match="must be a folder that only this user may open"):
            node_folder(NODE)
    finally:
        folder.parent.chmod(0o700)
