"""Places on GPUs: whoever has one fits there, and whoever has none fits nowhere."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmig.fleet.device_room import (
    DeviceMemory,
    DeviceNeed,
    Strategy,
    assign,
    groups_of,
    most_instances,
    reasons,
    too_large,
)

GIB = 1 << 30


def gpus(*free: int) -> dict[str, int]:
    return {f"g{at}": size for at, size in enumerate(free)}


needs = st.builds(
    DeviceNeed,
    each=st.integers(0, 5),
    devices=st.integers(1, 3),
    only=st.sets(st.sampled_from(["g0", "g1", "g2", "g3", "g9"])).map(frozenset),
)
frees = st.lists(st.integers(-2, 12), min_size=0, max_size=4).map(lambda found: gpus(*found))
strategies = st.sampled_from(["spread", "pack"])


@st.composite
def groupings(draw: st.DrawFn, free: dict[str, int]) -> list[tuple[str, ...]]:
    """The GPUs in some groups."""
    number = {one: draw(st.integers(0, 2)) for one in free}
    found = [tuple(one for one in free if number[one] == group) for group in range(3)]
    return [group for group in found if group]


def brute_force(
    free: dict[str, int], need: DeviceNeed, instances: int, groups: Sequence[Sequence[str]]
) -> bool:
    """Whether there are places, by trying all."""
    if not instances:
        return True
    within = groups if need.devices > 1 else [tuple(free)]
    for group in within:
        allowed = [one for one in group if not need.only or one in need.only]
        for chosen in combinations(allowed, need.devices):
            if all(free[one] >= need.each for one in chosen):
                after = {one: free[one] - need.each * (one in chosen) for one in free}
                if brute_force(after, need, instances - 1, groups):
                    return True
    return False


@given(st.data(), frees, needs, st.integers(0, 3), strategies)
def test_places_are_found_exactly_when_there_are_some(
    data: st.DataObject,
    free: dict[str, int],
    need: DeviceNeed,
    instances: int,
    strategy: Strategy,
) -> None:
    groups = data.draw(groupings(free))
    found = assign(free, need, instances, groups, strategy)
    assert (found is not None) == brute_force(free, need, instances, groups)
    if found is None:
        return
    used = Counter(one for place in found for one in place)
    assert len(found) == instances
    assert all(count * need.each <= max(0, free[one]) for one, count in used.items())
    for place in found:
        assert len(set(place)) == len(place) == need.devices
        assert not need.only or need.only >= set(place)
        assert need.devices == 1 or any(set(place) <= set(group) for group in groups)


@given(st.data(), frees, needs)
def test_most_instances_are_as_many_as_find_places(
    data: st.DataObject, free: dict[str, int], need: DeviceNeed
) -> None:
    groups = data.draw(groupings(free))
    most = most_instances(free, need, groups, 3)
    assert brute_force(free, need, most, groups)
    assert most == 3 or not brute_force(free, need, most + 1, groups)


@pytest.mark.parametrize(
    ("strategy", "places"),
    [("spread", (("g1",), ("g2",))), ("pack", (("g0",), ("g2",)))],
)
def test_instances_spread_over_the_emptiest_gpus_or_fill_the_fullest(
    strategy: Strategy, places: object
) -> None:
    free = gpus(5, 12, 8)
    assert assign(free, DeviceNeed(4), 2, [tuple(free)], strategy) == places


def test_instances_of_a_model_share_a_gpu_only_where_there_are_too_few() -> None:
    free = gpus(80, 10)
    assert assign(free, DeviceNeed(4), 3, [tuple(free)]) == (("g0",), ("g1",), ("g0",))


def test_workers_of_an_instance_have_gpus_that_reach_each_other() -> None:
    free = gpus(12, 4, 12, 8)
    pairs = [("g0", "g1"), ("g2", "g3")]
    assert assign(free, DeviceNeed(5, devices=2), 1, pairs) == (("g2", "g3"),)
    assert assign(free, DeviceNeed(9, devices=2), 1, pairs) is None


def device(name: str, total: int, *peers: str, **claims: int) -> DeviceMemory:
    return DeviceMemory(name, f"GPU {name}", total, claims=claims, peers=frozenset(peers))


def test_gpus_are_grouped_by_whom_they_reach() -> None:
    apart = [device("a", 1, "b"), device("b", 1, "a"), device("c", 1, "a"), device("d", 1)]
    assert groups_of(apart) == [("a", "b"), ("c",), ("d",)]


def lines() -> Iterator[DeviceMemory]:
    yield device("0", 10 * GIB, chat=6 * GIB, code=3 * GIB)
    yield DeviceMemory("1", "GPU 1", 10 * GIB, 8 * GIB, "process 7 (python) has 8.00 GiB")


def test_each_gpu_says_what_is_free_there_and_who_has_the_rest() -> None:
    need = DeviceNeed(4 * GIB)
    assert reasons(need, list(lines())) == [
        f"GPU 0: needs {4 * GIB} bytes, {GIB} of {10 * GIB} are free (model chat has 6.00 GiB,"
        " model code has 3.00 GiB)",
        f"GPU 1: needs {4 * GIB} bytes, {2 * GIB} of {10 * GIB} are free (process 7 (python) has"
        " 8.00 GiB)",
    ]


def test_a_model_that_no_gpu_can_hold_is_refused_by_the_missing_bytes_of_each() -> None:
    both = [device("0", 10, "1"), device("1", 8, "0")]
    assert too_large("model a", DeviceNeed(10), both) == ""
    said = too_large("model a", DeviceNeed(12), both)
    assert said.startswith("model a needs 12 bytes (0.00 GiB) of a GPU; GPU 0 has 10 bytes, 2 too")
    assert "GPU 1 has 8 bytes, 4 too few" in said
    assert "of each of 2 GPUs that reach each other" in too_large("model a", DeviceNeed(9, 2), both)
    assert "GPU 0 is not one of its gpus" in too_large(
        "a", DeviceNeed(9, only=frozenset("1")), both
    )
