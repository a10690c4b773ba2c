"""Room on GPUs: who starts where, who waits and why, who ends for whom."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from kvmig.fleet.capacity import (
    CapacityPlan,
    HostCapacity,
    HostDevices,
    ResidentModel,
    SharedHold,
    WaitingModel,
    plan,
)
from kvmig.fleet.device_room import DeviceMemory, DeviceNeed

HOST = HostCapacity(total=1000, available=1000)
NOW = 100.0
GIB = 1 << 30


def resident(name: str, held: Mapping[str, int], **more: Any) -> ResidentModel:
    return replace(ResidentModel(name, 1, since=0, stay_s=10, idle_s=50, held=held), **more)


def waiting(name: str, each: int, since: float = 90, devices: int = 1) -> WaitingModel:
    return WaitingModel(name, 1, since, DeviceNeed(each, devices))


def gpus(*residents: ResidentModel, sizes: Mapping[str, int], others: int = 0) -> HostDevices:
    """They all reach each other. others: of another process, on each."""
    return HostDevices(
        tuple(
            DeviceMemory(
                one,
                f"GPU {one}",
                total,
                others,
                claims={each.name: each.held.get(one, 0) for each in residents},
                peers=frozenset(sizes),
            )
            for one, total in sizes.items()
        )
    )


def planned(
    wanted: list[WaitingModel], residents: list[ResidentModel], others: int = 0, **sizes: int
) -> CapacityPlan:
    return plan(HOST, wanted, residents, NOW, gpus(*residents, sizes=sizes, others=others))


def test_two_models_share_a_gpu_and_a_third_waits_with_the_reason() -> None:
    wanted = [waiting("a", 4 * GIB, 1), waiting("b", 4 * GIB, 2), waiting("c", 4 * GIB, 3)]
    found = planned(wanted, [], g0=10 * GIB)
    assert found.places == {"a": (("g0",),), "b": (("g0",),)}
    assert found.refused["c"].startswith(
        "no room: it needs 4.0 GiB of a GPU's memory, 2.0 GiB is free"
    )
    assert not found.free_on


def test_a_model_of_two_workers_gets_two_gpus_or_waits_for_both() -> None:
    found = planned([waiting("a", 6, devices=2)], [], g0=10, g1=6)
    assert found.places == {"a": (("g0", "g1"),)}
    assert found.free_on == {"g0": 4, "g1": 0}
    busy = resident("b", {"g1": 1}, kept=True)
    waits = planned([waiting("a", 6, devices=2)], [busy], g0=10, g1=6)
    assert "each of 2 GPUs, 1 GPUs that reach each other have that" in waits.refused["a"]


def test_what_models_share_is_free_once_the_last_of_them_has_ended() -> None:
    shared = SharedHold("u", frozenset({"a", "b"}), {"g0": 5})
    residents = [resident(name, {"g0": 2}, shared=shared) for name in "ab"]
    devices = HostDevices((DeviceMemory("g0", "GPU 0", 10, claims={"a": 2, "b": 2, "unit u": 5}),))

    def yielding(each: int, *others: ResidentModel) -> frozenset[str]:
        return plan(HOST, [waiting("c", each)], [*residents, *others], NOW, devices).yielding

    assert len(yielding(3)) == 1
    assert yielding(6) == {"a", "b"}, "the cache ends with both"
    asks = replace(shared, models=shared.models | {"asks"})
    residents = [replace(one, shared=asks) for one in residents]
    assert not yielding(6), "the unit stays for a model that waits for its start"


def test_only_idle_models_on_the_right_gpu_end_for_another() -> None:
    residents = [
        resident("left", {"g0": 7}, idle_s=90),
        resident("right", {"g1": 5}, idle_s=20),
        resident("busy", {"g0": 5}, kept=True),
    ]
    found = planned([waiting("a", 8)], residents, g0=12, g1=10)
    assert found.yielding == {"right"}


def test_others_memory_is_no_room_and_no_model_ends_in_vain_for_it() -> None:
    found = planned([waiting("a", 8)], [resident("b", {"g0": 2})], others=3, g0=10)
    assert found.yielding == frozenset()
    assert found.refused["a"].endswith("the rest is taken for good")


def test_a_model_larger_than_every_gpu_never_starts_and_each_says_its_bytes() -> None:
    found = planned([waiting("a", 12)], [], g0=10, g1=11)
    assert found.never["a"] == (
        "model a needs 12 bytes (0.00 GiB) of a GPU; GPU g0 has 10 bytes, 2 too few; GPU g1 has 11"
        " bytes, 1 too few"
    )


def test_a_parked_model_wakes_on_the_gpu_that_it_has() -> None:
    asleep = resident("a", {"g0": 2}, parked=True)
    wakes = WaitingModel("a", 0, 90, more={"g0": 6})
    assert planned([wakes], [asleep], g0=8, g1=99).refused == {}
    beside = resident("b", {"g0": 4})
    found = planned([wakes], [asleep, beside], g0=8, g1=99)
    assert found.yielding == {"b"}
    assert (
        "2.0 GiB"
        in planned(
            [replace(wakes, more={"g0": 6 * GIB})],
            [
                resident("a", {"g0": 2 * GIB}, parked=True),
                resident("b", {"g0": 4 * GIB}, kept=True),
            ],
            g0=8 * GIB,
        ).refused["a"]
    )


def test_one_that_came_later_takes_no_gpu_that_the_first_will_need() -> None:
    busy = resident("b", {"g0": 6}, kept=True)
    wanted = [waiting("large", 9, 90), waiting("small", 3, 95)]
    assert set(planned(wanted, [busy], g0=10).refused) == {"large", "small"}
    assert planned(wanted, [busy], g0=10, g1=4).places == {"small": (("g1",),)}


models = st.lists(
    st.builds(
        waiting,
        name=st.just(""),
        each=st.integers(0, 6),
        since=st.floats(0, 90),
        devices=st.integers(1, 3),
    ),
    max_size=4,
).map(lambda found: [replace(one, name=f"w{at}") for at, one in enumerate(found)])


@given(
    models,
    st.lists(
        st.builds(
            resident,
            name=st.just(""),
            held=st.dictionaries(st.sampled_from(["g0", "g1"]), st.integers(0, 5)),
            kept=st.booleans(),
            pinned=st.booleans(),
            leaving=st.booleans(),
        ),
        max_size=3,
    ).map(lambda found: [replace(one, name=f"r{at}") for at, one in enumerate(found)]),
    st.integers(0, 3),
    st.tuples(*[st.integers(0, 12)] * 3),
)
def test_claims_never_exceed_a_gpu_and_nothing_starts_without_its_places(
    wanted: list[WaitingModel],
    residents: list[ResidentModel],
    others: int,
    sizes: tuple[int, int, int],
) -> None:
    by_name = {f"g{at}": size for at, size in enumerate(sizes)}
    there = gpus(*residents, sizes=by_name, others=others)
    found = plan(HOST, wanted, residents, NOW, there)
    before = {one.id: one.free for one in there.devices}
    for one in wanted:
        assert one.need is not None
        starts = one.name not in found.refused and one.name not in found.never
        places = found.places.get(one.name, ())
        assert bool(places) == starts
        for gpu in (gpu for place in places for gpu in place):
            before[gpu] -= one.need.each
    assert all(left >= 0 for left in before.values()), "claims exceed no GPU"
    if found.free_on:
        assert found.free_on == before
    for name in found.yielding:
        (model,) = (one for one in residents if one.name == name)
        assert model.leaving or not (model.kept or model.pinned)
