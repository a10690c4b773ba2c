"""A rolling restart, with processes that are only made up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from kvmig.asgi.errors import OrderFailed
from kvmig.controlplane.messages import AddInstances, RestartInstances, StopDrain
from kvmig.core.order_fence import OrderToken
from tests.support.inside import instance_of
from tests.support.made_up_cluster import BUSY, IDLE, World, asks, drain, guarantee, world
from tests.support.waiting import until


@pytest.fixture
async def it() -> AsyncIterator[World]:
    """Two instances of which each serves."""
    async with world() as made:
        yield made


async def restart(
    it: World, *names: str, deadline_s: float | None = None, tree: str | None = None
) -> tuple[str, ...]:
    return await it.link.order(lambda number: RestartInstances(number, names, deadline_s, tree))


def starts(it: World) -> list[str]:
    """Names, in the order of their starts."""
    return [one.launch.instance for one in it.launcher.starts]


async def test_all_start_again_one_after_the_other(it: World) -> None:
    assert await restart(it) == ("i0", "i1")
    await until(lambda: "rolling restart: done" in it.said)
    assert it.launcher.renewals == 1, "what is on disk now starts"
    assert starts(it) == ["i0", "i1", "i0", "i1"]
    await it.hears(i0="serving", i1="serving")
    assert all("serving" in states.values() for states in it.front.history if states)


async def test_all_serve_until_what_starts_next_is_loaded(it: World) -> None:
    it.launcher.loaded.clear()
    await restart(it)
    await asyncio.sleep(0.1)  # several reports
    assert it.front.states() == {"i0": "serving", "i1": "serving"}
    assert starts(it) == ["i0", "i1"]
    it.launcher.loaded.set()
    await until(lambda: "rolling restart: done" in it.said)
    assert starts(it) == ["i0", "i1", "i0", "i1"]


async def test_it_stops_at_one_that_has_left_while_all_was_loaded(it: World) -> None:
    it.launcher.loaded.clear()
    await restart(it)
    await it.link.order(drain("i0", leave=True))
    await until(lambda: "instance i0 is taken out" in it.said)
    it.launcher.loaded.set()
    await until(lambda: "rolling restart: stopped (instance i0 was taken out)" in it.said)
    assert starts(it) == ["i0", "i1"]


async def test_an_instance_goes_when_it_is_empty_and_the_next_when_it_serves(it: World) -> None:
    it.launcher.process("i0").load = BUSY
    await restart(it)
    await until(lambda: it.launcher.process("i0").state == "draining")
    assert starts(it) == ["i0", "i1"]
    it.launcher.process("i0").load = IDLE
    await until(lambda: starts(it) == ["i0", "i1", "i0", "i1"])
    await it.hears(i0="serving", i1="serving")


async def test_one_starts_again_with_the_guarantee_that_it_was_told(it: World) -> None:
    await asks(it, "i1", 0)
    await restart(it)
    await until(lambda: "rolling restart: done" in it.said)
    assert [guarantee(one) for one in it.launcher.starts] == [400, 400, 400, 0]


async def test_one_that_can_not_be_another_engine_is_the_old_one_with_its_new_guarantee(
    it: World,
) -> None:
    await asks(it, "i0", 700)
    it.launcher.bad_tree = "/new"
    await restart(it, "i0", tree="/new")
    await until(lambda: any("rolling restart: stopped" in said for said in it.said))
    await until(lambda: len(it.launcher.starts) == 4)
    assert [guarantee(one) for one in it.launcher.starts[2:]] == [700, 700]


async def test_only_those_that_are_named_start_again(it: World) -> None:
    assert await restart(it, "i1") == ("i1",)
    await until(lambda: "rolling restart: done" in it.said)
    assert starts(it) == ["i0", "i1", "i1"]


async def test_what_is_left_at_the_deadline_goes_on_elsewhere(it: World) -> None:
    it.launcher.process("i0").load = BUSY
    await restart(it, deadline_s=0.0)
    await until(lambda: it.front.evacuated == ["i0"])


async def test_one_that_dies_while_it_is_drained_starts_again_all_the_same(it: World) -> None:
    it.launcher.process("i0").load = BUSY
    await restart(it, "i0")
    await until(lambda: it.launcher.process("i0").state == "draining")
    it.launcher.process("i0").die()
    await until(lambda: "rolling restart: done" in it.said)
    assert starts(it) == ["i0", "i1", "i0", "i0"]
    await it.hears(i0="serving", i1="serving")


async def test_it_stops_at_the_first_that_is_told_something_else(it: World) -> None:
    it.launcher.process("i0").load = BUSY
    await restart(it)
    await it.link.order(lambda number: StopDrain(number, "i0"))
    words = "rolling restart: stopped at instance i0 (it was ordered to serve on)"
    await until(lambda: words in it.said)
    assert starts(it) == ["i0", "i1"]


async def test_a_second_one_is_refused_while_one_is_under_way(it: World) -> None:
    it.launcher.process("i0").load = BUSY
    await restart(it, "i0")
    with pytest.raises(OrderFailed, match="a rolling restart is under way"):
        await restart(it, "i1")
    it.launcher.process("i0").load = IDLE
    await until(lambda: "rolling restart: done" in it.said)
    with pytest.raises(OrderFailed, match="there is no instance i7"):
        await restart(it, "i7")


async def test_an_order_that_a_fleets_server_gives_again_is_carried_out_once() -> None:
    """Its answer got lost; the order has a later token then."""

    def order(number: int, contact: int, name: str = "i0") -> RestartInstances:
        return RestartInstances(number, (name,), token=OrderToken(6, contact))

    async with world() as it:
        it.launcher.process("i0").load = BUSY
        assert await it.link.order(lambda number: order(number, 1)) == ("i0",)
        assert await it.link.order(lambda number: order(number, 2)) == ("i0",)
        with pytest.raises(OrderFailed, match="a rolling restart is under way"):
            await it.link.order(lambda number: order(number, 3, "i1"))
        it.launcher.process("i0").load = IDLE
        await until(lambda: "rolling restart: done" in it.said)
        assert starts(it) == ["i0", "i1", "i0"]


async def test_the_only_one_that_serves_is_not_restarted(it: World) -> None:
    await it.link.order(drain("i1"))
    with pytest.raises(OrderFailed, match="1 instance serves, must be 2 or more"):
        await restart(it)


async def test_new_requests_had_better_begin_under_the_weights_that_come(it: World) -> None:
    assert it.front.preferred == ""
    it.launcher.weights = "new"
    it.launcher.process("i0").load = BUSY
    await restart(it)
    await until(lambda: it.front.preferred == "new")
    it.launcher.process("i0").load = IDLE
    await until(lambda: "rolling restart: done" in it.said)


@pytest.mark.parametrize(("deadline_s", "ends"), [(None, False), (0.0, True)])
async def test_only_a_deadline_that_was_given_ends_what_could_go_on_nowhere(
    deadline_s: float | None, ends: bool
) -> None:
    async with world(drain_deadline_s=0.0) as it:
        it.launcher.process("i0").load = BUSY
        await restart(it, "i0", deadline_s=deadline_s)
        await until(lambda: it.front.ended == [ends])
        left = "or ends with an error" if ends else "or stays until it ends"
        assert any(left in said for said in it.said)


async def test_the_only_one_is_not_restarted_onto_other_weights_and_they_are_named(
    it: World,
) -> None:
    await it.link.order(drain("i1"))
    await until(lambda: instance_of(it.cluster, "i0").weights)
    it.launcher.weights = "new"
    words = "i0 runs weights old, those on disk are new, and there is no room for both"
    with pytest.raises(OrderFailed, match=words):
        await restart(it)
    assert it.front.states() == {"i0": "serving", "i1": "draining"}


# -- onto another build of the engine


def trees(it: World) -> dict[str, str]:
    """What front ends hear."""
    return {one.instance: one.tree for one in it.front.members}


async def test_all_come_back_as_another_build_and_so_does_what_is_added_later() -> None:
    async with world(max_instances=3) as it:
        await restart(it, tree="/new")
        await until(lambda: "rolling restart: done" in it.said)
        await it.link.order(lambda number: AddInstances(number, 1))
        await it.hears(i0="serving", i1="serving", i2="serving")
        assert trees(it) == {"i0": "/new", "i1": "/new", "i2": "/new"}
        assert it.launcher.tree == "/new", "forks have it loaded"


async def test_one_alone_comes_back_as_another_build_and_stays_so_when_it_dies(it: World) -> None:
    await restart(it, "i1", tree="/new")
    await until(lambda: "rolling restart: done" in it.said)
    await it.hears(i0="serving", i1="serving")
    it.launcher.process("i1").die()
    await until(lambda: starts(it) == ["i0", "i1", "i1", "i1"])
    await it.hears(i0="serving", i1="serving")
    assert trees(it) == {"i0": "", "i1": "/new"}
    assert it.launcher.tree == "", "forks are what most are"


async def test_they_come_back_as_the_installed_one(it: World) -> None:
    await restart(it, tree="/new")
    await until(lambda: "rolling restart: done" in it.said)
    await restart(it, tree="")
    await until(lambda: it.said.count("rolling restart: done") == 2)
    await until(lambda: trees(it) == {"i0": "", "i1": ""})


async def test_one_that_cannot_start_as_another_build_comes_back_as_it_was() -> None:
    async with world(max_instances=3) as it:
        it.launcher.bad_tree = "/new"
        await restart(it, tree="/new")
        await until(lambda: any("rolling restart: stopped" in words for words in it.said))
        await it.hears(i0="serving", i1="serving")
        assert starts(it) == ["i0", "i1", "i0", "i0"], "i1 was never touched"
        assert trees(it) == {"i0": "", "i1": ""}
        await it.link.order(lambda number: AddInstances(number, 1))
        await until(lambda: trees(it) == {"i0": "", "i1": "", "i2": ""})
        (stopped,) = (words for words in it.said if "stopped" in words)
        assert stopped.endswith(
            "at instance i0 (it can't be the engine in /new (instance i0: no such name), and is the"
            " installed engine again)"
        )
        assert it.launcher.tree == "", "forks are what they were"


async def test_a_folder_without_an_engine_is_refused_before_anything_is_drained(it: World) -> None:
    with pytest.raises(OrderFailed, match="vllm is '/else' holds no vLLM"):
        await restart(it, tree="/else")
    assert starts(it) == ["i0", "i1"]
    assert it.front.states() == {"i0": "serving", "i1": "serving"}


async def test_an_instance_is_added_as_another_build() -> None:
    async with world(max_instances=3) as it:
        await it.link.order(lambda number: AddInstances(number, 1, tree="/new"))
        await it.hears(i0="serving", i1="serving", i2="serving")
        assert trees(it) == {"i0": "", "i1": "", "i2": "/new"}


async def restart_with(it: World, flags: str, *names: str) -> tuple[str, ...]:
    return await it.link.order(lambda number: RestartInstances(number, names, flags=flags))


async def test_all_start_again_with_other_flags_and_so_does_one_that_comes_later() -> None:
    async with world(max_instances=3) as it:
        await restart_with(it, "--seed 7")
        await until(lambda: "rolling restart: done" in it.said)
        await it.link.order(lambda number: AddInstances(number))
        await until(lambda: len(it.launcher.starts) == 5)
        argvs = [one.launch.engine_argv for one in it.launcher.starts]
        assert argvs == [["MODEL"]] * 2 + [["MODEL", "--seed", "7"]] * 3
        await it.hears(i0="serving", i1="serving", i2="serving")
        assert {one.flags for one in it.front.members} == {"--seed 7"}


async def test_flags_take_the_place_of_those_of_an_earlier_restart(it: World) -> None:
    for flags in ("--seed 7", "--seed 8", ""):
        await restart_with(it, flags)
        await until(lambda: "rolling restart: done" in it.said)
        it.said.clear()
    argvs = [one.launch.engine_argv[1:] for one in it.launcher.starts[2:]]
    assert argvs == [["--seed", "7"]] * 2 + [["--seed", "8"]] * 2 + [[]] * 2


async def test_one_that_can_not_start_with_other_flags_is_as_before_and_so_are_all() -> None:
    async with world(max_instances=3) as it:
        it.launcher.bad_flag = "--seed"
        await restart_with(it, "--seed 7")
        await until(lambda: any("rolling restart: stopped" in said for said in it.said))
        (stop,) = (said for said in it.said if "rolling restart: stopped" in said)
        assert "at instance i0 (it can't start with --seed 7 (" in stop
        assert "and is as before)" in stop
        await it.hears(i0="serving", i1="serving")
        await it.link.order(lambda number: AddInstances(number))
        await until(lambda: len(it.launcher.starts) == 5)
        assert it.launcher.starts[-1].launch.engine_argv == ["MODEL"]


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--bad", "unrecognized arguments: --bad"),
        ("'", "No closing quotation"),
        ("--block-size 64", "--block-size is 64 with 1 workers, must be left"),
    ],
)
async def test_flags_that_instances_can_not_have_are_refused_and_nothing_starts_again(
    it: World, flags: str, sentence: str
) -> None:
    with pytest.raises(OrderFailed, match=sentence):
        await restart_with(it, flags)
    await restart(it)
    await until(lambda: "rolling restart: done" in it.said)
    assert [one.launch.engine_argv for one in it.launcher.starts] == [["MODEL"]] * 4
