"""A host's GPUs as a record: which CUDA_VISIBLE_DEVICES leaves, and whose their memory is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmig.core.devices import GIB, DeviceInventory, DeviceProcess, DeviceRecord


def device(index: int, uuid: str = "", **more: object) -> DeviceRecord:
    name = uuid or f"GPU-{index}{index}-x"
    return DeviceRecord(id=str(index), index=index, uuid=name, name="H100", total=80 * GIB, **more)  # type: ignore[arg-type]


HOST = DeviceInventory(devices=(device(0), device(1), device(2)))
SPLIT = DeviceInventory(
    devices=(device(0), device(1, "MIG-a", parent="GPU-p"), device(1, "MIG-b", parent="GPU-p"))
)


def seen(words: str | None, host: DeviceInventory = HOST) -> list[str]:
    return [one.uuid for one in host.visible(words).devices]


@pytest.mark.parametrize(
    ("words", "uuids"),
    [
        (None, ["GPU-00-x", "GPU-11-x", "GPU-22-x"]),
        ("2,0", ["GPU-22-x", "GPU-00-x"]),
        ("GPU-11-x, 0", ["GPU-11-x", "GPU-00-x"]),
        ("GPU-2", ["GPU-22-x"]),
        ("", []),
        ("-1", []),
    ],
)
def test_indices_and_uuids_choose_devices_in_their_order(
    words: str | None, uuids: list[str]
) -> None:
    assert seen(words) == uuids
    assert HOST.visible(words).missing == ""


@pytest.mark.parametrize("word", ["7", "GPU-", "GPU-33", "MIG-a", "all"])
def test_a_word_that_names_no_device_hides_those_behind_it_and_is_said(word: str) -> None:
    found = HOST.visible(f"1,{word},0")
    assert [one.index for one in found.devices] == [1]
    assert f"{word} names no device (there are 0, 1, 2)" in found.missing


def test_a_device_that_is_named_twice_leaves_none() -> None:
    found = HOST.visible("1,GPU-11-x")
    assert found.devices == ()
    assert "names a device twice" in found.missing


def test_a_part_of_a_split_gpu_is_named_by_its_own_uuid() -> None:
    assert seen("MIG-b,0", SPLIT) == ["MIG-b", "GPU-00-x"]
    assert seen("1", SPLIT) == ["MIG-a"]


def test_a_device_keeps_the_name_that_the_user_gave_it() -> None:
    found = HOST.visible("GPU-2,1")
    assert [one.id for one in found.devices] == ["GPU-2", "1"]
    assert found.device("GPU-2") is found.device("GPU-22-x")


def test_memory_that_the_driver_names_nobody_for_is_of_others() -> None:
    mine, other = DeviceProcess(7, 10 * GIB), DeviceProcess(8, 20 * GIB, "python3")
    one = device(0, used=35 * GIB, processes=(mine, other, DeviceProcess(9)))

    assert one.free == 45 * GIB
    assert one.used_by_others({7}) == 25 * GIB
    assert one.whose({7}) == (
        "process 8 (python3) has 20.00 GiB, process 9 has an unknown amount,"
        " 5.00 GiB are of processes that the driver doesn't name"
    )


@given(st.lists(st.sampled_from(["0", "1", "2", "9", "GPU-00-x", "GPU-1", "x"]), max_size=5))
def test_no_device_is_chosen_twice_and_each_is_of_the_host(words: list[str]) -> None:
    found = seen(",".join(words))
    assert len(set(found)) == len(found)
    assert set(found) <= set(seen(None))
