"""Orders about instances: real sockets, and a launcher whose processes are only made up."""

from __future__ import annotations

import asyncio
import functools
import socket

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from kvmig.asgi.errors import LauncherGone, OrderFailed
from kvmig.controlplane.messages import (
    AddInstances,
    ClusterMember,
    DrainInstance,
    Members,
    RestartInstances,
    ScaleInstances,
    StopDrain,
)
from kvmig.core.config import ClusterConfig, LifecycleConfig, RayConfig
from kvmig.core.errors import StartupError
from kvmig.core.order_fence import OrderToken
from kvmig.core.priorities import NORMAL
from kvmig.engines.base import EngineLoad
from kvmig.frontend.launcher_link import InstanceMembership, LauncherLink
from kvmig.frontend.metrics import FrontendMetrics
from kvmig.frontend.router import FrontendRouter
from kvmig.launcher import control, instance
from kvmig.rpc.messages import RpcMessage
from tests.support.fake_llumlet import Front, decode
from tests.support.inside import client_of, instance_of, report_of, tell_front_ends
from tests.support.made_up_cluster import (
    BUSY,
    IDLE,
    SECRET,
    Process,
    Told,
    World,
    asks,
    drain,
    guarantee,
    world,
)
from tests.support.waiting import PATIENCE_S, until


async def test_added_instances_take_free_names_and_are_seen_starting() -> None:
    async with world(max_instances=4) as it:
        assert await it.link.order(lambda number: AddInstances(number, 2)) == ("i2", "i3")
        assert any(states.get("i3") == "starting" for states in it.front.history)
        await it.hears(i0="serving", i1="serving", i2="serving", i3="serving")


def numbered(order: RpcMessage, call_id: int) -> RpcMessage:
    return msgspec.structs.replace(order, call_id=call_id)


async def test_an_order_of_an_earlier_server_is_refused_whichever_front_end_passes_it() -> None:
    async with world(max_instances=4) as it:
        await it.link.raise_fence(OrderToken(6, 1))
        other = LauncherLink(it.control.endpoint, SECRET, "front-2", Told().hear)
        await until(lambda: client_of(other) is not None)
        for late in (
            AddInstances(0, token=OrderToken(5, 9)),
            DrainInstance(0, "i0", token=OrderToken(5, 9)),
            RestartInstances(0, token=OrderToken(6)),
            StopDrain(0, "i0", OrderToken(1, 1)),
        ):
            with pytest.raises(OrderFailed, match=r"must be 6\.1 or higher"):
                await other.order(functools.partial(numbered, late))
        with pytest.raises(OrderFailed, match="is of an earlier server"):
            await other.raise_fence(OrderToken(5, 10))
        await it.hears(i0="serving", i1="serving")
        await other.order(lambda number: AddInstances(number, token=OrderToken(6, 1)))
        await other.order(AddInstances)
        await it.hears(i0="serving", i1="serving", i2="serving", i3="serving")
        await other.close()


async def test_an_instance_keeps_its_place_in_a_placement_when_it_starts_again() -> None:
    async with world(max_instances=3) as it:
        await it.link.order(lambda number: AddInstances(number, unit="west"))
        await it.hears(i0="serving", i1="serving", i2="serving")
        await it.link.order(drain("i1"))
        await it.link.order(lambda number: RestartInstances(number, ("i2",)))
        await until(lambda: len([one for one in it.launcher.starts
                                 if one.launch.instance == "i2"]) == 2)  # fmt: skip
        units = {one.instance: one.unit for one in it.front.members}
        assert units == {"i0": "", "i1": "east", "i2": "west"}


async def test_an_instance_that_was_ordered_to_a_node_starts_again_there() -> None:
    node = 14 * "01ab"
    async with world(ray=RayConfig(), max_instances=3) as it:
        await it.link.order(lambda number: AddInstances(number, node=node))
        await it.hears(i0="serving", i1="serving", i2="serving")
        await it.link.order(lambda number: RestartInstances(number, ("i2",)))
        await until(lambda: len([one for one in it.launcher.starts
                                 if one.launch.instance == "i2"]) == 2)  # fmt: skip
        assert {one.launch.instance: one.launch.node for one in it.launcher.starts} == {
            "i0": "", "i1": "", "i2": node
        }  # fmt: skip
        assert [one.node for one in it.front.members] == ["", "", node]


