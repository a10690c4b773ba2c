"""Which GPUs each instance gets, and how many bytes; what can't fit is refused with all numbers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from kvmig.core.devices import GIB, DeviceProcess, DeviceRecord
from kvmig.launcher.gpu_division import (
    KV_LEAST,
    NOBODYS,
    OUTSIDE,
    USUAL_SHARE,
    GpuDivision,
    GpuNeed,
    GpuPlace,
    NoRoom,
    check,
    divide,
    flags,
    measured,
    need_by_flags,
    share_of,
)

TOTAL = 80 * GIB


def device(index: int, used: int = 0, **more: object) -> DeviceRecord:
    own = {"id": str(index), "index": index, "uuid": f"GPU-{index}", "name": "H100"}
    return DeviceRecord(**own, total=TOTAL, used=used, **more)  # type: ignore[arg-type]


def of(*workers: int) -> dict[str, int]:
    return {f"i{number}": count for number, count in enumerate(workers)}


def gpus(division: GpuDivision) -> list[str]:
    return [",".join(place.gpus) for place in division.places.values()]


def test_an_instance_that_is_alone_on_a_gpu_gets_no_flag() -> None:
    place = divide([device(0)], of(1)).place("i0")
    assert share_of(place, TOTAL) == USUAL_SHARE
    assert flags(place, TOTAL, [], GpuNeed()) == []


def test_two_on_one_gpu_get_half_of_it_each() -> None:
    division = divide([device(0)], of(1, 1))
    assert gpus(division) == ["0", "0"]
    assert {one.size for one in division.places.values()} == {(TOTAL - int(TOTAL * NOBODYS)) // 2}
    assert flags(division.place("i1"), TOTAL, [], GpuNeed())[0] == "--gpu-memory-utilization"


@pytest.mark.parametrize(("mps", "turns"), [(False, 1), (True, 0)])
def test_instances_that_take_turns_on_a_gpu_are_told_so(mps: bool, turns: int) -> None:
    said = "\n".join(divide([device(0, mps=mps)], of(1, 1)).lines())
    assert said.count("its instances take turns; under MPS (--mps) they don't") == turns
    assert len(divide([device(0), device(1)], of(1, 1)).lines()) == 2


def test_each_gets_a_gpu_as_long_as_there_are_enough() -> None:
    assert gpus(divide([device(0), device(1)], of(1, 1, 1))) == ["0", "1", "0"]
    assert gpus(divide([device(at) for at in range(8)], of(*[1] * 8))) == list("01234567")


def test_memory_that_others_have_is_not_given_away() -> None:
    full = device(0, used=70 * GIB, processes=(DeviceProcess(4711, 70 * GIB, "python3"),))
    division = divide([full, device(1)], of(1, 1))
    assert gpus(division) == ["1", "1"]

    (line,) = divide([full], of(1)).lines()
    assert line.startswith("GPU 0 (H100, GPU-0): i0, 8.40 GiB of 80.00 GiB; 70.00 GiB are in use")
    assert line.endswith("process 4711 (python3) has 70.00 GiB")


def test_workers_of_one_instance_get_gpus_that_reach_each_other() -> None:
    linked = [
        device(0, peers=("GPU-2",)),
        device(1, peers=("GPU-3",), nvlinks=("GPU-3",)),
        device(2, peers=("GPU-0",)),
        device(3, peers=("GPU-1",), nvlinks=("GPU-1",)),
    ]
    assert gpus(divide(linked, of(2, 2))) == ["0,2", "1,3"]


def test_more_workers_than_gpus_are_refused() -> None:
    with pytest.raises(NoRoom, match=r"--tensor-parallel-size is 4, must be at most 2, the number"):
        divide([device(0), device(1)], of(4))


def test_an_instance_that_does_not_fit_is_refused_with_what_it_needs_and_who_has_the_rest() -> None:
    used = device(0, used=30 * GIB, processes=(DeviceProcess(4711, 30 * GIB, "python3"),))
    division, need = divide([used], of(1, 1, 1)), GpuNeed(16 * GIB)
    with pytest.raises(NoRoom) as refused:
        check(division, dict.fromkeys(division.places, need))
    size = division.place("i0").size
    assert str(refused.value) == (
        f"instance i0 doesn't fit on GPU 0 (H100, GPU-0): it needs {need.least} bytes (17.25 GiB):"
        " 16.00 GiB of weights, 1.00 GiB for CUDA, at least 0.25 GiB of KV cache; of 80.00 GiB"
        f" {size} bytes (16.13 GiB) are free for it; i1 has 16.13 GiB, i2 has 16.13 GiB, process"
        " 4711 (python3) has 30.00 GiB"
    )
    check(divide([used], of(1, 1)), dict.fromkeys(("i0", "i1"), need))


def test_one_that_nobody_planned_gets_what_is_left_or_nothing() -> None:
    division = divide([device(0), device(1)], of(1))
    assert division.add("i5", 1).gpus == ("1",)
    assert division.add("i6", 1, ("0",)).size < 8 * GIB
    with pytest.raises(NoRoom, match=r"i6 doesn't fit on GPU 0 .* i0 has 74.60 GiB"):
        check(division, {"i6": GpuNeed(10 * GIB)})

    division.remove("i5")
    assert division.left("1") == division.budget["1"]


def test_a_server_keeps_to_the_bytes_that_it_is_given() -> None:
    division = divide([device(0)], of(1, 1), most=20 * GIB)
    assert [one.size for one in division.places.values()] == [10 * GIB, 10 * GIB]
    with pytest.raises(NoRoom, match=r"60\.00 GiB are kept from this server"):
        check(division, {"i0": GpuNeed(16 * GIB)})


def test_what_the_first_has_measured_names_the_next_ones_cache() -> None:
    place = divide([device(0)], of(1, 1)).place("i0")
    beside = measured(place, TOTAL, kv_bytes=20 * GIB)
    need = GpuNeed(16 * GIB, beside)

    share, least, size, kv = flags(place, TOTAL, [], need)

    assert (share, least, size) == (
        "--gpu-memory-utilization",
        "0.01",
        "--kv-cache-memory-bytes",
    )
    assert 20 * GIB <= int(kv) < 20 * GIB + TOTAL // 10_000  # the share was rounded down
    assert need.least == OUTSIDE + beside + KV_LEAST


def test_the_users_own_flags_stay() -> None:
    place = GpuPlace(("0",), 30 * GIB)
    assert flags(place, TOTAL, ["--gpu-memory-utilization=0.3"], GpuNeed()) == []
    assert flags(place, TOTAL, ["--gpu_memory_utilization", "0.3"], GpuNeed()) == []
    least = ["--gpu-memory-utilization", "0.01"]
    assert flags(place, TOTAL, ["--kv-cache-memory-bytes=1G"], GpuNeed()) == least
    both = ["--kv-cache-memory-bytes=1G", "--gpu-memory-utilization=0.5"]
    assert flags(place, TOTAL, both, GpuNeed()) == []


def test_a_cache_of_a_unit_has_the_arenas_addresses() -> None:
    size = ["--kv-cache-memory-bytes", str(GIB)]
    place = GpuPlace(("0",), 30 * GIB)
    least = ["--gpu-memory-utilization", "0.01"]
    assert flags(place, TOTAL, [], GpuNeed(), arena=GIB) == [*least, *size]
    assert flags(place, TOTAL, ["--gpu-memory-utilization=1"], GpuNeed(), arena=GIB) == size


def test_what_the_user_asks_for_is_refused_where_it_is_not_free() -> None:
    division, words = divide([device(0)], of(1, 1)), ["--gpu-memory-utilization=0.6"]
    known = GpuNeed(16 * GIB)
    wanted = need_by_flags(words, 0.6, None, known)
    assert wanted.on(TOTAL).asked == int(0.6 * TOTAL)
    with pytest.raises(NoRoom, match=r"needs \d+ bytes \(49.00 GiB\): 48.00 GiB by its flags"):
        check(division, {"i0": wanted})
    check(divide([device(0)], of(1)), {"i0": GpuNeed(asked=int(0.97 * TOTAL))})

    assert need_by_flags([], 0.92, None, known) == known
    assert need_by_flags([], 0.92, 2 * GIB, known).asked == 18 * GIB


def test_a_part_that_the_user_asks_for_is_of_the_gpu_that_the_instance_has() -> None:
    small = replace(device(1, used=8 * GIB), total=24 * GIB)
    division = divide([device(0, used=20 * GIB), small], of(1, 1), given={"i0": "0", "i1": "1"})
    check(division, {"i1": GpuNeed(part=0.6)})
    with pytest.raises(NoRoom, match=r"i0 .*64\.00 GiB by its flags"):
        check(division, {"i0": GpuNeed(part=0.8)})


def test_instances_have_the_bytes_that_they_are_given_on_each_gpu() -> None:
    devices = [device(0), replace(device(1), total=24 * GIB)]
    division = divide(devices, of(1, 1), each=20 * GIB)
    assert [division.place(one).size for one in ("i0", "i1")] == [20 * GIB] * 2
    assert division.add("i2", 1, ("0",)).size == 20 * GIB
    own = [
        flags(division.place("i1"), one.total, [], GpuNeed())[1] for one in devices
    ]  # the same bytes
    assert own == [f"{19 / 80:.4f}", f"{19 / 24 - 1e-4:.4f}"]
    most = divide([device(0)], of(1), each=78 * GIB).place("i0")
    assert flags(most, TOTAL, [], GpuNeed()) == ["--gpu-memory-utilization", "0.9625"]


@given(
    st.lists(st.integers(0, 80), min_size=1, max_size=8),
    st.lists(st.integers(1, 4), min_size=1, max_size=9),
)
def test_no_gpu_is_given_away_twice(used: list[int], workers: list[int]) -> None:
    devices = [device(at, used=size * GIB) for at, size in enumerate(used)]
    wanted = of(*(min(one, len(devices)) for one in workers))
    division = divide(devices, wanted)
    for name, place in division.places.items():
        assert len(set(place.gpus)) == wanted[name]
    for one in devices:
        assert division.left(one.id) >= 0
        assert division.budget[one.id] <= one.free
