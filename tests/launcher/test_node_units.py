"""The agents of units that a node's agent keeps, without Ray: the processes are real."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from kvmig.core.config import ClusterConfig, RayConfig, UnitConfig, check
from kvmig.core.errors import ConfigError, StartupError, TransportError
from kvmig.core.order_fence import OrderToken
from kvmig.launcher import ray_agents
from kvmig.launcher.gpu_division import NoRoom
from kvmig.launcher.launch import LlumletLaunch
from kvmig.launcher.node_fence import FenceUnknown, NodeFence
from kvmig.launcher.node_files import NodeFilesReport, NodeWish, WantedUnit
from kvmig.launcher.node_folders import NodeFolders
from kvmig.launcher.node_reports import UnitReport
from kvmig.launcher.node_units import (
    FIRST_PAUSE_S,
    HANG_S,
    LAST_PAUSE_S,
    NodeUnits,
    listener_at,
    pause_after,
    state_of,
    unit_address,
    unit_word,
)
from kvmig.launcher.ray_agents import NodeAgent, checked_measure
from kvmig.launcher.ray_gpus import gpu_roll, is_used
from kvmig.launcher.ray_launcher import (
    RayOrder,
    gpus_of_node,
    in_unit,
    node_environment,
    unit_on_node,
    with_gpus,
)
from kvmig.launcher.unit_gpus import UnitGpus
from kvmig.launcher.unit_memory import UnitArena
from kvmig.process.sockets import take_path
from kvmig.sharing.messages import UnitState
from tests.launcher.test_unit_gpus import MadeUpRay
from tests.support.fake_devices import FOLDER, GIB, MODULES, FakeMachine, devices
from tests.support.waiting import wait_until

NODE, PATH, MIB = "0123456789abcdef0123", "/the/servers/run/unit-u.sock", 1 << 20
WANTED = WantedUnit(path=PATH, memory=64 * MIB)
THERE = (UnitReport(path=PATH),)
FLEET = "f"


@pytest.fixture(autouse=True)
def short(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[None]:
    """Sockets of this test alone, with short paths, unlike those in tmp_path."""
    tmp_path_factory.getbasetemp()  # else it would be within the folder that goes
    with tempfile.TemporaryDirectory(prefix="kvmig-", dir="/tmp") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield


@pytest.fixture
def units() -> Iterator[NodeUnits]:
    made = NodeUnits(NODE)
    yield made
    made.close()


def keep(units: NodeUnits, wanted: Sequence[WantedUnit]) -> None:
    """Until all answer."""
    there = tuple(UnitReport(path=one.path) for one in wanted)
    wait_until(lambda: units.keep_units(wanted, FLEET) == there)


def address_of(path: str, fleet: str = FLEET) -> str:
    return unit_address(NODE, unit_word(fleet, path))


def listens(wanted: WantedUnit) -> bool:
    return Path(address_of(wanted.path)).exists()


def order_of(unit: UnitConfig | None) -> RayOrder:
    config = ClusterConfig(ray=RayConfig(address="auto", fleet=FLEET), unit=unit)
    launch = LlumletLaunch(
        cluster="test", instance="i0", secret=b"s", config=config, engine_argv=[]
    )
    return RayOrder(
        launch=launch, node=NODE, workers=1, threads=1, share=1.0, gpu=0.0, model="/m",
        kv_bytes=None, environment={}, fleet=FLEET,
    )  # fmt: skip


def test_a_unit_that_is_wanted_has_an_agent_and_one_that_is_not_any_more_has_none(
    units: NodeUnits,
) -> None:
    other = WantedUnit(path="/another.sock", memory=MIB)
    keep(units, [WANTED, other])
    assert state_of(address_of(PATH)).arena == 64 * MIB
    keep(units, [other])
    assert not listens(WANTED)
    assert listens(other)
    units.close()
    assert not listens(other)


def test_a_unit_of_another_size_gets_another_agent(units: NodeUnits) -> None:
    keep(units, [WANTED])
    larger = WantedUnit(path=PATH, memory=128 * MIB)
    keep(units, [larger])
    assert state_of(address_of(PATH)).arena == 128 * MIB


def test_units_of_two_fleets_with_one_path_are_two(units: NodeUnits) -> None:
    keep(units, [WANTED])
    with closing(NodeUnits(NODE)) as others:
        larger = WantedUnit(path=PATH, memory=128 * MIB)
        wait_until(lambda: others.keep_units([larger], "another") == THERE)
        assert state_of(address_of(PATH)).arena == 64 * MIB
        assert state_of(address_of(PATH, "another")).arena == 128 * MIB
    assert listens(WANTED)


def test_an_agent_that_is_killed_is_started_again_after_a_pause(units: NodeUnits) -> None:
    keep(units, [WANTED])
    os.kill(listener_at(address_of(PATH)), signal.SIGKILL)
    ended = "its agent has ended: killed by SIGKILL"
    wait_until(lambda: [one.why for one in units.keep_units([WANTED], FLEET)] == [ended])
    keep(units, [WANTED])


def test_an_agent_ends_with_who_has_started_it() -> None:
    """The node's agent may be killed: the end of a pipe is all that is left of it then."""
    code = (
        f"import sys, tempfile; tempfile.tempdir = {tempfile.tempdir!r};"
        "from kvmig.launcher.node_files import WantedUnit;"
        "from kvmig.launcher.node_units import NodeUnits;"
        f"made = NodeUnits({NODE!r}); made.keep_units([{WANTED!r}], {FLEET!r}); sys.stdin.read()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE) as agent:
        wait_until(lambda: listens(WANTED))
        agent.kill()
    wait_until(lambda: not listens(WANTED))


def test_pauses_grow_to_half_a_minute() -> None:
    assert [pause_after(one) for one in (1, 2, 3, 7, 999)] == [
        FIRST_PAUSE_S, 1.0, 2.0, LAST_PAUSE_S, LAST_PAUSE_S,
    ]  # fmt: skip


async def test_an_instance_on_a_node_joins_the_nodes_agent_and_has_its_arena(
    units: NodeUnits,
) -> None:
    order = in_unit(order_of(UnitConfig(path=PATH)))
    assert order.launch.config.unit == UnitConfig(path=address_of(PATH))
    with pytest.raises(StartupError, match="the unit's agent on this node does not answer"):
        await asyncio.to_thread(unit_on_node, order)
    await asyncio.to_thread(keep, units, [WANTED])
    found = await asyncio.to_thread(unit_on_node, order)
    assert found == (UnitArena(address_of(PATH), 64 * MIB), ())
    assert with_gpus((), {"CUDA_VISIBLE_DEVICES": ""}) == {"CUDA_VISIBLE_DEVICES": ""}


@pytest.fixture
def gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeMachine:
    """Two GPUs of this node."""
    made = FakeMachine(tmp_path)
    made.install(devices(2, 8 * GIB))
    monkeypatch.setenv(FOLDER, str(tmp_path))
    monkeypatch.syspath_prepend(MODULES)
    monkeypatch.delitem(sys.modules, "pynvml", raising=False)
    return made


async def test_a_units_instances_have_the_gpu_that_was_taken_for_it(gpus: FakeMachine) -> None:
    uuid = devices(2)[1].uuid
    ray = MadeUpRay([uuid])
    wanted = WantedUnit(path=PATH, memory=6 * GIB, gpus=(uuid,))
    order = in_unit(order_of(UnitConfig(path=PATH)))
    with closing(NodeUnits(NODE, gpus=UnitGpus(ray, lambda: 0.0))) as units:
        there = (UnitReport(path=PATH, gpus=(uuid,)),)
        await asyncio.to_thread(wait_until, lambda: units.keep_units([wanted], FLEET) == there)
        unit = await asyncio.to_thread(unit_on_node, order)
        assert unit is not None
        assert unit.gpus == (uuid,)
        hidden = {"CUDA_VISIBLE_DEVICES": ""}
        environment = node_environment(order, with_gpus(unit.gpus, hidden))
        assert environment["CUDA_VISIBLE_DEVICES"] == "1"
        starts = gpus_of_node(order, environment, unit)
        assert starts.division.devices[starts.place("i0", 1, ()).gpus[0]].uuid == uuid
        gpus.take(uuid, 2 * GIB)  # somebody else has it by now
        with pytest.raises(NoRoom, match=r"are kept for KV cache of unit .*"):
            gpus_of_node(order, environment, unit)
        units.keep_units([], FLEET)
        assert ray.held == []


async def test_a_unit_without_its_gpu_has_no_agent(gpus: FakeMachine) -> None:
    ray = MadeUpRay()
    units = NodeUnits(NODE, gpus=UnitGpus(ray, lambda: 0.0))
    wanted = WantedUnit(path=PATH, memory=6 * GIB, gpus=("GPU-0",))
    why = "Ray has not given GPU GPU-0 yet"
    assert await asyncio.to_thread(units.keep_units, [wanted], FLEET) == (
        UnitReport(path=PATH, why=why),
    )
    assert not listens(wanted)


def test_a_unit_without_kv_cache_has_gpus_and_no_agent(gpus: FakeMachine) -> None:
    uuids = tuple(one.uuid for one in devices(2))
    units = NodeUnits(NODE, gpus=UnitGpus(MadeUpRay(list(reversed(uuids))), lambda: 0.0))
    wanted = WantedUnit(path=PATH, memory=0, gpus=uuids, count=2)
    there = (UnitReport(path=PATH, gpus=uuids),)
    wait_until(lambda: units.keep_units([wanted], FLEET) == there)
    assert not listens(wanted)
    assert with_gpus(uuids, {"CUDA_VISIBLE_DEVICES": ""})["CUDA_VISIBLE_DEVICES"] == "0,1"


def test_an_instance_whose_gpu_is_not_there_is_refused_by_its_uuid(gpus: FakeMachine) -> None:
    with pytest.raises(StartupError, match="GPU GPU-7 of the unit is not there: NVML does not"):
        with_gpus(["GPU-7"], {})


def test_a_gpu_is_in_use_as_long_as_a_process_lives_that_uses_it() -> None:
    code = (
        f"import sys, tempfile; tempfile.tempdir = {tempfile.tempdir!r};"
        f"from kvmig.launcher.ray_gpus import use_gpu; use_gpu({NODE!r}, 'GPU-0');"
        "print(flush=True); sys.stdin.read()"
    )
    roll = gpu_roll(NODE, "GPU-0")
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe) as instance:
        assert instance.stdout is not None
        instance.stdout.readline()
        assert is_used(roll)
        assert not is_used(gpu_roll(NODE, "GPU-1"))
        instance.kill()
    assert not is_used(roll)


