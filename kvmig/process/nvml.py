"""Reads what the NVIDIA driver knows of this host's GPUs, through nvidia-ml-py: the one reader."""

from __future__ import annotations

import importlib
import os
import platform
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from msgspec.structs import replace

from kvmig.core.devices import DeviceInventory, DeviceProcess, DeviceRecord

MPS_PIPES = "CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps"  # noqa: S108 - MPS's own default
"""The variable, and where its daemon listens unless that says otherwise."""
DRIVER = Path("/dev/nvidiactl")
"""A file of NVIDIA's driver: a host that has it should have GPUs."""

Answer = TypeVar("Answer")


def read_devices(environment: Mapping[str, str] = os.environ) -> DeviceInventory:
    """The devices of this host that CUDA_VISIBLE_DEVICES leaves, as they are now.

    A host without NVML, or with one that fails, has no devices: `DeviceInventory.missing` has the
    reason. A device that fails alone is left out.
    """
    node = platform.node()
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and not visible.strip():
        return DeviceInventory(node=node)
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError as error:
        return DeviceInventory(node=node, missing=f"nvidia-ml-py is not there: {error}")
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return DeviceInventory(node=node, missing=f"NVML: {error}")
    try:
        devices, missing = _Reader(nvml, mps_listens(environment)).read()
    except nvml.NVMLError as error:
        return DeviceInventory(node=node, missing=f"NVML: {error}")
    finally:
        nvml.nvmlShutdown()
    inventory = DeviceInventory(node=node, devices=tuple(devices), missing="; ".join(missing))
    return inventory.visible(visible)


def missing_devices(inventory: DeviceInventory) -> str:
    """Return why devices are left out, for the user; empty where no driver is installed."""
    return inventory.missing if inventory.devices or DRIVER.exists() else ""


