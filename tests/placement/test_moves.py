"""From one placement to another: every state between is legal, and it is quick."""

from __future__ import annotations

import itertools
from collections import Counter
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmig.placement.matching import matched
from kvmig.placement.moves import (
    GIB,
    IDLE_GAP,
    LIVE_GAP,
    Leases,
    ModelNeeds,
    MoveUnit,
    PlacedLease,
    PlacementSite,
    PlanRefused,
    PlanWave,
    Slot,
    placed,
    plan,
)
from scripts import draw_moves
from tests.support.examples import examples
from tests.support.moves_oracle import Oracle


def site(
    units: dict[str, int], models: dict[str, tuple[int, int, float]], **more: bool
) -> PlacementSite:
    """Sizes in GiB; of a model: held, floor, seconds of a start."""
    return PlacementSite(
        {name: MoveUnit(memory * GIB) for name, memory in units.items()},
        {
            name: ModelNeeds(held * GIB, floor * GIB, start)
            for name, (held, floor, start) in models.items()
        },
        **more,
    )


def leases(**units: list[str]) -> dict[Slot, PlacedLease]:
    """Of instances with a GiB each: unit=[model:used GiB, ...]."""
    found: dict[Slot, PlacedLease] = {}
    for unit, models in units.items():
        for words in models:
            model, _, used = words.partition(":")
            found[model, unit] = PlacedLease(max(1, int(used or 0)) * GIB, int(used or 0) * GIB)
    return found


# -- matching


@given(st.integers(1, 6).flatmap(lambda n: st.lists(
    st.lists(st.integers(0, 20), min_size=n, max_size=n), min_size=n, max_size=n)))  # fmt: skip
def test_matching_is_the_cheapest_of_all(cost: list[list[int]]) -> None:
    found = matched(cost)
    assert sorted(found) == list(range(len(cost)))
    least = min(
        sum(cost[row][column] for row, column in enumerate(one))
        for one in itertools.permutations(range(len(cost)))
    )
    assert sum(cost[row][column] for row, column in enumerate(found)) == least


def test_units_that_are_alike_stay_as_they_are() -> None:
    where = site({"a": 10, "b": 10, "c": 20}, {"x": (4, 1, 9), "y": (5, 1, 9)})
    now = leases(a=["x:1"], b=["y:1"], c=["x"])
    assert placed(where, now, leases(a=["y"], b=["x"], c=["x"])) == leases(
        a=["x"], b=["y"], c=["x"]
    )
    assert plan(where, now, placed(where, now, leases(a=["y"], b=["x"], c=["x"]))) == []


def test_units_of_different_memory_arent_confused() -> None:
    where = site({"a": 10, "c": 20}, {"x": (4, 1, 9), "y": (5, 1, 9)})
    assert placed(where, leases(a=["x"], c=["y"]), leases(a=["y"], c=["x"])) == leases(
        a=["y"], c=["x"]
    )


# -- the plan


def shape(waves: list[PlanWave] | PlanRefused) -> list[list[str]]:
    assert not isinstance(waves, PlanRefused), waves.why
    return [[f"{one.kind} {one.model} {one.unit}" for one in wave.steps] for wave in waves]


def test_independent_units_are_in_one_wave() -> None:
    where = site({"a": 10, "b": 10, "c": 10}, {"x": (4, 1, 9), "y": (4, 1, 9)})
    now = leases(a=["x"], b=["x", "y"], c=["y"])
    found = plan(where, now, leases(a=["x", "y"], b=["y"], c=["y", "x"]))
    assert shape(found) == [["drain x b", "start x c", "start y a"]]


def test_models_change_places_over_a_third_unit() -> None:
    where = site({"a": 10, "b": 10, "c": 6}, {"x": (8, 1, 9), "y": (4, 1, 5)})
    now, then = leases(a=["x:1"], b=["y:1"]), leases(a=["y"], b=["x"])
    assert shape(plan(where, now, then)) == [
        ["start y c"], ["drain y b"], ["start x b"], ["drain x a"], ["start y a"], ["drain y c"],
    ]  # fmt: skip


def test_a_swap_without_a_third_unit_is_refused_with_what_is_short() -> None:
    where = site({"a": 10, "b": 10}, {"x": (8, 1, 9), "y": (4, 1, 5)})
    now, then = leases(a=["x:1"], b=["y:1"]), leases(a=["y"], b=["x"])
    found = plan(where, now, then)
    assert isinstance(found, PlanRefused)
    assert "model x can't start in unit b, 4 GiB are missing" in found.why


