"""Metrics of GPUs, on GPUs of the tests' own as NVML has them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from kvmig.fleet.device_metrics import of_devices
from kvmig.fleet.device_watch import DeviceWatch
from kvmig.fleet.worker_nodes import WorkerNode
from kvmig.proxy.exposition import merged
from tests.support import fake_devices
from tests.support.fake_devices import GIB, FakeMachine, FakeProcess, devices


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeMachine:
    monkeypatch.syspath_prepend(fake_devices.MODULES)
    monkeypatch.delitem(sys.modules, "pynvml", raising=False)
    monkeypatch.setenv(fake_devices.FOLDER, str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return FakeMachine(tmp_path)


def text_of(claims: dict[str, dict[str, int]], **beside: str) -> str:
    watch = DeviceWatch()
    watch.read_sample()
    node = WorkerNode("local", 0, 0, watch.memory(claims, {}))
    records = {one.uuid: one for one in watch.inventory.devices}
    return merged([of_devices([node], records, beside)]).decode()


def test_a_gpu_has_its_memory_whose_it_is_its_use_and_its_power(machine: FakeMachine) -> None:
    (gpu,) = devices(1)
    gpu.processes = [FakeProcess(1, 3 * GIB)]
    machine.install([gpu])
    text = text_of({gpu.uuid: {"qwen": 2 * GIB}})
    name = f'gpu="{gpu.uuid}"'
    for line in (
        f'kvmig_gpu_info{{{name},index="0",name="{gpu.name}",worker="local"}} 1.0',
        f'kvmig_gpu_memory_bytes{{{name},worker="local"}} {80 * GIB}',
        f'kvmig_gpu_memory_used_bytes{{{name},whose="others",worker="local"}} {3 * GIB}',
        f'kvmig_gpu_memory_used_bytes{{{name},whose="fleet",worker="local"}} 0.0',
        f'kvmig_gpu_claimed_bytes{{{name},model="qwen",worker="local"}} {2 * GIB}',
        f'kvmig_gpu_utilization_ratio{{{name},worker="local"}} 0.35',
        f'kvmig_gpu_power_watts{{{name},worker="local"}} 301.5',
    ):
        name_and_labels, _, value = line.rpartition(" ")
        (found,) = [one for one in text.splitlines() if one.startswith(name_and_labels)]
        assert float(found.rpartition(" ")[2]) == float(value)


def test_what_a_driver_does_not_know_is_left_out(machine: FakeMachine) -> None:
    (gpu,) = devices(1)
    gpu.busy = gpu.milliwatts = None
    machine.install([gpu])
    text = text_of({})
    assert "kvmig_gpu_memory_bytes{" in text
    assert "kvmig_gpu_utilization_ratio{" not in text
    assert "kvmig_gpu_power_watts{" not in text


def test_a_host_without_gpus_has_no_sample_of_them(machine: FakeMachine) -> None:
    assert machine.folder.exists()
    assert "kvmig_gpu_memory_bytes{" not in text_of({})


def test_a_model_that_rolls_out_claims_what_both_its_deployments_do(machine: FakeMachine) -> None:
    (gpu,) = devices(1)
    machine.install([gpu])
    text = text_of({gpu.uuid: {"qwen": GIB, "qwen2": 2 * GIB, "other": GIB}}, qwen2="qwen")
    claimed = [one for one in text.splitlines() if one.startswith("kvmig_gpu_claimed_bytes{")]
    assert len(claimed) == 2
    (own,) = [one for one in claimed if 'model="qwen"' in one]
    assert float(own.rpartition(" ")[2]) == 3 * GIB