async def test_what_is_no_id_of_a_node_is_refused() -> None:
    async with world(ray=RayConfig(), max_instances=3) as it:
        with pytest.raises(OrderFailed, match=r"node is '10\.0\.0\.1', must be the 56 hexadecimal"):
            await it.link.order(lambda number: AddInstances(number, node="10.0.0.1"))


@pytest.mark.parametrize(
    ("order", "sentence"),
    [
        (AddInstances(0, 1, node="n"), "node is 'n', must be left out without --ray"),
        (AddInstances(0, 0), "count is 0, must be 1 or more"),
        (AddInstances(0, 2), "count is 2: --max-instances allows 3, and there are 2, those that"),
        (AddInstances(0, 1, "--bad"), "unrecognized arguments: --bad"),
        (AddInstances(0, 1, "'"), 'flags is "\'": No closing quotation'),
        (AddInstances(0, 1, "--block-size 64"), "--block-size is 64 with 1 workers, must be left"),
        (DrainInstance(0, "i7"), "there is no instance i7, only i0, i1"),
        (DrainInstance(0, "i0", -1.0), "deadline_s is -1, must be 0 or more"),
        (
            AddInstances(0, 1, decode_share=40),
            "decode_share is 40, must be left out: the server has no --unit-shares",
        ),
        (StopDrain(0, "i0"), "instance i0 is serving, not draining"),
    ],
)
async def test_what_is_wrong_is_one_sentence_and_changes_nothing(
    order: AddInstances | DrainInstance | StopDrain, sentence: str
) -> None:
    async with world(max_instances=3) as it:
        with pytest.raises(OrderFailed, match="^" + sentence.replace("(", r"\(")):
            await it.link.order(functools.partial(numbered, order))
        assert it.front.states() == {"i0": "serving", "i1": "serving"}
        assert len(it.launcher.starts) == 2


async def test_a_drained_instance_stays_until_it_is_let_serve_again(it: World) -> None:
    await it.link.order(drain("i0"))
    await until(lambda: it.launcher.process("i0").state == "draining")
    await until(lambda: it.front.members[0].detail == "it is empty")
    await it.link.order(lambda number: StopDrain(number, "i0"))
    await until(lambda: it.launcher.process("i0").state == "serving")
    await it.hears(i0="serving", i1="serving")


async def test_one_that_is_to_leave_ends_when_it_is_empty(it: World) -> None:
    it.launcher.process("i0").load = BUSY
    await it.link.order(drain("i0", leave=True))
    await until(lambda: it.launcher.process("i0").state == "draining")
    await asyncio.sleep(0.3)
    assert it.front.states() == {"i0": "draining", "i1": "serving"}
    it.launcher.process("i0").load = IDLE
    await it.hears(i1="serving")
    await until(lambda: it.launcher.process("i0").stopped)


async def test_one_leaves_only_once_front_ends_know_where_its_requests_went(it: World) -> None:
    process = it.launcher.process("i0")
    process.untold = 1
    await it.link.order(drain("i0", leave=True))
    await until(lambda: process.state == "draining")
    await asyncio.sleep(0.3)
    assert it.front.states() == {"i0": "draining", "i1": "serving"}
    process.untold = 0
    await it.hears(i1="serving")


READ_BY_OTHERS = EngineLoad(100, 20, 0, 0, 0, 0, unread=2)
"""Nothing runs, and another engine is to read the blocks of two requests that have ended."""
WAITS = "waits until other engines have read KV blocks of 2 ended requests"


async def reporting_unread(it: World) -> Process:
    """The process of i0, once the launcher knows what others are to read there."""
    process = it.launcher.process("i0")
    process.load = READ_BY_OTHERS

    def reports() -> bool:
        report = report_of(instance_of(it.cluster, "i0"))
        return report is not None and report.load.unread == 2

    await until(reports)
    return process


@pytest.mark.parametrize("leave", [True, False])
async def test_a_drain_waits_until_other_engines_have_read_what_is_kept_for_them(
    it: World, leave: bool
) -> None:
    process = it.launcher.process("i0")
    process.load = READ_BY_OTHERS
    await it.link.order(drain("i0", leave=leave))
    await until(lambda: it.front.members[0].detail == WAITS)
    await asyncio.sleep(0.2)
    assert it.front.states() == {"i0": "draining", "i1": "serving"}
    assert not process.stopped
    process.load = IDLE
    if leave:
        await it.hears(i1="serving")
    else:
        await until(lambda: it.front.members[0].detail == "it is empty")