def test_a_model_without_live_requests_may_stop_before_it_starts_elsewhere() -> None:
    where = site({"a": 10, "b": 10}, {"x": (8, 1, 9), "y": (4, 1, 5)})
    now, then = leases(a=["x:1"], b=["y"]), leases(a=["y"], b=["x"])
    assert shape(plan(where, now, then)) == [
        ["gap y b"], ["start x b"], ["drain x a"], ["start y a"],
    ]  # fmt: skip


def test_requests_wait_for_a_start_only_where_that_is_allowed() -> None:
    where = site({"a": 10, "b": 10}, {"x": (8, 1, 9), "y": (4, 1, 5)}, allow_gap=True)
    now, then = leases(a=["x:1"], b=["y:1"]), leases(a=["y"], b=["x"])
    assert shape(plan(where, now, then))[0] == ["gap y b"]


def test_third_models_requests_leave_a_unit_that_must_be_squeezed() -> None:
    where = site({"a": 12, "b": 12}, {"x": (4, 1, 9), "y": (2, 1, 9)}, elastic=True)
    now = {
        ("y", "a"): PlacedLease(10 * GIB, 8 * GIB), ("y", "b"): PlacedLease(4 * GIB, GIB),
        ("x", "b"): PlacedLease(2 * GIB, GIB),
    }  # fmt: skip
    then = {**now, ("y", "a"): PlacedLease(5 * GIB), ("x", "a"): PlacedLease(GIB)}
    found = plan(where, now, then)
    assert ["move y a"] in shape(found)
    assert ["start x a"] in shape(found)


def test_quotas_shrink_before_others_grow() -> None:
    where = site({"a": 12}, {"x": (2, 1, 9), "y": (2, 1, 9)}, elastic=True)
    now = {("x", "a"): PlacedLease(6 * GIB, GIB), ("y", "a"): PlacedLease(2 * GIB, GIB)}
    then = {("x", "a"): PlacedLease(2 * GIB), ("y", "a"): PlacedLease(6 * GIB)}
    assert shape(plan(where, now, then)) == [["quota x a"], ["quota y a"]]


def test_the_last_quotas_are_those_of_the_placement_though_more_is_held() -> None:
    where = site({"a": 12}, {"x": (2, 1, 9), "y": (2, 1, 9)}, elastic=True)
    now = {("x", "a"): PlacedLease(6 * GIB, 5 * GIB), ("y", "a"): PlacedLease(2 * GIB, 0)}
    then = {("x", "a"): PlacedLease(3 * GIB), ("y", "a"): PlacedLease(5 * GIB)}
    assert shape(plan(where, now, then)) == [["quota x a"], ["quota y a"]]
    lent = {("x", "a"): PlacedLease(3 * GIB, 5 * GIB), ("y", "a"): PlacedLease(5 * GIB, 0)}
    assert plan(where, lent, then) == []


def test_quotas_keep_to_the_arena_where_the_memory_has_more() -> None:
    where = site({"a": 20, "b": 20}, {"x": (2, 1, 9), "y": (2, 1, 9)}, elastic=True)
    units = {name: one._replace(arena=4 * GIB) for name, one in where.units.items()}
    where = where._replace(units=units)
    now = {("x", "a"): PlacedLease(4 * GIB, GIB), ("y", "b"): PlacedLease(4 * GIB, GIB)}
    then = {("x", "a"): PlacedLease(2 * GIB), ("y", "a"): PlacedLease(2 * GIB)}
    waves = plan(where, now, then)
    assert shape(waves)[:2] == [["quota x a"], ["start y a"]]
    assert max(one.quota for wave in waves for one in wave.steps) <= 4 * GIB  # type: ignore[union-attr]
    over = {("x", "a"): PlacedLease(3 * GIB), ("y", "a"): PlacedLease(2 * GIB)}
    refused = plan(where, now, over)
    assert isinstance(refused, PlanRefused)
    assert refused.why == "unit a: the placement puts 1.00 GiB more there than it holds"