def test_an_instance_without_a_unit_is_as_it_was() -> None:
    assert in_unit(order_of(None)) == order_of(None)
    assert unit_on_node(order_of(None)) is None


def test_units_on_nodes_are_a_fleets() -> None:
    unit = UnitConfig(path=PATH)
    check(ClusterConfig(ray=RayConfig(address="auto", fleet=FLEET), unit=unit))
    with pytest.raises(ConfigError, match="only `kvmig up --ray` starts agents of units on nodes"):
        check(ClusterConfig(ray=RayConfig(address="auto"), unit=unit))


class OwnNode:
    """What Ray tells an actor of its node."""

    def get_node_id(self) -> str:
        return NODE


@pytest.fixture
def on_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """Node agents that are made here take this process for Ray's on the node."""
    pytest.importorskip("ray", reason="needs the extra kvmig[ray]")
    monkeypatch.setattr("ray.get_runtime_context", OwnNode)


@pytest.mark.usefixtures("on_node")
def test_a_later_servers_agent_has_the_units_and_the_one_before_lets_go_of_them() -> None:
    first, second, third = NodeAgent(), NodeAgent(), NodeAgent()

    def wish(term: int, *units: WantedUnit) -> NodeWish:
        return NodeWish(fleet=FLEET, token=OrderToken(term), units=units)

    wait_until(lambda: checked_measure(first.measure(wish(1, WANTED), {})).units == THERE)
    before = listener_at(address_of(PATH))
    wait_until(lambda: second.measure(wish(2, WANTED), {}).units == THERE)
    assert listener_at(address_of(PATH)) not in (0, before)
    refused = first.measure(wish(1, WANTED), {})
    assert (refused.units, "its token is 1.0" in refused.refused) == ((), True)
    third.measure(wish(3), {})  # the one before sees that by itself
    wait_until(lambda: not listens(WANTED))