class _Reader:
    """One look at all devices, while NVML is open."""

    def __init__(self, nvml: ModuleType, mps: bool) -> None:
        """nvml: nvidia-ml-py's module. mps: whether its daemon is there."""
        self._nvml: Any = nvml
        self._mps = mps

    def read(self) -> tuple[list[DeviceRecord], list[str]]:
        """The devices, and what is left out. Raises NVMLError."""
        devices: list[DeviceRecord] = []
        missing: list[str] = []
        handles = {}
        for index in range(self._nvml.nvmlDeviceGetCount()):
            try:
                handle = self._nvml.nvmlDeviceGetHandleByIndex(index)
                found = self._devices_of(index, handle)
            except self._nvml.NVMLError as error:
                missing.append(f"GPU {index} is left out: {error}")
                continue
            devices += found
            if len(found) == 1 and not found[0].parent:
                handles[found[0].uuid] = handle
        return [self._with_peers(one, handles) for one in devices], missing

    def _devices_of(self, index: int, handle: Any) -> list[DeviceRecord]:
        """The GPU, or its parts where it is split."""
        nvml = self._nvml
        uuid = _text(nvml.nvmlDeviceGetUUID(handle))
        capability = self._if_known(nvml.nvmlDeviceGetCudaComputeCapability, (0, 0), handle)
        split, _ = self._if_known(nvml.nvmlDeviceGetMigMode, (0, 0), handle)
        if split != nvml.NVML_DEVICE_MIG_ENABLE:
            return [self._device(handle, str(index), index, uuid, capability)]
        parts = []
        for number in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
            try:
                part = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, number)
            except nvml.NVMLError_NotFound:
                continue
            own = _text(nvml.nvmlDeviceGetUUID(part))
            parts.append(self._device(part, own, index, own, capability, parent=uuid))
        return parts

    def _device(
        self,
        handle: Any,
        name: str,
        index: int,
        uuid: str,
        capability: tuple[int, int],
        parent: str = "",
    ) -> DeviceRecord:
        nvml = self._nvml
        total, used = self._memory(handle)
        processes: dict[int, int | None] = {}
        nobody: list[Any] = []
        by_mps = self._if_known(nvml.nvmlDeviceGetMPSComputeRunningProcesses, nobody, handle)
        computing = self._if_known(nvml.nvmlDeviceGetComputeRunningProcesses, nobody, handle)
        drawing = self._if_known(nvml.nvmlDeviceGetGraphicsRunningProcesses, nobody, handle)
        for one in (*computing, *drawing, *by_mps):
            processes[one.pid] = _larger(processes.get(one.pid), one.usedGpuMemory)
        compute = {one.pid for one in (*computing, *by_mps)}
        return DeviceRecord(
            id=name,
            index=index,
            uuid=uuid,
            name=_text(nvml.nvmlDeviceGetName(handle)),
            total=total,
            used=used,
            processes=tuple(
                DeviceProcess(pid, size, _program(pid), pid in compute)
                for pid, size in sorted(processes.items())
            ),
            capability=capability,
            parent=parent,
            mps=self._mps or bool(by_mps),
            busy=self._busy(handle),
            watts=self._watts(handle),
        )

    def _busy(self, handle: Any) -> float | None:
        rates = self._if_known(self._nvml.nvmlDeviceGetUtilizationRates, None, handle)
        return None if rates is None else rates.gpu / 100

    def _watts(self, handle: Any) -> float | None:
        milliwatts = self._if_known(self._nvml.nvmlDeviceGetPowerUsage, None, handle)
        return None if milliwatts is None else milliwatts / 1000

    def _memory(self, handle: Any) -> tuple[int, int]:
        """Bytes there are, and those that are taken."""
        nvml = self._nvml
        try:
            known = nvml.nvmlDeviceGetMemoryInfo(handle, nvml.nvmlMemory_v2)
        except (nvml.NVMLError_NotSupported, nvml.NVMLError_FunctionNotFound):
            known = nvml.nvmlDeviceGetMemoryInfo(handle)  # counts what the driver keeps as used
            return int(known.total), int(known.used)
        return int(known.total - known.reserved), int(known.used)

    def _with_peers(self, device: DeviceRecord, handles: Mapping[str, Any]) -> DeviceRecord:
        """handles: of the GPUs that aren't split; the parts of one reach nothing."""
        if device.uuid not in handles:
            return device
        nvml, own = self._nvml, handles[device.uuid]

        def reached(index: int) -> tuple[str, ...]:
            return tuple(
                uuid
                for uuid, handle in handles.items()
                if uuid != device.uuid
                and self._if_known(nvml.nvmlDeviceGetP2PStatus, None, own, handle, index)
                == nvml.NVML_P2P_STATUS_OK
            )

        return replace(
            device,
            peers=reached(nvml.NVML_P2P_CAPS_INDEX_WRITE),
            nvlinks=reached(nvml.NVML_P2P_CAPS_INDEX_NVLINK),
        )

    def _if_known(self, ask: Callable[..., Answer], otherwise: Answer, *arguments: Any) -> Answer:
        """What NVML answers, or `otherwise` where a device or driver doesn't know such a thing."""
        nvml = self._nvml
        try:
            return ask(*arguments)
        except (
            nvml.NVMLError_NotSupported,
            nvml.NVMLError_FunctionNotFound,
            nvml.NVMLError_NoPermission,
            nvml.NVMLError_InvalidArgument,
            nvml.NVMLLibraryMismatchError,  # not an NVMLError: an older driver lists no processes
        ):
            return otherwise


def _larger(one: int | None, other: int | None) -> int | None:
    """The larger of two sizes; a process may both compute and draw."""
    known = [size for size in (one, other) if size is not None]
    return max(known) if known else None


def _text(value: str | bytes) -> str:
    """The text of a value, which older versions of nvidia-ml-py give as bytes."""
    return value.decode() if isinstance(value, bytes) else value


def _program(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:  # it has ended, or is of another container
        return ""


def mps_listens(environment: Mapping[str, str]) -> bool:
    """Whether an MPS daemon listens where a process with this environment would look for it."""
    variable, usual = MPS_PIPES
    return (Path(environment.get(variable, usual)) / "control").exists()