@pytest.mark.parametrize(
    ("then", "sentence"),
    [
        ({"a": ["x", "y"]}, "unit a: the placement puts 4.00 GiB more there than it holds"),
        ({"a": ["x"]}, "model y: the placement has no instance of it, and 1.00 GiB of live"),
    ],
)
def test_a_placement_that_cant_be_is_refused(then: dict[str, list[str]], sentence: str) -> None:
    where = site({"a": 10, "b": 10}, {"x": (8, 1, 9), "y": (4, 1, 5)})
    found = plan(where, leases(a=["x:1"], b=["y:1"]), leases(**then))
    assert isinstance(found, PlanRefused)
    assert sentence in found.why


def test_the_picture_is_current() -> None:
    assert draw_moves.TARGET.read_text() == draw_moves.drawing()


# -- any small case, beside all that is possible


@st.composite
def cases(
    draw: st.DrawFn,
) -> tuple[PlacementSite, dict[Slot, PlacedLease], dict[Slot, PlacedLease]]:
    return case(Random(draw(st.integers(0, 2**32))))


def case(chance: Random) -> tuple[PlacementSite, dict[Slot, PlacedLease], dict[Slot, PlacedLease]]:
    """Two to four models on two or three units, that are about as full as they may be."""
    names = "wxyz"[: chance.choice([2, 3, 3, 4])]
    units = "abc"[: chance.choice([2, 3])]
    models = {
        name: ModelNeeds(
            chance.randint(2, 8),
            chance.randint(1, 2),
            chance.choice([2.0, 5.0, 12.0]),
            chance.choice([0.0, 0.0, 2.0]),
        )
        for name in names
    }
    elastic, gap = chance.random() < 0.5, chance.random() < 0.3
    arena = [None, None, 4, 9]
    memory = {unit: MoveUnit(chance.randint(9, 22), 1, chance.choice(arena)) for unit in units}
    where = PlacementSite(memory, models, elastic, bandwidth=4.0, drain_s=0.5, allow_gap=gap)

    def some() -> dict[Slot, PlacedLease]:
        found: dict[Slot, PlacedLease] = {}
        left = {unit: memory[unit].memory for unit in units}
        arena = {unit: memory[unit].arena or left[unit] for unit in units}
        for model in names if chance.random() < 0.8 else names[1:]:
            for unit in chance.sample(units, chance.choice([1, 1, 1, 2])):
                floor = models[model].floor
                need = models[model].held + floor
                if need <= left[unit] and floor <= arena[unit]:
                    more = chance.randint(0, min(3, left[unit] - need, arena[unit] - floor))
                    found[model, unit] = PlacedLease(floor + more)
                    left[unit] -= need + more
                    arena[unit] -= floor + more
        return found

    now, then = some(), some()
    for slot, lease in now.items():
        used = chance.choice([0, chance.randint(0, lease.quota), lease.quota])
        now[slot] = lease._replace(used=used)
    return where, now, then


def carry_out(
    where: PlacementSite, now: Leases, waves: list[PlanWave], then: Leases
) -> dict[Slot, PlacedLease]:
    """Check each state, whatever order a wave's steps end in; the last one's leases.

    Only the target's own quotas may be less than what is held: that is lent.
    """
    at = dict(now)
    parted = Counter[str]()
    live = Counter[str]()
    for (model, _), lease in now.items():
        live[model] += lease.used
    for wave in waves:
        kinds = {one.kind for one in wave.steps}
        gone = {(one.model, one.unit) for one in wave.steps if one.kind in ("drain", "gap")}
        gaps = {one.model for one in wave.steps if one.kind == "gap"}
        # Memory, once all has come and nothing has gone.
        most = dict(at)
        coming = Counter[Slot]()
        for one in wave.steps:
            slot = (one.model, one.unit)
            if one.kind == "start":
                assert slot not in at
                most[slot] = PlacedLease(one.quota)
            elif one.kind == "quota":
                least = where.models[one.model].floor if where.elastic else at[slot].used
                assert one.quota >= max(at[slot].used, least) or one.quota == then[slot].quota
                most[slot] = PlacedLease(max(one.quota, at[slot].quota))
            for unit, size in one.to:
                to = (one.model, unit)
                if one.kind == "move":
                    most[to] = PlacedLease(max(most[to].quota, at[to].used + size))
                coming[to] += size
                assert at[to].used + coming[to] <= most[to].quota
        for unit, room in where.units.items():
            there = [slot for slot in most if slot[1] == unit]
            held = sum(where.models[slot[0]].held for slot in there)
            assert sum(most[slot].quota for slot in there) <= room.room(held), (wave, unit)
        # Who serves, once all has gone and nothing has come.
        serving = set(at) - gone
        for model in {slot[0] for slot in at} - {slot[0] for slot in serving}:
            assert model in gaps
            assert where.allow_gap or not live[model]
        for model in {slot[0] for slot in serving}:
            room_ = sum(
                min((one.quota for one in wave.steps
                     if one.kind == "quota" and (one.model, one.unit) == slot),
                    default=at[slot].quota)
                for slot in serving if slot[0] == model
            )  # fmt: skip
            if kinds <= {"start", "drain", "gap"}:
                assert room_ >= live[model], (wave, model)
        at = apply(at, wave, parted, most)
        assert all(
            0 <= one.used <= one.quota or one.quota == then[slot].quota for slot, one in at.items()
        ), wave
    return at