def test_an_agent_that_hangs_is_killed_and_another_one_starts() -> None:
    now = 100.0

    def look(address: str) -> UnitState:
        if hangs:
            raise TransportError("no answer")
        return state_of(address)

    hangs = False
    with closing(NodeUnits(NODE, clock=lambda: now, look=look)) as units:
        keep(units, [WANTED])
        before = listener_at(address_of(PATH))
        os.kill(before, signal.SIGSTOP)
        hangs = True
        assert [one.why for one in units.keep_units([WANTED], FLEET)] == ["no answer"]
        now += HANG_S - 1
        assert [one.why for one in units.keep_units([WANTED], FLEET)] == ["no answer"]
        now += 1
        ended = "its agent has ended: killed by SIGKILL"
        assert [one.why for one in units.keep_units([WANTED], FLEET)] == [ended]
        hangs, now = False, now + FIRST_PAUSE_S
        keep(units, [WANTED])
        assert listener_at(address_of(PATH)) not in (0, before)


@contextmanager
def takes_no_more(folder: Path) -> Iterator[str]:
    """The path of a socket that listens, and whose backlog is full."""
    path = str(folder / "full")
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as hangs,
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client,
    ):
        hangs.bind(path)
        hangs.listen(0)
        client.connect(path)
        yield path