async def test_a_drain_waits_for_readers_until_its_deadline_and_says_so(it: World) -> None:
    it.launcher.process("i0").load = READ_BY_OTHERS
    await it.link.order(drain("i0", leave=True, deadline_s=0.4))
    await until(lambda: it.front.members[0].detail == WAITS)
    await it.hears(i1="serving")
    assert "instance i0: 2 of them were not read in time" in it.said


async def test_a_rolling_restart_waits_until_other_engines_have_read(it: World) -> None:
    process = it.launcher.process("i0")
    process.load = READ_BY_OTHERS
    await it.link.order(lambda number: RestartInstances(number, ("i0",)))
    await until(lambda: it.front.members[0].detail == WAITS)
    assert not process.stopped
    process.load = IDLE
    await until(lambda: process.stopped)
    await it.hears(i0="serving", i1="serving")


async def test_the_last_instance_that_is_to_leave_waits_until_other_engines_have_read(
    it: World,
) -> None:
    await it.link.order(drain("i1", leave=True))
    await it.hears(i0="serving")
    process = await reporting_unread(it)
    await it.link.order(drain("i0", leave=True, last=True))
    await until(lambda: it.front.members[0].detail == WAITS)
    assert it.front.states() == {"i0": "serving"}, "it takes calls until then"
    process.load = IDLE
    await it.hears()


async def test_a_server_that_ends_waits_until_other_engines_have_read_or_for_a_second_signal(
    it: World, caplog: pytest.LogCaptureFixture
) -> None:
    process = await reporting_unread(it)
    at_once = asyncio.Event()
    ending = asyncio.create_task(it.cluster.let_read(60.0, at_once))
    await until(lambda: it.front.members[0].detail == WAITS)
    assert not ending.done()
    at_once.set()
    await asyncio.wait_for(ending, PATIENCE_S)
    assert not caplog.records

    ending = asyncio.create_task(it.cluster.let_read(60.0, asyncio.Event()))
    await asyncio.sleep(0.1)
    assert not ending.done()
    process.load = IDLE
    await asyncio.wait_for(ending, PATIENCE_S)


async def test_after_the_deadline_front_ends_are_told_to_go_on_elsewhere(it: World) -> None:
    it.launcher.process("i0").load = BUSY
    await it.link.order(drain("i0", deadline_s=0.0))
    await until(lambda: it.front.evacuated == ["i0"])


async def test_with_nowhere_to_go_what_runs_is_left_alone(it: World) -> None:
    it.launcher.process("i1").load = BUSY
    await it.link.order(drain("i0"))
    await it.link.order(drain("i1", deadline_s=0.0))
    await asyncio.sleep(0.3)
    assert it.front.evacuated == []
    assert it.front.states() == {"i0": "draining", "i1": "draining"}


async def test_the_last_that_serves_is_not_ended(it: World) -> None:
    await it.link.order(drain("i0"))
    for now in (False, True):
        with pytest.raises(OrderFailed, match="instance i1 is the only one that serves"):
            await it.link.order(drain("i1", leave=True, now=now))


async def test_one_that_is_ended_at_once_does_not_wait(it: World) -> None:
    it.launcher.process("i0").load = BUSY
    await it.link.order(drain("i0", leave=True, now=True))
    await it.hears(i1="serving")
    await until(lambda: it.launcher.process("i0").stopped)


async def test_one_that_dies_is_started_again_under_its_name(it: World) -> None:
    before = next(one.endpoint for one in it.front.members if one.instance == "i0")
    it.launcher.process("i0").die()
    gone = {"i0": "starting", "i1": "serving"}
    await until(lambda: gone in it.front.history[2:])
    await it.hears(i0="serving", i1="serving")
    assert it.front.members[0].endpoint != before
    assert "instance i0 is gone (killed by SIGKILL), again in 0.5 s" in it.said


async def test_an_instance_keeps_the_share_with_which_it_was_ordered() -> None:
    def shares(process: Process) -> tuple[int, int] | None:
        unit = process.launch.config.unit
        return None if unit is None else unit.shares

    async with world((8, 6), max_instances=3) as it:
        await it.link.order(lambda number: AddInstances(number, decode_share=40))
        await it.hears(i0="serving", i1="serving", i2="serving")
        assert [shares(one) for one in it.launcher.starts] == [(8, 6), (8, 6), (8, 4)]
        it.launcher.process("i2").die()
        await until(lambda: len(it.launcher.starts) == 4)
        assert shares(it.launcher.process("i2")) == (8, 4)