def apply(
    at: dict[Slot, PlacedLease], wave: PlanWave, parted: Counter[str], most: dict[Slot, PlacedLease]
) -> dict[Slot, PlacedLease]:
    """parted: what waits in gaps."""
    after = dict(at)
    for one in wave.steps:
        slot = (one.model, one.unit)
        if one.kind in ("drain", "gap"):
            used = after.pop(slot).used
            assert sum(size for _, size in one.to) == (used if one.kind == "drain" else 0)
            if one.kind == "gap":
                parted[one.model] += used
        elif one.kind == "move":
            used = at[slot].used - one.size
            after[slot] = PlacedLease(max(used, 0), used)
        else:
            used = at[slot].used if slot in at else 0
            if one.kind == "start":
                used = min(parted[one.model], one.quota)
                parted[one.model] -= used
            after[slot] = PlacedLease(one.quota, used, one.share)
    for one in wave.steps:
        for unit, size in one.to:
            to = (one.model, unit)
            after[to] = PlacedLease(max(after[to].quota, most[to].quota), after[to].used + size)
    return after


@examples(150)
@given(cases())
def test_every_state_between_is_legal(
    one: tuple[PlacementSite, dict[Slot, PlacedLease], dict[Slot, PlacedLease]],
) -> None:
    where, now, then = one
    found = plan(where, now, then)
    if not isinstance(found, PlanRefused):
        assert set(carry_out(where, now, found, then)) == set(then)


def cost(where: PlacementSite, now: Leases, waves: list[PlanWave], then: Leases) -> float:
    """As the oracle counts: seconds of starts and drains, each instance with as much as the others
    of its model, and what gaps do to those who wait."""
    live = Oracle(where, now, then).live
    ends = {model for model, _ in then}
    on = set(now)
    total = 0.0
    for wave in waves:
        times = [0.0]
        for one in wave.steps:
            start_s = where.models[one.model].start_s
            alike = sum(model == one.model for model, _ in on)
            if one.kind == "start":
                times.append(start_s)
            elif one.kind in ("drain", "gap"):
                byte_s = 1 / where.bandwidth + where.models[one.model].byte_s
                times.append(where.drain_s + live[one.model] / alike * byte_s)
            if one.kind == "gap" and one.model in ends:
                total += start_s * (LIVE_GAP if live[one.model] else IDLE_GAP)
        total += max(times)
        on |= {(one.model, one.unit) for one in wave.steps if one.kind == "start"}
        on -= {(one.model, one.unit) for one in wave.steps if one.kind in ("drain", "gap")}
    return total


def check_beside_the_oracle(
    where: PlacementSite, now: dict[Slot, PlacedLease], then: dict[Slot, PlacedLease]
) -> None:
    found = plan(where, now, then)
    best = Oracle(where, now, then).best()
    if isinstance(found, PlanRefused):
        assert best is None
        assert "GiB" in found.why or "live requests" in found.why
    else:
        assert best is not None
        assert cost(where, now, found, then) <= 1.3 * best


@examples(40)
@given(cases().filter(lambda one: len(one[0].models) * len(one[0].units) <= 9))
def test_a_plan_takes_little_longer_than_the_quickest_and_is_refused_only_if_there_is_none(
    one: tuple[PlacementSite, dict[Slot, PlacedLease], dict[Slot, PlacedLease]],
) -> None:
    check_beside_the_oracle(*one)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(60))
def test_so_it_is_with_four_models_on_three_units(seed: int) -> None:
    chance = Random(seed)
    one = case(chance)
    while len(one[0].models) * len(one[0].units) < 12:
        one = case(chance)
    check_beside_the_oracle(*one)
