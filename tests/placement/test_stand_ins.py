"""Where models are while workers of their placement are lost."""

from __future__ import annotations

from kvmig.placement.file import PlacedModel, PlacedUnit, UnitPlacement
from kvmig.placement.stand_ins import stand_ins, stand_ins_to_text

GIB = 1 << 30


def unit(name: str, models: str, *, gpus: int = 1, size: int = 10, arena: int = 0) -> PlacedUnit:
    placed = [PlacedModel(one, 2 * GIB, 2 * GIB, GIB) for one in models.split()]
    return PlacedUnit(
        size * GIB, name, 0, list(range(gpus)), placed, arena_bytes=arena * GIB, worker=f"w-{name}"
    )


def anywhere(name: str, worker: str) -> str:
    return ""


def models_of(placement: UnitPlacement) -> dict[str, list[str]]:
    return {one.called: [it.name for it in one.models] for one in placement.units}


def test_a_model_with_another_place_serves_from_that_alone() -> None:
    found = stand_ins(UnitPlacement([unit("l", "a b"), unit("r", "a b")]), {"w-l"}, anywhere)
    assert models_of(found.placement) == {"l": [], "r": ["a", "b"]}
    assert stand_ins_to_text(found) == ""


def test_a_model_that_has_lost_all_places_goes_where_most_is_left() -> None:
    units = [unit("l", "a"), unit("m", "b", size=12), unit("r", "c")]
    found = stand_ins(UnitPlacement(units), {"w-l"}, anywhere)
    assert models_of(found.placement) == {"l": [], "m": ["b", "a"], "r": ["c"]}
    assert stand_ins_to_text(found) == "model a is in unit m until then"


def test_a_model_that_no_unit_has_room_for_waits_and_says_how_much_is_missing() -> None:
    units = [unit("l", "a b"), unit("r", "c", size=8)]
    found = stand_ins(UnitPlacement(units), {"w-l"}, anywhere)
    assert models_of(found.placement) == {"l": [], "r": ["c", "a"]}
    assert stand_ins_to_text(found) == (
        "model a is in unit r until then; model b waits, no other unit has room for it: unit r has"
        " 4.00 GiB too few"
    )


def test_a_model_goes_to_units_of_as_many_gpus_only() -> None:
    units = [unit("l", "a", gpus=2), unit("r", "b")]
    found = stand_ins(UnitPlacement(units), {"w-l"}, anywhere)
    assert found.waiting == {"a": "no other unit has 2 GPUs"}


def test_a_model_goes_to_workers_only_that_can_have_it() -> None:
    units = [unit("l", "a"), unit("r", "b")]
    found = stand_ins(
        UnitPlacement(units), {"w-l"}, lambda name, worker: "it has no label zone=east"
    )
    assert found.waiting == {"a": "worker w-r can't have it: it has no label zone=east"}


def test_in_shared_kv_cache_it_is_guaranteed_what_is_left_of_that() -> None:
    units = [unit("l", "a", arena=4), unit("r", "b", arena=3)]
    found = stand_ins(UnitPlacement(units), {"w-l"}, anywhere)
    (_, right) = found.placement.units
    assert [one.kv_bytes for one in right.models] == [2 * GIB, GIB]


def test_all_workers_lost_leave_no_unit() -> None:
    found = stand_ins(UnitPlacement([unit("l", "a"), unit("r", "b")]), {"w-l", "w-r"}, anywhere)
    assert found.waiting == dict.fromkeys("ab", "there is no other unit")
