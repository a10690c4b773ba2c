"""What NVML says of a host's GPUs becomes a record; a host without it has none, and says so."""

from __future__ import annotations

import importlib
import inspect
import os
import re
import sys
from pathlib import Path

import pytest

from kvmig.core.devices import DeviceInventory
from kvmig.process import nvml
from kvmig.process.nvml import read_devices
from tests.support import fake_devices
from tests.support.fake_devices import GIB, FakeMachine, FakePart, FakeProcess, devices


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeMachine:
    """This process sees its GPUs."""
    monkeypatch.syspath_prepend(fake_devices.MODULES)
    monkeypatch.delitem(sys.modules, "pynvml", raising=False)
    monkeypatch.setenv(fake_devices.FOLDER, str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return FakeMachine(tmp_path)


def read(**environment: str) -> DeviceInventory:
    return read_devices(environment)


def test_the_memory_is_read_where_the_driver_is_too_old_to_list_processes(
    machine: FakeMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.install(devices(1))
    fake = importlib.import_module("pynvml")

    def too_old(handle: object) -> list[object]:
        raise fake.NVMLLibraryMismatchError("Unversioned function called")

    monkeypatch.setattr(fake, "nvmlDeviceGetComputeRunningProcesses", too_old)
    (one,) = read().devices
    assert (one.total, one.processes) == (80 * GIB, ())


@pytest.mark.parametrize("number", [1, 2, 8])
def test_each_gpu_has_its_memory_and_what_it_reaches(machine: FakeMachine, number: int) -> None:
    machine.install(devices(number))

    found = read()

    assert [one.id for one in found.devices] == [str(at) for at in range(number)]
    assert {one.total for one in found.devices} == {80 * GIB}
    assert {len(one.nvlinks) for one in found.devices} == {number - 1}
    assert {one.peers for one in found.devices} == {one.nvlinks for one in found.devices}
    assert found.node == os.uname().nodename
    assert found.missing == ""


def test_memory_in_use_is_missing_and_has_a_name_until_its_process_ends(
    machine: FakeMachine,
) -> None:
    gpu = devices(1)[0]
    gpu.reserved = GIB
    gpu.processes = [FakeProcess(1, 3 * GIB), FakeProcess(1, GIB, drawing=True)]
    machine.install([gpu])
    machine.take(gpu.uuid, 5 * GIB)
    machine.take(gpu.uuid, 7 * GIB, pid=2**22 + 1)  # it was there once

    (one,) = read().devices

    assert (one.total, one.free) == (79 * GIB, 70 * GIB)
    sizes = {process.pid: process.used for process in one.processes}
    assert sizes == {1: 3 * GIB, os.getpid(): 5 * GIB}
    assert one.processes[1].name == Path("/proc/self/comm").read_text().strip()


def test_the_parts_of_a_split_gpu_are_devices_of_their_own(machine: FakeMachine) -> None:
    whole, split = devices(2)
    split.parts = [FakePart("MIG-a", 10 * GIB), FakePart("MIG-b", 40 * GIB)]
    machine.install([whole, split])

    found = read()

    assert [one.uuid for one in found.devices] == [whole.uuid, "MIG-a", "MIG-b"]
    assert [one.total for one in found.devices] == [80 * GIB, 10 * GIB, 40 * GIB]
    assert {one.parent for one in found.devices[1:]} == {split.uuid}
    assert found.devices[0].peers == ()  # no part is reached


def test_processes_of_mps_compute_at_the_same_time(machine: FakeMachine, tmp_path: Path) -> None:
    first, second = devices(2)
    first.processes = [FakeProcess(1, GIB, mps=True)]
    machine.install([first, second])
    assert [one.mps for one in read().devices] == [True, False]

    (tmp_path / "control").touch()
    pipes = read(CUDA_MPS_PIPE_DIRECTORY=str(tmp_path))
    assert [one.mps for one in pipes.devices] == [True, True]


def test_a_process_that_only_draws_does_not_compute(machine: FakeMachine) -> None:
    (gpu,) = devices(1)
    gpu.processes = [
        FakeProcess(1, GIB),
        FakeProcess(2, GIB, drawing=True),
        FakeProcess(3, GIB, mps=True),
        *(FakeProcess(4, GIB, drawing=drawing) for drawing in (True, False)),
    ]
    machine.install([gpu])
    (one,) = read().devices
    assert [process.computes for process in one.processes] == [True, False, True, True]


def test_a_gpu_says_how_busy_it_is_and_what_it_draws_where_its_driver_knows(
    machine: FakeMachine,
) -> None:
    known, unknown, split = devices(3)
    unknown.busy = unknown.milliwatts = None
    split.parts = [FakePart("MIG-a", GIB)]
    machine.install([known, unknown, split])
    found = [(one.busy, one.watts) for one in read().devices]
    assert found == [(0.35, 301.5), (None, None), (None, None)]


def test_an_old_driver_says_less(machine: FakeMachine) -> None:
    gpu = devices(1)[0]
    gpu.old, gpu.reserved = True, GIB
    machine.install([gpu])
    (one,) = read().devices
    assert (one.total, one.free) == (80 * GIB, 79 * GIB)


def test_a_gpu_that_is_lost_is_left_out_and_named(machine: FakeMachine) -> None:
    lost, well = devices(2)
    lost.lost = True
    machine.install([lost, well])

    found = read()

    assert [one.id for one in found.devices] == ["1"]
    assert found.missing == "GPU 0 is left out: GPU is lost"


def test_the_users_choice_is_kept(machine: FakeMachine) -> None:
    machine.install(devices(3))
    assert [one.index for one in read(CUDA_VISIBLE_DEVICES="2,1").devices] == [2, 1]
    assert read(CUDA_VISIBLE_DEVICES="").devices == ()


def test_a_host_without_nvml_has_no_devices_and_says_why(machine: FakeMachine) -> None:
    assert read() == DeviceInventory(
        node=os.uname().nodename, missing="NVML: NVML Shared Library Not Found"
    )


def test_a_host_without_nvidia_ml_py_has_no_devices_and_says_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    found = read()
    assert found.devices == ()
    assert found.missing.startswith("nvidia-ml-py is not there: ")


def test_nvidia_ml_py_has_every_name_that_the_reader_and_the_stand_in_use(
    machine: FakeMachine,
) -> None:
    stand_in = importlib.import_module("pynvml")
    sys.path.remove(str(fake_devices.MODULES))
    del sys.modules["pynvml"]
    real = pytest.importorskip("pynvml")
    used = set(re.findall(r"nvml\.((?:nvml|NVML)\w+)", inspect.getsource(nvml)))
    assert len(used) > 15

    for name in sorted(used):
        ours, theirs = getattr(stand_in, name), getattr(real, name)
        if inspect.isfunction(ours) and name.startswith("nvmlDevice"):
            parameters = inspect.signature(ours).parameters
            there = inspect.signature(inspect.unwrap(theirs)).parameters
            assert len(parameters) == len(there), name
        elif isinstance(ours, int):
            assert ours == theirs, name


def test_a_host_without_a_driver_is_not_told_that_it_has_no_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    none = DeviceInventory(missing="NVML: not found")
    monkeypatch.setattr(nvml, "DRIVER", tmp_path / "nvidiactl")
    assert nvml.missing_devices(none) == ""
    nvml.DRIVER.touch()
    assert nvml.missing_devices(none) == "NVML: not found"
