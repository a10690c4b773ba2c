"""What a unit needs of a GPU, and when its agent starts and ends."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmig.core.errors import ConfigError
from kvmig.fleet.device_room import DeviceMemory, DeviceNeed
from kvmig.fleet.place_choice import choose_places, with_places
from kvmig.fleet.unit_plan import (
    LAST_PAUSE_S,
    AgentLife,
    check_unit,
    ended,
    need_in_unit,
    need_of_unit,
    need_on_worker,
    next_step,
    node_of_unit,
    started,
    whole_need,
)
from kvmig.fleet.worker_nodes import InstanceNeed, NodeRoom, Rooms, WorkerNode, room_now

GIB = 1 << 30
A, B = DeviceNeed(4 * GIB), DeviceNeed(3 * GIB, only=frozenset({"g0", "g1"}))


def gpu(name: str, total: int) -> DeviceMemory:
    return DeviceMemory(name, f"GPU {name}", total)


def test_a_unit_needs_its_cache_and_all_of_its_models_on_a_gpu_that_all_may_have() -> None:
    whole = whole_need({"a": A, "b": B}, 10 * GIB)
    assert whole == DeviceNeed(17 * GIB, 1, frozenset({"g0", "g1"}))
    assert need_in_unit(B, ("g1",)) == replace(B, only=frozenset({"g1"}))


def test_a_unit_that_no_gpu_can_hold_is_refused_in_bytes() -> None:
    with pytest.raises(ConfigError) as refused:
        check_unit("u", {"a": A, "b": B}, 10 * GIB, (gpu("g0", 16 * GIB), gpu("g1", 17 * GIB - 1)))
    said = str(refused.value)
    assert said.startswith("unit u (10.00 GiB of KV cache, 4.00 GiB of a, 3.00 GiB of b) needs")
    assert f"GPU g0 has {16 * GIB} bytes, {GIB} too few" in said
    assert f"GPU g1 has {17 * GIB - 1} bytes, 1 too few" in said
    check_unit("u", {"a": A, "b": B}, 10 * GIB, (gpu("g0", 17 * GIB),))


def test_models_without_a_gpu_in_common_are_no_unit() -> None:
    other = replace(A, only=frozenset({"g2"}))
    with pytest.raises(ConfigError, match="gpus of its models must have one GPU in common"):
        check_unit("u", {"a": other, "b": B}, GIB, (gpu("g0", 80 * GIB), gpu("g2", 80 * GIB)))


@given(st.lists(st.tuples(st.booleans(), st.booleans(), st.floats(0, 100))))
def test_there_is_one_agent_at_most_and_one_while_a_model_wants_it(
    turns: list[tuple[bool, bool, float]],
) -> None:
    """turns: whether a model wants it, whether the agent ends then, seconds until the next one."""
    life, now, running, asked_to_end = AgentLife(), 0.0, False, False
    for wanted, ends, seconds in turns:
        match next_step(life, wanted, now):
            case "start":
                assert wanted
                assert not running
                life, running, asked_to_end = started(life, "agent", now), True, False
            case "stop":
                assert running
                assert not wanted
                assert not asked_to_end, "once is enough"
                life, asked_to_end = msgspec.structs.replace(life, ends=True), True
            case None:
                assert running or not wanted or now < life.retry_at
        if running and ends:
            life, running = ended(life, "it was killed", now), False
            assert life.retry_at <= now + LAST_PAUSE_S
            assert bool(life.deaths) != asked_to_end
        now += seconds


def test_an_agent_that_keeps_dying_is_tried_ever_later_and_at_once_after_a_long_life() -> None:
    life, pauses = AgentLife(), []
    for _ in range(9):
        life = ended(started(life, "agent", 10), "it was killed", 11)
        pauses.append(life.retry_at - 11)
    assert pauses == [0.5, 1, 2, 4, 8, 16, 30, 30, 30]
    again = ended(started(life, "agent", 10), "it was killed", 100)
    assert again.retry_at == 100.5


# -- on workers

CPUS = st.integers(0, 6)
NODES = st.lists(st.tuples(st.integers(0, 40), CPUS, st.booleans()), min_size=1, max_size=5)
MODELS = st.lists(st.tuples(st.integers(0, 9), CPUS, st.booleans()), min_size=1, max_size=4)


def rooms_of(nodes: list[tuple[int, int, bool]]) -> Rooms:
    """Nodes by their GiB and CPUs; those in the east have a label."""
    found: dict[str, NodeRoom] = {}
    for at, (size, cpus, east) in enumerate(nodes):
        name, amounts = f"w{at}", {"CPU": float(cpus)}
        labels = {"worker": name} | ({"zone": "east"} if east else {})
        node = WorkerNode(
            name, size * GIB, size * GIB, labels=labels, resources=amounts, free_resources=amounts
        )
        found[name] = room_now(node, size * GIB)
    return found


def needs_of(models: list[tuple[int, int, bool]]) -> list[InstanceNeed]:
    return [
        InstanceNeed(
            f"m{at}", size * GIB, selector={"zone": "east"} if east else {},
            resources={"CPU": float(cpus)},
        )
        for at, (size, cpus, east) in enumerate(models)
    ]  # fmt: skip


@given(NODES, MODELS, st.integers(0, 20))
def test_where_a_unit_is_put_all_of_its_models_have_room_beside_its_cache(
    nodes: list[tuple[int, int, bool]], models: list[tuple[int, int, bool]], arena: int
) -> None:
    rooms, needs = rooms_of(nodes), needs_of(models)
    first, *others = needs
    places = choose_places(rooms, need_of_unit(first, others, arena * GIB), 1)
    if places is None:
        return
    (place,) = places
    room = rooms[place.node]
    left: Rooms = {**rooms, place.node: replace(room, memory=room.memory - arena * GIB)}
    for need in needs:
        found = choose_places(left, need_on_worker(need, place.node), 1)
        assert found is not None
        assert found[0].node == place.node
        left = with_places(left, need, found)


@given(NODES, MODELS, st.integers(0, 20))
def test_a_unit_waits_only_where_no_worker_holds_all_of_it(
    nodes: list[tuple[int, int, bool]], models: list[tuple[int, int, bool]], arena: int
) -> None:
    rooms, needs = rooms_of(nodes), needs_of(models)
    first, *others = needs
    if choose_places(rooms, need_of_unit(first, others, arena * GIB), 1) is not None:
        return
    memory = arena + sum(size for size, _, _ in models)
    cpus = sum(cpus for _, cpus, _ in models)
    east = any(east for _, _, east in models)
    for size, there, is_east in nodes:
        assert size < memory or there < cpus or (east and not is_east)


@given(st.sampled_from("abc") | st.just(""), st.lists(st.sampled_from("abc")), st.sets(
    st.sampled_from("abc")
))  # fmt: skip
def test_a_unit_stays_while_it_can_and_then_goes_where_one_of_its_instances_is(
    now: str, instances: list[str], leaving: set[str]
) -> None:
    found = node_of_unit(now, instances, leaving.__contains__)
    assert found not in leaving
    if now and now not in leaving:
        assert found == now
    else:
        assert bool(found) == any(one not in leaving for one in instances)
