"""The memory of GPUs: which reach each other, and why an instance has no room."""

from __future__ import annotations

from collections.abc import Iterator

from kvmig.fleet.device_room import DeviceMemory, DeviceNeed, groups_of, reasons, too_large

GIB = 1 << 30


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