def errors_of(work: Callable[[], object]) -> list[str]:
    """What work says that should fail, and that could hang for ever."""
    found: list[str] = []

    def run() -> None:
        try:
            work()
        except (OSError, TransportError) as error:
            found.append(str(error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(5.0)
    return found


def test_a_look_at_an_agent_that_takes_no_more_clients_ends(tmp_path: Path) -> None:
    """The node's agent looks at the units each second, and at all else of its node."""
    with takes_no_more(tmp_path) as path:
        said = errors_of(lambda: listener_at(path))
        assert said == [f"who listens at {path} takes no more clients"]


def test_a_path_whose_listener_takes_no_more_clients_is_not_taken_over(tmp_path: Path) -> None:
    with takes_no_more(tmp_path) as path:
        (said,) = errors_of(lambda: take_path(path, socket.SOCK_SEQPACKET).close())
        assert "Address already in use" in said


@pytest.mark.usefixtures("on_node")
def test_a_part_of_a_node_that_can_not_be_kept_keeps_no_other_part_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(NodeUnits, "keep_units", lambda *_: THERE)
    agent = NodeAgent()
    wish = NodeWish(fleet="f", token=OrderToken(1), units=(WANTED,))

    def odd(*_: object) -> NodeFilesReport:
        raise ZeroDivisionError

    with monkeypatch.context() as patched:
        patched.setattr(NodeFolders, "take_wish", odd)
        found = agent.measure(wish, {})
    assert (found.units, found.refused) == (THERE, "")
    assert found.files.why == "its files: the node's agent failed: ZeroDivisionError()"
    assert agent.measure(wish, {}).files.why == ""


@pytest.mark.usefixtures("on_node")
def test_an_agent_that_can_not_end_one_part_of_its_node_lets_go_of_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ended: list[str] = []

    def odd(_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(NodeFolders, "close", odd)
    monkeypatch.setattr(NodeUnits, "close", lambda _: ended.append("units"))
    first, second = NodeAgent(), NodeAgent()
    first.measure(NodeWish(fleet="f", token=OrderToken(1)), {})
    second.measure(NodeWish(fleet="f", token=OrderToken(2)), {})
    refused = first.measure(NodeWish(fleet="f", token=OrderToken(1)), {}).refused
    assert "its token is 1.0" in refused
    assert set(ended) == {"units"}  # on a slow machine the thread that looks lets go of them, too


@pytest.mark.usefixtures("on_node")
def test_an_agent_that_can_not_see_which_server_leads_keeps_what_it_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another process on the node has taken all file descriptors, for a while."""
    monkeypatch.setattr(ray_agents, "FENCE_LOOK_S", 0.01)
    monkeypatch.setattr(NodeUnits, "keep_units", lambda *_: THERE)
    ended, looks = list[str](), list[int]()
    monkeypatch.setattr(NodeUnits, "close", lambda _: ended.append("units"))
    agent, wish = NodeAgent(), NodeWish(fleet="f", token=OrderToken(1), units=(WANTED,))
    assert agent.measure(wish, {}).units == THERE

    def refuse(*_: object) -> str:
        looks.append(1)
        raise FenceUnknown("no file can be opened now")

    with monkeypatch.context() as patched:
        patched.setattr(NodeFence, "refuse", refuse)
        assert agent.measure(wish, {}).refused == "no file can be opened now"
        wait_until(lambda: len(looks) > 3)
    assert (agent.measure(wish, {}).units, ended) == (THERE, [])