async def test_one_that_dies_is_started_again_with_the_guarantee_that_it_was_told(
    it: World,
) -> None:
    assert guarantee(it.launcher.process("i0")) == 400
    await asks(it, "i0", 700)
    it.launcher.process("i0").die()
    await until(lambda: len(it.launcher.starts) == 3)
    assert guarantee(it.launcher.process("i0")) == 700
    it.launcher.process("i0").die()
    await until(lambda: len(it.launcher.starts) == 4)
    assert guarantee(it.launcher.process("i0")) == 700, "though it hasn't said so since"


async def test_one_that_is_silent_for_long_is_ended_and_started_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(instance, "TICK_S", 0.1)
    async with world() as it:
        first = it.launcher.process("i0")
        first.silent = True
        await until(lambda: first.stopped)
        await until(lambda: "instance i0 is gone (no report for 1 s), again in 0.5 s" in it.said)
        await it.hears(i0="serving", i1="serving")


async def test_one_that_dies_while_it_drains_goes_on_draining(it: World) -> None:
    it.launcher.process("i0").load = BUSY
    await it.link.order(drain("i0"))
    it.launcher.process("i0").die()
    await until(lambda: len(it.launcher.starts) == 3)
    await until(lambda: it.launcher.process("i0").state == "draining")


async def test_one_that_dies_while_it_leaves_is_gone(it: World) -> None:
    it.launcher.process("i0").load = BUSY
    await it.link.order(drain("i0", leave=True))
    it.launcher.process("i0").die()
    await it.hears(i1="serving")
    assert len(it.launcher.starts) == 2


async def test_one_that_dies_again_and_again_is_given_up_and_can_be_removed() -> None:
    async with world(max_restarts=1) as it:
        it.launcher.process("i0").die()
        await until(lambda: len(it.launcher.starts) == 3)
        await it.hears(i0="serving", i1="serving")
        it.launcher.process("i0").die("exit code 1")
        await it.hears(i0="failed", i1="serving")
        assert it.front.members[0].detail == "exit code 1, after 1 restarts"
        assert "instance i0 is given up (exit code 1, after 1 restarts)" in it.said
        with pytest.raises(OrderFailed, match="instance i0 is failed"):
            await it.link.order(drain("i0"))
        await it.link.order(drain("i0", leave=True))
        await it.hears(i1="serving")


async def test_an_added_one_that_cannot_start_is_not_tried_again(it: World) -> None:
    it.launcher.broken = "can't serve MODEL: no memory"
    await it.link.order(AddInstances)
    await it.hears(i0="serving", i1="serving", i2="failed")
    given_up = "instance i2: can't serve MODEL: no memory; it is given up"
    await until(lambda: given_up in it.said)
    assert len(it.launcher.starts) == 3


async def test_a_first_one_that_cannot_start_ends_the_start() -> None:
    it = World(LifecycleConfig())
    it.launcher.broken = "can't serve MODEL"
    with pytest.raises(StartupError, match="instance i0: can't serve MODEL"):
        await it.cluster.start()
    await it.link.close()
    await it.control.close()
    await it.cluster.stop()
    assert all(process.stopped for process in it.launcher.starts)


async def test_the_schedulers_decisions_are_carried_out() -> None:
    async with world(max_instances=3) as it:
        it.cluster.scale(ScaleInstances(add=1))
        await it.hears(i0="serving", i1="serving", i2="serving")
        it.cluster.scale(ScaleInstances(add=1))  # there can't be more: nothing happens
        it.cluster.scale(ScaleInstances(drain="i1"))
        await it.hears(i0="serving", i2="serving")


async def test_a_launcher_that_fails_at_an_order_hears_the_next() -> None:
    async with world(max_instances=3) as it:
        with pytest.raises(OrderFailed, match="the launcher failed: KeyError") as failed:
            await it.link.order(lambda number: AddInstances(number, 1, "--bug"))
        assert failed.value.status == 500
        assert await it.link.order(AddInstances) == ("i2",)


async def test_one_that_hangs_is_ended_though_it_is_taken_out_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(instance, "SILENT_TICKS", 2)
    monkeypatch.setattr(instance, "TICK_S", 0.1)
    async with world() as it:
        hung = it.launcher.process("i0")
        hung.may_stop.clear()
        hung.silent = True
        await it.hears(i0="starting", i1="serving")
        assert not hung.stopped
        await it.link.order(drain("i0", leave=True, now=True))
        await it.hears(i1="serving")
        assert not hung.stopped
        hung.may_stop.set()
        await it.cluster.stop()
        assert hung.stopped


