"""Instances in units on GPUs: what the KV cache of their units leaves for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmig.core.config import UnitConfig
from kvmig.core.devices import GIB, DeviceProcess, DeviceRecord
from kvmig.launcher.gpu_division import NOBODYS, OUTSIDE, GpuDivision, GpuNeed, NoRoom, divide
from kvmig.launcher.unit_memory import InstanceUnits, UnitArena, fit_in_units

TOTAL = 80 * GIB
BUDGET = TOTAL - int(TOTAL * NOBODYS)
NEED = GpuNeed(weights=16 * GIB)
OWN = 16 * GIB + OUTSIDE


def gpu(at: int, *processes: DeviceProcess) -> DeviceRecord:
    used = sum(one.used or 0 for one in processes)
    return DeviceRecord(
        id=str(at), index=at, uuid=f"GPU-{at}", name="H100", total=TOTAL, used=used,
        processes=processes,
    )  # fmt: skip


def of_one(arena: UnitArena) -> Callable[[str], UnitArena]:
    return lambda _: arena


def fitted(
    *devices: DeviceRecord, arena: UnitArena, instances: int = 1
) -> tuple[GpuDivision, Mapping[str, GpuNeed]]:
    names = [f"i{at}" for at in range(instances)]
    division = divide(devices, dict.fromkeys(names, 1))
    needs = dict.fromkeys(names, NEED)
    fit_in_units(division, needs, of_one(arena))
    return division, needs


def test_an_instance_gets_its_weights_and_the_cache_is_the_units() -> None:
    division, _ = fitted(gpu(0), arena=UnitArena("/u", BUDGET - 2 * OWN), instances=2)
    assert [division.place(name).size for name in ("i0", "i1")] == [OWN, OWN]


def test_what_does_not_fit_beside_the_units_cache_is_refused_in_bytes() -> None:
    other = DeviceProcess(7, 5 * GIB, "python3")
    with pytest.raises(NoRoom) as refused:
        fitted(gpu(0, other), arena=UnitArena("/u", 50 * GIB, leased=4 * GIB), instances=2)
    free = BUDGET - 5 * GIB - 46 * GIB - OWN
    assert str(refused.value) == (
        f"instance i1 doesn't fit on GPU 0 (H100, GPU-0): besides KV cache it needs {OWN} bytes"
        f" (17.00 GiB): 16.00 GiB of weights, 1.00 GiB for CUDA; of 80.00 GiB {free} bytes"
        f" ({free / GIB:.2f} GiB) are free for it; 46.00 GiB are kept for KV cache of unit /u, i0"
        " has 17.00 GiB, process 7 (python3) has 5.00 GiB"
    )


def test_what_members_have_leased_is_not_kept_for_them_once_more() -> None:
    members = DeviceProcess(7, 60 * GIB, "python3")
    fitted(gpu(0, members), arena=UnitArena("/u", 60 * GIB, leased=60 * GIB))
    with pytest.raises(NoRoom, match=r"2.00 GiB are kept for KV cache of unit /u"):
        fitted(gpu(0, members), arena=UnitArena("/u", 62 * GIB, leased=60 * GIB))


def test_units_on_two_gpus_keep_their_cache_where_their_instances_are() -> None:
    arenas = {"/a": UnitArena("/a", 60 * GIB), "/b": UnitArena("/b", 62 * GIB)}
    units = InstanceUnits(arenas, UnitConfig(path="/a", paths={"right": "/b"}, model="m"))
    assert (units.largest, units.kept) == (62 * GIB, 122 * GIB)
    at = {"i0": "left", "i1": "right"}
    division = divide([gpu(0), gpu(1)], {"i0": 1, "i1": 1}, given={"i0": ["0"], "i1": ["1"]})
    with pytest.raises(NoRoom, match=r"instance i1 doesn't fit on GPU 1 .*62.00 GiB.* unit /b"):
        fit_in_units(division, {"i0": NEED, "i1": NEED}, lambda name: units.unit_of(name, at[name]))


@given(
    st.lists(st.integers(0, 20), min_size=1, max_size=4),
    st.integers(0, 90),
    st.integers(0, 90),
    st.integers(0, 79),
)
def test_who_is_let_in_fits_with_all_that_the_unit_may_lease(
    weights: list[int], arena: int, leased: int, used: int
) -> None:
    leased = min(arena, leased, used)
    device = gpu(0, DeviceProcess(7, used * GIB))
    needs = {f"i{at}": GpuNeed(weights=size * GIB) for at, size in enumerate(weights)}
    division = divide([device], dict.fromkeys(needs, 1))
    unit = UnitArena("/u", arena * GIB, leased * GIB)
    own = sum(OUTSIDE + one.weights for one in needs.values())
    full = used * GIB - leased * GIB + arena * GIB + own
    try:
        fit_in_units(division, needs, of_one(unit))
    except NoRoom:
        assert full > TOTAL - int(TOTAL * NOBODYS)
    else:
        assert full <= TOTAL