async def test_a_launcher_that_fails_at_a_start_tries_again(it: World) -> None:
    it.launcher.bug = RuntimeError("out of descriptors")
    it.launcher.process("i0").die()
    await until(lambda: "out of descriptors" in it.front.members[0].detail)
    it.launcher.bug = None
    await it.hears(i0="serving", i1="serving")


async def test_without_a_launcher_an_order_fails(it: World) -> None:
    await it.control.close()
    with pytest.raises(LauncherGone):
        await it.link.order(AddInstances)


async def test_front_ends_hear_what_the_launcher_and_the_scheduler_have_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(control, "TELL_S", 0.01)
    async with world() as it:
        await until(lambda: it.front.refusals == {"launcher": {}, "scheduler": {}})
        client = client_of(it.link)
        assert client is not None
        client.send(ScaleInstances())  # isn't for the launcher
        await until(lambda: it.front.refusals["launcher"] == {"unexpected": 1})
        await it.launcher.process("i0").send(b"no message")
        await until(lambda: it.front.refusals["launcher"].get("unreadable") == 1)
        it.cluster.scheduler_refusals = {"early": 3}
        await until(lambda: it.front.refusals["scheduler"] == {"early": 3})
        later = Told()
        link = LauncherLink(it.control.endpoint, SECRET, "front-2", later.hear)
        await until(lambda: later.refusals == it.front.refusals)
        await link.close()


class Counting(InstanceMembership):
    """A front end's, without its instances."""

    def _take(self, members: Members) -> None:
        """The router is to follow nobody."""


async def test_metrics_show_what_is_refused_of_the_launchers_by_the_launcher_and_by_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(control, "TELL_S", 0.01)
    registry = CollectorRegistry()
    observer = FrontendMetrics(registry, [NORMAL])
    router = FrontendRouter("front-2", SECRET, ClusterConfig(), Front(), decode, observer=observer)

    def shown(process: str, reason: str) -> float | None:
        labels = {"process": process, "reason": reason}
        return registry.get_sample_value("kvmig_messages_refused", labels)

    async with world() as it:
        link = LauncherLink(it.control.endpoint, SECRET, "front-2", Counting(router).apply_news)
        await until(lambda: client_of(link) is not None)
        it.cluster.scheduler_refusals = {"early": 3}
        await until(lambda: shown("scheduler", "early") == 3)
        tell_front_ends(it.control, ScaleInstances())  # isn't for a front end
        await until(lambda: shown("front-2", "unexpected") == 1)
        port = int(it.control.endpoint.rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port), timeout=20) as stranger:
            stranger.sendall(b"GET / HTTP/1.1")
        await until(lambda: shown("launcher", "unauthenticated") == 1)
        await link.close()
    await router.close()


# -- all of a server that has joined others


OTHERS = [ClusterMember("b-i0", "tcp://b", server="toy at B")]


async def test_a_whole_server_drains_and_its_instances_end_when_they_are_empty(it: World) -> None:
    it.cluster.set_guests(OTHERS, {})
    it.launcher.process("i0").load = BUSY

    assert await it.link.order(drain("", leave=True)) == ("i0", "i1")

    await it.hears(**{"i0": "draining", "b-i0": "serving"})  # i1 was empty
    it.launcher.process("i0").load = IDLE
    await it.hears(**{"b-i0": "serving"})


async def test_a_whole_server_that_was_drained_serves_again(it: World) -> None:
    it.cluster.set_guests(OTHERS, {})
    await it.link.order(drain(""))
    await it.hears(**{"i0": "draining", "i1": "draining", "b-i0": "serving"})

    await it.link.order(lambda number: StopDrain(number, ""))

    await it.hears(**{"i0": "serving", "i1": "serving", "b-i0": "serving"})
    with pytest.raises(OrderFailed, match="no instance of this server is draining"):
        await it.link.order(lambda number: StopDrain(number, ""))


async def test_without_another_server_a_whole_one_is_not_drained(it: World) -> None:
    it.cluster.set_guests([], {"toy at C": "its weights is v, here w"})

    with pytest.raises(OrderFailed, match="toy at C can't: its weights is v, here w"):
        await it.link.order(drain("", leave=True))

    await it.hears(i0="serving", i1="serving")


async def test_the_deadline_of_a_whole_servers_drain_lets_the_rest_go_on_elsewhere(
    it: World,
) -> None:
    it.cluster.set_guests(OTHERS, {})
    it.launcher.process("i1").load = BUSY

    await it.link.order(drain("", deadline_s=0.1))

    await until(lambda: "i1" in it.front.evacuated)
